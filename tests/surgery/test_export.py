"""Back to mamba_ssm's layout: equal logits, its own config and nothing else, and what cannot go there."""

import json

import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError, OutputExistsError, UsageError, VerificationError
from palimpsa_surgery.modeling import metaplasticity_off
from palimpsa_surgery.surgery import export
from palimpsa_surgery.surgery.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.export import export_mamba_ssm
from palimpsa_surgery.surgery.loading import load_model

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
FIELDS = {  # of mamba_ssm's MambaConfig, which takes no other
    "d_model",
    "d_intermediate",
    "n_layer",
    "vocab_size",
    "ssm_cfg",
    "attn_layer_idx",
    "attn_cfg",
    "rms_norm",
    "residual_in_fp32",
    "fused_add_norm",
    "pad_vocab_size_multiple",
    "tie_embeddings",
}


@torch.no_grad()
def logits(folder, off=False):
    model = load_model(folder, dtype=torch.float32)
    if not off:
        return model(input_ids=IDS).logits
    with metaplasticity_off(model):
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    "sizes",
    [{}, {"tied": False}, {"groups": 2, "bias": True}, {"conv_bias": False, "dtype": torch.float32}],
    ids=str,
)
def test_a_plain_model_opens_again_with_equal_logits(tmp_path, sizes):
    pico.write_hf(tmp_path / "plain", **sizes)
    out = export_mamba_ssm(tmp_path / "plain", tmp_path / "out")
    found, source = open_checkpoint(out), open_checkpoint(tmp_path / "plain")
    assert found.layout == "mamba_ssm"
    assert {n: (e.shape, e.dtype) for n, e in found.tensors.items()} == {
        n: (e.shape, e.dtype) for n, e in source.tensors.items()
    }
    assert torch.equal(logits(out), logits(tmp_path / "plain"))


def test_the_files_are_those_that_mamba_ssm_reads(tmp_path):
    pico.write_hf(tmp_path / "plain")
    out = export_mamba_ssm(tmp_path / "plain", tmp_path / "out")
    assert set(json.loads((out / "config.json").read_text())) == FIELDS
    state = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert state["lm_head.weight"].data_ptr() == state["backbone.embedding.weight"].data_ptr()
    size = sum(tensor.nbytes for name, tensor in state.items() if name != "lm_head.weight")
    assert (out / "pytorch_model.bin").stat().st_size < 2 * size + 2**15, "no tensor drags a whole file along"


def test_round_trip_through_mamba_ssm_and_back(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source", groups=2)
    out = export_mamba_ssm(tmp_path / "source", tmp_path / "out")
    assert torch.equal(logits(out), logits(tmp_path / "source"))


def test_a_swapped_model_is_refused_without_off(tmp_path):
    pico.write_hf(tmp_path / "converted", swapped=(0, 2))
    with pytest.raises(UsageError, match=r"converted: layers 0, 2 are Palimpsa-M.*--off"):
        export_mamba_ssm(tmp_path / "converted", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_switched_off_it_is_the_model_with_metaplasticity_off(tmp_path):
    pico.write_hf(tmp_path / "converted", swapped=(0, 2), dtype=torch.float32)
    out = export_mamba_ssm(tmp_path / "converted", tmp_path / "out", off=True)
    assert open_checkpoint(out).palimpsa_layers == ()
    expected = logits(tmp_path / "converted", off=True)
    assert (logits(out) - expected).norm() <= 1e-6 * expected.norm()  # fp32, another code path
    assert (logits(tmp_path / "converted") - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize(
    ("given", "read"), [([0.0, 0.5], (0.0, 0.5)), ([0.01, None], (0.01, torch.finfo(torch.float32).max))]
)
def test_the_limit_of_the_step_size_comes_along(tmp_path, given, read):
    pico.write_hf(tmp_path / "plain", config={"time_step_limit": given})
    out = export_mamba_ssm(tmp_path / "plain", tmp_path / "out")
    assert open_checkpoint(out).config["time_step_limit"] == read
    assert torch.equal(logits(out), logits(tmp_path / "plain"))


def test_another_epsilon_is_refused(tmp_path):
    pico.write_hf(tmp_path / "plain", config={"layer_norm_epsilon": 1e-6})
    with pytest.raises(CheckpointError, match="layer_norm_epsilon 1e-06"):
        export_mamba_ssm(tmp_path / "plain", tmp_path / "out")


def test_an_output_that_exists_needs_force(tmp_path):
    pico.write_hf(tmp_path / "plain")
    export_mamba_ssm(tmp_path / "plain", tmp_path / "out")
    with pytest.raises(OutputExistsError, match="--force"):
        export_mamba_ssm(tmp_path / "plain", tmp_path / "out")
    export_mamba_ssm(tmp_path / "plain", tmp_path / "out", force=True)


def test_weights_that_do_not_read_back_leave_nothing(tmp_path, monkeypatch):
    pico.write_hf(tmp_path / "plain")
    original = export._state_dict

    def broken(checkpoint, names):
        state = original(checkpoint, names)
        state["backbone.norm_f.weight"] = state["backbone.norm_f.weight"] + 1
        return state

    monkeypatch.setattr(export, "_state_dict", broken)
    with pytest.raises(VerificationError, match="does not read back"):
        export_mamba_ssm(tmp_path / "plain", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
