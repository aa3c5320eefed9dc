"""The operator and whole training steps on a CPU: numba's form beside torch's, and swapped models beside the unswapped.

    OMP_NUM_THREADS=1 python benchmarks/bench_cpu.py -o benchmarks/results/cpu-NAME

All variants take turns in one process, so that what else the machine does meets them alike; figures are the best of
their turns, and ratios are of those. Writes NAME.csv and NAME.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_scan import make_inputs
from common import command_line, markdown_table, provenance, write_csv
from palimpsa_surgery.kernels.metaplastic import scan as api
from palimpsa_surgery.mixers.mixer import PalimpsaMixer
from training_step import build

LAYERS = {
    "mamba2-docs-1m": ({"H": 8, "P": 32, "N": 64}, (32, 4, 1)),
    "mamba2-130m": ({"H": 24, "P": 64, "N": 128}, (64,)),
}
SHAPE, SWAPPED, LENGTH = "mamba2-docs-1m", 3, 512
BACKENDS = ("numba", "torch")


def best_of_turns(variants: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Shortest seconds of each; a first turn compiles and warms up."""
    seconds = dict.fromkeys(variants, float("inf"))
    for turn in range(turns + 1):
        for name, run in variants.items():
            started = time.perf_counter()
            run()
            if turn:
                seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def scan_rows(layer: str, sizes: dict[str, int], g: int, turns: int) -> list[dict]:
    """Nanoseconds per element-step (a channel's key, a token) of one sequence, forward and with the backward pass."""
    inputs, _, _ = make_inputs(1, LENGTH, **sizes, g=g, dtype=torch.float32, device="cpu")
    leaves = [x.requires_grad_() for x in inputs.values()]
    d_output = torch.randn_like(inputs["v"])

    def forward(backend: str) -> None:
        with torch.no_grad():
            api.metaplastic_scan(*leaves, backend=backend)

    def both(backend: str) -> None:
        api.metaplastic_scan(*leaves, backend=backend).output.backward(d_output)

    rows = []
    for what, run in (("forward", forward), ("forward+backward", both)):
        variants = {name: (lambda name=name, run=run: run(name)) for name in BACKENDS}
        seconds = best_of_turns(variants, turns)
        per = {n: s * 1e9 / (LENGTH * sizes["H"] * sizes["P"] * sizes["N"]) for n, s in seconds.items()}
        row = {"layer": layer, "T": LENGTH, **sizes, "g": g, "what": f"scan {what}"}
        row |= {f"{n} ns": f"{x:.2f}" for n, x in per.items()}
        rows.append({**row, "ratio": f"{per['torch'] / per['numba']:.1f}"})
    return rows


def training_rows(turns: int) -> list[dict]:
    """Whole steps of the embedded model's shape: forward, backward, clipping, AdamW, one window as in `tiny_cpu`."""
    ids = torch.randint(0, 4096, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def step_of(swapped: int, backend: str) -> Callable[[], None]:
        torch.manual_seed(0)
        module = build(SHAPE, swapped, None, "cpu", precision="no", checkpointing=False)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
        for mixer in module.modules():
            if isinstance(mixer, PalimpsaMixer):
                mixer.backend = backend

        def step() -> None:
            loss = module(input_ids=ids[:, :-1], targets=ids[:, 1:]) / LENGTH
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    variants = {"unswapped": step_of(0, "auto")}
    variants |= {f"{SWAPPED} of 8 layers swapped, {name}": step_of(SWAPPED, name) for name in BACKENDS}
    seconds = best_of_turns(variants, turns)
    return [
        {
            "layer": SHAPE,
            "T": LENGTH,
            "what": f"training step, {name}",
            "ms": f"{s * 1e3:.0f}",
            "speed of unswapped": f"{seconds['unswapped'] / s:.2f}",
        }
        for name, s in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="without an ending")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--commit", help="commit to note where git is not there")
    options = parser.parse_args()
    rows = [
        row for layer, (sizes, gs) in LAYERS.items() for g in gs for row in scan_rows(layer, sizes, g, options.turns)
    ]
    rows += training_rows(options.turns)
    facts = provenance(options.commit, cpu=True)
    write_csv(options.output.with_suffix(".csv"), [{**facts, **row} for row in rows])
    said = ", ".join(f"{name} {value}" for name, value in facts.items())
    text = f"{said}; `{command_line('bench_cpu.py')}`\n\n{markdown_table(rows)}"
    options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
