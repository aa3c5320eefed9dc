"""The authors' checkpoints: names, config, what is refused, and their own layer computed by a model that was read."""

import json

import pico
import pytest
import torch
from metamamba2 import config_of, write
from palimpsa_surgery.base.errors import CheckpointError, UsageError
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.checkpoint.metamamba2 import translate_config
from palimpsa_surgery.surgery.conversion.convert import convert
from safetensors import safe_open
from safetensors.torch import save_file

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])


def test_every_tensor_gets_its_name_and_every_layer_is_swapped(tmp_path):
    tensors = write(tmp_path / "theirs")
    found = open_checkpoint(tmp_path / "theirs")
    assert (found.layout, found.palimpsa_layers) == ("meta_mamba2", (0, 1, 2))
    assert found.config.gate.scale_form == "softplus"
    assert found.config.gate.train_prior is False
    assert (found.config.gate.rank, found.config.gate.groups, found.config.num_heads) == (2, 8, 4)
    assert found.config.tie_word_embeddings
    del tensors["lm_head.weight"]
    assert set(found.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found.load(name), tensor), name
    assert any("softplus" in note for note in found.notes)


def test_the_model_that_is_read_equals_one_of_ours(tmp_path):
    write(tmp_path / "theirs")
    pico.write_hf(tmp_path / "ours", swapped=(0, 1, 2), dtype=torch.float32, config={"beta_scale_form": "softplus"})
    theirs, ours = (load_model(tmp_path / name)(input_ids=IDS).logits for name in ("theirs", "ours"))
    assert torch.equal(theirs, ours)


def test_their_own_layer_in_a_model_gives_their_output(shared, tmp_path):
    with safe_open(shared / "golden" / "palimpsa-m-layer-g1.safetensors", "pt") as file:
        golden = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = pico.Pico(width=64, layers=1, head_dim=32, state=16, rank=8, dtype=torch.float32)
    tensors = {
        "backbone.embeddings.weight": torch.eye(64),
        "backbone.layers.0.norm.weight": torch.ones(64),
        "backbone.norm_f.weight": torch.ones(64),
        **{
            name.replace("state_dict", "backbone.layers.0.mixer"): tensor
            for name, tensor in golden.items()
            if name.startswith("state_dict")
        },
    }
    content = config_of(model, vocab_size=64)
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file(tensors, tmp_path / "model.safetensors")
    mixer = load_model(tmp_path).backbone.layers[0].mixer
    with torch.no_grad():
        output = mixer(golden["x"])
    output = output[0] if isinstance(output, tuple) else output
    assert ((output - golden["y"]).norm() / golden["y"].norm()) < 1e-5  # fp32


def test_trained_without_metaplasticity_it_is_a_plain_mamba2(tmp_path):
    write(tmp_path / "theirs", metaplasticity=False)
    pico.write_hf(tmp_path / "plain", dtype=torch.float32)
    found = open_checkpoint(tmp_path / "theirs")
    assert found.palimpsa_layers == ()
    unused = [entry for entry in found.dropped if "trained without" in entry.reason]
    assert len(unused) == 12
    # Sizes of the gate change what the generator of the pico model draws next, so shapes are compared, not values.
    assert {n: e.shape for n, e in found.tensors.items()} == {
        n: e.shape for n, e in open_checkpoint(tmp_path / "plain").tensors.items()
    }
    report = convert(tmp_path / "theirs", tmp_path / "out", layers=(1,), verify="logits")
    assert report.verification.on_error < 1e-4
    assert len([entry for entry in report.tensors.dropped if "trained without" in entry.reason]) == 12


def test_swapping_a_swapped_layer_says_so(tmp_path):
    write(tmp_path / "theirs")
    with pytest.raises(UsageError, match=r"layer 1.*already"):
        convert(tmp_path / "theirs", tmp_path / "out", layers=(1,))


def test_a_missing_gate_tensor_is_listed(tmp_path):
    def edit(tensors):
        return {name: tensor for name, tensor in tensors.items() if not name.endswith("1.mixer.b_scale")}

    write(tmp_path / "theirs", edit=edit)
    with pytest.raises(CheckpointError, match=r"1 missing \(backbone.layers.1.mixer.metaplasticity.beta_scale\)"):
        open_checkpoint(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_groups": 2}, "n_groups: is 2, only 1 is supported for meta_mamba2"),
        ({"rms_norm": False}, "rms_norm: is false"),
        ({"beta_step_rank": 0}, "beta_step_rank = 0, expected a whole number"),
        ({"beta_step_rank": "many"}, "beta_step_rank = 'many'"),
        ({"head_dim": -1}, "head_dim = -1"),
        ({"model_type": "palimpsa"}, "model_type: is 'palimpsa'"),
    ],
)
def test_what_is_refused(tmp_path, changes, message):
    write(tmp_path / "theirs", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "theirs")


def test_defaults_that_their_config_leaves_out():
    found = translate_config("config.json", {"hidden_size": 100, "num_hidden_layers": 2, "beta_step_rank": "auto"})
    assert (found["beta_rank"], found["num_heads"], found["beta_groups"]) == (7, 3, 64)
    assert (found["pad_token_id"], found["bos_token_id"], found["eos_token_id"]) == (0, 1, 2)


@pytest.mark.parametrize("kind", ["meta_mamba2", "metamamba2"])
def test_both_spellings_of_the_type_are_theirs(tmp_path, kind):
    write(tmp_path / "theirs", model_type=kind)
    assert open_checkpoint(tmp_path / "theirs").layout == "meta_mamba2"
