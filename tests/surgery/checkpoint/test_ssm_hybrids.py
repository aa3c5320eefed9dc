"""mamba_ssm's hybrids as checkpoints: what of `attn_layer_idx`, `attn_cfg` and `d_intermediate` is read and refused."""

import json

import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.mixers.attention_geometry import AttentionGeometry
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model

HYBRID = {"layers": 4, "attention": (1,), "mlp": 100, "groups": 2}
LEAST = {"causal": True, "num_heads": 2, "head_dim": 8}  # biases, and neither convolution nor rotation


@pytest.mark.parametrize("file", [{}, {"shards": 2}, {"format": "safetensors"}], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"mlp": 0}, {"attn_cfg": LEAST}, {"attention": ()}, {"tied": False}], ids=str)
def test_every_tensor_is_accounted_for(tmp_path, file, sizes):
    tensors = pico.write_mamba_ssm(tmp_path, **file, **{**HYBRID, **sizes})
    found = open_checkpoint(tmp_path)
    stored = {name for name in tensors if name != "lm_head.weight" or sizes.get("tied") is False}
    assert set(found.tensors) == stored
    assert found.notes == ()
    for name in stored:
        assert torch.equal(found.load(name), tensors[name])


def test_the_config_is_typed_and_layers_of_attention_are_no_sites(tmp_path):
    pico.write_mamba_ssm(tmp_path, **{**HYBRID, "attention": (2, 1)})
    found = open_checkpoint(tmp_path)
    assert found.config.attn_layer_idx == (1, 2)
    assert found.config.attention == AttentionGeometry(16, 2, 1, 8, False, False, 4, 4, 10000.0)
    assert found.config.d_intermediate == 100
    assert list(found.sites) == [0, 3]
    assert [found.family.kind(found.config, layer) for layer in (0, 1)] == ["Mamba2", "attention"]


def test_the_model_that_runs_has_these_tensors(tmp_path):
    tensors = pico.write_mamba_ssm(tmp_path, dtype=torch.float32, **HYBRID)
    model = load_model(tmp_path)
    state = model.state_dict()
    assert set(state) == set(tensors)
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    ids = torch.arange(9)[None]
    with torch.no_grad():
        swap = torch.arange(9)[None]
        swap[0, 0] = 20
        moved = (model(ids).logits - model(swap).logits).abs().amax(-1)[0]
    assert (moved > 0).all()  # the first token reaches every later one


def settings(**changes):
    return {"attn_cfg": {**pico.ATTENTION, **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_layer_idx": 1}, r"attn_layer_idx = 1, expected a list of layers from 0 to 3"),
        ({"attn_layer_idx": [4]}, r"attn_layer_idx = \[4\], expected a list of layers from 0 to 3, each once"),
        ({"attn_layer_idx": [1, 1]}, r"attn_layer_idx = \[1, 1\], expected .* each once and not all"),
        ({"attn_layer_idx": [True]}, r"attn_layer_idx = \[True\], expected"),
        ({"attn_layer_idx": [0, 1, 2, 3]}, r"attn_layer_idx = .* not all of them"),
        ({"attn_layer_idx": []}, "attn_cfg: is .* asks for more than Mamba2 blocks"),
        ({"attn_cfg": [4]}, r"attn_cfg = \[4\], expected a table of attention settings"),
        ({"attn_cfg": {}}, "attn_cfg.num_heads: is missing, expected a number of heads"),
        (settings(causal=False), "attn_cfg.causal: is False, only True is supported"),
        (settings(mlp_dim=32), "attn_cfg.mlp_dim: is 32, only 0 is supported"),
        (settings(softmax_scale=0.1), "attn_cfg.softmax_scale: is 0.1, only None is supported"),
        (settings(rotary_emb_interleaved=True), "attn_cfg.rotary_emb_interleaved: is True, only False"),
        (settings(window=7), "attn_cfg.window: is no setting of mamba_ssm's attention"),
        (settings(num_heads_kv=3), "attn_cfg.num_heads_kv: 3 does not divide 2 heads"),
        (settings(num_heads=4), r"layers.1.mixer.in_proj.weight is \[32, 16\] instead of \[48, 16\]"),
        ({"d_intermediate": -5}, "d_intermediate = -5, expected a whole number above 0"),
        ({"d_intermediate": 0}, r"12 unexpected \(.*mlp.fc1.weight"),
        ({"attn_layer_idx": [2]}, r"missing \(.*unexpected \("),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, changes, message):
    pico.write_mamba_ssm(tmp_path, **HYBRID)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("write", [pico.write_hf, pico.write_codestral])
def test_other_layouts_have_no_such_layers(tmp_path, write):
    write(tmp_path, config={"attn_layer_idx": [1], "attn_cfg": pico.ATTENTION})
    with pytest.raises(CheckpointError, match=r"attn_layer_idx: is .* asks for more than Mamba2 blocks"):
        open_checkpoint(tmp_path)


def test_a_swapped_layer_of_attention_is_refused(tmp_path):
    pico.write_hf(tmp_path, swapped=(1,), config={"attn_layer_idx": [1], "attn_cfg": pico.ATTENTION})
    with pytest.raises(CheckpointError, match=r"palimpsa_layers: is \[1\], .* and none of attention \(1\)"):
        open_checkpoint(tmp_path)
