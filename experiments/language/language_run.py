"""Runs one arm through the stages of the package: plan, convert, finetune, evaluate; nothing is trained elsewhere."""

from __future__ import annotations

import json
import logging
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from language_arms import SOURCE, VARIANTS, Arm, Preset, lr_new_of
from language_overlap import overlap
from language_results import LOSS, ArmResult, Gate, Row, to_row
from palimpsa_surgery import __version__
from palimpsa_surgery.base.files import write_json, write_text
from palimpsa_surgery.base.schemas import write_model
from palimpsa_surgery.base.text import data_name, iter_documents
from palimpsa_surgery.kernels.backends import describe_device
from palimpsa_surgery.mixers.metaplasticity import metaplasticity_off
from palimpsa_surgery.recipes.data.documents import open_text
from palimpsa_surgery.recipes.evaluation.suites.suite import EvalOptions, EvalText, Subject, suite_module
from palimpsa_surgery.recipes.training.finetune import finetune
from palimpsa_surgery.recipes.training.metrics import read_metrics
from palimpsa_surgery.recipes.training.recipe import Recipe, load_recipe
from palimpsa_surgery.surgery.checkpoint.checkpoint import Checkpoint, open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.checkpoint.tokenizer import open_tokenizer
from palimpsa_surgery.surgery.conversion.convert import convert
from palimpsa_surgery.surgery.families.registry import mixers
from palimpsa_surgery.surgery.measure.forgetting import measure
from palimpsa_surgery.surgery.measure.profile import Profile, read_profile, rounded, write_profile
from palimpsa_surgery.surgery.planning.plan import Plan, make_plan

logger = logging.getLogger("palimpsa_surgery.experiments")

DEV_EVERY = 4
"""Every fourth held-out document chooses the learning rate; the others are measured, and choose nothing."""
OVERLAP_RUNS = (13, 50)


@dataclass(frozen=True)
class Experiment:
    """Where the experiment takes everything from, and where it writes.

    Attributes:
        name, preset: a key of `PRESETS` and what it holds.
        model: the source's folder or Hub id.
        train, held_out: text.
        out: gets `raw/` (one file an arm) and `work/` (models, runs).
    """

    name: str
    preset: Preset
    model: str
    train: Path
    held_out: Path
    out: Path

    @property
    def raw(self) -> Path:
        return self.out / "raw"

    @property
    def work(self) -> Path:
        return self.out / "work"

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.model)

    @cached_property
    def tokenizer(self) -> Any:
        return open_tokenizer(self.checkpoint)

    @cached_property
    def train_tokens(self) -> int:
        return len(open_text(str(self.training_text), self.tokenizer, cache=self.work / "cache").tokens)

    @cached_property
    def profile(self) -> Profile:
        """Of the source on training text; kept, so that every arm is planned from the same figures."""
        path = self.work / "profile.json"
        if not path.is_file():
            write_profile(self._measured(self.checkpoint, calibrate=True), path)
        return read_profile(path)

    @cached_property
    def long_text(self) -> EvalText:
        return self._text(self.preset.eval_length, self.preset.eval_tokens)

    @cached_property
    def probe_text(self) -> EvalText:
        longest = max(self.preset.probe_lengths)
        return self._text(longest, 8 * longest)

    def _text(self, longest: int, tokens: int) -> EvalText:
        rows = self.checkpoint.config.vocab_size
        return EvalText(self.test_file, self.tokenizer, longest=longest, tokens=tokens, seed=0, vocab_size=rows)

    @cached_property
    def training_text(self) -> Path:
        """The training file, or pieces of its documents where the preset asks for them."""
        if self.preset.pieces is None:
            return self.train
        path = self.work / "train.jsonl"
        if not path.is_file():
            count, size = self.preset.pieces
            write_text(path, "".join(_line(piece) for piece in pieces(list(iter_documents(self.train)), count, size)))
        return path

    @property
    def dev_file(self) -> Path:
        return self.work / "dev.jsonl"

    @property
    def test_file(self) -> Path:
        return self.work / "test.jsonl"

    def split(self) -> None:
        """Writes the held-out documents as two files, and how much of them stands in the training text."""
        if not self.test_file.is_file():
            lines = [_line(text) for text in iter_documents(self.held_out)]
            write_text(self.dev_file, "".join(lines[::DEV_EVERY]))
            write_text(self.test_file, "".join(line for i, line in enumerate(lines) if i % DEV_EVERY))
        path = self.out / "overlap.json"
        if not path.is_file():
            stores = [
                open_text(str(file), self.tokenizer, cache=self.work / "cache").tokens
                for file in (self.train, self.test_file)
            ]
            shared = {str(length): overlap(*stores, length) for length in OVERLAP_RUNS}
            write_json(path, {"train_tokens": len(stores[0]), "test_tokens": len(stores[1]), "in_runs_of": shared})

    def _measured(self, model: Checkpoint | Path, *, calibrate: bool) -> Profile:
        return measure(
            model,
            data=self.train,
            tokens=self.preset.measure_tokens,
            seq_len=min(2048, self.preset.measure_tokens),
            calibrate=calibrate,
            device=self.preset.device,
        )


def _line(text: str) -> str:
    return json.dumps({"text": text}, ensure_ascii=False) + "\n"


def pieces(documents: Sequence[str], count: int, size: int, seed: int = 0) -> list[str]:
    """At most `count` pieces of `size` characters, each from another document and from anywhere in it."""
    generator = random.Random(seed)
    long = [text for text in documents if len(text) >= size]
    chosen = generator.sample(long, min(count, len(long)))
    return [text[start : start + size] for text in chosen for start in [generator.randint(0, len(text) - size)]]


def run_source(experiment: Experiment) -> ArmResult:
    """Measures the source as it is; see `run_arm`."""
    started = time.perf_counter()
    values = _facts(experiment, Arm(SOURCE, 0.0, 0)) | {"arm": SOURCE}
    values |= _after(experiment, experiment.checkpoint, experiment.profile, probed=bool(experiment.preset.probed))
    return _written(experiment, values, started)


def run_arm(experiment: Experiment, arm: Arm) -> ArmResult:
    """Operates (unless it is the control), fine-tunes and measures one arm, and writes `raw/NAME.json`."""
    started = time.perf_counter()
    folder, plan = experiment.work / arm.name, plan_of(experiment, arm)
    model: Checkpoint | str | Path = experiment.model
    values = _facts(experiment, arm)
    if plan is not None:
        model = folder / "model"
        convert(experiment.checkpoint, model, plan=plan, profile=experiment.profile, force=True)
        values |= {"palimpsa_layers": list(plan.layers), "rule": plan.rule, "init": plan.init}
        values["beta_groups"] = plan.beta_groups
    run = finetune(model, recipe_of(experiment, arm), folder / "run", force=True)
    history = read_metrics(run.folder / "metrics.jsonl")
    values |= {"steps": run.steps, "tokens": run.tokens, "train_seconds": round(run.seconds, 1)}
    pace = [line["tokens_per_second"] for line in history if line["kind"] == "train"]
    values["tokens_per_second"] = round(statistics.median(pace), 1)
    values |= {"dev": list(run.validation), "importance": importance_history(history)}
    final = open_checkpoint(run.final)
    preset = experiment.preset
    values |= _after(
        experiment,
        final,
        experiment._measured(final, calibrate=False),
        probed=arm.variant in preset.probed,
        ablated=plan is not None and arm.variant in preset.ablated and arm.seed == preset.seeds[0],
    )
    return _written(experiment, values, started)


def plan_of(experiment: Experiment, arm: Arm) -> Plan | None:
    """The surgery of an arm; None for the control."""
    variant, preset = VARIANTS[arm.variant], experiment.preset
    if variant.rule is None:
        return None
    return make_plan(
        experiment.checkpoint,
        experiment.profile,
        layers=preset.layers,
        rule=variant.rule,
        init=variant.init,
        beta_groups=None if variant.per_channel else preset.beta_groups,
        seed=arm.seed,
    )


def recipe_of(experiment: Experiment, arm: Arm) -> Recipe:
    """The recipe of an arm: only learning rate and seed differ between arms."""
    preset = experiment.preset
    changes = {
        "data.train": experiment.training_text,
        "mode": VARIANTS[arm.variant].mode,
        "data.val": experiment.dev_file,
        "data.seq_len": preset.seq_len,
        "data.cache": experiment.work / "cache",
        "batch_size": preset.batch_size,
        "micro_batch_size": preset.micro_batch_size,
        "steps": preset.steps(experiment.train_tokens if preset.tokens is None else 0),
        "lr": arm.lr,
        "lr_new": lr_new_of(preset, arm),
        "seed": arm.seed,
        "eval_every": 0,
        "eval_windows": preset.dev_windows,
        "save_every": 0,
        "save_dtype": "float32",  # what was trained is what is measured
        "importance_every": 8,
        **preset.changes,
    }
    return load_recipe(
        preset.recipe,
        [f"{key}={json.dumps(str(value) if isinstance(value, Path) else value)}" for key, value in changes.items()],
    )


def importance_history(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step and layers of each line of `metrics.jsonl` that has importance; five digits."""
    found = []
    for line in history:
        if "importance" in line:
            layers = line["importance"]["layers"]
            short = {k: {name: float(f"{x:.5g}") for name, x in v.items()} for k, v in layers.items()}
            found.append({"step": line["step"], "layers": short})
    return found


def _facts(experiment: Experiment, arm: Arm) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "variant": arm.variant,
        "lr": arm.lr,
        "lr_new": lr_new_of(experiment.preset, arm),
        "seed": arm.seed,
        "seq_len": experiment.preset.seq_len,
        "preset": experiment.name,
        "version": __version__,
        "device": describe_device(torch.device(experiment.preset.device)),
        "source": experiment.checkpoint.source_id,
        "train": data_name(experiment.train),
        "held_out": data_name(experiment.held_out),
    }


def _after(
    experiment: Experiment, checkpoint: Checkpoint, profile: Profile, *, probed: bool, ablated: bool = False
) -> dict[str, Any]:
    """Losses, probes, importance, windows and gates of a model."""
    preset = experiment.preset
    model = load_model(checkpoint, dtype=torch.float32, device=preset.device)
    subject = Subject(model, checkpoint.source_id)
    long = EvalOptions(lengths=(preset.seq_len, preset.eval_length), tokens=preset.eval_tokens, trials=1)
    short = EvalOptions(
        lengths=preset.probe_lengths, trials=preset.probe_trials, pairs=preset.probe_pairs, depths=(0.0, 0.5, 0.9)
    )
    rows = _rows(subject, experiment.long_text, long, (LOSS, "importance"))
    if probed:
        rows += _rows(subject, experiment.probe_text, short, ("recall", "needle"))
    if ablated:
        with metaplasticity_off(model):
            off = _rows(Subject(model, checkpoint.source_id), experiment.long_text, long, (LOSS,))
        rows += [row.model_copy(update={"suite": "off"}) for row in off]
    return {
        "rows": rows,
        "windows": [rounded(layer.head_window) for layer in profile.layers],
        "rates": [rounded(layer.head_rate) for layer in profile.layers],
        "gates": gates_of(model),
    }


def _rows(subject: Subject, text: EvalText, options: EvalOptions, suites: Sequence[str]) -> list[Row]:
    return [
        to_row(name, measurement)
        for name in suites
        for measurement in suite_module(name).run(subject, text, options).measurements
    ]


@torch.no_grad()
def gates_of(model: Any) -> dict[int, Gate]:
    """f(s) and I_prior of the heads of every swapped layer."""
    return {
        layer: Gate(scale=mixer.metaplasticity.scale().tolist(), prior=mixer.metaplasticity.prior().tolist())
        for layer, mixer in mixers(model).items()
        if hasattr(mixer, "metaplasticity")
    }


def _written(experiment: Experiment, values: dict[str, Any], started: float) -> ArmResult:
    result = ArmResult(**values, seconds=round(time.perf_counter() - started, 1))
    write_model(result, experiment.raw / f"{result.arm}.json")
    logger.info("%s: done in %.0f s", result.arm, result.seconds)
    return result
