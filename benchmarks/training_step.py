"""One training step of a whole model, with layers swapped and without, in one run on one GPU.

    python benchmarks/training_step.py --shape mamba2_2.7b --swap 8 --batch 4 --length 4096 -o results.csv

Weights are random: the shapes decide the time. Both models are built in turn, the unswapped one first and last, so
that a drift of the card's clock shows as a difference between its two rows. Weights, gradients and Adam's moments are
fp32, products bf16, activations one layer at a time, as `precision: bf16` and `gradient_checkpointing: true` do.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from palimpsa_surgery.kernels.conv.causal_conv import CAUSAL_CONV
from palimpsa_surgery.kernels.conv.types import ConvProblem
from palimpsa_surgery.kernels.metaplastic.scan import METAPLASTIC_SCAN
from palimpsa_surgery.kernels.metaplastic.types import ScanProblem
from palimpsa_surgery.kernels.ssd.mamba2_scan import MAMBA2_SCAN
from palimpsa_surgery.kernels.ssd.types import SsdProblem
from palimpsa_surgery.modeling import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.recipes.training.losses import CausalLoss

SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_heads": 4, "head_dim": 32, "state_size": 16},
    "mamba2-docs-1m": {
        **{"hidden_size": 128, "num_hidden_layers": 8, "num_heads": 8, "head_dim": 32, "state_size": 64},
        "vocab_size": 4096,
    },
    "mamba2_130m": {"hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24},
    "mamba2_370m": {"hidden_size": 1024, "num_hidden_layers": 48, "num_heads": 32},
    "mamba2_1.3b": {"hidden_size": 2048, "num_hidden_layers": 48, "num_heads": 64},
    "mamba2_2.7b": {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80},
}
COMMON = {"head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2, "vocab_size": 50288}


@dataclass(frozen=True)
class StepTime:
    """Median of `seconds`, and bytes at the peak of a step."""

    swapped: int
    seconds: float
    spread: float
    tokens_per_second: float
    peak_bytes: int


def swapped_layers(layers: int, count: int) -> list[int]:
    """`count` layers spread evenly; which ones makes no difference to the time."""
    return sorted({round((i + 0.5) * layers / count - 0.5) for i in range(count)}) if count else []


def build(
    shape: str, swapped: int, beta_groups: int | None, device: str, *, precision: str = "bf16", checkpointing=True
) -> CausalLoss:
    """A model with random weights and a loss of a few nats, ready to train."""
    sizes = {**COMMON, **SHAPES[shape]}
    layers = swapped_layers(sizes["num_hidden_layers"], swapped)
    more = {} if beta_groups is None else {"beta_groups": beta_groups}
    config = PalimpsaMamba2Config(
        **sizes, palimpsa_layers=layers, beta_rank=max(1, sizes["hidden_size"] // 16), beta_scale_form="abs", **more
    )
    with torch.device(device):
        model = PalimpsaMamba2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("beta_scale"):
                parameter.fill_(0.5)  # an importance that is really felt, as after training
    if checkpointing:
        model.gradient_checkpointing_enable()
    return CausalLoss(model.train(), precision=precision)


def time_steps(module: CausalLoss, batch: int, length: int, warmup: int, steps: int, swapped: int) -> StepTime:
    """Whole steps: forward, backward, clipping, AdamW."""
    device = next(module.parameters()).device
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=device.type == "cuda")
    vocabulary = module.causal.config.vocab_size
    ids = torch.randint(0, vocabulary, (batch, length + 1), device=device)
    seconds = []
    for step in range(warmup + steps):
        if step == warmup:
            torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss = module(input_ids=ids[:, :-1], targets=ids[:, 1:]) / (batch * length)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
        if not bool(torch.isfinite(loss)):
            sys.exit(f"the loss of step {step} is not finite: a time means nothing")
    kept = seconds[warmup:]
    print(f"  first step {seconds[0]:.1f} s (with compilation), loss {loss.item():.3f}", flush=True)
    median = statistics.median(kept)
    return StepTime(swapped, median, max(kept) - min(kept), batch * length / median, torch.cuda.max_memory_allocated())


def backends(module: CausalLoss) -> str:
    """Which kernels run: metaplastic scan, plain scan, convolution."""
    config, dtype = module.causal.config, torch.bfloat16
    problem = ScanProblem(dtype, config.head_dim, config.state_size, config.gate.groups)
    scan = METAPLASTIC_SCAN.resolve("auto", "cuda", problem)
    plain = MAMBA2_SCAN.resolve("auto", "cuda", SsdProblem(dtype))
    return f"{scan}/{plain}/{CAUSAL_CONV.resolve('auto', 'cuda', ConvProblem(dtype))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="mamba2_2.7b")
    parser.add_argument("--swap", type=int, default=8)
    parser.add_argument("--beta-groups", type=int, default=None, help="1 is one beta per head; default one per channel")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--commit", default="", help="written into the rows")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("training_step: needs a CUDA device; there is none here")
    rows, names = [], ""
    for swapped in (0, options.swap, 0):
        torch.manual_seed(0)
        module = build(options.shape, swapped, options.beta_groups, "cuda")
        names = backends(module)
        rows.append(time_steps(module, options.batch, options.length, options.warmup, options.steps, swapped))
        del module
        gc.collect()
        torch.cuda.empty_cache()
    plain = (rows[0].seconds + rows[2].seconds) / 2
    card = torch.cuda.get_device_name()
    lines = []
    for row in rows:
        lines.append(
            {
                "date": date.today().isoformat(),
                "card": card,
                "commit": options.commit,
                "shape": options.shape,
                "batch": options.batch,
                "length": options.length,
                "kernels": names,
                "swapped": row.swapped,
                "ms": round(row.seconds * 1e3, 1),
                "spread_ms": round(row.spread * 1e3, 1),
                "ratio": round(row.seconds / plain, 4),
                "tokens_per_s": round(row.tokens_per_second),
                "peak_gb": round(row.peak_bytes / 1e9, 2),
            }
        )
        print(lines[-1], flush=True)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
