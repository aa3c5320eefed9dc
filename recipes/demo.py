"""The whole pipeline on the embedded model and text in about a minute on two cores, and the commands for the same.

measure -> plan -> convert (verified) -> finetune -> losses of source, converted and tuned model -> generate -> report
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ..base.console import counted, human_seconds, table
from ..base.errors import OutputExistsError
from ..base.files import named_path, refuse_existing, write_text
from ..base.text import EMBEDDED_CHECKPOINT, iter_documents, token_sequences
from ..mixers.importance import record_importance
from ..surgery.checkpoint.checkpoint import open_checkpoint
from ..surgery.checkpoint.loading import load_model
from ..surgery.checkpoint.tokenizer import load_tokenizer
from ..surgery.conversion.convert import convert
from ..surgery.measure.forgetting import measure
from ..surgery.measure.plots import plot_profile
from ..surgery.measure.profile import Profile, write_profile
from ..surgery.planning.plan import Plan, make_plan, write_plan
from .demo_plots import plot_importance, plot_losses
from .evaluation.generation import continue_text
from .training.finetune import finetune
from .training.metrics import read_metrics
from .training.validation import LossResult, evaluate_loss, paired_difference

logger = logging.getLogger(__name__)

PROMPT = "The CREATE TABLE statement"
TITLE = "# Surgery on the embedded Mamba2"
HELD_OUT = 10
"""Every tenth document is kept from training, for the losses."""

_WRITTEN = (
    *("text", "profile.json", "profile.png", "plan.yaml", "converted", "run"),
    *("losses.png", "importance.png", "report.md"),
)

T = TypeVar("T")


@dataclass(frozen=True)
class DemoOptions:
    """How much the demo does; the defaults take about a minute on two cores.

    Attributes:
        layers: how many layers to swap.
        tokens: measured, in sequences of `seq_len`.
        seq_len: also of training and of the losses.
        steps: of fine-tuning.
        batch_size: sequences per optimizer step.
        loss_tokens: of held-out text.
        new_tokens: to generate.
    """

    layers: int = 3
    tokens: int = 16384
    seq_len: int = 512
    steps: int = 48
    batch_size: int = 4
    loss_tokens: int = 16384
    new_tokens: int = 40
    seed: int = 0


@dataclass(frozen=True)
class DemoResult:
    """What the demo did.

    Attributes:
        folder: with report.md, the pictures and every stage's files.
        commands: the same as shell commands.
        losses: on held-out text, of `source`, `converted` and `tuned`.
        layers: that were swapped.
        head_ratios: metaplasticity ratio of every head of the tuned model, by swapped layer, on the held-out text.
        texts: continuations of `PROMPT` by source and tuned model.
        seconds: by stage.
    """

    folder: Path
    commands: tuple[str, ...]
    losses: dict[str, LossResult]
    layers: tuple[int, ...]
    head_ratios: dict[int, tuple[float, ...]]
    texts: dict[str, str]
    seconds: dict[str, float]

    def gain(self, name: str) -> tuple[float, float]:
        """Loss of a model less that of the source on the same sequences, and its error."""
        return paired_difference(self.losses["source"], self.losses[name])

    def rows(self) -> list[tuple[str, str, str]]:
        """Model, loss with its error, and difference from the source with its error."""
        rows = []
        for name, result in self.losses.items():
            difference, error = self.gain(name)
            # Adding zero makes a rounded -0.0 positive.
            change = "" if name == "source" else f"{round(difference, 4) + 0.0:+.4f} ± {error:.4f}"
            rows.append((name, f"{result.loss:.4f} ± {result.stderr:.4f}", change))
        return rows


def run_demo(
    out: str | Path = "palimpsa-demo", *, options: DemoOptions | None = None, force: bool = False
) -> DemoResult:
    """Runs the pipeline and writes everything it makes into `out`.

    Args:
        out: the folder to make.
        options: amounts of work.
        force: replace what an earlier demo wrote in `out`.

    Raises:
        OutputExistsError: `out` holds something and `force` is false, or files of these names that no demo has written.
        PalimpsaError: what any of the stages raises.
    """
    options, folder = options or DemoOptions(), named_path(out, "output")
    _claim(folder, force=force)
    seconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], T]) -> T:
        logger.info("%s ...", stage)
        started = time.perf_counter()
        value = work()
        seconds[stage] = time.perf_counter() - started
        return value

    source = open_checkpoint(EMBEDDED_CHECKPOINT)
    _split_text(folder / "text")
    profile: Profile = timed(
        "measure", lambda: measure(source, tokens=options.tokens, seq_len=options.seq_len, seed=options.seed)
    )
    plan: Plan = make_plan(source, profile, layers=options.layers, seed=options.seed)
    write_profile(profile, folder / "profile.json")
    plot_profile(profile, folder / "profile.png", chosen=plan.layers)
    write_plan(plan, folder / "plan.yaml")
    timed(
        "convert",
        lambda: convert(source, folder / "converted", plan=plan, profile=profile, verify="logits", force=force),
    )
    timed(
        "finetune",
        lambda: finetune(
            folder / "converted", "tiny_cpu", folder / "run", overrides=_overrides(folder, options), force=force
        ),
    )
    losses, head_ratios = timed("evaluate", lambda: _evaluate(folder, options))
    texts = timed("generate", lambda: _texts(folder, options))
    result = DemoResult(folder, demo_commands(folder, options), losses, plan.layers, head_ratios, texts, seconds)
    history = read_metrics(folder / "run" / "metrics.jsonl")
    plot_losses(history, {name: result.gain(name) for name in losses if name != "source"}, folder / "losses.png")
    plot_importance(history, head_ratios, folder / "importance.png")
    write_text(folder / "report.md", render_report(result, options))
    return result


def demo_commands(out: Path, options: DemoOptions) -> tuple[str, ...]:
    """The stages as commands a person could type, after the first run wrote `text/`."""

    def at(name: str) -> str:
        return shlex.quote(str(out / name))

    changes = " ".join(shlex.quote(change) for change in _overrides(out, options))
    return (
        f"palimpsa measure {EMBEDDED_CHECKPOINT} -o {at('profile.json')} --tokens {options.tokens} "
        f"--seq-len {options.seq_len}",
        f"palimpsa plan {EMBEDDED_CHECKPOINT} --profile {at('profile.json')} --layers {options.layers} "
        f"-o {at('plan.yaml')}",
        f"palimpsa convert {EMBEDDED_CHECKPOINT} {at('converted')} --plan {at('plan.yaml')} --verify logits",
        f"palimpsa finetune {at('converted')} --recipe tiny_cpu -o {at('run')} {changes}",
        f"palimpsa evaluate {at('run/final')} --against {EMBEDDED_CHECKPOINT} --suite loss --lengths {options.seq_len} "
        f"--tokens {options.loss_tokens} --data {at('text/held-out.jsonl')} -o {at('eval.json')}",
        f"palimpsa generate {at('run/final')} {shlex.quote(PROMPT)} --max-new-tokens {options.new_tokens}",
    )


def _claim(folder: Path, *, force: bool) -> None:
    """Begins `report.md`, by which a later demo knows what may be replaced, also where this one is interrupted."""
    refuse_existing(folder, force=force)
    report = folder / "report.md"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    taken = [name for name in names if name in _WRITTEN]
    ours = report.is_file() and report.read_text(encoding="utf-8", errors="replace").startswith(TITLE)
    if taken and not ours:
        raise OutputExistsError(
            f"{folder}: holds {', '.join(taken)}, which no demo has written (report.md would begin with {TITLE!r}), "
            "and replacing that would lose it; choose another output"
        )
    write_text(report, f"{TITLE}\n\nNot finished: the demo still runs, or was interrupted.\n")


def _overrides(out: Path, options: DemoOptions) -> list[str]:
    values = {
        "data.train": out / "text" / "train.jsonl",
        "data.val": out / "text" / "held-out.jsonl",
        "data.seq_len": options.seq_len,
        "steps": options.steps,
        "lr": 2e-4,
        "lr_new": 1e-2,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "eval_every": max(1, options.steps // 6),
        "eval_windows": 8,
        "importance_every": max(1, options.steps // 6),
        "save_every": 0,
    }
    return [f"{key}={value}" for key, value in values.items()]


def _split_text(folder: Path) -> None:
    """train.jsonl and held-out.jsonl: whole documents of the embedded text."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in iter_documents()]
    write_text(folder / "held-out.jsonl", "".join(lines[::HELD_OUT]))
    write_text(folder / "train.jsonl", "".join(line for i, line in enumerate(lines) if i % HELD_OUT))


def _models(folder: Path) -> dict[str, str | Path]:
    return {"source": EMBEDDED_CHECKPOINT, "converted": folder / "converted", "tuned": folder / "run" / "final"}


def _evaluate(folder: Path, options: DemoOptions) -> tuple[dict[str, LossResult], dict[int, tuple[float, ...]]]:
    """Losses of all models on held-out sequences, and the ratios of the tuned one's heads there."""
    sequences, _ = token_sequences(
        folder / "text" / "held-out.jsonl",
        load_tokenizer(folder / "converted"),
        tokens=options.loss_tokens,
        seq_len=options.seq_len,
        seed=options.seed,
    )
    losses = {}
    for name, path in _models(folder).items():
        model = load_model(path, dtype=torch.float32)
        with record_importance(model) as recorder:
            losses[name] = evaluate_loss(model, sequences, batch_size=4)
    return losses, {layer: figures.head_ratio for layer, figures in recorder.layers().items()}


def _texts(folder: Path, options: DemoOptions) -> dict[str, str]:
    tokenizer = load_tokenizer(folder / "converted")
    models = {name: model for name, model in _models(folder).items() if name != "converted"}
    return {
        name: continue_text(
            load_model(model, dtype=torch.float32), tokenizer, PROMPT, max_new_tokens=options.new_tokens
        )
        for name, model in models.items()
    }


def render_report(result: DemoResult, options: DemoOptions) -> str:
    """report.md."""
    swapped = ", ".join(str(layer) for layer in result.layers)
    stages = ", ".join(f"{stage} {human_seconds(seconds)}" for stage, seconds in result.seconds.items())
    losses = table(result.rows(), ("model", "loss", "difference from the source"))
    commands = "\n".join(result.commands)
    ratios = [ratio for layer in result.head_ratios.values() for ratio in layer]
    most, heads = max(ratios) - 1, len(ratios)
    texts = "\n\n".join(f"{name}:\n\n> {PROMPT}{' '.join(text.split(chr(10)))}" for name, text in result.texts.items())
    return f"""{TITLE}

Layers {swapped} (the longest windows of 8, see `plan.yaml`) became Palimpsa-M. The converted model was verified to
equal its source (`converted/surgery_report.json`), then fine-tuned for {counted(options.steps, "step")}.

![forgetting](profile.png)

## Loss on held-out text (nats per token, bootstrap error over sequences)

```
{losses}
```

The converted model equals the source: surgery alone changes nothing. What fine-tuning gains on so little text is mostly
familiarity with this kind of text, by all parameters; the demo shows that the pipeline works, not that
metaplasticity pays.

![losses](losses.png)

## Importance in the swapped layers

They start with every synapse as important as any other (ratio 1), and fine-tuning lets importance in where that
lowers the loss. In so few steps the ratio rises by at most {most:.1%}, in one of {heads} heads.

![importance](importance.png)

## Continuations

{texts}

## The same as commands

What they write is here already: run them with `--force`, or with other names.

```bash
{commands}
```

Time: {stages}.
"""
