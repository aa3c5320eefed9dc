"""The command `palimpsa`: thin verbs over the Python API, and the only module that prints.

Help has to answer at once, so nothing heavy is imported outside a verb.
"""

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .base.console import setup_logging, table
from .base.errors import EXIT_FAILED, PalimpsaError

app = typer.Typer(
    help="Give a pretrained Mamba2 a better memory: measure, plan, convert, fine-tune, evaluate, share.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # they print the values of local variables, tokens included
    context_settings={"help_option_names": ["-h", "--help"]},
)

Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint's folder or a Hub id.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or a Hub id, source or converted.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
Data = Annotated[str | None, typer.Option(help="Text: .jsonl, .json, .txt (or .gz), a folder, or a dataset's id.")]
Tokens = Annotated[int, typer.Option(help="How many tokens of the text to use.")]
SeqLen = Annotated[int, typer.Option(help="Tokens in a window.")]
Seed = Annotated[int, typer.Option(help="Of every random choice.")]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or Hub id of a tokenizer, when SRC has none.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU when there is one.")]
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
    own = inspect.signature(function).parameters.values()
    added = [
        inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, annotation=a, default=False) for k, a in options.items()
    ]
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
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

    print(dump_json(value), end="")


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _require_kernels(required: bool) -> None:
    if required:
        from .kernels.api import set_require_kernels

        set_require_kernels(True)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"palimpsa-surgery {__version__}")
        raise typer.Exit


@verb
def measure(
    src: Source,
    out: Annotated[Path, typer.Option("-o", "--out", help="The profile; a heat map goes beside it.")] = Path(
        "profile.json"
    ),
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
    from .base.files import refuse_existing
    from .surgery.forgetting import measure as run
    from .surgery.plots import plot_profile
    from .surgery.profile import write_profile

    refuse_existing(out, force=force)
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
    write_profile(profile, out)
    plot_profile(profile, out.with_suffix(".png"))
    if json:
        _print_json(profile.model_dump(mode="json"))
        return
    rows = [(x.layer, x.window, x.rate, "swapped" if x.swapped else "") for x in profile.layers]
    print(table(rows, ("layer", "window (tokens)", "rate (nats/token)", "")))
    print(f"\n{profile.source}: {profile.describe()}\nwrote {out} and {out.with_suffix('.png')}")


@verb
def plan(
    src: Source,
    profile: Annotated[Path | None, typer.Option(help="profile.json of the same checkpoint; a count needs it.")] = None,
    layers: Annotated[str, typer.Option(help="A count such as 8, or a list such as 4,8,11 (one layer: 8,).")] = "8",
    rule: Annotated[
        str, typer.Option(help="How a count is chosen: window, rate, strongest, random or all.")
    ] = "window",
    init: Annotated[str, typer.Option(help="How the layers start: identity, calibrated or paper.")] = "identity",
    strength: Annotated[float | None, typer.Option(help="Mean growth of importance, calibrated start only.")] = None,
    beta_rank: Annotated[int | None, typer.Option(help="Rank of the importance gate.")] = None,
    beta_groups: Annotated[int | None, typer.Option(help="Importances per head, a divisor of the head size.")] = None,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option("-o", "--out", help="The plan, meant to be read and edited.")] = Path(
        "plan.yaml"
    ),
    revision: Revision = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Choose the layers to swap and how they start."""
    from .base.files import refuse_existing
    from .surgery.checkpoint import open_checkpoint
    from .surgery.plan import make_plan, parse_layers, write_plan
    from .surgery.profile import read_profile

    refuse_existing(out, force=force)
    made = make_plan(
        open_checkpoint(src, revision=revision),
        None if profile is None else read_profile(profile),
        layers=parse_layers(layers),
        rule=rule,
        init=init,
        strength=strength,
        beta_rank=beta_rank,
        beta_groups=beta_groups,
        seed=seed,
    )
    write_plan(made, out)
    if json:
        _print_json(made.model_dump(mode="json"))
        return
    print(table([(layer, made.reasons.get(layer, "")) for layer in made.layers], ("layer", "reason")))
    print(f"\nstart: {made.init}, rank {made.beta_rank}, {made.beta_groups} importance(s) a head\nwrote {out}")


def main() -> None:
    """Entry point of the console script."""
    app()
