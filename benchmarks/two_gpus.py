"""One process and two, DDP and FSDP2, through the project's launcher: is it the same run, and how much faster?

    python benchmarks/two_gpus.py MODEL -o OUT --recipe docs_25m --steps 40 data.train=TRAIN.jsonl.gz
    python benchmarks/two_gpus.py --shape mamba2_1.3b --swap 8 --no-kill -o OUT --recipe docs_25m --steps 12 ...
    python benchmarks/two_gpus.py MODEL -o OUT --cpu --steps 6 data.seq_len=128        gloo, to find faults

All runs read the same tokens in the same order at the same global batch. How far two of them may lie apart is measured
too: by one process again, with micro-batches of another size, which changes nothing but the order of sums and the
rounding of products. Then runs are killed without warning and resumed on the other number of processes. What is
finished in OUT is not run again. Writes OUT/two_gpus.csv and OUT/two_gpus.md after every stage.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import command_line, markdown_table, provenance, write_csv
from launched import LaunchError, run_command
from palimpsa_surgery.base.console import setup_logging
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.recipes.launch import launch_command
from palimpsa_surgery.recipes.training.checkpointing import latest_checkpoint
from palimpsa_surgery.recipes.training.metrics import read_metrics
from palimpsa_surgery.recipes.training.recipe import Recipe, dump_recipe, load_recipe
from palimpsa_surgery.surgery.checkpoint.loading import load_model

HERE = Path(__file__).resolve().parent
FACTOR = 4.0
"""Two runs may lie this many times as far apart as the two orders of one process."""
FLOOR = {"no": 2e-5, "bf16": 2e-3}
"""And at least this far, in nats and as a relative L2 of logits, where the measured noise is next to nothing."""


@dataclass(frozen=True)
class Setup:
    """A way to run: name, accelerate configuration, number of processes."""

    name: str
    config: str
    processes: int

    def command(self, arguments: Sequence[str], *, cpu: bool) -> list[str]:
        """The launcher's command; on CPUs FSDP2 needs a script in front, see `fsdp_on_cpu.py`."""
        command = launch_command("cpu" if cpu else self.config, arguments, processes=self.processes)
        if cpu and self.config == "fsdp2":
            at = command.index("palimpsa_surgery")
            command[at - 1 : at + 1] = [str(HERE / "fsdp_on_cpu.py")]
        return command


ONE = Setup("one", "one_gpu", 1)
AGAIN = Setup("one, other micro-batches", "one_gpu", 1)
DDP, FSDP = Setup("ddp-2", "ddp", 2), Setup("fsdp2-2", "fsdp2", 2)
PAIRS = ((DDP, ONE), (FSDP, ONE), (ONE, DDP), (ONE, FSDP))


@dataclass(frozen=True)
class Bench:
    """What all runs have in common."""

    model: Path
    recipe: Path
    out: Path
    cpu: bool
    timeout: float

    def folder(self, name: str) -> Path:
        return self.out / name.replace(", ", "-").replace(" ", "-")

    def run(self, setup: Setup, name: str, *changes: str, resume: bool = False, kill_at: int | None = None) -> bool:
        """One launch; returns whether it ended by itself."""
        folder = self.folder(name)
        arguments = ["finetune", str(self.model), "--recipe", str(self.recipe), "-o", str(folder), *changes]
        arguments += ["--resume"] if resume else ["--force"]
        print(f"{name}: {setup.processes} x {setup.config}{' resumes' if resume else ''}", flush=True)
        return run_command(
            setup.command(arguments, cpu=self.cpu),
            self.out / f"{folder.name}{'-resumed' if resume else ''}.log",
            timeout=self.timeout,
            metrics=folder / "metrics.jsonl",
            kill_when=None if kill_at is None else partial(_reached, folder, kill_at),
            environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.cpu else {},
        )

    def once(self, setup: Setup, *changes: str) -> None:
        """A whole run, unless it is there already."""
        if not (self.folder(setup.name) / "final" / "config.json").is_file():
            self.run(setup, setup.name, *changes)

    def kill_and_resume(self, first: Setup, second: Setup, kill_at: int) -> tuple[str, int]:
        """Kills `first` when its checkpoint of step `kill_at` is there, `second` finishes; (name, step resumed at)."""
        name = f"{first.name} killed, {second.name} resumes"
        folder = self.folder(name)
        if not (folder / "final" / "config.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            every = max(1, kill_at // 2)  # a validation before each checkpoint: it leaves a sharded model gathered
            saving = [f"save_every={every}", f"eval_every={every}", "keep=3"]
            if self.run(first, name, *saving, kill_at=kill_at):
                raise LaunchError(f"{name}: ended before it could be killed; give more --steps")
            self.run(second, name, *saving, resume=True)
        starts = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "start"]
        return name, starts[-1]["step"]


def _reached(folder: Path, step: int) -> bool:
    found = latest_checkpoint(folder / "checkpoints")
    return found is not None and int(found.name.removeprefix("step-")) >= step


def losses(folder: Path) -> dict[int, float]:
    """Step -> training loss."""
    return {line["step"]: line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"}


def apart(first: dict[int, float], second: dict[int, float], *, after: int = 0) -> tuple[float, float]:
    """Largest and mean distance of two loss curves beyond step `after`.

    Raises:
        LaunchError: they are not of the same steps.
    """
    if first.keys() != second.keys():
        raise LaunchError(f"loss curves of {len(first)} and {len(second)} steps cannot be compared; run anew")
    distances = [abs(first[step] - second[step]) for step in first if step > after]
    return max(distances), statistics.fmean(distances)


def speed(folder: Path) -> tuple[float, int]:
    """Median tokens/s without the first two steps (compilation), and peak bytes, as the first process sees them."""
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]
    rates = [line["tokens_per_second"] for line in lines[2:] or lines]
    return statistics.median(rates), max(line["memory_bytes"] for line in lines)


@torch.no_grad()
def logits(folder: Path, device: str) -> torch.Tensor:
    """Of 96 fixed tokens, by the saved model, loaded like any model folder; kept beside it."""
    kept = folder / "logits.pt"
    if not kept.is_file():
        model = load_model(folder / "final", dtype=torch.float32, device=device)
        ids = torch.randint(0, min(4000, model.config.vocab_size), (1, 96), generator=torch.Generator().manual_seed(0))
        torch.save(model(input_ids=ids.to(device)).logits[..., :4000].float().cpu(), kept)
        del model
        torch.cuda.empty_cache()  # runs on the same card follow
    return torch.load(kept, weights_only=True)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2; in fp64, because a norm of many numbers in fp32 is itself only good to 1e-5."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


class Report:
    """Rows of the result, written after each; the runs compared with are `one` and `one, other micro-batches`."""

    def __init__(self, bench: Bench, facts: dict[str, str], precision: str) -> None:
        self.bench, self.facts, self.rows = bench, facts, []
        self.device = "cpu" if bench.cpu else "cuda"
        one, again = bench.folder(ONE.name), bench.folder(AGAIN.name)
        self.reference, self.logits, self.speed = losses(one), logits(one, self.device), speed(one)[0]
        self.floor = FLOOR[precision]
        self.limit = max(self.floor, FACTOR * apart(self.reference, losses(again))[0])
        self.limit_logits = max(self.floor, FACTOR * relative(logits(again, self.device), self.logits))

    def add(self, name: str, processes: int, *, after: int = 0) -> None:
        """The row of a run, compared from step `after` on; a resumed run, and one on CPUs, has no speed."""
        folder = self.bench.folder(name)
        largest, mean = apart(self.reference, losses(folder), after=after)
        off = relative(logits(folder, self.device), self.logits)
        rate, peak = speed(folder)
        ok = largest <= self.limit and off <= self.limit_logits
        row: dict[str, Any] = {"run": name, "processes": processes, "resumed at": after or ""}
        timed = not (after or self.bench.cpu)
        row["tokens/s"] = f"{rate:,.0f}" if timed else ""
        row["times one"] = f"{rate / self.speed:.2f}" if timed else ""
        row["peak GB a process"] = f"{peak / 1e9:.2f}"
        row |= {"loss apart, max": f"{largest:.2e}", "mean": f"{mean:.2e}", "logits apart": f"{off:.2e}"}
        row["same run"] = "yes" if ok else "NO"
        self.rows.append(row)
        print(" ".join(f"{key}={value}" for key, value in row.items() if value != ""), flush=True)
        self.write()

    def write(self) -> None:
        write_csv(self.bench.out / "two_gpus.csv", [{**self.facts, **row} for row in self.rows])
        facts = self.facts
        text = (
            f"{facts['device']}, {facts['date']}, commit {facts['commit']}, torch {facts['torch']}; {facts['what']}.\n"
            f"\n    {facts['command']}\n\n{markdown_table(self.rows)}\n"
            f"Losses are compared step by step with those of `one`. Limits: {self.limit:.1e} nats and"
            f" {self.limit_logits:.1e} of the logits: {FACTOR:g} times what another order of sums gives in one process,"
            f" and at least {self.floor:g}. Peak memory is that of the first process.\n"
        )
        (self.bench.out / "two_gpus.md").write_text(text, encoding="utf-8")


def other_micro_batch(size: int) -> int:
    """Half of it, which needs less memory and divides the batch as well; two windows where it is one."""
    return 2 if size == 1 else size // 2 if size % 2 == 0 else 1


def random_model(shape: str, swapped: int, out: Path) -> Path:
    """A model folder with random weights and the embedded tokenizer."""
    from training_step import COMMON, SHAPES, PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM, swapped_layers

    if not (out / "config.json").is_file():
        sizes = {**COMMON, **SHAPES[shape]}
        layers, rank = swapped_layers(sizes["num_hidden_layers"], swapped), max(1, sizes["hidden_size"] // 16)
        torch.manual_seed(0)
        PalimpsaMamba2ForCausalLM(
            PalimpsaMamba2Config(**sizes, palimpsa_layers=layers, beta_rank=rank)
        ).save_pretrained(out)
        for file in embedded_checkpoint_path().glob("tokenizer*"):
            shutil.copyfile(file, out / file.name)
    return out


def prepare(options: argparse.Namespace) -> tuple[Bench, Recipe]:
    """The model folder, and the recipe with what this benchmark needs."""
    model = random_model(options.shape, options.swap, options.out / "model") if options.shape else Path(options.model)
    fixed = [f"steps={options.steps}", "schedule=constant", "warmup=0", "save_every=0", "log_every=1", "eval_every=0"]
    recipe = load_recipe(options.recipe, [*fixed, "save_dtype=float32", *options.changes])
    file = options.out / "recipe.yaml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    return Bench(model, file, options.out, options.cpu, options.timeout), recipe


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a converted model folder")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes of the recipe")
    parser.add_argument("--shape", help="instead of a model: random weights, a name from training_step.py")
    parser.add_argument("--swap", type=int, default=8, help="layers of --shape to swap")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--recipe", default="tiny_cpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cpu", action="store_true", help="processes on CPUs through gloo; times say nothing")
    parser.add_argument("--no-kill", action="store_true", help="leave out the runs that are killed and resumed")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each launch")
    parser.add_argument("--commit", help="to note where git is not there")
    options = parser.parse_intermixed_args(argv)
    if options.shape and options.model:  # then what stood first is a change of the recipe
        options.changes, options.model = [options.model, *options.changes], None
    if not (options.shape or options.model):
        parser.error("name a model folder, or give --shape")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    setup_logging(-1)
    if not options.cpu and torch.cuda.device_count() < 2:
        sys.exit(f"two_gpus: needs two CUDA devices and found {torch.cuda.device_count()}; --cpu runs on processors")
    options.out.mkdir(parents=True, exist_ok=True)
    bench, recipe = prepare(options)
    other = other_micro_batch(recipe.micro_batch_size)
    facts = provenance(options.commit, cpu=options.cpu)
    facts |= {"what": options.shape or bench.model.name, "command": command_line("two_gpus.py", argv)}
    try:
        for setup, changes in ((ONE, []), (AGAIN, [f"micro_batch_size={other}"])):
            bench.once(setup, *changes)
        report = Report(bench, facts, recipe.precision)
        report.add(ONE.name, 1)
        report.add(AGAIN.name, 1)
        for setup in (DDP, FSDP):
            bench.once(setup)
            report.add(setup.name, setup.processes)
        for first, second in () if options.no_kill else PAIRS:
            name, step = bench.kill_and_resume(first, second, max(1, options.steps // 3))
            report.add(name, second.processes, after=step)
    except LaunchError as error:
        sys.exit(f"two_gpus: {error}")
    if any(row["same run"] == "NO" for row in report.rows):
        sys.exit("two_gpus: some runs are not the same run; see the table")


if __name__ == "__main__":
    main()
