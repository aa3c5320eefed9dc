"""The benchmarks are scripts beside the package; the tests import them by their file names."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 8, "vocab_size": 4096}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random model of two layers, one swapped, with the embedded tokenizer: as `two_gpus.py --shape` makes them."""
    import training_step
    import two_gpus

    patch = pytest.MonkeyPatch()
    patch.setitem(training_step.SHAPES, "tiny", TINY)
    yield two_gpus.random_model("tiny", 1, tmp_path_factory.mktemp("model") / "tiny")
    patch.undo()
