"""A tiny converted model as a folder, a tiny text, and the recipe that joins them."""

import json
import shutil

import pytest
import torch
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.modeling.configuration_palimpsa_mamba2 import PalimpsaMamba2Config
from palimpsa_surgery.modeling.modeling_palimpsa_mamba2 import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.recipes import loop
from palimpsa_surgery.recipes.finetune import finetune

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "beta_rank": 2,
    "beta_groups": 2,
}


def make_model(layers=(1,), seed=0, **changes) -> PalimpsaMamba2ForCausalLM:
    """A random model with these layers swapped, its importance gate at the paper's start."""
    torch.manual_seed(seed)
    return PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(**{**SIZES, **changes, "palimpsa_layers": list(layers)}))


def save_folder(model, folder):
    """The model as a folder with the embedded checkpoint's tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded_checkpoint_path() / name, folder / name)
    return folder


@pytest.fixture
def model():
    return make_model()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_folder(make_model(), tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Forty documents of a few dozen tokens."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    words = ["the", "quick", "table", "of", "an", "index", "reads", "every", "row", "before", "commit", "ends"]
    with path.open("w") as stream:
        for number in range(40):
            document = " ".join(words[(number * i + i // 3) % len(words)] for i in range(20 + number % 7))
            stream.write(json.dumps({"text": document}) + "\n")
    return path


@pytest.fixture
def interrupted(monkeypatch):
    """A function: `finetune` with these arguments, ended by Ctrl-C when `step` optimiser steps are done."""

    def run(step, *arguments):
        original = loop.optimiser_step

        def stop(training, now):
            if now == step:
                raise KeyboardInterrupt
            return original(training, now)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "optimiser_step", stop)
            with pytest.raises(KeyboardInterrupt):
                finetune(*arguments)

    return run


@pytest.fixture
def recipe(text, tmp_path):
    """Four steps of four short windows."""
    return {
        "schema_version": 1,
        "steps": 4,
        "batch_size": 4,
        "micro_batch_size": 2,
        "lr": 1e-3,
        "lr_new": 1e-2,
        "warmup": 2,
        "eval_windows": 2,
        "data": {
            "train": str(text),
            "seq_len": 24,
            "val_fraction": 0.2,
            "cache": str(tmp_path / "cache"),
        },
    }
