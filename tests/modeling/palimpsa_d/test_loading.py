"""Saving and loading Palimpsa-D models, their config and start, and what is refused."""

import json
import math

import pytest
import torch
from absent import ABSENT, run
from palimpsa_surgery.base.errors import CheckpointError, UsageError
from palimpsa_surgery.modeling import PalimpsaDConfig, PalimpsaDForCausalLM, PalimpsaDModel
from palimpsa_surgery.modeling.bundle import bundle_remote_code, remote_code_keys
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

KEPT = ("A_log", "dt_bias", "mixer.D", "beta_scale", "log_prior")


@pytest.fixture
def folder(lively_d, tmp_path):
    lively_d().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_auto_classes_load_it_and_logits_are_the_same(folder, lively_d, ids):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is PalimpsaDForCausalLM
    assert torch.equal(model(ids).logits, lively_d()(ids).logits)
    assert model.lm_head.weight is model.backbone.embeddings.weight
    backbone = AutoModel.from_pretrained(folder)
    assert type(backbone) is PalimpsaDModel
    assert torch.equal(backbone(ids).last_hidden_state, model.backbone(ids).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_save_load_save_writes_the_same_bytes_and_fp32_stays(folder, tmp_path, dtype):
    first, second = tmp_path / "first", tmp_path / "second"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.save_pretrained(first)
    AutoModelForCausalLM.from_pretrained(first, dtype="auto").save_pretrained(second)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "config.json").read_text() == (second / "config.json").read_text()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.endswith(KEPT) else dtype), name


@pytest.mark.parametrize("train_prior", [True, False])
def test_train_prior_survives(lively_d, tmp_path, train_prior):
    lively_d(train_prior=train_prior).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    frozen = {name.rsplit(".", 1)[1] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == (set() if train_prior else {"log_prior"})


def test_a_missing_tensor_is_an_error_not_a_random_layer(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("backbone.layers.1.mixer.bs_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensors that are missing, 1 in all \(backbone.layers.1.mixer.bs_proj"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid", "gated_deltanet"])
def test_a_gated_delta_net_is_not_converted(folder, kind):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    with pytest.raises(CheckpointError, match=f"model_type '{kind}'; expected 'palimpsa_d'. .*has no exact start"):
        PalimpsaDForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"n_groups": 5}, r"config: n_groups \(5\) must divide num_heads \(16\)"),
        ({"head_dim": 0}, "config: head_dim is 0; it must be at least 1"),
        ({"conv_kernel": 1}, "config: conv_kernel is 1; it must be at least 2"),
        ({"beta_groups": 5}, "config: beta_groups: 5 does not divide head_dim 48"),
        ({"beta_scale_form": "exp"}, "config: beta_scale_form: 'exp' is none of abs, softplus"),
        ({"hidden_act": "gelu"}, "config: hidden_act is 'gelu'; Palimpsa-D has silu"),
    ],
)
def test_a_wrong_key_is_named(said, message):
    with pytest.raises(UsageError, match=message):
        PalimpsaDConfig(**said)


def test_defaults_are_the_authors():
    config = PalimpsaDConfig()
    assert (config.n_groups, config.beta_rank, config.beta_groups) == (16, 48, 48)
    assert (config.beta_scale_form, config.train_prior) == ("softplus", False)
    assert config.layer_types == ["linear_attention"] * 19


def test_a_new_model_starts_in_the_authors_ranges():
    torch.manual_seed(0)
    config = PalimpsaDConfig(vocab_size=40, hidden_size=32, num_hidden_layers=4, num_heads=64, head_dim=4, state_size=4)
    for block in PalimpsaDForCausalLM(config).backbone.layers:
        mixer = block.mixer
        rates, steps = mixer.decay_rate().detach(), mixer.step_size(torch.zeros(64)).detach()
        assert 0 < rates.min() < 2
        assert 14 < rates.max() <= 16
        assert 0.0009 < steps.min() < 0.003
        assert 0.04 < steps.max() < 0.11
        assert math.log(2) < mixer.metaplasticity.scale().min() < mixer.metaplasticity.scale().max() < 1.32
        assert torch.equal(mixer.D, torch.ones(64))
        assert torch.equal(mixer.o_norm.weight, torch.ones(4))
        assert not mixer.metaplasticity.log_prior.any()
        for name, parameter in mixer.named_parameters():
            assert parameter.dim() < 2 or parameter.std() > 0, name


@pytest.mark.slow
def test_a_folder_with_its_code_loads_generates_and_saves_where_the_package_is_absent(folder, lively_d, ids, tmp_path):
    code = """
        import torch
        from transformers import AutoModel, AutoModelForCausalLM
        source, out = sys.argv[1:]
        ids = torch.load(out + "/ids.pt")
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        assert type(model).__module__.endswith(".modeling_palimpsa_d"), type(model).__module__
        with torch.no_grad():
            hidden = AutoModel.from_pretrained(source, trust_remote_code=True)(ids).last_hidden_state
            assert torch.equal(hidden, model.backbone(ids).last_hidden_state)
            torch.save((model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)), out + "/found.pt")
            model.save_pretrained(out + "/again")
            again = AutoModelForCausalLM.from_pretrained(out + "/again", trust_remote_code=True)
            assert torch.equal(again(ids).logits, model(ids).logits)
    """
    bundle_remote_code(folder, "palimpsa_d")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **remote_code_keys("palimpsa_d")}))
    torch.save(ids, tmp_path / "ids.pt")
    done = run(code, folder, tmp_path, home=tmp_path, absent=(*ABSENT, "numba"))
    assert done.returncode == 0, done.stderr
    logits, tokens = torch.load(tmp_path / "found.pt")
    with torch.no_grad():
        torch.testing.assert_close(logits, lively_d()(ids).logits)
        assert torch.equal(tokens, lively_d().generate(ids, max_new_tokens=4, do_sample=False))
