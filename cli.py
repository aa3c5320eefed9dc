"""The command `palimpsa`: thin verbs over the Python API, and the only module that prints.

Help has to answer at once, so nothing heavy is imported outside a verb.
"""

import functools
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .base.console import counted, human_bytes, human_count, human_seconds, setup_logging, table
from .base.errors import EXIT_CHECK_FAILED, EXIT_FAILED, PalimpsaError, UsageError

app = typer.Typer(
    help="Give a pretrained Mamba2 a better memory: measure, plan, convert, fine-tune, evaluate, share.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # they print the values of local variables, tokens included
    context_settings={"help_option_names": ["-h", "--help"]},
)

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint's folder, a Hub id, or embedded:mamba2-docs-1m.")
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or a Hub id, source or converted.")]
OutFolder = Annotated[str, typer.Argument(metavar="OUT", help="The model folder to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
Data = Annotated[str | None, typer.Option(help="Text: .jsonl, .json, .txt (or .gz), a folder, or a dataset's id.")]
Tokens = Annotated[int, typer.Option(help="How many tokens of the text to use.")]
SeqLen = Annotated[int, typer.Option(help="Tokens in a window.")]
Seed = Annotated[int, typer.Option(help="Of every random choice.")]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or Hub id of a tokenizer (default: the model's own).")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU when there is one.")]
Layers = Annotated[str | None, typer.Option(help="A count such as 8, or a list such as 4,8,11 (one layer: 8,).")]
Rule = Annotated[str | None, typer.Option(help="How a count is chosen: window (default), rate, random, ...")]
Init = Annotated[str | None, typer.Option(help="How the layers start: identity (default), calibrated or paper.")]
Strength = Annotated[float | None, typer.Option(help="Mean growth of importance; for the calibrated start.")]
BetaRank = Annotated[int | None, typer.Option(help="Rank of the importance gate.")]
BetaGroups = Annotated[int | None, typer.Option(help="Importances per head, a divisor of the head size.")]
ProfileFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="profile.json of the same checkpoint, to choose by.")
]
RequireKernels = Annotated[bool, typer.Option("--require-kernels", help="Fail where plain torch would step in.")]


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Registers a verb; adds -v and -q to it and turns what it raises into one line and an exit code."""

    @functools.wraps(function)
    def run(*args: Any, verbose: bool, quiet: bool, **kwargs: Any) -> None:
        setup_logging(1 if verbose else -1 if quiet else 0)
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except (typer.Exit, BrokenPipeError):
            raise
        except Exception as error:
            raise typer.Exit(_report(error, verbose)) from None

    options = {
        "verbose": Annotated[bool, typer.Option("-v", "--verbose", help="Say more; show where an error came from.")],
        "quiet": Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing but errors and results.")],
    }
    own = signature(function).parameters.values()
    added = [Parameter(k, Parameter.KEYWORD_ONLY, annotation=kind, default=False) for k, kind in options.items()]
    run.__signature__ = Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**function.__annotations__, **options}
    return app.command()(run)


def _report(error: Exception, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    known = isinstance(error, PalimpsaError)
    text = " ".join(str(error).split())
    if not known:
        text = f"{type(error).__name__}: {text[:500]} (unexpected; -v shows where)"
    print(f"error: {text}", file=sys.stderr)
    return error.exit_code if known else EXIT_FAILED


def _print_json(value: Any) -> None:
    from .base.files import dump_json

    print(dump_json(value, ascii_only=True), end="")  # whatever the encoding of the terminal or pipe


def _print_wrote(path: Any) -> None:
    print(f"wrote {path}")


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _device(name: str) -> str:
    import torch

    count = torch.cuda.device_count()
    if name == "auto":
        return "cuda" if count else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: there is no such device; give auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= count:
        there = counted(count, "CUDA device")
        raise UsageError(f"--device {name}: this machine has {there}; give auto, cpu or one that is there")
    return name


def _require_kernels(required: bool) -> None:
    if required:
        from .kernels.backends import set_require_kernels

        set_require_kernels(True)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"palimpsa-surgery {__version__}")
        raise typer.Exit


@verb
def demo(
    out: Annotated[str, typer.Option("-o", "--out", metavar="FOLDER", help="The folder to make.")] = "palimpsa-demo",
    tokens: Annotated[int | None, typer.Option(help="Of text to measure on (16384).")] = None,
    steps: Annotated[int | None, typer.Option(help="Of fine-tuning (48).")] = None,
    force: Force = False,
) -> None:
    """Run the whole pipeline on a small model that comes with this package."""
    from .recipes.demo import PROMPT, DemoOptions, run_demo

    result = run_demo(out, options=DemoOptions(**_given(tokens=tokens, steps=steps)), force=force)
    print("What was done, as commands:\n\n  " + "\n  ".join(result.commands) + "\n")
    print(table(result.rows(), ("model", "loss", "difference from the source")) + "\n")
    print("\n".join(f"{name}: {PROMPT}{text}\n" for name, text in result.texts.items()))
    _print_wrote(result.folder / "report.md")


@verb
def inspect(src: Source, revision: Revision = None, json: Json = False) -> None:
    """Show what a checkpoint is, without running it."""
    from .surgery.checkpoint.checkpoint import open_checkpoint
    from .surgery.measure.inspection import LAYER_HEADERS, inspect_checkpoint

    found = inspect_checkpoint(open_checkpoint(src, revision=revision))
    if json:
        _print_json(found.to_dict())
        return
    print(table(found.rows(), ("fact", "value")))
    print(f"stored in {human_bytes(found.bytes)}\n")
    print(table(found.layer_rows(), LAYER_HEADERS))


@verb
def measure(
    src: Source,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE", help="The profile; a heat map goes beside it.")
    ] = "profile.json",
    data: Data = None,
    tokens: Tokens = 65536,
    seq_len: SeqLen = 2048,
    seed: Seed = 0,
    static: Annotated[bool, typer.Option("--static", help="Estimate from the weights alone, without text.")] = False,
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    require_kernels: RequireKernels = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure how fast each layer forgets."""
    from .base.files import refuse_file_name, refuse_to_replace
    from .surgery.checkpoint.sources import files_read
    from .surgery.measure.forgetting import measure as run
    from .surgery.measure.plots import write_profile_and_picture

    refuse_file_name(out, ".json", ".yaml", ".yml")
    picture = Path(out).with_suffix(".png")
    refuse_to_replace([out, picture], *files_read(src), *files_read(tokenizer), data, force=force)
    _require_kernels(require_kernels)
    profile = run(
        src,
        data=data,
        tokens=tokens,
        seq_len=seq_len,
        seed=seed,
        static=static,
        device=_device(device),
        tokenizer=tokenizer,
        revision=revision,
    )
    write_profile_and_picture(profile, out, picture)
    if json:
        _print_json(profile.model_dump(mode="json"))
        return
    rows = [(x.layer, x.window, x.rate, "swapped" if x.swapped else "") for x in profile.layers]
    print(table(rows, ("layer", "window (tokens)", "rate (nats/token)", "")))
    print(f"\n{profile.source}: {profile.describe()}\nwrote {out} and {picture}")


@verb
def plan(
    src: Source,
    profile: ProfileFile = None,
    layers: Layers = None,
    rule: Rule = None,
    init: Init = None,
    strength: Strength = None,
    beta_rank: BetaRank = None,
    beta_groups: BetaGroups = None,
    seed: Seed = 0,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE", help="The plan, to be read and edited.")
    ] = "plan.yaml",
    revision: Revision = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Choose the layers to swap and how they start."""
    from .base.files import refuse_file_name, refuse_to_replace
    from .recipes.training.estimate import estimate_rows
    from .surgery.checkpoint.checkpoint import open_checkpoint
    from .surgery.checkpoint.sources import files_read
    from .surgery.measure.profile import read_profile
    from .surgery.planning.plan import make_plan, parse_layers, write_plan

    refuse_file_name(out, ".yaml", ".yml")
    refuse_to_replace([out], *files_read(src), profile, force=force)
    checkpoint = open_checkpoint(src, revision=revision)
    made = make_plan(
        checkpoint,
        None if profile is None else read_profile(profile),
        strength=strength,
        beta_rank=beta_rank,
        beta_groups=beta_groups,
        seed=seed,
        **_given(layers=None if layers is None else parse_layers(layers), rule=rule, init=init),
    )
    write_plan(made, out)
    if json:
        _print_json(made.model_dump(mode="json"))
        return
    print(table([(layer, made.reasons.get(layer, "")) for layer in made.layers], ("layer", "reason")))
    print(f"\nstart: {made.init}, rank {made.beta_rank}, {counted(made.beta_groups, 'importance')} a head\n")
    print("estimates for 100 M tokens in bf16, one window of 2,048 tokens at a time:\n")
    headers = ("fine-tuning", "trained", "memory", "time at 200 TFLOP/s")
    print(table(estimate_rows(checkpoint, made.layers), headers) + f"\n\nwrote {out}")


@verb
def convert(
    src: Source,
    out: OutFolder,
    plan: Annotated[
        str | None, typer.Option(metavar="FILE", help="A plan.yaml; otherwise one is made from the options.")
    ] = None,
    layers: Layers = None,
    profile: ProfileFile = None,
    rule: Rule = None,
    init: Init = None,
    strength: Strength = None,
    beta_rank: BetaRank = None,
    beta_groups: BetaGroups = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: the source's).")] = None,
    verify: Annotated[str, typer.Option(help="What is compared with the source: auto, logits, layers, none.")] = "auto",
    data: Data = None,
    tokens: Annotated[int | None, typer.Option(help="How many tokens of the text to measure on (16384).")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a window (2048).")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every random choice (default 0).")] = None,
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Swap layers for Palimpsa-M, prove the result, write a model folder."""
    from .surgery.conversion.convert import MeasureOptions
    from .surgery.conversion.convert import convert as run
    from .surgery.planning.plan import parse_layers

    report = run(
        src,
        out,
        plan=plan,
        profile=profile,
        layers=None if layers is None else parse_layers(layers),
        measuring=MeasureOptions(
            **_given(data=data, tokens=tokens, seq_len=seq_len, seed=seed, tokenizer=tokenizer), device=_device(device)
        ),
        dtype=dtype,
        verify=verify,
        force=force,
        revision=revision,
        **_given(rule=rule, init=init, strength=strength, beta_rank=beta_rank, beta_groups=beta_groups, seed=seed),
    )
    if json:
        _print_json(report.model_dump(mode="json"))
        return
    rows = [
        ("layers swapped", ", ".join(map(str, report.layers))),
        ("start", report.init),
        ("parameters", f"{human_count(report.parameters)}, {human_count(report.added)} of them new, {report.dtype}"),
        *report.verification_lines().items(),
        *(("note", note) for note in report.notes),
    ]
    print(table(rows, ("what", "result")))
    print(f"\nwrote {out}")


@verb
def finetune(
    model: Model,
    recipe: Annotated[str, typer.Option(help="Name of a shipped recipe, or a file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Recipe changes.")] = None,
    out: Annotated[str, typer.Option("-o", "--out", metavar="FOLDER", help="The run folder.")] = "run",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Same numbers twice, or a refusal.")] = False,
    require_kernels: RequireKernels = False,
    revision: Revision = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Fine-tune a model by a recipe."""
    from .recipes.training.finetune import finetune as run

    switches = {"deterministic": deterministic, "require_kernels": require_kernels}
    overrides = [*(overrides or []), *(f"{key}=true" for key, on in switches.items() if on)]
    result = run(model, recipe, out, resume=resume, overrides=overrides, force=force, revision=revision)
    if os.environ.get("RANK", "0") != "0":
        return  # of several processes the first one reports
    if json:
        _print_json({**asdict(result), "folder": result.folder.name, "final": result.final.name})
        return
    rows = [(step, loss, error) for step, loss, error in result.validation]
    if rows:
        print(table(rows, ("step", "validation loss", "+-")) + "\n")
    print(f"{counted(result.steps, 'step')}, {human_count(result.tokens)} tokens, {human_seconds(result.seconds)}")
    _print_wrote(result.final)


@verb
def evaluate(
    model: Model,
    against: Annotated[str | None, typer.Option(help="Another model, for differences on the same questions.")] = None,
    suite: Annotated[str | None, typer.Option(help="Some of loss,positions,recall,needle,speed,importance.")] = None,
    lm_eval: Annotated[str | None, typer.Option(help="Tasks of lm-evaluation-harness, with commas.")] = None,
    lm_eval_limit: Annotated[int | None, typer.Option(help="Questions of each task at most.")] = None,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE", help="The report; pictures go beside it.")
    ] = "eval.json",
    data: Data = None,
    lengths: Annotated[str, typer.Option(help="Tokens of a sequence, with commas.")] = "512,2048",
    tokens: Annotated[int, typer.Option(help="Of text at each length.")] = 16384,
    trials: Annotated[int, typer.Option(help="Sequences for each setting of a probe.")] = 4,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32, bfloat16, float16 or float64.")] = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    require_kernels: RequireKernels = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure what a model is worth, beside another one."""
    from .base.text import parse_numbers
    from .recipes.evaluation.evaluate import UnwrittenReportError
    from .recipes.evaluation.evaluate import evaluate as run

    _require_kernels(require_kernels)
    try:
        report = run(
            model,
            against,
            suites=None if suite is None else suite.split(","),
            data=data,
            lengths=parse_numbers("--lengths", lengths),
            tokens=tokens,
            trials=trials,
            seed=seed,
            lm_eval=lm_eval.split(",") if lm_eval else (),
            lm_eval_limit=lm_eval_limit,
            device=_device(device),
            dtype=dtype,
            tokenizer=tokenizer,
            revision=revision,
            out=out,
            force=force,
        )
    except UnwrittenReportError as error:  # the figures took hours, perhaps
        _print_evaluation(error.report, json, None)
        raise
    _print_evaluation(report, json, out)


def _print_evaluation(report: Any, json: bool, out: str | None) -> None:
    if json:
        _print_json(report.model_dump(mode="json"))
        return
    total = len(report.table_rows())
    rows = report.table_rows() if out is None else report.printed_rows()  # what is in no file is printed whole
    print(table(rows, report.table_headers()))
    rest = [f"these are {len(rows)} of {total} rows; {out} has them all"] if len(rows) < total else []
    print("\n".join(["", *rest, *report.notes, *([] if out is None else [f"wrote {out}"])]))


@verb
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the most likely token; above, samples (default: by the generation config)."),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    require_kernels: RequireKernels = False,
    json: Json = False,
) -> None:
    """Continue a text."""
    from .recipes.evaluation.generation import generate as run

    _require_kernels(require_kernels)
    text = run(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        device=_device(device),
        tokenizer=tokenizer,
        revision=revision,
    )
    if json:
        _print_json({"prompt": prompt, "text": text})
    else:
        print(prompt + text)


@verb
def merge(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A lora or qlora run, or its adapter folder.")],
    out: OutFolder,
    base: Annotated[str | None, typer.Option(help="The model that was trained, when it is not on the Hub.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the matrices: source, float32, bfloat16, float16.")] = "source",
    force: Force = False,
) -> None:
    """Merge an adapter and its base into one model folder."""
    from .recipes.training.adapters import merge as write

    _print_wrote(write(run, out, base=base, dtype=dtype, force=force))


@verb
def export(
    model: Model,
    out: OutFolder,
    layout: Annotated[
        str | None, typer.Option(help="mamba_ssm or palimpsa_mamba2; of a hybrid its model_type, or palimpsa_ and it.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Leave the importance of swapped layers out.")] = False,
    revision: Revision = None,
    force: Force = False,
) -> None:
    """Write a model as it is in another layout."""
    from .surgery.conversion.export import export as write

    _print_wrote(write(model, out, layout=layout, off=off, force=force, revision=revision))


@verb
def push(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or an adapter folder.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="owner/name on the Hub.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; it is private else.")] = False,
    to_folder: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write what would be uploaded there, upload nothing.")
    ] = None,
    evaluation: Annotated[str | None, typer.Option("--eval", metavar="FILE", help="eval.json for the card.")] = None,
    base: Annotated[str | None, typer.Option(help="Hub id of an adapter's base.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another model, or a folder that exists.")] = False,
    json: Json = False,
) -> None:
    """Share a model on the Hub, with its code and its card."""
    from .sharing.hub import push as run
    from .sharing.hub import push_to_folder

    if to_folder is not None:
        _print_wrote(push_to_folder(model, repo_id, to_folder, evaluation=evaluation, base=base, force=force))
        return
    result = run(model, repo_id, public=public, evaluation=evaluation, base=base, force=force)
    if json:
        _print_json(asdict(result))
        return
    print("\n".join([*result.notes, f"{'private' if result.private else 'public'}: {result.url}"]))


@verb
def doctor(device: Device = "auto", require_kernels: RequireKernels = False, json: Json = False) -> None:
    """Show what is installed and check the kernels on this machine."""
    from .doctor import diagnose

    _require_kernels(require_kernels)
    found = diagnose(_device(device), *() if json else (_print_diagnosis,))
    if json:
        _print_json(found.to_dict())
    if not found.ok:
        print("error: a kernel is wrong or missing here; see the lines above", file=sys.stderr)
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print_diagnosis(found: Any) -> None:
    """What has been added to the diagnosis since the last call, at once, also into a pipe."""
    if found.checks:
        check = found.checks[-1]
        verdict = check.note if check.ok and check.note else "ok" if check.ok else f"WRONG {check.note}"
        error = "" if check.error is None else f"{check.error:.1e}"
        print(f"{check.name:<48} {error:>8} {check.tolerance:>8.0e}  {verdict}", flush=True)
        return
    packages = [(name, version or "not installed") for name, version in found.versions.items()]
    print(table(packages, ("package", "version")))
    print(f"\ndevice  {found.device}\n")
    for part in found.backends:
        print(f"{part.part}: {part.chosen or 'NOTHING'}")
        print("\n".join(f"  {name}: {reason or 'works here'}" for name, reason in part.unavailable.items()) + "\n")
    print(f"{'check against fp64':<48} {'error':>8} {'limit':>8}", flush=True)


def stop_in_good_order() -> None:
    """Makes the signals of schedulers and closed terminals clean up as Ctrl-C does; one that is ignored stays so."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    for number in (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")):
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, stop)


def main() -> None:
    """Entry point of the console script."""
    # Read when torch loads. OpenMP threads that spin at every barrier made a small scan 24 times slower (two threads,
    # 24.0 against 1.0 s) while other processes wanted the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # text of a model may hold what a code page does not
    stop_in_good_order()
    app()
