"""Saving and loading through transformers: dtypes, ties, missing tensors, the stock class."""

import json

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.modeling import PalimpsaMamba2ForCausalLM, PalimpsaMamba2Model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, Mamba2ForCausalLM

KEPT = ("A_log", "dt_bias", "mixer.D", "beta_scale", "log_prior")


@pytest.fixture
def folder(lively_model, tmp_path):
    lively_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_auto_classes_load_it_and_logits_are_the_same(folder, lively_model, ids):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is PalimpsaMamba2ForCausalLM
    assert torch.equal(model(ids).logits, lively_model()(ids).logits)
    backbone = AutoModel.from_pretrained(folder)
    assert type(backbone) is PalimpsaMamba2Model
    assert torch.equal(backbone(ids).last_hidden_state, model.backbone(ids).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "auto"], ids=str)
def test_which_parameters_are_fp32_after_loading_and_after_save_and_reload(folder, tmp_path, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    expected = torch.float32 if dtype == "auto" else dtype
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == str(expected).split(".")[1]
    for loaded in (model, again):
        for name, parameter in loaded.named_parameters():
            assert parameter.dtype == (torch.float32 if name.endswith(KEPT) else expected), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_save_load_save_writes_the_same_bytes(folder, tmp_path, dtype):
    first, second = tmp_path / "first", tmp_path / "second"
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(first)
    AutoModelForCausalLM.from_pretrained(first, dtype="auto").save_pretrained(second)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "config.json").read_text() == (second / "config.json").read_text()


def test_short_copies_of_the_fp32_parameters_are_widened(folder):
    edit(folder, lambda t: t.update({name: t[name].bfloat16() for name in t}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert model.backbone.layers[0].mixer.A_log.dtype == torch.float32


def test_a_tied_head_is_stored_once_and_shared(folder, lively_model):
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.backbone.embeddings.weight


def test_an_untied_head_is_its_own(lively_model, tmp_path, ids):
    model = lively_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is not again.backbone.embeddings.weight
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("train_prior", [True, False])
def test_train_prior_survives(lively_model, tmp_path, train_prior):
    lively_model(train_prior=train_prior).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    frozen = {name.rsplit(".", 1)[1] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == (set() if train_prior else {"log_prior"})


@pytest.mark.parametrize(
    "name",
    [
        "backbone.layers.0.mixer.metaplasticity.beta_scale",
        "backbone.layers.2.mixer.metaplasticity.beta_down.weight",
        "backbone.layers.1.mixer.A_log",
        "backbone.embeddings.weight",
    ],
)
def test_a_missing_tensor_is_an_error_not_a_random_layer(folder, name):
    edit(folder, lambda t: t.pop(name))
    with pytest.raises(
        CheckpointError, match=rf"config.json calls for tensors that are missing, \d+ in all \(.*{name}"
    ):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_layer_swapped_in_the_config_alone_is_an_error(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "palimpsa_layers": [0, 1, 2]}))
    with pytest.raises(
        CheckpointError, match=r"tensors that are missing, 4 in all \(backbone.layers.1.mixer.metaplasticity"
    ):
        AutoModelForCausalLM.from_pretrained(folder)


def test_an_importance_gate_that_the_config_does_not_list_is_an_error(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "palimpsa_layers": [0]}))
    with pytest.raises(CheckpointError, match=r"importance gates for layers that palimpsa_layers .* does not list"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_loading_info_can_still_be_asked_for(folder):
    model, info = PalimpsaMamba2ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, PalimpsaMamba2ForCausalLM)
    assert not info["missing_keys"]


@pytest.mark.parametrize("layers", [[0, 2], []], ids=["swapped", "plain"])
def test_the_stock_mamba2_class_refuses_it(lively_model, tmp_path, layers):
    lively_model(palimpsa_layers=layers).save_pretrained(tmp_path)
    with pytest.raises((AttributeError, ValueError, TypeError), match="layer_types"):
        Mamba2ForCausalLM.from_pretrained(tmp_path)


def test_device_map_and_low_memory_loading(folder, lively_model, ids, rel):
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"})
    assert torch.equal(model(ids).logits, lively_model()(ids).logits)


def test_offloading_to_disk_fires_every_hook(folder, lively_model, ids, rel, tmp_path):
    """Weights that wait on disk: a module that reads another's weight directly would meet a meta tensor."""
    accelerate = pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(folder)
    accelerate.disk_offload(model, tmp_path / "offload", execution_device="cpu")
    assert {p.device.type for p in model.backbone.layers.parameters()} == {"meta"}
    with torch.no_grad():
        assert rel(model(ids).logits, lively_model()(ids).logits) < 1e-6
        tokens = model.generate(ids[:, :5], max_new_tokens=3, do_sample=False, eos_token_id=None)
        expected = lively_model().generate(ids[:, :5], max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.equal(tokens, expected)


def test_resizing_the_embedding(lively_model, ids, rel):
    model = lively_model()
    expected = model(ids).logits
    model.resize_token_embeddings(64, mean_resizing=False)
    assert model.config.vocab_size == 64
    assert model.lm_head.weight is model.backbone.embeddings.weight
    assert rel(model(ids).logits[..., :53], expected) < 1e-6


def test_golden_logits_of_mamba_ssm(shared, rel):
    """The plain source of 25 M parameters, as mamba_ssm wrote it, against logits that mamba_ssm computed."""
    from palimpsa_surgery.modeling import PalimpsaMamba2Config

    source = shared / "checkpoints" / "mamba2-docs-25m"
    sizes = {"hidden_size": 384, "num_hidden_layers": 24, "num_heads": 12, "head_dim": 64, "state_size": 128}
    model = PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(vocab_size=4096, **sizes)).eval()
    tensors = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    model.load_state_dict({name.replace("embedding.", "embeddings."): t.float() for name, t in tensors.items()})
    golden = load_file(shared / "golden" / "mamba2-docs-25m-logits.safetensors")
    with torch.no_grad():
        assert rel(model(golden["input_ids"]).logits[0], golden["logits"]) < 1e-3
