"""A tiny converted model as a folder, a tiny text, and the recipe that joins them."""

import json

import pytest
from palimpsa_surgery.recipes.training import loop
from palimpsa_surgery.recipes.training.finetune import finetune
from tiny import make_model, save_folder


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
    """A function: `finetune` with these arguments, ended by Ctrl-C when `step` optimizer steps are done."""

    def run(step, *arguments):
        original = loop.optimizer_step

        def stop(training, now):
            if now == step:
                raise KeyboardInterrupt
            return original(training, now)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "optimizer_step", stop)
            with pytest.raises(KeyboardInterrupt):
                finetune(*arguments)

    return run


@pytest.fixture(scope="session")
def recipe_of(text):
    """A function: four steps of four short sequences, their tokens kept in this folder."""
    return lambda folder: {
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
            "cache": str(folder / "cache"),
        },
    }


@pytest.fixture
def recipe(recipe_of, tmp_path):
    return recipe_of(tmp_path)
