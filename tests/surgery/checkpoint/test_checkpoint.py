"""Every layout a checkpoint comes in opens to the same tensors and the same config."""

import hashlib
import json
import logging
import shutil

import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from safetensors.torch import save_file

EMBEDDING, HEAD = "backbone.embeddings.weight", "lm_head.weight"

WRITERS = {
    "mamba_ssm bin": lambda folder, **kw: pico.write_mamba_ssm(folder, **kw),
    "mamba_ssm safetensors": lambda folder, **kw: pico.write_mamba_ssm(folder, format="safetensors", **kw),
    "mamba_ssm sharded bin": lambda folder, **kw: pico.write_mamba_ssm(folder, shards=3, **kw),
    "hf safetensors": lambda folder, **kw: pico.write_hf(folder, **kw),
    "hf sharded safetensors": lambda folder, **kw: pico.write_hf(folder, shards=2, **kw),
    "hf bin": lambda folder, **kw: pico.write_hf(folder, format="bin", **kw),
    "hf sharded bin": lambda folder, **kw: pico.write_hf(folder, format="bin", shards=2, **kw),
}


def assert_holds(checkpoint, tensors, *, tied):
    """The checkpoint holds exactly these tensors, bit for bit."""
    expected = {name: value for name, value in tensors.items() if not (tied and name == HEAD)}
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        loaded = checkpoint.load(name)
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor), name
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("writer", WRITERS)
def test_every_layout_opens_to_the_same_tensors(tmp_path, writer, tied):
    tensors = WRITERS[writer](tmp_path / "any name", tied=tied)
    checkpoint = open_checkpoint(tmp_path / "any name")
    assert checkpoint.layout == writer.split()[0].replace("hf", "hf_mamba2")
    assert checkpoint.config.tie_word_embeddings is tied
    assert checkpoint.source_id == "any name"
    assert_holds(checkpoint, tensors, tied=tied)
    assert [name.source_name for name in checkpoint.dropped] == ([HEAD] if tied else [])


def test_both_layouts_give_the_same_config(tmp_path):
    sizes = {"groups": 2, "bias": True, "conv_bias": False, "state": 12}
    pico.write_mamba_ssm(tmp_path / "a", **sizes)
    pico.write_hf(tmp_path / "b", **sizes)
    one, two = (vars(open_checkpoint(tmp_path / name).config) for name in "ab")
    told = {"bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"}
    assert {k: v for k, v in one.items() if k not in told} == {k: v for k, v in two.items() if k not in told}
    assert one["vocab_size"] == 32  # the rows of the embedding, 29 padded to 16s
    assert (one["num_heads"], one["n_groups"], one["use_bias"], one["use_conv_bias"]) == (4, 2, True, False)


def test_tensors_come_in_the_order_of_the_model(tmp_path):
    pico.write_hf(tmp_path, shards=3, tied=False, swapped=(0,))
    names = list(open_checkpoint(tmp_path).tensors)
    assert names[0] == EMBEDDING
    assert names[-2:] == ["backbone.norm_f.weight", HEAD]
    assert [int(name.split(".")[2]) for name in names[1:-2]] == sorted(int(n.split(".")[2]) for n in names[1:-2])


def test_a_converted_folder_keeps_its_swapped_layers(tmp_path):
    tensors = pico.write_hf(tmp_path, swapped=(2, 0))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "palimpsa_mamba2"
    assert checkpoint.palimpsa_layers == (0, 2)
    assert checkpoint.config.gate.rank == 2
    assert_holds(checkpoint, tensors, tied=True)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([0], r"4 unexpected \(backbone.layers.2.mixer.metaplasticity"),
        ([0, 1, 2], r"4 missing \(backbone.layers.1.mixer.metaplasticity"),
        ([0, 9], r"palimpsa_layers: is \[0, 9\], expected a list of layers from 0 to 2"),
        ("0, 2", "palimpsa_layers: is '0, 2'"),
    ],
)
def test_a_converted_folder_whose_config_lists_other_layers_is_refused(tmp_path, layers, message):
    pico.write_hf(tmp_path, swapped=(0, 2), config={"palimpsa_layers": layers})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_converted_folder_without_its_rank_is_refused(tmp_path):
    pico.write_hf(tmp_path, swapped=(0,), config={"beta_rank": None})
    with pytest.raises(CheckpointError, match="lists swapped layers but not beta_rank"):
        open_checkpoint(tmp_path)


def test_codestral_alone(tmp_path):
    tensors = pico.write_codestral(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "codestral"
    assert checkpoint.config.num_heads == 1
    assert checkpoint.config.state_size == 128
    assert_holds(checkpoint, tensors, tied=False)


def test_codestral_beside_shards_reads_the_shards_alone(tmp_path, caplog):
    sizes = {"width": 32, "layers": 2, "head_dim": 64, "state": 128, "tied": False}
    pico.write_codestral(tmp_path, seed=1)
    tensors = pico.write_hf(tmp_path, shards=2, seed=2, **sizes)
    with caplog.at_level(logging.INFO):
        checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "hf_mamba2"
    assert_holds(checkpoint, tensors, tied=False)
    assert "not read: consolidated.safetensors" in caplog.text


def test_safetensors_go_before_bin_and_the_log_says_so(tmp_path, caplog):
    pico.write_hf(tmp_path, format="bin", seed=1)
    tensors = pico.write_hf(tmp_path, seed=2)
    with caplog.at_level(logging.INFO):
        checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, tensors, tied=True)
    assert "read from model.safetensors; not read: pytorch_model.bin" in caplog.text


def test_the_folder_name_says_nothing(tmp_path):
    pico.write_mamba_ssm(tmp_path / "llama-7b-hf")
    assert open_checkpoint(tmp_path / "llama-7b-hf").layout == "mamba_ssm"


def test_no_architectures_and_no_model_type(tmp_path):
    tensors = pico.write_hf(tmp_path, config={"architectures": None, "model_type": None})
    assert_holds(open_checkpoint(tmp_path), tensors, tied=True)


@pytest.mark.parametrize("name", ["embedding", "embeddings"])
@pytest.mark.parametrize("writer", [pico.write_mamba_ssm, pico.write_hf])
def test_embedding_in_either_spelling(tmp_path, writer, name):
    def rename(tensors):
        return {key.replace("embeddings", "embedding").replace("embedding", name): t for key, t in tensors.items()}

    tensors = writer(tmp_path, edit=rename)
    assert_holds(open_checkpoint(tmp_path), tensors, tied=True)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "_orig_mod.module.model."])
def test_wrapper_prefixes_are_stripped(tmp_path, prefix):
    tensors = pico.write_mamba_ssm(tmp_path, edit=lambda found: {prefix + k: t for k, t in found.items()})
    checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, tensors, tied=True)
    assert checkpoint.tensors[EMBEDDING].source_name == f"{prefix}backbone.embedding.weight"


def test_a_model_saved_without_its_head_lacks_the_backbone_prefix(tmp_path):
    def bare(tensors):
        return {name.removeprefix("backbone."): t for name, t in tensors.items() if name != HEAD}

    tensors = pico.write_hf(tmp_path, edit=bare)
    assert_holds(open_checkpoint(tmp_path), tensors, tied=True)


# Head and embedding: what is stored, what the config says, what becomes of it.


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if not key.endswith(name)}


@pytest.mark.parametrize("gone", ["lm_head.weight", "embedding.weight"])
def test_a_tied_file_with_one_of_the_two(tmp_path, gone):
    tensors = pico.write_mamba_ssm(tmp_path, edit=without(gone))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.tie_word_embeddings is True
    assert_holds(checkpoint, tensors, tied=True)
    assert not checkpoint.dropped


def test_a_config_that_says_nothing_and_one_matrix_is_tied_and_noted(tmp_path):
    tensors = pico.write_hf(tmp_path, config={"tie_word_embeddings": None}, edit=without(HEAD))
    checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, tensors, tied=True)
    assert "only one is stored" in checkpoint.notes[0]


def test_says_tied_but_the_head_differs(tmp_path, caplog):
    tensors = pico.write_mamba_ssm(tmp_path, tied=False, config={"tie_embeddings": True})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.tie_word_embeddings is False
    assert_holds(checkpoint, tensors, tied=False)
    assert "their values differ: kept as two matrices" in caplog.text


def test_says_untied_but_they_share_storage(tmp_path):
    tensors = pico.write_mamba_ssm(tmp_path, config={"tie_embeddings": False})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.tie_word_embeddings is True
    assert checkpoint.dropped == ((HEAD, "shares its storage with the embedding"),)
    assert_holds(checkpoint, tensors, tied=True)


def test_says_untied_and_equal_matrices_stay_two(tmp_path):
    tensors = pico.write_hf(tmp_path, config={"tie_word_embeddings": False})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.tie_word_embeddings is False
    assert_holds(checkpoint, tensors, tied=False)


def test_says_untied_and_a_missing_head_is_missing(tmp_path):
    pico.write_hf(tmp_path, tied=False, edit=without(HEAD))
    with pytest.raises(CheckpointError, match=r"1 missing \(lm_head.weight\)"):
        open_checkpoint(tmp_path)


def test_both_spellings_with_equal_values_are_one(tmp_path):
    tensors = pico.write_hf(tmp_path, edit=lambda t: {**t, "backbone.embedding.weight": t[EMBEDDING].clone()})
    checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, tensors, tied=True)
    assert len(checkpoint.dropped) == 2


def test_both_spellings_with_different_values_are_refused(tmp_path):
    pico.write_hf(tmp_path, edit=lambda t: {**t, "backbone.embedding.weight": t[EMBEDDING] + 1})
    with pytest.raises(CheckpointError, match=r"both stand for backbone.embeddings.weight and differ"):
        open_checkpoint(tmp_path)


# What lies beside the weights.


def test_license_base_model_generation_config_and_tokenizer_come_along(tmp_path):
    pico.write_hf(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\nbase_model:\n- org/base\n---\n# A model\n")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.license, checkpoint.base_model) == ("apache-2.0", "org/base")
    assert checkpoint.generation_config == {"eos_token_id": 0}
    assert [path.name for path in checkpoint.tokenizer_files] == ["tokenizer.json"]


@pytest.mark.parametrize(
    "card",
    [
        None,
        "# no metadata\n",
        "---\n: : broken [\n---\n",
        "---\n- a list\n---\n",
        "---\nlicense: [3, {}]\nbase_model: 3\n---\n",
        f"---\nlicense: {'[' * 5000}\n---\n",
    ],
)
def test_a_license_is_never_invented(tmp_path, card):
    pico.write_hf(tmp_path)
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.license, checkpoint.base_model) == (None, None)


def test_token_ids_come_from_the_tokenizer_where_the_config_has_none(tmp_path):
    pico.write_mamba_ssm(tmp_path / "a", config={"eos_token_id": 7})
    tokenizer = {"added_tokens": [{"id": 3, "content": "<end>"}, {"id": 5, "content": "<start>"}]}
    settings = {"eos_token": "<end>", "bos_token": {"content": "<start>"}, "pad_token": None}
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps(settings))
    config = open_checkpoint(tmp_path / "a").config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (5, 7, None)


# The fingerprint.


def test_the_fingerprint_belongs_to_the_content_not_to_the_place(tmp_path):
    pico.write_hf(tmp_path / "a", shards=2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = open_checkpoint(tmp_path / "a").fingerprint
    assert first == open_checkpoint(tmp_path / "b").fingerprint == open_checkpoint(tmp_path / "a").fingerprint
    assert len(first) == 64


@pytest.mark.parametrize("position", [-1, -100])
def test_the_fingerprint_changes_with_a_byte_of_the_weights(tmp_path, position):
    pico.write_hf(tmp_path)
    before = open_checkpoint(tmp_path).fingerprint
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert open_checkpoint(tmp_path).fingerprint != before


def test_the_fingerprint_changes_with_the_config(tmp_path):
    pico.write_hf(tmp_path)
    before = open_checkpoint(tmp_path).fingerprint
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + "\n")
    assert open_checkpoint(tmp_path).fingerprint != before


@pytest.mark.parametrize("writer", [pico.write_hf, pico.write_mamba_ssm])
def test_the_fingerprint_sees_every_tensor(tmp_path, writer):
    names = [name for name in writer(tmp_path / "m") if name != HEAD]
    seen = {open_checkpoint(tmp_path / "m").fingerprint}
    for name in names:

        def change(tensors, name=name):
            key = name if name in tensors else name.replace("embeddings", "embedding")
            tensors[key].view(-1)[tensors[key].numel() // 2] += 1

        writer(tmp_path / "m", edit=change)
        seen.add(open_checkpoint(tmp_path / "m").fingerprint)
    assert len(seen) == len(names) + 1


def test_the_fingerprint_does_not_depend_on_the_shards(tmp_path):
    pico.write_hf(tmp_path / "a")
    pico.write_hf(tmp_path / "b", shards=3)
    assert open_checkpoint(tmp_path / "a").fingerprint == open_checkpoint(tmp_path / "b").fingerprint


def test_a_fingerprint_made_earlier_is_known(tmp_path):
    pico.write_hf(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    checkpoint, content = open_checkpoint(tmp_path), weights.read_bytes()
    digest = hashlib.sha256(config.read_bytes())
    for name in sorted(entry.source_name for entry in (*checkpoint.tensors.values(), *checkpoint.dropped)):
        info = checkpoint._owners[name].tensors[name]
        digest.update(f"\n{name} {list(info.shape)} {info.dtype}".encode())
    digest.update(f"\n{len(content)}\n".encode() + content + content)
    assert checkpoint.matches(digest.hexdigest())
    assert checkpoint.matches(checkpoint.fingerprint)
    assert not checkpoint.matches("0" * 64)


# Values.


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("writer", [pico.write_hf, pico.write_mamba_ssm])
def test_a_value_that_is_not_finite_is_refused_by_the_name_of_its_tensor(tmp_path, writer, value):
    def spoil(tensors):
        tensors["backbone.layers.1.mixer.in_proj.weight"][3, 5] = value

    writer(tmp_path, edit=spoil)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.load("backbone.layers.0.mixer.in_proj.weight")
    for read in (lambda: checkpoint.load("backbone.layers.1.mixer.in_proj.weight"), checkpoint.check_all):
        with pytest.raises(CheckpointError, match=r"tensor backbone.layers.1.mixer.in_proj.weight holds values that a"):
            read()


def test_the_shared_checkpoint(shared):
    checkpoint = open_checkpoint(shared / "checkpoints" / "mamba2-docs-25m")
    assert checkpoint.layout == "mamba_ssm"
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.config.vocab_size == 4096
    assert checkpoint.num_layers == 24
    assert len(checkpoint.tensors) == 218


def test_the_dtype_is_that_of_most_weights(tmp_path):
    def widen(tensors):
        return {name: t.float() if t.dim() == 1 else t for name, t in tensors.items()}

    pico.write_hf(tmp_path, edit=widen)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.tensors["backbone.norm_f.weight"].dtype == torch.float32


def test_shards_without_an_index(tmp_path):
    tensors = pico.write_hf(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_holds(open_checkpoint(tmp_path), tensors, tied=True)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    pico.write_hf(tmp_path, shards=2)
    save_file({EMBEDDING: torch.zeros(32, 16)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"holds tensor .*, which .* holds too"):
        open_checkpoint(tmp_path)


def test_an_unknown_tensor_name_says_what_there_is(tmp_path):
    pico.write_hf(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no tensor nonsense, expected one of the names in \.tensors"):
        open_checkpoint(tmp_path).load("nonsense")
