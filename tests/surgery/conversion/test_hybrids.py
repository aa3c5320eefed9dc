"""Hybrids from folder to folder: the source's files stay as they are, and what is written equals the host."""

import json
import os
import subprocess
import sys

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError, VerificationError
from palimpsa_surgery.mixers.metaplasticity import metaplasticity_off
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts
from palimpsa_surgery.sharing.hub import push_to_folder
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.conversion import verify
from palimpsa_surgery.surgery.conversion.convert import convert
from palimpsa_surgery.surgery.conversion.export import export
from palimpsa_surgery.surgery.conversion.model_folder import output_specs, write_weights
from palimpsa_surgery.surgery.families.registry import mixers
from palimpsa_surgery.surgery.measure.inspection import inspect_checkpoint
from palimpsa_surgery.surgery.planning.plan import make_plan
from safetensors.torch import load_file, save_file
from tiny_hybrids import DELTAS, SWAPPED, VARIANTS, make_host, same, save_host, token_ids, with_true_bounds
from transformers import AutoModelForCausalLM

KNOWN = [variant for variant in VARIANTS if variant.partition("/")[0] in known_hosts()]
KINDS = [kind for kind in SWAPPED if kind in known_hosts()]
EQUAL = 1e-5
"""Relative L2 of logits in fp32, the limit of every conversion."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module")
def converted(folders):
    """variant -> the folders of a host and of its conversion, and the report; made once, not to be changed."""
    made = {}

    def make(variant):
        if variant not in made:
            source, out = folders / variant.replace("/", " "), folders / f"{variant.replace('/', ' ')} converted"
            save_host(variant, source)
            made[variant] = source, out, convert(source, out, layers=SWAPPED[variant.partition("/")[0]])
        return made[variant]

    return make


def logits(model):
    with torch.no_grad():
        return model.eval()(token_ids()).logits


@pytest.mark.parametrize("variant", KNOWN)
def test_a_conversion_is_proved_and_equals_the_host(variant, converted, rel):
    _, out, report = converted(variant)
    swapped = SWAPPED[variant.partition("/")[0]]
    assert report.verification.mode == "logits"
    assert max(report.verification.off_error, report.verification.on_error) < EQUAL
    expected = logits(with_true_bounds(make_host(variant)))
    model = load_model(out)
    assert {layer for layer, mixer in mixers(model).items() if hasattr(mixer, "metaplasticity")} == set(swapped)
    assert rel(logits(model), expected) < EQUAL
    with metaplasticity_off(model):
        assert rel(logits(model), expected) < EQUAL
    assert same(variant, logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))


@pytest.mark.parametrize("variant", KNOWN)
def test_files_are_copied_and_new_tensors_are_in_one_more(variant, converted):
    source, out, report = converted(variant)
    assert (out / "model-source.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    new = load_file(out / "model-palimpsa.safetensors")
    assert set(new) == {tensor.name for tensor in report.tensors.created}
    assert len(new) == 4 * len(report.layers)
    assert not report.tensors.transformed
    assert not report.tensors.dropped
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(new) | set(load_file(source / "model.safetensors"))
    assert report.weight_files == ("model-palimpsa.safetensors", "model-source.safetensors")


@pytest.mark.parametrize("variant", KNOWN)
def test_export_off_gives_the_host_back_to_the_bit(variant, converted, tmp_path):
    source, out, _ = converted(variant)
    export(out, tmp_path / "off", off=True)
    assert (tmp_path / "off" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "off")
    assert type(model) is type(make_host(variant))
    assert same(variant, logits(model), logits(AutoModelForCausalLM.from_pretrained(source)))
    assert not list((tmp_path / "off").glob("*.py"))


@pytest.mark.parametrize("variant", KNOWN)
def test_layers_are_proved_one_by_one_against_the_hosts_mixers(variant, converted):
    source, out, report = converted(variant)
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, layers=report.layers)
    found = verify.verify_layers(checkpoint, out, plan)
    assert list(found) == list(report.layers)
    assert max(max(errors) for errors in found.values()) < EQUAL


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_can_be_pushed(kind, converted, tmp_path):
    _, out, _ = converted(kind)
    push_to_folder(out, "owner/name", tmp_path / "upload")
    names = {path.name for path in (tmp_path / "upload").iterdir()}
    assert {"modeling_palimpsa_hybrid.py", "model.safetensors.index.json", "model-source.safetensors"} <= names
    text = (tmp_path / "upload" / "README.md").read_text()
    assert f"hybrid {'Gated DeltaNet' if kind in DELTAS else 'Mamba2'} (`{kind}`) language model" in text
    assert ("in nobody's paper, and untested as to benefit" in text) == (kind in DELTAS)
    assert ("Palimpsa-M" in text) == (kind not in DELTAS)


def test_another_tensor_of_the_host_fails_the_proof(converted, tmp_path):
    source, out, report = converted("falcon_h1")
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, layers=report.layers)
    for path in out.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(out / "model-source.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model-source.safetensors")
    with pytest.raises(
        VerificationError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight: what was written differs"
    ):
        verify.verify(checkpoint, tmp_path, plan, mode="layers")


@pytest.mark.parametrize("kind", [kind for kind in ("zamba2", "nemotron_h") if kind in KINDS])
def test_the_report_says_which_bounds_were_corrected(kind, converted):
    _, _, report = converted(kind)
    assert [note for note in report.notes if "the model was trained with (0, inf)" in note]


FRESH = """
import sys
sys.modules["palimpsa_surgery"] = None  # an import of the package is an error
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


def test_a_process_without_this_package_runs_the_same_model(converted, tmp_path):
    _, out, _ = converted("nemotron_h")
    torch.save(token_ids(), tmp_path / "ids.pt")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", FRESH, str(out), *(str(tmp_path / name) for name in ("ids.pt", "logits.pt"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(load_model(out)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_anew_is_read_and_gives_the_host_back(kind, converted, tmp_path):
    source, out, _ = converted(kind)
    model = load_model(out)
    model.save_pretrained(tmp_path / "saved")
    assert same(kind, logits(load_model(tmp_path / "saved")), logits(model))
    export(tmp_path / "saved", tmp_path / "off", off=True)
    found, expected = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "off", source))
    assert same(kind, logits(found), logits(expected))


def test_a_host_can_be_written_as_ours_with_nothing_swapped(converted, tmp_path):
    source, _, _ = converted("nemotron_h")
    export(source, tmp_path / "ours", layout="palimpsa_nemotron_h")
    assert open_checkpoint(tmp_path / "ours").palimpsa_layers == ()
    assert convert(tmp_path / "ours", tmp_path / "out", layers=(4,)).palimpsa_layers == (4,)


def test_a_second_surgery_adds_a_second_file(converted, tmp_path, rel):
    source, out, _ = converted("zamba2")
    report = convert(out, tmp_path / "again", layers=(1,))
    assert report.palimpsa_layers == (0, 1, 3)
    assert "model-palimpsa-2.safetensors" in report.weight_files
    expected = logits(with_true_bounds(make_host("zamba2")))
    assert rel(logits(load_model(tmp_path / "again")), expected) < EQUAL
    export(tmp_path / "again", tmp_path / "off", off=True)
    assert (tmp_path / "off" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_shards_keep_their_names(tmp_path):
    make_host("nemotron_h").save_pretrained(tmp_path / "source", max_shard_size="60KB")
    shards = {path.name for path in (tmp_path / "source").glob("*.safetensors")}
    assert len(shards) > 1
    report = convert(tmp_path / "source", tmp_path / "out", layers=(0,))
    assert set(report.weight_files) == shards | {"model-palimpsa.safetensors"}
    export(tmp_path / "out", tmp_path / "off", off=True)
    for name in shards:
        assert (tmp_path / "off" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


def test_another_dtype_is_written_anew(converted, tmp_path):
    source, _, _ = converted("nemotron_h")
    report = convert(source, tmp_path / "out", layers=(0,), dtype="bfloat16")
    assert report.verification.off_error < EQUAL
    written = open_checkpoint(tmp_path / "out").tensors
    wide = {name for name, entry in written.items() if entry.dtype == torch.float32}
    swapped = {name for name in wide if name.startswith("model.layers.0.mixer.")}
    assert {name.rpartition("mixer.")[2] for name in swapped} == {
        *("A_log", "D", "dt_bias", "metaplasticity.beta_scale", "metaplasticity.log_prior")
    }
    assert all("gate" in name for name in wide - swapped)  # the host's own routers
    assert torch.isfinite(logits(load_model(tmp_path / "out"))).all()


def test_experts_that_were_trained_are_written_whole(converted, tmp_path):
    source, _, _ = converted("nemotron_h")
    checkpoint, model = open_checkpoint(source), make_host("nemotron_h")
    name = "model.layers.1.mixer.experts.up_proj"
    trained = {name: model.state_dict()[name] + 1}
    write_weights(checkpoint, tmp_path, output_specs(checkpoint, checkpoint.config), trained.get)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    expected = model.state_dict() | trained
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_pickled_weights_are_written_anew(tmp_path, rel):
    host = make_host("bamba")
    save_host("bamba", tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    torch.save({f"module.{name}": tensor for name, tensor in host.state_dict().items()}, tmp_path / "source/model.bin")
    report = convert(tmp_path / "source", tmp_path / "out", layers=(0,))
    assert report.weight_files == ("model.safetensors",)
    assert rel(logits(load_model(tmp_path / "out")), logits(host)) < EQUAL


def test_tensors_that_the_class_does_not_know_come_along(tmp_path):
    save_host("nemotron_h", tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors["mtp.layers.0.eh_proj.weight"] = torch.zeros(4, 8)
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    report = convert(tmp_path / "source", tmp_path / "out", layers=(0,))
    assert report.tensors.copied["mtp.layers.0.eh_proj.weight"] == "mtp.layers.0.eh_proj.weight"
    assert not report.tensors.dropped
    (unused,) = open_checkpoint(tmp_path / "out").dropped
    assert unused == ("mtp.layers.0.eh_proj.weight", "no part of NemotronHForCausalLM")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_layers_without_a_mixer_are_named_and_refused(converted, tmp_path):
    source, _, _ = converted("nemotron_h")
    with pytest.raises(
        UsageError, match=r"--layers: layer 1: has no mixer to swap \(a layer of kind: mixture of experts\)"
    ):
        convert(source, tmp_path / "out", layers=(1, 4))
    found = inspect_checkpoint(open_checkpoint(source))
    assert found.other_layers == {1: "mixture of experts", 2: "attention", 3: "MLP"}
    assert [figures.layer for figures in found.layers] == [0, 4, 5]
    assert found.geometry["num_heads"] == 8


@pytest.mark.parametrize("kind", [kind for kind in DELTAS if kind in KINDS])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers": (3,)},
            r"--layers: layer 3: has no mixer to swap \(a layer of kind: attention\); choose layers of Gated DeltaNet",
        ),
        (
            {"init": "calibrated"},
            "--init: calibrated has no meaning for the metaplastic delta rule, .*; choose identity",
        ),
        ({"init": "paper"}, "--init: paper has no meaning for the metaplastic delta rule, .*; choose identity"),
        ({"beta_groups": 2}, "--beta-groups: 2 is not 1, but all values of a head share one importance here; choose 1"),
    ],
)
def test_a_delta_rule_is_swapped_where_there_is_one_and_with_an_exact_start_alone(
    kind, options, message, converted, tmp_path
):
    source, out, _ = converted(kind)
    with pytest.raises(UsageError, match=message):
        convert(source, tmp_path / "out", **{"layers": (0,), **options})
    with pytest.raises(UsageError, match="layer 0: is metaplastic delta rule already"):
        convert(out, tmp_path / "out", layers=(0,))
    with pytest.raises(UsageError, match=r"has metaplastic delta rule layers .*; give --off"):
        export(out, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [kind for kind in DELTAS if kind in KINDS])
def test_what_is_inspected_has_the_names_of_a_delta_host(kind, converted):
    _, out, _ = converted(kind)
    found = inspect_checkpoint(open_checkpoint(out))
    assert [row[1] for row in found.layer_rows()] == [
        "metaplastic delta rule",
        "Gated DeltaNet",
        "metaplastic delta rule",
    ]
    assert found.other_layers == {3: "attention"}
    assert (found.geometry["num_heads"], found.geometry["head_dim"], found.geometry["state_size"]) == (4, 6, 8)


@pytest.mark.parametrize(
    ("layout", "off", "message"),
    [
        (None, False, "converted: has Palimpsa-M layers .*, for which the layout bamba has no place; give --off"),
        ("mamba_ssm", True, "--layout mamba_ssm: .*; choose one of bamba, palimpsa_bamba"),
    ],
)
def test_exports_that_cannot_be(layout, off, message, converted, tmp_path):
    _, out, _ = converted("bamba")
    with pytest.raises(UsageError, match=message):
        export(out, tmp_path / "out", layout=layout, off=off)
