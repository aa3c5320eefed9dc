"""Models that mix Mamba2 with attention, with layers swapped and without.

    python benchmarks/hybrids.py step --out results/hybrids-step-NAME     a training step at published shapes, on a GPU
    python benchmarks/hybrids.py step --tiny                              seconds on a CPU, to see that it runs
    python benchmarks/hybrids.py errors --out docs/results/hybrid-errors  how far from the host, tiny, on a CPU

Weights are random. `step` trains one small published shape per family: fp32 weights and moments of Adam, products in
bf16, activations one layer at a time, as `precision: bf16` and `gradient_checkpointing: true` do. Importance has scale
0, where Palimpsa-M computes what Mamba2 does, so the first losses must agree. The first row is the host's own class.
The model without swapped layers runs before and after that with some: a drift of the clock shows as a difference
between its two rows.

`errors` swaps all mixers but one in each branch of each host's code, importance off, and gives the relative L2 distance
of the logits to the host's own class in fp32, which bounds step sizes as the model was trained: in one pass, with rows
padded on the left, in generation token by token, and in a new process that has the model folder and not this package.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from common import markdown_table, provenance, write_csv
from palimpsa_surgery.kernels.metaplastic.scan import METAPLASTIC_SCAN
from palimpsa_surgery.kernels.metaplastic.types import ScanProblem
from palimpsa_surgery.kernels.ssd.mamba2_scan import MAMBA2_SCAN
from palimpsa_surgery.kernels.ssd.types import SsdProblem
from palimpsa_surgery.modeling.bundle import bundle_remote_code, remote_code_keys
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import config_class, host_config_class, known_hosts
from palimpsa_surgery.modeling.hybrids.hosts import mixer_paths
from palimpsa_surgery.modeling.hybrids.mixer_hybrid import HybridMixer, PlainHybridMixer
from palimpsa_surgery.modeling.hybrids.modeling_palimpsa_hybrid import PalimpsaHybridMixin, host_class, model_class
from palimpsa_surgery.modeling.hybrids.swapping import bound_step_sizes
from palimpsa_surgery.recipes.training.losses import CausalLoss
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Arguments of a host's config, and what makes the same model small."""

    host: str
    keys: Mapping[str, Any]
    tiny: Mapping[str, Any]


def _types(layers: int, special: tuple[int, ...], plain: str, other: str) -> list[str]:
    return [other if layer in special else plain for layer in range(layers)]


SHAPES = {
    "falcon-h1-0.5b": Shape(
        "falcon_h1",
        {
            "vocab_size": 32784,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_chunk_size": 128,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": 5.656854249492381,
            "lm_head_multiplier": 0.0390625,
            "key_multiplier": 0.390625,
            "attention_out_multiplier": 0.9375,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.23570226039551587,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        },
        {"num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 96, "mamba_d_ssm": 96, "mamba_n_heads": 6}
        | {"mamba_d_head": 16, "mamba_d_state": 16, "vocab_size": 128, "head_dim": 8},
    ),
    "granite-4.0-h-350m": Shape(
        "granitemoehybrid",
        {
            "vocab_size": 100352,
            "hidden_size": 768,
            "num_hidden_layers": 32,
            "layer_types": _types(32, (10, 13, 17, 27), "mamba", "attention"),
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "shared_intermediate_size": 2048,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "tie_word_embeddings": True,
        },
        {"num_hidden_layers": 6, "layer_types": _types(6, (2,), "mamba", "attention"), "hidden_size": 48}
        | {"shared_intermediate_size": 64, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16}
        | {"vocab_size": 128},
    ),
    "zamba2-1.2b": Shape(
        "zamba2",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "num_hidden_layers": 38,
            "layers_block_type": _types(38, (5, 11, 17, 23, 29, 35), "mamba", "hybrid"),
            "num_attention_heads": 32,
            "intermediate_size": 8192,
            "n_mamba_heads": 64,
            "mamba_d_state": 128,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
        {"num_hidden_layers": 6, "layers_block_type": _types(6, (2, 5), "mamba", "hybrid"), "hidden_size": 64}
        | {"num_attention_heads": 4, "intermediate_size": 96, "n_mamba_heads": 8, "mamba_d_state": 16}
        | {"adapter_rank": 4, "vocab_size": 128},
    ),
}
"""Sizes of tiiuae/Falcon-H1-0.5B-Base, ibm-granite/granite-4.0-h-350m and Zyphra/Zamba2-1.2B."""


def _falcon(**norm: bool) -> dict[str, Any]:
    return {**SHAPES["falcon-h1-0.5b"].keys, **SHAPES["falcon-h1-0.5b"].tiny, **norm}


_GRANITE = {**SHAPES["granite-4.0-h-350m"].keys, **SHAPES["granite-4.0-h-350m"].tiny}
_SMALL = {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
BRANCHES = {
    "bamba": {
        **_SMALL,
        **{"intermediate_size": 48, "num_hidden_layers": 4, "attn_layer_indices": [1]},
        **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8},
    },
    "granitemoehybrid, dense": _GRANITE,
    "granitemoehybrid, experts": {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1, no norm": _falcon(),
    "falcon_h1, gate before norm": _falcon(mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon_h1, norm before gate": _falcon(mamba_rms_norm=True, mamba_norm_before_gate=True),
    "zamba2": {**SHAPES["zamba2-1.2b"].keys, **SHAPES["zamba2-1.2b"].tiny},
    "nemotron_h": {
        **_SMALL,
        **{"intermediate_size": 48, "head_dim": 8, "chunk_size": 8, "n_groups": 2, "ssm_state_size": 16},
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "mamba"],
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
    },
}
"""Arguments of a host's config, by `model_type` and which branch of the host's code."""


def build(shape: Shape, swapped: int | None, *, tiny: bool, state: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A model in fp32 on the CPU, importance off in the `swapped` mixers, which are spread over those there are.

    Args:
        swapped: how many; None for the host's own class.
        state: weights of the same model without swapped layers; random ones where None.
    """
    keys = {**shape.keys, **(shape.tiny if tiny else {})}
    if swapped is None:
        model = host_class(shape.host)(host_config_class(shape.host)(**keys))
        with_true_bounds(model)
    else:
        known = list(mixer_paths(config_class(shape.host)(**keys)))
        chosen = [known[round((i + 0.5) * len(known) / swapped - 0.5)] for i in range(swapped)]
        model = model_class(shape.host)(config_class(shape.host)(**keys, palimpsa_layers=chosen))
    if state is not None:
        model.load_state_dict({**model.state_dict(), **state})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("beta_scale"):
                parameter.zero_()
            elif state is None:
                spread(name, parameter)
    return model


def with_true_bounds(host: nn.Module) -> None:
    """Its mixers bound the step size as in training."""
    for path in mixer_paths(host.config).values():
        bound_step_sizes(host.get_submodule(path), host.config)


def spread(name: str, parameter: Tensor) -> None:
    """Decays and step sizes of a start of Mamba2; other parameters stay."""
    if name.endswith("A_log"):
        parameter.uniform_(1, 16).log_()
    elif name.endswith("dt_bias"):  # the inverse of softplus, of 0.001 to 0.1
        step = torch.empty_like(parameter).uniform_(-6.9, -2.3).exp()
        parameter.copy_(step + torch.log(-torch.expm1(-step)))


def time_steps(model: nn.Module, ids: Tensor, warmup: int, steps: int) -> dict[str, Any]:
    """Whole steps: forward, backward, clipping, AdamW; the loss is the first step's, in nats a token."""
    device = ids.device
    model.to(device).train().gradient_checkpointing_enable()
    module = CausalLoss(model, precision="bf16")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=device.type == "cuda")
    seconds, losses = [], []
    for step in range(warmup + steps):
        if step == warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = module(input_ids=ids[:, :-1], targets=ids[:, 1:]) / ids[:, 1:].numel()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device; the last kernels of the step are the optimizer's
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    kept = seconds[warmup:]
    peak = round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else ""
    return {
        "ms": round(statistics.median(kept) * 1e3, 1),
        "spread_ms": round((max(kept) - min(kept)) * 1e3, 1),
        "first_step_s": round(seconds[0], 1),
        "peak_gb": peak,
        "loss": round(losses[0], 6),
        "last_loss": round(losses[-1], 6),
    }


def kernels(model: nn.Module, device: torch.device) -> dict[str, str]:
    """What runs the scans of the swapped mixers and of the plain ones."""
    first = {type(module): module for module in reversed(list(model.modules()))}
    names = {"swapped_on": "", "plain_on": ""}
    if swapped := first.get(HybridMixer):
        geometry, groups = swapped.geometry, swapped.metaplasticity.spec.groups
        problem = ScanProblem(torch.bfloat16, geometry.head_dim, geometry.state_size, groups)
        names["swapped_on"] = METAPLASTIC_SCAN.resolve("auto", device, problem)
    if plain := first.get(PlainHybridMixer):
        problem = SsdProblem(torch.bfloat16, plain.geometry.state_size)
        names["plain_on"] = MAMBA2_SCAN.resolve("auto", device, problem)
    if not isinstance(model, PalimpsaHybridMixin):
        fast = all(importlib.util.find_spec(name) for name in ("mamba_ssm", "causal_conv1d"))  # one is not enough
        names["plain_on"] = f"transformers, {'mamba_ssm' if fast and device.type == 'cuda' else 'torch'}"
    return names


def step_rows(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row a model: the host's class, ours without swapped layers, with them, and without again."""
    device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
    shape = SHAPES[name]
    torch.manual_seed(0)
    state = build(shape, 0, tiny=options.tiny).state_dict()
    vocabulary = shape.tiny["vocab_size"] if options.tiny else shape.keys["vocab_size"]
    ids = torch.randint(3, vocabulary, (options.batch, options.length + 1)).to(device)
    for swapped in (None, 0, options.swap, 0):
        model = build(shape, swapped, tiny=options.tiny, state=state)
        row = {
            "model": f"{name}, tiny" if options.tiny else name,
            "parameters_m": round(sum(one.numel() for one in model.parameters()) / 1e6, 1),
            "swapped": swapped or 0,
            **kernels(model, device),
            "batch": options.batch,
            "length": options.length,
        }
        try:
            row |= time_steps(model, ids, options.warmup, options.steps)
        except torch.OutOfMemoryError:
            row["ms"] = "out of memory"
        yield row
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def run_step(options: argparse.Namespace) -> None:
    rows, known = [], provenance(options.commit, cpu=options.tiny)
    for name in options.shapes or SHAPES:
        for row in step_rows(name, options):
            rows.append(row | known)
            print(row, flush=True)
            write(rows, options.out)
    print(markdown_table([{key: value for key, value in row.items() if key not in known} for row in rows]))


@torch.no_grad()
def pair(branch: str) -> tuple[nn.Module, nn.Module]:
    """The host with the true bounds of the step size, and ours with all its mixers but the last swapped."""
    kind, keys = branch.partition(",")[0], BRANCHES[branch]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    host = host_class(kind)(host_config_class(kind)(**keys, **special)).eval()
    for name, parameter in host.named_parameters():
        if parameter.ndim > 1:  # layers that are felt, unlike those of a start
            parameter.normal_(0.0, 0.25)
        spread(name, parameter)
    chosen = list(mixer_paths(host.config))[:-1]
    model = model_class(kind)(config_class(kind)(**keys, **special, palimpsa_layers=chosen)).eval()
    model.load_state_dict({**model.state_dict(), **host.state_dict()})
    for name, parameter in model.named_parameters():
        if name.endswith("beta_scale"):
            parameter.zero_()
    with_true_bounds(host)
    return host, model


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative L2."""
    return ((found - expected).norm() / expected.norm()).item()


@torch.no_grad()
def branch_errors(branch: str, folder: Path) -> dict[str, Any]:
    """A row of errors; `folder` is for the model that the new process loads."""
    torch.manual_seed(0)
    host, model = pair(branch)
    ids = torch.randint(2, 128, (3, 21))
    mask = (torch.arange(21) >= torch.tensor([[0], [4], [15]])).long()
    padded = ids * mask
    hosts, ours = (one(padded, attention_mask=mask).logits[mask.bool()] for one in (host, model))
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    texts = [one.generate(ids[:1], attention_mask=torch.ones(1, 21), **options) for one in (host, model)]
    expected, generated = (torch.stack(text.logits) for text in texts)
    return {
        "host": branch,
        "swapped": f"{len(model.config.palimpsa_layers)} of {len(mixer_paths(model.config))}",
        "prefill": distance(model(ids).logits, host(ids).logits),
        "left-padded": distance(ours, hosts),
        "generation": distance(generated, expected),
        "fresh process": distance(in_new_process(model, ids, folder), host(ids).logits),
    }


NEW_PROCESS = """
import sys
sys.modules["palimpsa_surgery"] = None  # importing it fails
sys.modules["numba"] = None  # which would compile for half a minute
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[1] + "/ids.pt")).logits, sys.argv[1] + "/logits.pt")
"""


def in_new_process(model: nn.Module, ids: Tensor, folder: Path) -> Tensor:
    """Logits of the saved model where the package cannot be imported."""
    kind = model.config.model_type
    model.save_pretrained(folder)
    bundle_remote_code(folder, kind)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | remote_code_keys(kind)))
    torch.save(ids, folder / "ids.pt")
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", NEW_PROCESS, str(folder)], env=environment, cwd=folder, check=True)
    return torch.load(folder / "logits.pt")


def run_errors(options: argparse.Namespace) -> None:
    known = provenance(options.commit, cpu=True) | {"transformers": transformers.__version__}
    rows = []
    for branch in options.branches or BRANCHES:
        if branch.partition(",")[0] not in known_hosts():
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = branch_errors(branch, Path(folder))
        rows.append({key: f"{one:.1e}" if isinstance(one, float) else one for key, one in row.items()} | known)
        print(row, flush=True)
        write(rows, options.out)


def write(rows: list[dict[str, Any]], out: Path | None) -> None:
    """OUT.csv and OUT.md; after every row, so that a run that is stopped leaves what it had."""
    if out is not None:
        write_csv(out.with_name(f"{out.name}.csv"), rows)
        out.with_name(f"{out.name}.md").write_text(markdown_table(rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    step = commands.add_parser("step", help="time and memory of a training step")
    step.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: all")
    step.add_argument("--swap", type=int, default=4, help="mixers to swap")
    step.add_argument("--batch", type=int, default=1)
    step.add_argument("--length", type=int, default=4096, help="tokens of a row")
    step.add_argument("--warmup", type=int, default=3)
    step.add_argument("--steps", type=int, default=8)
    step.add_argument("--tiny", action="store_true", help="few narrow layers, on the CPU")
    step.add_argument("--commit", help="for the rows, where git is not there")
    step.add_argument("--out", type=Path, help="path of the .csv and the .md, without the ending")
    step.set_defaults(run=run_step)
    errors = commands.add_parser("errors", help="distances to the host")
    errors.add_argument("--branches", nargs="+", choices=BRANCHES, help="default: all that transformers has")
    errors.add_argument("--commit", help="for the rows, where git is not there")
    errors.add_argument("--out", type=Path, help="path of the .csv and the .md, without the ending")
    errors.set_defaults(run=run_errors)
    options = parser.parse_args(argv)
    options.run(options)


if __name__ == "__main__":
    main()
