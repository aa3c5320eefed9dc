"""One checkpoint fine-tuned in every mode on the same tokens in the same order: loss curves and a table.

    python benchmarks/modes.py SOURCE --layers 8 --recipe docs_25m -o OUT data.train=TRAIN data.val=VAL lora:lr=5e-4

SOURCE is converted into OUT/model first; without --layers it is a converted folder already. `key=value` changes the
recipe in every mode, `MODE:key=value` in one. Each mode has a folder and a process of its own, so that its peak memory
is its own. What is finished is not run again; what was cut short goes on from its newest checkpoint. Writes into OUT
modes.md (the table), curves.png (losses) and modes.png (how they change and differ, which short runs need).
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import palimpsa_surgery as ps
import torch
from common import command_line, markdown_table, provenance
from palimpsa_surgery.base.console import human_bytes, human_count, setup_logging
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.base.files import write_text
from palimpsa_surgery.recipes.training.finetune import make_accelerator, open_streams
from palimpsa_surgery.recipes.training.metrics import read_metrics
from palimpsa_surgery.recipes.training.modes import prepare_mode
from palimpsa_surgery.recipes.training.optim import describe_selection
from palimpsa_surgery.recipes.training.recipe import Recipe, load_recipe
from palimpsa_surgery.recipes.training.validation import LossResult, evaluate_loss, paired_difference
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
from plot_runs import draw, draw_changes

MODES = ("full", "new", "new+swapped", "lora")
# Changed in one mode only, these would make the runs read other tokens, or be measured on others.
SHARED = ("data", "seed", "steps", "tokens", "batch_size", "eval_windows")

logger = logging.getLogger("palimpsa_surgery.benchmarks")


def overrides_for(mode: str, changes: Sequence[str]) -> list[str]:
    """The changes of the recipe that a mode gets: those for all, then its own.

    Raises:
        UsageError: an unknown mode, or a change in one mode of what all must have in common.
    """
    shared, own = [], []
    for change in changes:
        prefix, colon, rest = change.partition(":")
        if not colon or "=" in prefix:
            shared.append(change)
            continue
        if prefix not in MODES:
            raise UsageError(f"{change}: there is no mode {prefix!r}; expected one of {', '.join(MODES)}")
        if rest.partition("=")[0].split(".")[0] in SHARED:
            raise UsageError(f"{change}: must be the same in all modes, or their losses cannot be compared")
        if prefix == mode:
            own.append(rest)
    return [*shared, *own, f"mode={mode}"]


def in_child(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function in a new process, whose peak memory is then that of the call."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=setup_logging) as pool:
        return pool.submit(function, *arguments, **options).result()


def run_mode(model: Path, recipe: Recipe, out: Path) -> None:
    """Fine-tunes, unless that is done; goes on where a run was cut short."""
    if (out / "final" / "config.json").is_file():
        logger.info("%s: done before", out.name)
        return
    logger.info("%s: starts", out.name)
    result = in_child(ps.finetune, model, recipe, out, resume=out.exists())
    logger.info("%s: validation %s", out.name, ", ".join(f"{loss:.4f}" for _, loss, _ in result.validation))


def losses_of(folders: dict[str, str | Path], recipe: Recipe, out: Path) -> dict[str, LossResult]:
    """The loss of each model on the validation sequences of the recipe: the same ones for all; the first tokenizes."""
    accelerator = make_accelerator(recipe, out)
    results, sequences = {}, None
    for name, folder in folders.items():
        model = ps.load_model(folder, dtype=torch.float32, device=accelerator.device)
        if sequences is None:
            tokenizer = load_tokenizer(recipe.data.tokenizer or folder)
            sequences = open_streams(accelerator, recipe, tokenizer, model.config.vocab_size)[1]
        results[name] = evaluate_loss(model, sequences, precision=recipe.precision)
        logger.info("%s: loss %.4f", name, results[name].loss)
    return results


def signed(start: LossResult, end: LossResult) -> str:
    """Loss of `end` less that of `start` on the same sequences, with its error."""
    difference, error = paired_difference(start, end)
    return f"{difference:+.4f} ± {error:.4f}"


def mode_row(lines: list[dict[str, Any]], start: LossResult, end: LossResult, trained: int) -> dict[str, str]:
    """One mode as a row of the table, from its `metrics.jsonl`, two losses and the number of trained parameters."""
    training = [line for line in lines if line["kind"] == "train"]
    speeds = [line["tokens_per_second"] for line in training[1:] or training]  # the first step compiles
    return {
        "trained parameters": human_count(trained),
        "tokens": f"{training[-1]['tokens']:,}",
        "validation loss before": f"{start.loss:.4f} ± {start.stderr:.4f}",
        "after": f"{end.loss:.4f} ± {end.stderr:.4f}",
        "paired difference": signed(start, end),
        "tokens/s": f"{statistics.median(speeds):,.0f}",
        "peak memory": human_bytes(max(line["memory_bytes"] for line in training)),
    }


def trained_parameters(model: Path, recipe: Recipe) -> int:
    """How many parameters a mode trains."""
    checkpoint = ps.open_checkpoint(model)
    return describe_selection(prepare_mode(ps.load_model(checkpoint), checkpoint, recipe), recipe).trained


def report(
    model: Path, out: Path, recipes: dict[str, Recipe], losses: dict[str, LossResult], facts: dict[str, str]
) -> str:
    """The page: table, sequences, machine and command."""
    rows = []
    for mode, recipe in recipes.items():
        lines = read_metrics(out / mode / "metrics.jsonl")
        rates = {"mode": mode, "lr": f"{recipe.lr:g}", "lr of what is new": f"{recipe.lr_new:g}"}
        trained = trained_parameters(model, recipe)
        rows.append({**rates, **mode_row(lines, losses["start"], losses[mode], trained)})
    start, source = losses["start"], losses.get("source")
    before = f" The start lies {signed(source, start)} from its source." if source else ""
    return (
        f"{facts['device']}, {facts['date']}, commit {facts['commit']}, torch {facts['torch']}. Losses in nats"
        f" per token over {start.sequences} sequences of {start.seq_len} held-out tokens; ± is one bootstrap standard"
        f" error; the paired difference takes the same sequences for both models.{before}\n\n"
        f"    {facts['command']}\n\n{markdown_table(rows)}"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a Mamba2 checkpoint (with --layers), or a converted model folder")
    parser.add_argument("changes", nargs="*", metavar="[MODE:]key=value", help="changes of the recipe")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--recipe", default="tiny_cpu")
    parser.add_argument("--layers", type=int, help="convert first: how many layers to swap")
    parser.add_argument("--init", default="identity", help="of the conversion")
    parser.add_argument("--beta-groups", type=int, help="of the conversion; 1 is one beta per head")
    parser.add_argument("--title", default="")
    parser.add_argument("--commit", help="to note where git is not there")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    setup_logging()
    recipes = {mode: load_recipe(options.recipe, overrides_for(mode, options.changes)) for mode in MODES}
    facts = {**provenance(options.commit), "command": command_line("modes.py", argv)}
    model = Path(options.source)
    if options.layers is not None:
        model = options.out / "model"
        if not model.exists():
            ps.convert(options.source, model, layers=options.layers, init=options.init, beta_groups=options.beta_groups)
    for mode, recipe in recipes.items():
        run_mode(model, recipe, options.out / mode)
        draw([options.out / m for m in MODES if (options.out / m).is_dir()], options.out / "curves.png", options.title)
    source = {} if options.layers is None else {"source": options.source}
    folders = {"start": model, **source, **{mode: options.out / mode / "final" for mode in MODES}}
    losses = losses_of(folders, recipes["full"], options.out)
    errors = {mode: paired_difference(losses["start"], losses[mode])[1] for mode in MODES}
    draw_changes([options.out / m for m in MODES], "new", options.out / "modes.png", options.title, errors)
    page = report(model, options.out, recipes, losses, facts)
    write_text(options.out / "modes.md", page)
    print(page)


if __name__ == "__main__":
    main()
