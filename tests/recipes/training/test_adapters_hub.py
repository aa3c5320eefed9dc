"""An adapter on the Hub: pushed beside its base, loaded by PEFT where this package is not, merged from there."""

import os
import subprocess
import sys
import textwrap

import hub_server
import pytest
import torch
from hub_server import TOKEN
from huggingface_hub import snapshot_download
from palimpsa_surgery.base.errors import CheckpointError, UsageError
from palimpsa_surgery.recipes.training.adapters import merge
from palimpsa_surgery.recipes.training.finetune import finetune
from palimpsa_surgery.sharing.hub import push
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.conversion.export import export

pytest.importorskip("peft")

IDS = torch.arange(20).view(1, 20)


@pytest.fixture
def server(monkeypatch, tmp_path):
    with hub_server.for_the_client(monkeypatch, tmp_path) as server:
        yield server


@pytest.mark.slow
def test_an_adapter_and_its_base_from_the_hub_are_the_trained_model(server, model_folder, recipe, tmp_path):
    model_folder = export(
        model_folder, tmp_path / "model", layout="palimpsa_mamba2"
    )  # as convert would have written it
    lora = {**recipe, "mode": "lora", "lora": {"rank": 2, "alpha": 8}, "lr": 1e-2, "steps": 2, "warmup": 0}
    run = finetune(model_folder, lora, tmp_path / "run").folder
    push(model_folder, "alice/base")
    with pytest.raises(UsageError, match="push that model first and name it with --base"):
        push(run / "adapter", "alice/adapter")
    same_sizes = finetune(model_folder, {**recipe, "steps": 1, "lr": 1e-2, "warmup": 0}, tmp_path / "other").final
    push(same_sizes, "alice/other")
    with pytest.raises(CheckpointError, match="alice/other: has other weights than the model that the adapter was"):
        push(run / "adapter", "alice/adapter", base="alice/other")
    result = push(run / "adapter", "alice/adapter", base="alice/base")
    assert result.notes[-1] == "--base alice/base: its weights are those that the adapter was trained on"
    assert set(result.files) == {
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "adapter_source.json", "recipe.yaml")
    }
    assert push(run / "adapter", "alice/adapter", base="alice/base").commit == result.commit
    with pytest.raises(UsageError, match="holds another model"):
        push(run / "adapter", "alice/base", base="alice/base")
    with pytest.raises(UsageError, match="holds another model"):
        push(model_folder, "alice/adapter")

    trained = load_model(run / "final")(input_ids=IDS).logits
    base = load_model(model_folder)(input_ids=IDS).logits
    assert (trained - base).norm() > 1e-3 * base.norm()
    code = """
    import sys, importlib.abc
    class Absent(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name.split(".")[0] in ("palimpsa_surgery", "triton", "numba"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Absent())
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    base = AutoModelForCausalLM.from_pretrained("alice/base", trust_remote_code=True)
    model = PeftModel.from_pretrained(base, "alice/adapter").eval()
    torch.save(model(input_ids=torch.arange(20).view(1, 20)).logits.detach(), "logits.pt")
    """
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        **{"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "elsewhere"), "HF_TOKEN": TOKEN},
        **{"HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"},
    }
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    limit = 1e-5 * trained.norm()  # fp32
    assert (torch.load(tmp_path / "logits.pt") - trained).norm() <= limit

    folder = snapshot_download("alice/adapter")
    # The base is found by its name.
    merged = load_model(merge(folder, tmp_path / "merged"))(input_ids=IDS).logits
    assert (merged - trained).norm() <= limit
