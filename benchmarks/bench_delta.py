"""The delta rule with importance in plain torch, beside the metaplastic scan: a short table, printed.

    python benchmarks/bench_delta.py [--shape toy|0.8b|7b] [--device cpu|cuda] [-o NAME.csv]

All variants take turns in one process; figures are the best of their turns. "off" is the same call with beta = 0 and
prior 1, which gives what a Gated DeltaNet gives, at this form's cost and not at that of its kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from common import command_line, markdown_table, provenance, write_csv
from palimpsa_surgery.kernels.metaplastic.scan import metaplastic_scan
from palimpsa_surgery.kernels.metaplastic_delta.scan import metaplastic_delta_scan
from torch import Tensor

SHAPES = {
    "toy": {"B": 1, "T": 256, "G": 2, "H": 4, "P": 16, "N": 16},
    "0.8b": {"B": 1, "T": 4096, "G": 16, "H": 16, "P": 128, "N": 128},
    "7b": {"B": 1, "T": 4096, "G": 30, "H": 30, "P": 256, "N": 128},
}


def make_inputs(B: int, T: int, G: int, H: int, P: int, N: int, device: str) -> dict[str, Tensor]:
    """Unit keys, write gates around a half, decays like a trained layer's; bf16 on a GPU, fp32 on a CPU."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    k, b = torch.nn.functional.normalize(randn(B, T, G, N), dim=-1), torch.sigmoid(randn(B, T, H))
    wide = {"q": randn(B, T, G, N) * N**-0.5, "k": k, "v": randn(B, T, H, P), "b": b, "beta": b * torch.rand(H)}
    exact = {"log_decay": -torch.exp(randn(B, T, H) - 3), "prior": torch.ones(H)}
    short = torch.bfloat16 if device == "cuda" else torch.float32
    return {n: x.to(device, short) for n, x in wide.items()} | {n: x.to(device) for n, x in exact.items()}


def calls(inputs: dict[str, Tensor]) -> dict[str, Callable[[dict[str, Tensor]], Tensor]]:
    """What is compared, each a function of the inputs."""

    def scan(x: dict[str, Tensor], groups: int) -> Tensor:
        beta = x["beta"].unsqueeze(-1).expand(*x["beta"].shape, groups)
        args = (x["q"], x["k"], x["v"] * x["b"].unsqueeze(-1), beta, x["log_decay"], x["prior"])
        return metaplastic_scan(*args).output

    return {
        "delta rule with importance": lambda x: metaplastic_delta_scan(**x).output,
        "the same, off": lambda x: metaplastic_delta_scan(**{**x, "beta": torch.zeros_like(x["beta"])}).output,
        "metaplastic scan, one beta per head": lambda x: scan(x, 1),
        "metaplastic scan, one per channel": lambda x: scan(x, inputs["v"].shape[-1]),
    }


def seconds(run: Callable[[], object], device: str) -> float:
    """Of one call, the device's work included."""
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measured(shape: str, device: str, turns: int) -> list[dict[str, str]]:
    """A row a variant: milliseconds forward, and with the backward pass; the first turn warms up."""
    inputs = make_inputs(**SHAPES[shape], device=device)
    d_output = torch.randn_like(inputs["v"])
    best: dict[tuple[str, str], float] = {}
    for turn in range(turns + 1):
        for name, call in calls(inputs).items():
            leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
            with torch.no_grad():
                forward = seconds(lambda call=call: call(inputs), device)
            both = seconds(lambda call=call, leaves=leaves: call(leaves).backward(d_output), device)
            for what, found in (("forward ms", forward), ("forward + backward ms", both)):
                if turn:
                    best[name, what] = min(best.get((name, what), float("inf")), found)
    whats = dict.fromkeys(what for _, what in best)
    return [
        {"shape": shape, "what": name, **{what: f"{best[name, what] * 1e3:.2f}" for what in whats}}
        for name in dict.fromkeys(name for name, _ in best)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="toy")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="also write the rows as CSV")
    parser.add_argument("--commit", help="commit to note where git is not there")
    options = parser.parse_args(argv)
    rows = measured(options.shape, options.device, options.turns)
    facts = provenance(options.commit, cpu=options.device == "cpu")
    if options.output is not None:
        write_csv(options.output, [{**facts, **row} for row in rows])
    said = ", ".join(f"{name} {value}" for name, value in facts.items())
    sizes = ", ".join(f"{name} {value}" for name, value in SHAPES[options.shape].items())
    print(f"{said}; {sizes}; `{command_line('bench_delta.py', argv)}`\n\n{markdown_table(rows)}")


if __name__ == "__main__":
    main()
