"""Conversion end to end on pico models and the embedded checkpoint: files, accounts, dtypes, refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError, OutputExistsError, SchemaError, UsageError, VerificationError
from palimpsa_surgery.base.files import load_json
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.mixers.geometry import FP32_NAMES
from palimpsa_surgery.modeling import metaplasticity_off
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
from palimpsa_surgery.surgery.conversion import convert as conversion
from palimpsa_surgery.surgery.conversion import model_folder, writer
from palimpsa_surgery.surgery.conversion.convert import MeasureOptions, convert
from palimpsa_surgery.surgery.conversion.export import export
from palimpsa_surgery.surgery.conversion.report import ConversionReport, TensorAccounts
from palimpsa_surgery.surgery.measure.forgetting import measure
from palimpsa_surgery.surgery.measure.profile import read_profile, write_profile
from palimpsa_surgery.surgery.planning.plan import make_plan, read_plan, write_plan

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


def logits(source, *, off=False):
    model = load_model(source, dtype=torch.float32)
    with torch.no_grad():
        if off:
            with metaplasticity_off(model):
                return model(IDS).logits
        return model(IDS).logits


def distance(value, reference):
    return ((value - reference).norm() / reference.norm()).item()


WRITERS = {
    "mamba_ssm": lambda folder, **sizes: pico.write_mamba_ssm(folder, **sizes),
    "mamba_ssm shards": lambda folder, **sizes: pico.write_mamba_ssm(folder, shards=2, **sizes),
    "transformers": lambda folder, **sizes: pico.write_hf(folder, **sizes),
    "transformers shards": lambda folder, **sizes: pico.write_hf(folder, shards=3, format="bin", **sizes),
    "codestral": lambda folder, **sizes: pico.write_codestral(folder),
}


@pytest.mark.parametrize("layout", sorted(WRITERS))
@pytest.mark.parametrize("mode", ["logits", "layers"])
def test_every_layout_converts_to_the_same_function(tmp_path, layout, mode):
    WRITERS[layout](tmp_path / "source", groups=2, tied=False)
    report = convert(tmp_path / "source", tmp_path / "out", layers=(1,), verify=mode)
    assert report.verification.mode == mode
    assert report.verification.off_error <= 1e-5
    assert report.verification.on_error <= 1e-4
    assert distance(logits(tmp_path / "out"), logits(tmp_path / "source")) < 1e-4
    assert distance(logits(tmp_path / "out", off=True), logits(tmp_path / "source")) < 1e-5


@pytest.mark.parametrize(
    "sizes", [{"groups": 2}, {"bias": True}, {"conv_bias": False}, {"tied": False}, {"width": 24, "head_dim": 6}]
)
def test_every_geometry_converts(tmp_path, sizes):
    pico.write_mamba_ssm(tmp_path / "source", **sizes)
    report = convert(tmp_path / "source", tmp_path / "out", layers=(0, 1, 2), verify="logits")
    assert report.palimpsa_layers == (0, 1, 2)


@pytest.mark.parametrize("init", ["paper", "calibrated"])
def test_other_starts_differ_with_metaplasticity_and_not_without(tmp_path, init):
    source, out = embedded_checkpoint_path(), tmp_path / "out"
    measuring = MeasureOptions(tokens=512, seq_len=256)
    report = convert(source, out, layers=(2, 5), init=init, measuring=measuring)
    assert report.verification.off_error <= 1e-5
    assert report.verification.on_error > 1e-4
    assert distance(logits(out, off=True), logits(source)) < 1e-5
    assert distance(logits(out), logits(source)) > 1e-4


def test_the_folder_holds_what_the_design_says(tmp_path):
    out = tmp_path / "out"
    report = convert(embedded_checkpoint_path(), out, layers=(2, 5), verify="none")
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "modeling_palimpsa_mamba2.py",
        "kernels_metaplastic_scan.py",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "plan.yaml",
        "profile.json",
        "profile.png",
        "surgery_report.json",
        "README.md",
    }
    config = load_json(out / "config.json")
    assert config["architectures"] == ["PalimpsaMamba2ForCausalLM"]
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_palimpsa_mamba2.PalimpsaMamba2ForCausalLM"
    assert config["palimpsa_layers"] == [2, 5]
    assert config["dtype"] == "bfloat16"
    assert load_json(out / "generation_config.json")["eos_token_id"] == 0
    assert read_plan(out / "plan.yaml").layers == (2, 5)
    assert read_profile(out / "profile.json").method == "static"
    assert ConversionReport.model_validate(load_json(out / "surgery_report.json")) == report
    assert (out / "tokenizer.json").read_bytes() == (embedded_checkpoint_path() / "tokenizer.json").read_bytes()


def test_no_path_of_this_machine_is_in_any_file(tmp_path):
    source = tmp_path / "home-of-somebody" / "source"
    pico.write_hf(source, config={"_name_or_path": str(source)}, rows=4096, vocab=4096)
    shutil.copyfile(embedded_checkpoint_path() / "tokenizer.json", source / "tokenizer.json")
    settings = {"name_or_path": str(source), "eos_token": "<|endoftext|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "generation_config.json").write_text(json.dumps({"cache_dir": str(source), "eos_token_id": 0}))
    convert(source, tmp_path / "out", layers=(0,))
    for path in (tmp_path / "out").iterdir():
        assert b"home-of-somebody" not in path.read_bytes(), path.name
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written == {"eos_token": "<|endoftext|>"}


def test_every_tensor_is_in_one_of_four_lists_that_add_up(tmp_path):
    written = pico.write_mamba_ssm(tmp_path / "source")
    accounts = convert(tmp_path / "source", tmp_path / "out", layers=(1,)).tensors
    assert accounts.source_count == len(written)
    assert [dropped.source for dropped in accounts.dropped] == ["lm_head.weight"]
    assert {tensor.name.rsplit(".", 1)[-1] for tensor in accounts.transformed} == {"A_log", "dt_bias", "D"}
    assert {tensor.how for tensor in accounts.transformed} == {"bfloat16 to float32"}
    assert accounts.copied["backbone.embeddings.weight"] == "backbone.embedding.weight"
    assert [tensor.name.removeprefix("backbone.layers.1.mixer.metaplasticity.") for tensor in accounts.created] == [
        "beta_down.weight",
        "beta_up.weight",
        "beta_scale",
        "log_prior",
    ]
    assert accounts.output_count == len(open_checkpoint(tmp_path / "out").tensors)


def test_accounts_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="1 copied, 0 transformed, 0 dropped and 0 created do not add up to 2 in"):
        TensorAccounts(source_count=2, output_count=1, copied={"a": "a"}, transformed=[], dropped=[], created=[])


@pytest.mark.parametrize(("asked", "expected"), [(None, torch.bfloat16), ("float32", torch.float32), ("float16", None)])
def test_stored_dtype_is_the_sources_unless_asked_and_agrees_with_the_config(tmp_path, asked, expected):
    expected = expected or torch.float16
    pico.write_mamba_ssm(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", layers=(1,), dtype=asked, verify="logits")
    written = open_checkpoint(tmp_path / "out")
    for name, entry in written.tensors.items():
        assert entry.dtype == (torch.float32 if name.endswith(FP32_NAMES) else expected), name
    assert load_json(tmp_path / "out" / "config.json")["dtype"] == str(expected).removeprefix("torch.")


def test_rounding_is_said_in_the_notes(tmp_path):
    pico.write_hf(tmp_path / "source", dtype=torch.float32)
    report = convert(tmp_path / "source", tmp_path / "out", layers=(1,), dtype="bfloat16", verify="logits")
    assert report.notes[0].startswith("rounded to bfloat16: ")
    assert convert(tmp_path / "source", tmp_path / "same", layers=(1,)).notes == ()


@pytest.mark.parametrize(
    ("source", "stored", "lossy"),
    [
        (torch.float16, "bfloat16", True),
        (torch.bfloat16, "float16", True),
        (torch.float64, "float32", True),
        (torch.bfloat16, "float32", False),
        (torch.float16, "float32", False),
    ],
)
def test_rounding_is_said_of_every_pair_of_dtypes_that_rounds(tmp_path, source, stored, lossy):
    pico.write_hf(tmp_path / "source", dtype=source)
    report = convert(tmp_path / "source", tmp_path / "out", layers=(1,), dtype=stored, verify="none")
    assert [f"rounded to {stored}" in note for note in report.notes] == [True] * lossy


OUT_PROJ = "backbone.layers.0.mixer.out_proj.weight"


def test_values_beyond_the_range_of_a_dtype_are_refused(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source", edit=lambda tensors: {**tensors, OUT_PROJ: tensors[OUT_PROJ] * 1e7})
    with pytest.raises(CheckpointError, match=r"out_proj.weight: holds values up to .* beyond the range of float16"):
        convert(tmp_path / "source", tmp_path / "out", layers=(1,), dtype="float16", verify="none")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", ["logits", "layers"])
def test_a_source_that_gives_no_numbers_proves_nothing(tmp_path, mode):
    def damage(tensors):
        return {**tensors, OUT_PROJ: torch.full_like(tensors[OUT_PROJ], 3e38)}

    pico.write_mamba_ssm(tmp_path / "source", edit=damage)
    with pytest.raises(VerificationError, match="the source itself gives values that are not finite"):
        convert(tmp_path / "source", tmp_path / "out", layers=(0,), verify=mode)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("writer", [pico.write_mamba_ssm, pico.write_hf])
def test_a_value_that_is_not_finite_is_refused_wherever_it_is(tmp_path, writer, dtype):
    """Such as in a row of the embedding that no text of a proof uses."""

    def damage(tensors):
        next(tensor for name, tensor in tensors.items() if "embedding" in name)[-1, 0] = float("nan")

    writer(tmp_path / "source", edit=damage)
    with pytest.raises(CheckpointError, match=r"tensor backbone.embeddings?.weight holds values that are not finite"):
        convert(tmp_path / "source", tmp_path / "out", layers=(0,), verify="none", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("writer", [pico.write_mamba_ssm, pico.write_hf])
@pytest.mark.parametrize("keep", [None, 0, 3000])
def test_a_source_that_goes_while_it_is_read_is_whole_or_refused(tmp_path, writer, keep):
    """A deleted file is read to its end, as the system keeps it; one that is cut short is named."""
    writer(tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    weights = next(path for path in (tmp_path / "source").iterdir() if path.suffix in (".bin", ".safetensors"))
    assert source.fingerprint
    if keep is None:
        weights.unlink()
        convert(source, tmp_path / "out", layers=(0,))
        return
    os.truncate(weights, keep)
    with pytest.raises(CheckpointError, match=rf"{weights.name}: became shorter while it was read"):
        convert(source, tmp_path / "out", layers=(0,))
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_cut_short_during_the_proof_is_blamed_itself(tmp_path, monkeypatch):
    pico.write_mamba_ssm(tmp_path / "source")
    prove = conversion.verify_folder

    def cut_first(*args, **options):
        os.truncate(tmp_path / "source" / "pytorch_model.bin", 3000)
        return prove(*args, **options)

    monkeypatch.setattr(conversion, "verify_folder", cut_first)
    with pytest.raises(CheckpointError, match=r"^pytorch_model.bin: became shorter while it was read"):
        convert(tmp_path / "source", tmp_path / "out", layers=(0,))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["source", "source/tokenizer.json"])
@pytest.mark.parametrize("layout", [None, "mamba_ssm", "palimpsa_mamba2"], ids=["convert", "mamba_ssm", "palimpsa"])
def test_files_beside_the_weights_that_go_while_it_is_read_are_named(tmp_path, monkeypatch, name, layout):
    pico.write_mamba_ssm(tmp_path / "source", rows=4096, vocab=4093)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded_checkpoint_path() / file, tmp_path / "source" / file)
    copy = model_folder.copy_tokenizer

    def copy_too_late(*args):
        (tmp_path / name).rename(tmp_path / "moved")
        copy(*args)

    monkeypatch.setattr(model_folder, "copy_tokenizer", copy_too_late)
    with pytest.raises(
        CheckpointError, match=r"^source: tokenizer.json cannot be read \(No such file .*\); put it back"
    ):
        if layout is None:
            convert(tmp_path / "source", tmp_path / "out", layers=(0,), verify="none")
        else:
            export(tmp_path / "source", tmp_path / "out", layout=layout)
    assert {path.name for path in tmp_path.iterdir()} <= {"source", "moved"}


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert(tmp_path / "source", tmp_path / name, layers=(0, 2), seed=seed, verify="none")
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_layer_starts_the_same_whatever_else_is_swapped(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "one", layers=(2,), verify="none")
    convert(tmp_path / "source", tmp_path / "two", layers=(0, 2), verify="none")
    one, two = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "two")
    assert all(torch.equal(one.load(name), two.load(name)) for name in one.tensors)


def test_a_converted_model_keeps_its_layers_and_takes_more(tmp_path):
    pico.write_hf(tmp_path / "source", swapped=(1,))
    report = convert(tmp_path / "source", tmp_path / "out", layers=(2,), verify="logits")
    assert report.palimpsa_layers == (1, 2)
    assert report.layers == (2,)
    assert distance(logits(tmp_path / "out"), logits(tmp_path / "source")) < 1e-4
    name = "backbone.layers.1.mixer.metaplasticity.beta_up.weight"
    before, after = (open_checkpoint(tmp_path / folder).load(name) for folder in ("source", "out"))
    assert torch.equal(before, after)
    assert convert(tmp_path / "source", tmp_path / "layers", layers=(0,), verify="layers").palimpsa_layers == (0, 1)
    with pytest.raises(UsageError, match=r"layer 1: is Palimpsa-M already \(swapped: 1, 2\)"):
        convert(tmp_path / "out", tmp_path / "again", layers=(1,))
    assert not (tmp_path / "again").exists()


def test_a_count_measures_and_takes_the_longest_windows(tmp_path):
    measuring = MeasureOptions(tokens=512, seq_len=256)
    report = convert(embedded_checkpoint_path(), tmp_path / "out", layers=3, measuring=measuring, verify="none")
    profile = read_profile(tmp_path / "out" / "profile.json")
    longest = sorted(profile.layers, key=lambda layer: -layer.window)[:3]
    assert report.layers == tuple(sorted(layer.layer for layer in longest))
    assert profile.tokens == 512
    assert "3 of 8 by window" in "".join(read_plan(tmp_path / "out" / "plan.yaml").reasons.values())


def test_a_plan_file_with_the_profile_beside_it(tmp_path):
    source = open_checkpoint(embedded_checkpoint_path())
    profile = measure(source, tokens=256, seq_len=256)
    write_profile(profile, tmp_path / "profile.json")
    write_plan(make_plan(source, profile, layers=2, init="calibrated"), tmp_path / "plan.yaml")
    convert(source, tmp_path / "out", plan=tmp_path / "plan.yaml", verify="none")
    assert read_profile(tmp_path / "out" / "profile.json") == profile
    assert read_plan(tmp_path / "out" / "plan.yaml") == read_plan(tmp_path / "plan.yaml")


def test_a_profile_of_another_model_beside_the_plan_is_not_used(tmp_path, caplog):
    source = open_checkpoint(embedded_checkpoint_path())
    write_profile(measure(source, static=True).model_copy(update={"fingerprint": "00"}), tmp_path / "profile.json")
    write_plan(make_plan(source, layers=(1,)), tmp_path / "plan.yaml")
    convert(source, tmp_path / "out", plan=tmp_path / "plan.yaml", verify="none")
    assert "profile.json beside the plan is of another checkpoint" in caplog.text


def _refusals():
    yield {"layers": (7,)}, UsageError, "layer 7: the model has 3 layers, 0 to 2"
    yield {"layers": 4}, UsageError, "--layers 4: the model has 3 layers to choose from"
    yield {"layers": (1,), "dtype": "int8"}, UsageError, "--dtype int8: there is no such dtype"
    yield {"layers": (1,), "verify": "twice"}, UsageError, "--verify twice: there is no such check"
    yield {"layers": (1,), "init": "zero"}, UsageError, "--init: is 'zero'"
    yield {"layers": (1,), "strength": 0.5}, UsageError, "--strength: belongs to init calibrated"
    yield {"layers": (1,), "beta_groups": 3}, UsageError, "--beta-groups: 3 does not divide head_dim 8"


@pytest.mark.parametrize(("options", "error", "message"), list(_refusals()))
def test_refusals_write_nothing(tmp_path, options, error, message):
    pico.write_mamba_ssm(tmp_path / "source")
    with pytest.raises(error, match=message):
        convert(tmp_path / "source", tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_options_beside_a_plan_are_refused(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source")
    plan = make_plan(open_checkpoint(tmp_path / "source"), layers=(1,))
    with pytest.raises(UsageError, match="--layers, --init: the plan holds that already"):
        convert(tmp_path / "source", tmp_path / "out", plan=plan, layers=(1,), init="paper")


def test_a_plan_for_another_checkpoint_is_refused(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source")
    pico.write_mamba_ssm(tmp_path / "other", seed=1)
    plan = make_plan(open_checkpoint(tmp_path / "other"), layers=(1,))
    with pytest.raises(SchemaError, match=r"plan\.yaml:fingerprint: the plan was made for other"):
        convert(tmp_path / "source", tmp_path / "out", plan=plan)


def test_a_mamba1_checkpoint_is_refused_in_one_line(tmp_path):
    pico.write_mamba_ssm(
        tmp_path / "source",
        config={"ssm_cfg": {}},
        edit=lambda tensors: {**tensors, "backbone.layers.0.mixer.x_proj.weight": torch.zeros(4, 32)},
    )
    with pytest.raises(CheckpointError, match="Mamba1"):
        convert(tmp_path / "source", tmp_path / "out", layers=(1,))
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_refused_and_replaced_with_force(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="give --force to replace it"):
        convert(tmp_path / "source", out, layers=(1,))
    with pytest.raises(OutputExistsError, match=r"no model, adapter or run folder, .* would delete notes\.txt;"):
        convert(tmp_path / "source", out, layers=(1,), force=True)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    (out / "notes.txt").unlink()
    convert(tmp_path / "source", out, layers=(1,))
    convert(tmp_path / "source", out, layers=(0,), force=True)
    assert open_checkpoint(out).palimpsa_layers == (0,)


def test_a_plan_in_the_output_is_written_again_and_another_one_keeps_the_output(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    pico.write_mamba_ssm(source)
    convert(source, out, layers=(1,))
    convert(source, out, plan=out / "plan.yaml", force=True)
    (out / "plan.yaml").rename(out / "mine.yaml")
    with pytest.raises(OutputExistsError, match=r"would delete mine\.yaml, which is in use and lies in it"):
        convert(source, out, plan=out / "mine.yaml", force=True)
    assert (out / "mine.yaml").is_file()


def test_a_readme_of_the_users_own_survives_force(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source")
    out = tmp_path / "out"
    convert(tmp_path / "source", out, layers=(1,))
    first = (out / "README.md").read_text()
    convert(tmp_path / "source", out, layers=(1, 2), force=True)
    assert (out / "README.md").read_text() != first
    (out / "README.md").write_text("# My words")
    convert(tmp_path / "source", out, layers=(1,), force=True)
    assert (out / "README.md").read_text() == "# My words"


def test_a_failed_verification_keeps_nothing(tmp_path, monkeypatch):
    pico.write_mamba_ssm(tmp_path / "source")
    monkeypatch.setattr("palimpsa_surgery.surgery.conversion.verify.OFF_LIMIT", -1.0)
    with pytest.raises(VerificationError, match="nothing was kept") as failure:
        convert(tmp_path / "source", tmp_path / "out", layers=(1,))
    assert failure.value.exit_code == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_folder_that_cannot_be_read_back_is_a_failed_verification(tmp_path, monkeypatch):
    pico.write_mamba_ssm(tmp_path / "source")

    def truncate(checkpoint, folder, *rest):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-64])

    monkeypatch.setattr("palimpsa_surgery.surgery.conversion.convert.write_surroundings", truncate)
    with pytest.raises(VerificationError, match="what was written cannot be read back"):
        convert(tmp_path / "source", tmp_path / "out", layers=(1,))
    assert not (tmp_path / "out").exists()


KILLED = """
import sys, time
from palimpsa_surgery.surgery.conversion import convert as module
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
def hang(*args, **kwargs):
    print("written", flush=True)
    time.sleep(60)
module.verify_folder = hang
module.convert(sys.argv[1], sys.argv[2], layers=(1,))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_killed_run_leaves_no_folder_of_that_name(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "source"), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == "written"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "source", tmp_path / "out", layers=(1,), verify="layers")
    assert load_json(tmp_path / "out" / "surgery_report.json")["layers"] == [1]


def test_shards_and_their_index(tmp_path, monkeypatch):
    pico.write_mamba_ssm(tmp_path / "source")
    monkeypatch.setattr(writer, "MAX_SHARD_BYTES", 4000)
    report = convert(tmp_path / "source", tmp_path / "out", layers=(1,), verify="logits")
    assert len(report.weight_files) > 2
    assert all((tmp_path / "out" / name).is_file() for name in report.weight_files)
    weight_map = load_json(tmp_path / "out" / "model.safetensors.index.json")["weight_map"]
    assert len(weight_map) == report.tensors.output_count


def test_the_shared_checkpoint_converts_in_time_and_equals_mamba_ssm(tmp_path, shared):
    from safetensors.torch import load_file

    golden = load_file(shared / "golden" / "mamba2-docs-25m-logits.safetensors")
    start = time.process_time()
    layers = (4, 8, 11, 12, 14, 15, 16, 22)
    report = convert(shared / "checkpoints" / "mamba2-docs-25m", tmp_path / "out", layers=layers, verify="layers")
    assert time.process_time() - start < 60
    assert report.verification.off_error <= 1e-5
    model = load_model(tmp_path / "out", dtype=torch.float32)
    ids = next(tensor for tensor in golden.values() if not tensor.is_floating_point())
    expected = next(tensor for tensor in golden.values() if tensor.is_floating_point()).float()
    with torch.no_grad():
        found = model(ids.view(1, -1).long()).logits[0, :, : expected.shape[-1]]
    assert distance(found, expected.view_as(found)) < 1e-3


def test_a_tokenizer_that_was_named_comes_along(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source", rows=4096, vocab=4093)
    options = MeasureOptions(tokenizer=embedded_checkpoint_path(), tokens=64, seq_len=64)
    convert(tmp_path / "source", tmp_path / "out", layers=1, measuring=options)
    loaded = load_tokenizer(tmp_path / "out")
    assert loaded("hello")["input_ids"] == load_tokenizer(embedded_checkpoint_path())("hello")["input_ids"]
    assert str(embedded_checkpoint_path()) not in (tmp_path / "out" / "tokenizer_config.json").read_text()


def test_force_does_not_delete_a_source_inside_the_output(tmp_path):
    source = tmp_path / "models" / "source"
    pico.write_mamba_ssm(source)
    (tmp_path / "models" / "mine.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="would delete source"):
        convert(source, tmp_path / "models", layers=[0], verify="none", force=True)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["mine.txt", "source"]


def test_options_on_a_text_that_is_not_read_are_named(tmp_path, caplog):
    pico.write_hf(tmp_path / "source")
    text = MeasureOptions(data=tmp_path / "absent.jsonl", tokens=7)
    said = "--data, --tokens: not used, as nothing is measured"
    convert(tmp_path / "source", tmp_path / "listed", layers=(1,), measuring=text, verify="none")
    assert said in caplog.text
    caplog.clear()
    plan = tmp_path / "listed" / "plan.yaml"
    convert(tmp_path / "source", tmp_path / "planned", plan=plan, measuring=text, verify="none", rule=None)
    assert said in caplog.text
    caplog.clear()
    convert(tmp_path / "source", tmp_path / "silent", layers=(1,), rule="rate", verify="none")
    assert "not used, as nothing is measured" not in caplog.text
    assert "--rule rate: not used, as the layers are listed" in caplog.text
    measure(tmp_path / "source", static=True, data="absent.jsonl")
    assert "--data absent.jsonl: not used, as --static reads no text" in caplog.text
