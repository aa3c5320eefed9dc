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
    help="""Give a pretrained Mamba2 a better memory.

    The stages in order: inspect, measure, plan, convert, finetune, evaluate, push. `palimpsa demo` runs them all in
    about a minute, on a CPU, with a small model that comes with this package.""",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # they print the values of local variables, tokens included
    context_settings={"help_option_names": ["-h", "--help"]},
)

EMBEDDED = "embedded:mamba2-docs-1m (a small model in this package)"
Source = Annotated[
    str, typer.Argument(metavar="SRC", help=f"The checkpoint to read: a folder, a Hub id, or {EMBEDDED}.")
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help=f"The model, converted or not: a folder, a Hub id, or {EMBEDDED}.")
]
OutFolder = Annotated[str, typer.Argument(metavar="OUT", help="The folder to write the model to.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for another program to read.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the Hub repository (default: main).")]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text to use: a .jsonl, .json, .txt (each also .gz) or .parquet file, a folder of them, or a dataset on "
        "the Hub as owner/name:config:split (default: the documentation of SQLite, in this package)."
    ),
]
SeqLen = Annotated[int, typer.Option(help="Length in tokens of the sequences the text is cut into.")]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or Hub id of a tokenizer (default: the model's own).")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.")]
Layers = Annotated[
    str | None,
    typer.Option(
        help="The layers to swap: how many (8, the default), or which ones, numbered from 0 (4,8,11; just one: 8,)."
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(
        help="How to choose when --layers says how many: window (the longest memory; the default), rate (the lowest "
        "rate of forgetting), strongest (the shortest memory), random, all."
    ),
]
Init = Annotated[
    str | None,
    typer.Option(
        help="How swapped layers start: identity (as the source; the default), calibrated (with importance at work "
        "from the first token), paper (at random, as in the paper)."
    ),
]
Strength = Annotated[
    float | None,
    typer.Option(
        help="For --init calibrated: how far importance grows on average, as a multiple of its prior (default: 0.1)."
    ),
]
BetaRank = Annotated[
    int | None, typer.Option(help="Rank of the matrices that compute importance (default: hidden size / 16).")
]
BetaGroups = Annotated[
    int | None,
    typer.Option(
        help="How many groups of channels of a head have an importance of their own; it must divide the head size. "
        "Fewer take less time and memory (default: one per channel, as in the paper)."
    ),
]
ProfileFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="The profile.json that `palimpsa measure` wrote for this checkpoint.")
]
RequireKernels = Annotated[
    bool, typer.Option("--require-kernels", help="Stop if a layer would run in plain torch for want of a fast kernel.")
]


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
        "verbose": Annotated[bool, typer.Option("-v", "--verbose", help="Show more, and the traceback of an error.")],
        "quiet": Annotated[bool, typer.Option("-q", "--quiet", help="Show results and errors only.")],
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
def _options(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"palimpsa-surgery {__version__}")
        raise typer.Exit


@verb
def demo(
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FOLDER", help="The folder to write everything to.")
    ] = "palimpsa-demo",
    tokens: Annotated[int | None, typer.Option(help="How many tokens of text to measure on (default: 16384).")] = None,
    steps: Annotated[int | None, typer.Option(help="How many optimizer steps to fine-tune for (default: 48).")] = None,
    force: Force = False,
) -> None:
    """Try all stages on a small model, in about a minute.

    Model and text come with this package. Each stage is also printed as the command that does it.
    """
    from .recipes.demo import PROMPT, DemoOptions, run_demo

    result = run_demo(out, options=DemoOptions(**_given(tokens=tokens, steps=steps)), force=force)
    print("What was done, as commands:\n\n  " + "\n  ".join(result.commands) + "\n")
    print(table(result.rows(), ("model", "loss", "difference from the source")) + "\n")
    print("\n".join(f"{name}: {PROMPT}{text}\n" for name, text in result.texts.items()))
    _print_wrote(result.folder / "report.md")


@verb
def inspect(src: Source, revision: Revision = None, json: Json = False) -> None:
    """Show what a checkpoint is, without running it.

    Prints layout, sizes, dtypes, tokenizer, license and fingerprint, and for each layer what its weights alone say
    about forgetting.
    """
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
        str,
        typer.Option(
            "-o", "--out", metavar="FILE", help="The profile to write; a heat map (.png) is written beside it."
        ),
    ] = "profile.json",
    data: Data = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text to use.")] = 65536,
    seq_len: SeqLen = 2048,
    seed: Annotated[int, typer.Option(help="Which parts of the text are taken.")] = 0,
    static: Annotated[
        bool,
        typer.Option("--static", help="Estimate from the weights alone: quick, needs no text, but only a rough guide."),
    ] = False,
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    require_kernels: RequireKernels = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure how fast each layer forgets.

    Runs the checkpoint on text and writes profile.json: for each layer and head the rate of forgetting (nats per token)
    and the window, which is how many tokens a memory lasts.
    """
    from .base.files import refuse_existing, refuse_file_name, refuse_to_replace
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
    if json:
        _print_json(profile.model_dump(mode="json"))
    else:
        rows = [(x.layer, x.window, x.rate, "swapped" if x.swapped else "") for x in profile.layers]
        print(table(rows, ("layer", "window (tokens)", "rate (nats/token)", "")))
        print(f"\n{profile.source}: {profile.describe()}", flush=True)  # before the file, which may be refused
    for path in (out, picture):
        refuse_existing(path, force=force)  # another process may have been faster
    write_profile_and_picture(profile, out, picture)
    if not json:
        print(f"wrote {out} and {picture}")


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
    seed: Annotated[int, typer.Option(help="Seed of the rule random and of the new layers' random weights.")] = 0,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE", help="The plan to write; read and edit it as you like.")
    ] = "plan.yaml",
    revision: Revision = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Choose the layers to swap, and how they start.

    Writes plan.yaml, which `palimpsa convert` carries out, and prints what fine-tuning would take. To choose a number
    of layers it needs a profile; to take the layers you list it needs none.
    """
    from .base.files import refuse_existing, refuse_file_name, refuse_to_replace
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
    refuse_existing(out, force=force)  # another process may have been faster
    write_plan(made, out)
    if json:
        _print_json(made.model_dump(mode="json"))
        return
    print(table([(layer, made.reasons.get(layer, "")) for layer in made.layers], ("layer", "reason")))
    print(f"\nstart: {made.init}, rank {made.beta_rank}, {counted(made.beta_groups, 'importance')} per head\n")
    print("estimates for 100 M tokens in bf16, one sequence of 2,048 tokens at a time:\n")
    headers = ("fine-tuning", "trained", "memory", "time at 200 TFLOP/s")
    print(table(estimate_rows(checkpoint, made.layers), headers) + f"\n\nwrote {out}")


@verb
def convert(
    src: Source,
    out: OutFolder,
    plan: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The plan.yaml to carry out (default: one is made from the options below)."),
    ] = None,
    layers: Layers = None,
    profile: ProfileFile = None,
    rule: Rule = None,
    init: Init = None,
    strength: Strength = None,
    beta_rank: BetaRank = None,
    beta_groups: BetaGroups = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Number format of the weights: float32, bfloat16, float16 (default: the source's)."),
    ] = None,
    verify: Annotated[
        str,
        typer.Option(
            help="What is compared with the source: logits (whole models), layers (one swapped layer at a time, in "
            "less memory), none; auto takes logits if the model fits into memory easily."
        ),
    ] = "auto",
    data: Data = None,
    tokens: Annotated[
        int | None, typer.Option(help="How many tokens of the text to measure on (default: 16384).")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Length in tokens of the sequences to measure on (default: 2048).")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the parts of the text, the rule random and the new layers' random weights (default: 0)."
        ),
    ] = None,
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Swap layers, and prove that the model equals its source.

    Writes a model folder that transformers loads, and nothing if the proof fails. With --plan it carries out that plan;
    otherwise it makes one from the other options, and measures first if the choice of layers or the start needs it.
    """
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
    recipe: Annotated[str, typer.Option(help="A recipe of this package, such as tiny_cpu, or a file of your own.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe, such as lr=1e-4 data.seq_len=512."),
    ] = None,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FOLDER", help="The folder to write to: metrics, checkpoints, model.")
    ] = "run",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in that folder from its newest checkpoint.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Give the same numbers every time, or stop if that is impossible.")
    ] = False,
    require_kernels: RequireKernels = False,
    revision: Revision = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Fine-tune a model by a recipe.

    A recipe is a YAML file; KEY=VALUE changes one of its keys. The finished model is in the folder final/ of the run.
    """
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
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A second model, to compare with on the same text and the same questions."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="What to measure, separated by commas: loss, positions, recall, needle, speed, importance (default: "
            "all of them, or none with --lm-eval)."
        ),
    ] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            metavar="TASKS", help="Tasks of lm-evaluation-harness (names or .yaml files), separated by commas."
        ),
    ] = None,
    lm_eval_limit: Annotated[
        int | None, typer.Option(help="Take only the first N questions of each of these tasks.")
    ] = None,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE", help="The report to write; plots are written beside it.")
    ] = "eval.json",
    data: Data = None,
    lengths: Annotated[str, typer.Option(help="Lengths of the sequences in tokens, separated by commas.")] = "512,2048",
    tokens: Annotated[int, typer.Option(help="How many tokens of the text to use at each length.")] = 16384,
    trials: Annotated[
        int, typer.Option(help="How many sequences recall and needle try in each of their settings.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Which parts of the text are taken, and which questions are asked.")] = 0,
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Number format to run in: float32, bfloat16, float16, float64 (default: float32 on a CPU, on a GPU "
            "that of the stored weights)."
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    require_kernels: RequireKernels = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure loss, recall and speed, and compare two models.

    Prints a table and writes eval.json with plots. For figures that count, give --data text that neither model was
    trained on.
    """
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
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens to add at most.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 always takes the likeliest token; the higher, the more random (default: as the model's "
            "generation_config.json says)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random choice of tokens.")] = 0,
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    require_kernels: RequireKernels = False,
    json: Json = False,
) -> None:
    """Continue a text with a model."""
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
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The folder of a run in mode lora or qlora, or of its adapter alone.")
    ],
    out: OutFolder,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model that the adapter was trained on: a folder or a Hub id (default: the one on the Hub that "
            "the adapter names).",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Number format of the matrices: source (the base's), float32, bfloat16, float16.")
    ] = "source",
    force: Force = False,
) -> None:
    """Merge an adapter into the model it was trained on.

    The folder final/ of a run holds the merged model already; this is for an adapter that was kept alone, or for
    another number format.
    """
    from .recipes.training.adapters import merge as write

    _print_wrote(write(run, out, base=base, dtype=dtype, force=force))


@verb
def export(
    model: Model,
    out: OutFolder,
    layout: Annotated[
        str | None,
        typer.Option(
            help="mamba_ssm, for programs that read that; palimpsa_mamba2, for transformers and push. Of a hybrid: its "
            "model_type, or palimpsa_ and it. Default: the first."
        ),
    ] = None,
    off: Annotated[
        bool, typer.Option("--off", help="Leave importance out: swapped layers become plain ones again.")
    ] = False,
    revision: Revision = None,
    force: Force = False,
) -> None:
    """Write a model in another layout.

    Swapped layers exist only in the layouts that begin with palimpsa_; any other needs --off.
    """
    from .surgery.conversion.export import export as write

    _print_wrote(write(model, out, layout=layout, off=off, force=force, revision=revision))


@verb
def push(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The folder of a model or of an adapter.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="The repository on the Hub, as owner/name.")],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public (default: it is private).")
    ] = False,
    to_folder: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write what would be uploaded to a folder; upload nothing.")
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option(
            "--eval", metavar="FILE", help="The eval.json to show on the card (default: the one in the model's folder)."
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="REPO_ID", help="For an adapter: the Hub id of the model it was trained on.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace another model in the repository, or the folder if it exists.")
    ] = False,
    json: Json = False,
) -> None:
    """Share a model on the Hub, with its code and card.

    Anybody can load it with transformers, without this package. Needs a token with write access (`hf auth login`).
    """
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
    """Show what is installed, and check the kernels here.

    Lists the kernel that each kind of layer runs on and why the others do not, and compares every kernel that works
    here with a reference in fp64.
    """
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
