"""What cannot be opened is refused with one line that says what was wrong and where."""

import json
import math
import pickle

import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError, PalimpsaError
from palimpsa_surgery.modeling.palimpsa_mamba2.configuration_palimpsa_mamba2 import PalimpsaMamba2Config
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint


def refused(folder, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


# Kinds of models.


def mamba1(tensors):
    for name in [name for name in tensors if name.endswith(("A_log", "dt_bias"))]:
        tensors[name.replace("dt_bias", "dt_proj.weight")] = torch.zeros(32, 8)
        if name.endswith("dt_bias"):
            del tensors[name]


def test_mamba1_is_named_by_its_tensors(tmp_path):
    pico.write_mamba_ssm(tmp_path, config={"ssm_cfg": {}}, edit=mamba1)
    refused(tmp_path, r"A_log: this is a Mamba1 checkpoint .* expected Mamba2")


def test_mamba1_in_the_layout_of_transformers(tmp_path):
    pico.write_hf(tmp_path, config={"model_type": "mamba"})
    refused(tmp_path, r"config.json:model_type: is 'mamba', whose mixers are Mamba1, expected Mamba2")


def test_an_empty_ssm_cfg_with_mamba2_tensors_opens(tmp_path):
    pico.write_mamba_ssm(tmp_path, width=32, head_dim=64, state=128, config={"ssm_cfg": {}})
    assert open_checkpoint(tmp_path).config.num_heads == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"attn_layer_idx": [1, 2]}, r"attn_layer_idx: names attention layers \(1, 2\), only models"),
        ({"d_intermediate": 64}, "d_intermediate: is 64, so every block has an MLP"),
        ({"rms_norm": False}, "rms_norm: is False, only True is supported"),
        ({"ssm_cfg": {"layer": "Mamba1"}}, "ssm_cfg.layer: is 'Mamba1', only Mamba2"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer: is 'Mamba3', only Mamba2"),
        ({"ssm_cfg": {"D_has_hdim": True}}, "D_has_hdim: is True, only False"),
        ({"ssm_cfg": {"rmsnorm": False}}, r"ssm_cfg.rmsnorm: is False, only True"),
        ({"ssm_cfg": {"norm_before_gate": True}}, "norm_before_gate: is True, only False"),
        ({"ssm_cfg": {"d_ssm": 16}}, r"d_ssm: is 16, expected expand \* d_model = 32"),
        ({"ssm_cfg": {"headdim": 24}}, r"headdim: 24 does not divide expand \* d_model = 32"),
        ({"ssm_cfg": {"headdim": 8, "rotary": 1}}, r"does not know \(rotary\)"),
        ({"ssm_cfg": [1]}, "ssm_cfg: holds a list, expected a table"),
        ({"ssm_cfg": {"headdim": 8, "dt_limit": [0.2, 0.1]}}, r"dt_limit: is \[0.2, 0.1\], expected 0 <= low <= high"),
        ({"n_layer": "three"}, "num_hidden_layers = 'three', expected a whole number above 0"),
        ({"n_layer": 0}, "num_hidden_layers = 0, expected a whole number above 0"),
        ({"vocab_size": 99}, "has 32 rows, fewer than the vocabulary of 99"),
        ({"d_model": None}, "is no Mamba2 config, expected mamba_ssm's d_model and n_layer"),
    ],
)
def test_variants_of_mamba_ssm_are_refused_by_name(tmp_path, changes, match):
    pico.write_mamba_ssm(tmp_path, config=changes)
    refused(tmp_path, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_heads": 5}, r"num_heads \* head_dim = 5 \* 8 = 40, expected expand \* hidden_size = 2 \* 16 = 32"),
        ({"n_groups": 3}, "3 groups do not divide 4 heads"),
        ({"hidden_act": "gelu"}, "hidden_act: is 'gelu', only silu"),
        ({"model_type": "rwkv"}, "model_type: is 'rwkv', expected mamba2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: the weights are quantised"),
        ({"time_step_limit": 3}, "time_step_limit: is 3, expected two numbers"),
        ({"hidden_size": None}, "is no Mamba2 config, expected .* hidden_size and num_hidden_layers"),
    ],
)
def test_variants_of_transformers_are_refused_by_name(tmp_path, changes, match):
    pico.write_hf(tmp_path, config=changes)
    refused(tmp_path, match)


def plain_config(folder):
    """What the folder opens as, less the paths and notes."""
    return open_checkpoint(folder).config


@pytest.mark.parametrize(
    ("other", "usual"),
    [
        ("d_model", "hidden_size"),
        ("num_layers", "num_hidden_layers"),
        ("headdim", "head_dim"),
        ("ssm_state_size", "state_size"),
        ("ngroups", "n_groups"),
        ("d_conv", "conv_kernel"),
        ("norm_eps", "layer_norm_epsilon"),
        ("dt_limit", "time_step_limit"),
    ],
)
def test_names_of_other_programs_are_read(tmp_path, other, usual):
    """`other` alone is `usual`; both of one value are fine; of two values they are refused."""
    values = {"layer_norm_epsilon": 1e-4, "time_step_limit": [0.0, 0.5]}
    pico.write_hf(tmp_path, config={key: values[key] for key in [usual] if key in values})
    path = tmp_path / "config.json"
    content, expected = json.loads(path.read_text()), plain_config(tmp_path)
    value = content[usual]
    renamed = {**{key: held for key, held in content.items() if key != usual}, other: value}
    for spelled in (renamed, {**content, other: value}):
        path.write_text(json.dumps(spelled))
        assert plain_config(tmp_path) == expected
        assert open_checkpoint(tmp_path).notes == ()
    path.write_text(json.dumps({**content, other: [0.0, 0.1] if isinstance(value, list) else value * 2}))
    refused(tmp_path, rf"gives {other} = .* and {usual} = .*, two names of one setting")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_attention_heads": 4}, "num_attention_heads: is 4, which asks for more than Mamba2 blocks"),
        ({"attn_layer_indices": [3]}, r"attn_layer_indices: is \[3\]"),
        ({"num_local_experts": 8}, "num_local_experts: is 8"),
        ({"embedding_multiplier": 12}, "embedding_multiplier: is 12"),
        ({"logits_scaling": 8.0}, "logits_scaling: is 8.0"),
        ({"mlp_hidden_size": 64}, "mlp_hidden_size: is 64"),
        ({"intermediate_size": 64}, r"intermediate_size: is 64, expected expand \* hidden_size = 32"),
        ({"rms_norm": False}, "rms_norm: is False, only True"),
        ({"norm_type": "layernorm"}, "norm_type: is 'layernorm', only rms_norm"),
        ({"bidirectional": True}, "bidirectional: is True, only False"),
        (
            {"chunk_size": 10**30},
            "chunk_size = 1000000000000000000000000000000, expected a whole number above 0 and bel",
        ),
        ({"layer_norm_epsilon": 10**30}, "layer_norm_epsilon = .*, expected a number from 0 to 1"),
        ({"use_conv_bias": "x"}, "use_conv_bias = 'x', expected true or false"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes', expected true or false"),
    ],
)
def test_settings_that_change_what_is_computed_are_refused(tmp_path, changes, match):
    pico.write_hf(tmp_path, config=changes)
    refused(tmp_path, match)


@pytest.mark.parametrize(
    "changes",
    [
        {"embedding_multiplier": 1.0, "logits_scaling": 1},
        {"num_attention_heads": 0, "attn_layer_idx": [], "use_mlp": False},
        {"intermediate_size": 32, "rms_norm": True},
        {"fuse_norm": True, "use_cache": False, "max_position_embeddings": 2048, "A_init_range": [1, 16]},
        {"_commit_hash": "abc", "torch_dtype": "bfloat16", "id2label": {"0": "a"}},
    ],
)
def test_settings_that_change_nothing_are_passed_over(tmp_path, changes):
    pico.write_hf(tmp_path / "plain")
    pico.write_hf(tmp_path / "more", config=changes)
    assert plain_config(tmp_path / "more") == plain_config(tmp_path / "plain")
    assert open_checkpoint(tmp_path / "more").notes == ()


WITHOUT = (
    *("causal", "is_causal", "dt_softplus", "use_gate", "use_norm", "final_norm", "use_D", "use_short_conv"),
    *("use_residual", "residual", "skip_connection", "use_conv1d", "use_gated_norm", "use_dt_bias"),
)
WITH = ("non_causal", "is_encoder_decoder", "no_final_norm", "norm_bias", "lm_head_bias", "scale_embeddings")


@pytest.mark.parametrize("writer", [pico.write_mamba_ssm, pico.write_hf, pico.write_codestral])
@pytest.mark.parametrize("key", [*WITHOUT, *WITH])
def test_a_part_that_is_left_out_or_added_is_refused(tmp_path, key, writer):
    usual = key in WITHOUT
    writer(tmp_path, config={key: usual})
    assert open_checkpoint(tmp_path).notes == ()
    path = next(tmp_path.glob("*s.json" if writer is pico.write_codestral else "config.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), key: not usual}))
    refused(tmp_path, rf"{key}: is {not usual}, only {usual} is supported; choose a checkpoint without this variant")


@pytest.mark.parametrize("value", [False, 0, 0.0, None, "", [], {}], ids=repr)
def test_a_key_that_nobody_knows_is_noted_whatever_its_value(tmp_path, value):
    pico.write_hf(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_thing": value}))
    (note,) = open_checkpoint(tmp_path).notes
    assert f"1 key that this package does not know and does not follow (use_thing = {value!r})" in note


@pytest.mark.parametrize("key", ["residual_multiplier", "logits_scaling"])
@pytest.mark.parametrize(("value", "noted"), [(0, True), (0.0, True), (1, False), (None, False), (False, False)])
def test_a_factor_of_zero_is_noted(tmp_path, key, value, noted):
    pico.write_hf(tmp_path, config={key: value})
    assert [f"{key} = {value!r}" in note for note in open_checkpoint(tmp_path).notes] == [True] * noted


@pytest.mark.parametrize("writer", [pico.write_mamba_ssm, pico.write_hf, pico.write_codestral])
def test_settings_that_nobody_knows_are_noted(tmp_path, writer):
    writer(tmp_path, config={"state_dropout": 0.1, "gate_order": "last"})
    (note,) = open_checkpoint(tmp_path).notes
    assert "2 keys that this package does not know" in note
    assert "state_dropout = 0.1, gate_order = 'last'" in note


@pytest.mark.parametrize(
    ("limit", "read"),
    [
        (None, (0.0, math.inf)),
        ([None, None], (0.0, math.inf)),
        ([0.01, 1e308], (0.01, math.inf)),
        ([0.1, 0.1], (0.1, 0.1)),
    ],
)
def test_no_limit_of_the_step_size_in_every_spelling(tmp_path, limit, read):
    """JSON has no infinity; the config of the swapped model reads the same words."""
    pico.write_hf(tmp_path / "hf", config={"time_step_limit": limit})
    pico.write_mamba_ssm(tmp_path / "ssm", config={"ssm_cfg": {"headdim": 8, "d_state": 8, "dt_limit": limit}})
    for name in ("hf", "ssm"):
        assert plain_config(tmp_path / name).time_step_limit == read
    assert tuple(PalimpsaMamba2Config(time_step_limit=limit).time_step_limit) == read


@pytest.mark.parametrize("limit", [[0.001, 0.1], [0.0, None], [0.0, {"__float__": "Infinity"}], [0.0, float("inf")]])
def test_the_step_limit_in_every_spelling(tmp_path, limit):
    pico.write_hf(tmp_path / "hf", config={"time_step_limit": limit})
    pico.write_mamba_ssm(tmp_path / "ssm", config={"ssm_cfg": {"headdim": 8, "d_state": 8, "dt_limit": limit}})
    high = limit[1] if isinstance(limit[1], float) else float("inf")
    for name in ("hf", "ssm"):
        assert open_checkpoint(tmp_path / name).config.time_step_limit == (limit[0], high)


def test_norm_before_gate_in_an_export_of_transformers_has_no_effect_and_is_noted(tmp_path):
    pico.write_hf(tmp_path, config={"norm_before_gate": True})
    assert "a key without effect" in open_checkpoint(tmp_path).notes[0]


# Tensors.


def test_missing_extra_and_misshapen_tensors_are_all_listed(tmp_path):
    def spoil(tensors):
        del tensors["backbone.layers.1.mixer.D"]
        tensors["backbone.layers.0.mlp.fc1.weight"] = torch.zeros(2, 2)
        tensors["backbone.norm_f.weight"] = torch.zeros(15)

    pico.write_hf(tmp_path, edit=spoil)
    refused(
        tmp_path,
        r"1 missing \(backbone.layers.1.mixer.D\), 1 unexpected \(backbone.layers.0.mlp.fc1.weight\), "
        r"1 of another shape than the config gives \(backbone.norm_f.weight is \[15\] instead of \[16\]\)",
    )


def test_a_long_list_is_counted(tmp_path):
    pico.write_mamba_ssm(tmp_path, edit=lambda t: {k: v for k, v in t.items() if ".layers.1." not in k})
    refused(tmp_path, r"9 missing \(backbone.layers.1.norm.weight, .* and 1 more\)")


def test_nothing_in_common_is_refused(tmp_path):
    pico.write_hf(tmp_path, edit=lambda t: {f"other.{name}": tensor for name, tensor in t.items()})
    refused(tmp_path, r"30 missing \(.* and 22 more\), 30 unexpected \(other.* and 22 more\)")


@pytest.mark.parametrize("name", ["lm_head.weight", "backbone.embeddings.weight", "backbone.norm_f.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused_by_name(tmp_path, name, dtype):
    def quantise(tensors):
        tensors[name] = tensors[name].to(dtype)
        tensors[f"{name}_scale"] = torch.ones(1)

    pico.write_hf(tmp_path, edit=quantise, tied=False)
    kind = str(dtype).removeprefix("torch.")
    refused(tmp_path, f"{name} is stored as {kind}, expected weights in float32, .* before it was quantised")


# Files.


def test_an_empty_folder(tmp_path):
    refused(tmp_path, "is an empty folder, expected config.json and weights")


def test_a_file_where_a_folder_should_be(tmp_path):
    pico.write_hf(tmp_path)
    refused(tmp_path / "model.safetensors", "is a file, expected the folder that holds it")


def test_no_such_folder(tmp_path):
    refused(tmp_path / "nowhere", "no such folder; give a checkpoint's folder or a Hub id")


def test_a_config_without_weights(tmp_path):
    pico.write_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "holds no weights, expected model.safetensors")


def test_weights_without_a_config(tmp_path):
    pico.write_hf(tmp_path)
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "has weights but neither config.json nor params.json")


def test_an_adapter_is_not_a_model(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    refused(tmp_path, "holds an adapter, not a model; merge it")


@pytest.mark.parametrize("content", ["{", "[1, 2]", "\x00\x01"])
def test_a_config_of_nonsense(tmp_path, content):
    pico.write_hf(tmp_path)
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path, "config.json: (is not JSON|holds a list, expected a table)")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"backbone.ghost": "model-00001-of-00002.safetensors"},
            "does not hold tensor backbone.ghost, which",
        ),
        (
            {"lm_head.weight": "model-00001-of-00002.safetensors"},
            "of-00002.safetensors: does not hold tensor lm_h",
        ),
        ({"backbone.ghost": "x" * 5000}, r"of its 3 files 1 cannot be found \(x{100}\); download the missing shards"),
        ({"backbone.ghost": "../" + "x" * 5000}, "weight_map points to '../x{97}', outside its folder"),
    ],
)
def test_an_index_that_names_what_is_not_there(tmp_path, change, message):
    pico.write_hf(tmp_path, shards=2, tied=False)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    assert index["weight_map"].get("lm_head.weight") != "model-00001-of-00002.safetensors"
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], **change}}))
    refused(tmp_path, message)


def without_head(tensors):
    tensors.pop("lm_head.weight", None)


def list_the_head(folder, **kind):
    """A model in two shards with a head that the index lists and no shard holds."""
    tensors = pico.write_hf(folder, shards=2, edit=without_head, **kind)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    return tensors


def test_an_index_may_list_the_head_that_is_stored_as_the_embedding(tmp_path):
    tensors = list_the_head(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.tie_word_embeddings is True
    assert set(checkpoint.tensors) == tensors.keys() - {"lm_head.weight"}


@pytest.mark.parametrize("said", [False, None])
def test_an_index_may_not_list_a_head_that_no_config_ties(tmp_path, said):
    list_the_head(tmp_path, config={"tie_word_embeddings": said})
    refused(tmp_path, "model-00001-of-00002.safetensors: does not hold tensor lm_head.weight, which the index")


@pytest.mark.parametrize("target", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "C:\\x"])
def test_a_shard_index_that_points_outside_its_folder(tmp_path, target):
    pico.write_hf(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = target
    path.write_text(json.dumps(index))
    refused(tmp_path, "outside its folder; this is refused")


def test_a_missing_shard(tmp_path):
    pico.write_hf(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, r"of its 3 files 1 cannot be found \(model-00002-of-00003.safetensors\)")


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": {"a": 1}}, {"weight_map": ["a"]}])
def test_an_index_without_a_map(tmp_path, content):
    pico.write_hf(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    refused(tmp_path, "has no usable weight_map")


class Evil:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_an_unsafe_pickle_is_refused_and_never_runs(tmp_path, capsys):
    pico.write_mamba_ssm(tmp_path)
    torch.save({"a": torch.zeros(2), "b": Evil()}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "holds pickled objects besides tensors, which could run code and are refused")
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_plain_pickle_is_refused(tmp_path, capsys):
    pico.write_mamba_ssm(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"b": Evil()}))
    refused(tmp_path, r"pytorch_model.bin: cannot be read as a torch file \(Unsupported operand")
    assert "must not run" not in capsys.readouterr().out


# Nonsense of every kind is one line of refusal, never another error and never a hang.


def refusal(folder):
    """The message of the refusal, None when the folder opens and its config is good for the model; any other error
    fails the test."""
    try:
        PalimpsaMamba2Config(**open_checkpoint(folder).config.arguments())
    except PalimpsaError as error:
        return str(error)
    return None


NONSENSE = ["x", -1, 2.5, True, [None], {"a": 1}, 10**12]


@pytest.mark.parametrize("writer", [pico.write_mamba_ssm, pico.write_hf, pico.write_codestral])
@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_nonsense_in_any_key_of_a_config(tmp_path, writer, value):
    sizes = {"swapped": (1,)} if writer is pico.write_hf else {}
    writer(tmp_path, **sizes)
    path = next(path for path in tmp_path.iterdir() if path.name in ("config.json", "params.json"))
    content = json.loads(path.read_text())
    nested = [("ssm_cfg", key) for key in content.get("ssm_cfg", {})]
    for table, key in [(None, key) for key in content] + nested:
        changed = json.loads(json.dumps(content))
        (changed if table is None else changed[table])[key] = value
        path.write_text(json.dumps(changed))
        assert "\n" not in (refusal(tmp_path) or "")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("writer", [pico.write_mamba_ssm, pico.write_hf])
def test_flipped_bytes_in_a_weights_file(tmp_path, writer, seed):
    writer(tmp_path)
    path = next(path for path in tmp_path.iterdir() if path.suffix in (".bin", ".safetensors"))
    whole = path.read_bytes()
    random = torch.Generator().manual_seed(seed)
    refusals = 0
    for _ in range(25):
        content = bytearray(whole)
        for place in torch.randint(0, 2500, (3,), generator=random).tolist():
            content[place] ^= 1 << int(torch.randint(0, 8, (), generator=random))
        path.write_bytes(content)
        message = refusal(tmp_path)
        refusals += message is not None
        assert "\n" not in (message or "")
    assert refusals > 5
