"""Models with attention and MLPs: what their config refuses, how they start, are saved and train.

How they run is tested with all other models (`test_forms.py`, `test_generation.py`).
"""

import json

import pytest
import torch
from absent import ABSENT, run
from palimpsa_surgery.base.errors import CheckpointError, UsageError
from palimpsa_surgery.mixers.attention import Attention
from palimpsa_surgery.modeling import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.modeling.bundle import auto_map, bundle_remote_code
from tiny import ATTENTION, HYBRID, make_lively_model, make_tiny_config
from transformers import AutoModelForCausalLM, Mamba2ForCausalLM


@pytest.fixture
def model():
    return make_lively_model(make_tiny_config(**HYBRID))


def test_the_config_is_completed_and_says_what_each_layer_keeps():
    config = make_tiny_config(attn_layer_idx=(1,), attn_cfg={"causal": True, "num_heads": 4})
    assert config.layer_types == ["linear_attention", "hybrid", "linear_attention"]
    assert config.attn_cfg == {
        **{"causal": True, "num_heads": 4, "num_heads_kv": 4, "head_dim": 6, "d_conv": 0, "rotary_emb_dim": 0},
        **{"qkv_proj_bias": True, "out_proj_bias": True, "rotary_emb_base": 10000.0},
    }
    plain = make_tiny_config(attn_cfg={"num_heads": 5})  # nobody looks at it
    assert (plain.attn_layer_idx, plain.attn_cfg) == ([], None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_layer_idx": [3]}, "attn_layer_idx names layer 3; this model has layers 0 to 2"),
        ({"attn_layer_idx": [1, 1]}, r"attn_layer_idx names a layer twice \(\[1, 1\]\)"),
        ({"attn_layer_idx": [0, 1]}, "palimpsa_layers names layer 0, which is attention"),
        ({"attn_layer_idx": [0, 1, 2], "palimpsa_layers": []}, "attn_layer_idx names every layer"),
        ({"attn_cfg": None}, "attn_cfg.num_heads: is missing"),
        ({"attn_cfg": {**ATTENTION, "causal": False}}, "attn_cfg.causal: is False, only True"),
        ({"d_intermediate": -1}, "d_intermediate is -1; it must be 0"),
    ],
)
def test_a_config_that_is_no_model_is_refused(changes, message):
    with pytest.raises(UsageError, match=f"config: {message}"):
        make_tiny_config(**{**HYBRID, **changes})


def test_initial_values_are_those_of_mamba_ssm():
    torch.manual_seed(0)
    block = PalimpsaMamba2ForCausalLM(make_tiny_config(**HYBRID)).backbone.layers[1]
    # kaiming_uniform with a = sqrt(5), and 1 / sqrt(2 residual branches in each of 3 layers) where a branch ends.
    for projection, bound in (
        (block.mixer.in_proj, 24**-0.5),
        (block.mixer.out_proj, (40 * 6) ** -0.5),
        (block.mlp.fc1, 24**-0.5),
        (block.mlp.fc2, (128 * 6) ** -0.5),
    ):
        assert 0.95 * bound < projection.weight.abs().max() <= bound
    assert block.mixer.in_proj.bias.abs().max() == 0
    assert block.mixer.conv1d.bias.abs().max() == 0
    assert (block.norm2.weight == 1).all()


def test_saved_and_loaded_it_is_the_same_and_other_classes_refuse_it(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again.backbone.layers[1].mixer, Attention)
    assert torch.equal(again(ids).logits, model(ids).logits)
    for key in (*HYBRID, "layer_types", "palimpsa_layers"):
        assert getattr(again.config, key) == getattr(model.config, key)
    with pytest.raises((AttributeError, ValueError, TypeError), match="layer_types"):
        Mamba2ForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["layers.1.mixer.in_proj.bias", "layers.0.mlp.fc2.weight", "layers.2.norm2.weight"])
def test_a_missing_tensor_is_an_error(model, tmp_path, name):
    state = {key: value for key, value in model.state_dict().items() if key != f"backbone.{name}"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=rf"tensors that are missing, 1 in all \(backbone.{name}\)"):
        PalimpsaMamba2ForCausalLM.from_pretrained(tmp_path)


def test_it_loads_with_its_own_code_where_the_package_is_absent(model, ids, tmp_path):
    folder = tmp_path / "hybrid"
    model.save_pretrained(folder)
    bundle_remote_code(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map()}))
    code = """
        import torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
        ids = torch.tensor(eval(sys.argv[2]))
        print(model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)[0].tolist())
    """
    # That compiled code is found there is tested with the bundle.
    done = run(code, folder, ids[:1, :7].tolist(), home=tmp_path, absent=(*ABSENT, "numba"))
    assert done.returncode == 0, done.stderr
    expected = model.generate(ids[:1, :7], max_new_tokens=5, do_sample=False, eos_token_id=None)[0].tolist()
    assert done.stdout.splitlines()[-1] == str(expected)


@torch.no_grad()
def test_bf16_is_near_and_keeps_keys_in_bf16(model, ids, rel):
    expected = model(ids).logits
    short = model.to(torch.bfloat16)
    output = short(ids, use_cache=True)
    assert rel(output.logits, expected) < 5e-2
    assert output.cache.layers[1].keys.dtype == torch.bfloat16
    tokens = short.generate(ids[:, :5], max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert tokens.shape == (2, 11)


def test_autocast_is_near(model, ids, rel):
    expected = model(ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rel(model(ids).logits, expected) < 5e-2


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the newest release has a longer name for the same switch
def test_gradient_checkpointing_changes_no_gradient(model, ids, rel, reentrant):
    def gradients():
        model.zero_grad()
        model.train()(ids, labels=ids).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    actual = gradients()
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    assert all(rel(actual[name], gradient) < 1e-5 for name, gradient in expected.items())
