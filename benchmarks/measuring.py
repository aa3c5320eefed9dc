"""Time and memory of measuring a model that does not fit in memory.

    python benchmarks/measuring.py --shape codestral-7b --layers 2 -o results.csv   64k tokens through two layers
    python benchmarks/measuring.py --shape nemotron-h-8b --tokens 4096 -o results.csv its whole depth
    python benchmarks/measuring.py --shape tiny --tokens 512                          seconds, to see that it runs

Weights are random, bf16, a shard a layer; the tokenizer is the embedded model's. Measuring is a process of its own,
`palimpsa measure` as it is typed; memory is the peak of its RssAnon, sampled every 10 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from common import provenance, write_csv
from conversion import Measurement, run
from palimpsa_surgery.base.text import embedded_checkpoint_path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
KINDS = {"M": "mamba", "-": "mlp", "*": "attention"}
SHAPES = {
    "tiny": ("mamba2", {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "n_groups": 1, "num_hidden_layers": 3}),
    "codestral-7b": ("mamba2", {"num_hidden_layers": 64}),
    "nemotron-h-8b": ("nemotron_h", {"layers_block_type": [KINDS[letter] for letter in NEMOTRON_H_8B]}),
    "bamba-9b": (
        "bamba",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "attn_layer_indices": [9, 18, 27],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
}
"""Model types of transformers and what differs from the defaults of their configs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="codestral-7b")
    parser.add_argument("--layers", type=int, help="only the first so many")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--work", type=Path, help="folder on the disk to use; the model must fit")
    parser.add_argument("-o", "--out", type=Path, help="CSV to append to")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="palimpsa-measuring-", dir=options.work))
    try:
        row = measure(work, options.shape, options.layers, options.tokens)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(row, indent=1))
    if options.out:
        write_csv(options.out, [*rows_of(options.out), row])


def measure(work: Path, shape: str, layers: int | None, tokens: int) -> dict[str, object]:
    """One row: the peak of RssAnon in bytes, the seconds by the clock and of the processor."""
    source = work / "source"
    layers = write_checkpoint(source, *SHAPES[shape], layers)
    os.sync()
    program = "from palimpsa_surgery.cli import main; main()"
    command = [sys.executable, "-c", program, "measure", str(source), "-o", str(work / "profile.json")]
    measured: Measurement = run(
        [*command, "--tokens", str(tokens), "--seq-len", str(min(tokens, 2048)), "--device", "cpu"]
    )
    return {
        **provenance(cpu=True),
        "shape": shape,
        "layers": layers,
        "bytes": sum(file.stat().st_size for file in source.glob("*.safetensors")),
        "tokens": tokens,
        "seconds": round(measured.seconds, 1),
        "cpu": round(measured.cpu, 1),
        "peak_rss_anon": measured.peak,
        "cores": os.cpu_count(),
    }


def write_checkpoint(folder: Path, model_type: str, keys: dict[str, object], layers: int | None) -> int:
    """A random model in the layout of transformers, a decoder layer in memory at a time; returns how many it has."""
    folder.mkdir(parents=True)
    config = CONFIG_MAPPING[model_type](**first_layers(keys, layers), dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for number, names in enumerate(shards(model)):
        file = f"model-{number:05}.safetensors"
        stored = {name: random_values(name, model.get_parameter_or_buffer(name).shape, generator) for name in names}
        save_file(stored, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(embedded_checkpoint_path() / name, folder / name)
    return config.num_hidden_layers


def first_layers(keys: dict[str, object], layers: int | None) -> dict[str, object]:
    """The keys for the first so many layers of a model."""
    if layers is None:
        return keys
    if "layers_block_type" in keys:
        return {**keys, "layers_block_type": keys["layers_block_type"][:layers]}
    cut = {"attn_layer_indices": [layer for layer in keys.get("attn_layer_indices", ()) if layer < layers]}
    return {**keys, **(cut if "attn_layer_indices" in keys else {}), "num_hidden_layers": layers}


def shards(model: torch.nn.Module) -> Iterator[list[str]]:
    """The names of the model's tensors, those of each decoder layer together."""
    layers = list(model.get_decoder().layers)
    prefixes = [f"{name}." for name, module in model.named_modules() if module in layers]
    names = list(model.state_dict())
    for prefix in prefixes:
        yield [name for name in names if name.startswith(prefix)]
    for name in names:
        if not name.startswith(tuple(prefixes)):
            yield [name]


def random_values(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """bf16 of a scale at which a deep random model stays finite, with step sizes and decays of trained models."""
    values = torch.empty(shape, dtype=torch.bfloat16)
    for piece in values.view(-1).split(2**22):
        piece.normal_(0, 0.02, generator=generator)
    leaf = name.rpartition(".")[2]
    offset = {"dt_bias": -4, "A_log": 1, "D": 1}.get(leaf, 1 if "norm" in name else 0)
    return values.add_(offset)


def rows_of(path: Path) -> list[dict[str, str]]:
    import csv

    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


if __name__ == "__main__":
    main()
