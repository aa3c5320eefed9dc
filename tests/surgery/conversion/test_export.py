"""Back to mamba_ssm's layout: equal logits, its own config and nothing else, and what cannot go there."""

import json
import math

import metamamba2
import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError, OutputExistsError, UsageError, VerificationError
from palimpsa_surgery.modeling import metaplasticity_off
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.conversion import export as module
from palimpsa_surgery.surgery.conversion.export import export

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
    out = export(tmp_path / "plain", tmp_path / "out")
    found, source = open_checkpoint(out), open_checkpoint(tmp_path / "plain")
    assert found.layout == "mamba_ssm"
    assert {n: (e.shape, e.dtype) for n, e in found.tensors.items()} == {
        n: (e.shape, e.dtype) for n, e in source.tensors.items()
    }
    assert torch.equal(logits(out), logits(tmp_path / "plain"))


def test_the_files_are_those_that_mamba_ssm_reads(tmp_path):
    pico.write_hf(tmp_path / "plain")
    out = export(tmp_path / "plain", tmp_path / "out")
    assert set(json.loads((out / "config.json").read_text())) == FIELDS
    state = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert state["lm_head.weight"].data_ptr() == state["backbone.embedding.weight"].data_ptr()
    size = sum(tensor.nbytes for name, tensor in state.items() if name != "lm_head.weight")
    assert (out / "pytorch_model.bin").stat().st_size < 2 * size + 2**15, "no tensor drags a whole file along"


def test_round_trip_through_mamba_ssm_and_back(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source", groups=2)
    out = export(tmp_path / "source", tmp_path / "out")
    assert torch.equal(logits(out), logits(tmp_path / "source"))


def test_a_swapped_model_is_refused_without_off(tmp_path):
    pico.write_hf(tmp_path / "converted", swapped=(0, 2))
    with pytest.raises(UsageError, match=r"converted: has Palimpsa-M layers \(0, 2\).*--off"):
        export(tmp_path / "converted", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_switched_off_it_is_the_model_with_metaplasticity_off(tmp_path):
    pico.write_hf(tmp_path / "converted", swapped=(0, 2), dtype=torch.float32)
    out = export(tmp_path / "converted", tmp_path / "out", off=True)
    assert open_checkpoint(out).palimpsa_layers == ()
    expected = logits(tmp_path / "converted", off=True)
    ours = export(tmp_path / "converted", tmp_path / "ours", off=True, layout="palimpsa_mamba2")
    assert torch.equal(logits(ours), logits(out))
    assert (logits(out) - expected).norm() <= 1e-6 * expected.norm()  # fp32, another code path
    assert (logits(tmp_path / "converted") - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize(("given", "read"), [([0.0, 0.5], (0.0, 0.5)), ([0.01, None], (0.01, math.inf))])
def test_the_limit_of_the_step_size_comes_along(tmp_path, given, read):
    pico.write_hf(tmp_path / "plain", config={"time_step_limit": given})
    out = export(tmp_path / "plain", tmp_path / "out")
    assert open_checkpoint(out).config.time_step_limit == read
    assert torch.equal(logits(out), logits(tmp_path / "plain"))


def test_another_epsilon_is_refused(tmp_path):
    pico.write_hf(tmp_path / "plain", config={"layer_norm_epsilon": 1e-6})
    with pytest.raises(CheckpointError, match="layer_norm_epsilon 1e-06"):
        export(tmp_path / "plain", tmp_path / "out")


@pytest.mark.parametrize(
    ("out", "here", "kept"),
    [("models", ".", "source"), (".", ".", "[^ ]+"), ("work", "work/here", "here"), ("models/notes", ".", "mine.txt")],
)
@pytest.mark.parametrize("layout", ["mamba_ssm", "palimpsa_mamba2"])
def test_force_deletes_neither_the_model_that_is_read_nor_the_folder_of_work(
    tmp_path, monkeypatch, out, here, kept, layout
):
    pico.write_hf(tmp_path / "models" / "source")
    (tmp_path / "models" / "notes").mkdir()
    (tmp_path / "work" / "here").mkdir(parents=True)
    (tmp_path / "models" / "notes" / "mine.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path / here)
    arguments = {"layout": layout, "force": True}
    with pytest.raises(OutputExistsError, match=rf"replacing (this|it) would delete {kept}[,;]"):
        export(tmp_path / "models" / "source", tmp_path / out, **arguments)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_output_that_exists_needs_force(tmp_path):
    pico.write_hf(tmp_path / "plain")
    export(tmp_path / "plain", tmp_path / "out")
    with pytest.raises(OutputExistsError, match="--force"):
        export(tmp_path / "plain", tmp_path / "out")
    export(tmp_path / "plain", tmp_path / "out", force=True)


@pytest.mark.parametrize("layout", ["mamba_ssm", "palimpsa_mamba2"])
def test_force_keeps_a_readme_that_a_user_wrote_and_renews_its_own(tmp_path, layout):
    pico.write_hf(tmp_path / "plain")
    (tmp_path / "plain" / "README.md").write_text("---\nlicense: mit\n---\n")
    readme = export(tmp_path / "plain", tmp_path / "out", layout=layout) / "README.md"
    assert open_checkpoint(tmp_path / "out").license == "mit"
    (tmp_path / "plain" / "README.md").write_text("---\nlicense: bsd-3-clause\n---\n")
    export(tmp_path / "plain", tmp_path / "out", layout=layout, force=True)
    assert open_checkpoint(tmp_path / "out").license == "bsd-3-clause"
    readme.write_text("# What I found out about this model\n")
    export(tmp_path / "plain", tmp_path / "out", layout=layout, force=True)
    assert readme.read_text() == "# What I found out about this model\n"


def test_weights_that_do_not_read_back_leave_nothing(tmp_path, monkeypatch):
    pico.write_hf(tmp_path / "plain")
    original = module._state_dict

    def broken(checkpoint, names):
        state = original(checkpoint, names)
        state["backbone.norm_f.weight"] = state["backbone.norm_f.weight"] + 1
        return state

    monkeypatch.setattr(module, "_state_dict", broken)
    with pytest.raises(VerificationError, match="does not read back"):
        export(tmp_path / "plain", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_the_authors_model_becomes_a_folder_of_ours(tmp_path):
    source = tmp_path / "theirs"
    metamamba2.write(source, sizes={"dtype": torch.bfloat16})
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: odd\nbase_model: bob/base\n---\n")
    out = export(source, tmp_path / "out", layout="palimpsa_mamba2")
    found = open_checkpoint(out)
    assert (found.layout, found.palimpsa_layers) == ("palimpsa_mamba2", (0, 1, 2))
    assert found.config.gate.scale_form == "softplus"
    assert torch.equal(logits(out), logits(source))
    assert (found.license, found.base_model) == ("other", "bob/base")
    assert "license_name: odd" in (out / "README.md").read_text()
    assert (out / "modeling_palimpsa_mamba2.py").is_file()


def test_an_unknown_layout_is_refused(tmp_path):
    pico.write_hf(tmp_path / "source")
    with pytest.raises(UsageError, match=r"--layout gguf: there is no such .* source; choose one of mamba_ssm, "):
        export(tmp_path / "source", tmp_path / "out", layout="gguf")


def test_a_source_in_two_dtypes_is_not_rounded(tmp_path):
    def edit(tensors):
        return {name: t.float() * 1.001 if "norm" in name else t for name, t in tensors.items()}

    pico.write_hf(tmp_path / "plain", edit=edit)
    out = export(tmp_path / "plain", tmp_path / "out", layout="palimpsa_mamba2")
    norm = "backbone.norm_f.weight"
    assert torch.equal(open_checkpoint(out).load(norm), open_checkpoint(tmp_path / "plain").load(norm))


def test_a_disk_that_fills_up_leaves_the_old_output_and_one_sentence(tmp_path):
    resource = pytest.importorskip("resource")
    pico.write_hf(tmp_path / "plain")
    old = export(tmp_path / "plain", tmp_path / "out") / module.WEIGHTS_FILE
    before, limits = old.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be written .*; free room on the disk"):
            export(tmp_path / "plain", tmp_path / "out", force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert old.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]
