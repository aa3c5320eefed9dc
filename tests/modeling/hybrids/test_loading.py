"""Model folders of hybrids: what is written, what is refused, and types, devices and names other than usual."""

import json

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.mixers.geometry import GATE, GateSpec
from palimpsa_surgery.modeling.hybrids.hosts import mixer_path, mixer_paths
from palimpsa_surgery.modeling.hybrids.modeling_palimpsa_hybrid import model_class
from safetensors.torch import load_file, save_file
from tiny_hybrids import DELTAS, SWAPPED, same, token_ids
from transformers import AutoModel, AutoModelForCausalLM

FP32 = 1e-5  # relative L2
KEPT = ("A_log", "dt_bias", "D", f"{GATE}.beta_scale", f"{GATE}.log_prior")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture
def folder(kind, hybrid, folders):
    """A model folder as transformers writes it; not to be changed."""
    if not (folders / kind).exists():
        hybrid(kind).save_pretrained(folders / kind)
    return folders / kind


def logits(model):
    with torch.no_grad():
        return model.eval()(token_ids()).logits


def test_the_auto_class_loads_what_was_saved(kind, hybrid, folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is model_class(kind)
    assert same(kind, logits(model), logits(hybrid(kind)))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_model_without_a_head_is_the_causal_models(kind, hybrid, folder):
    model = AutoModel.from_pretrained(folder)
    assert type(model) is model_class(kind, headless=True)
    with torch.no_grad():
        expected = hybrid(kind).base_model(token_ids()).last_hidden_state
        assert same(kind, model(token_ids()).last_hidden_state, expected)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_decays_of_the_swapped_layers_alone_stay_fp32(kind, folder, auto):
    model = auto.from_pretrained(folder, dtype=torch.bfloat16)
    inside = "" if auto is AutoModelForCausalLM else "model."
    paths = [mixer_path(model.config, layer).removeprefix(inside) for layer in SWAPPED[kind]]
    expected = {f"{path}.{name}" for path in paths for name in KEPT}
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    known = {name for name, _ in model.named_parameters()}
    hosts = (
        "gate.weight",
        *(("A_log",) if kind == "olmo_hybrid" else ()),
    )  # what the host's class keeps in fp32 itself
    assert {name for name in wide if name in expected or not name.endswith(hosts)} == expected & known
    assert all(parameter.dtype in (torch.float32, torch.bfloat16) for parameter in model.parameters())


def test_a_model_from_its_config_alone_starts_as_the_paper(kind, hybrid):
    model = AutoModelForCausalLM.from_config(hybrid(kind).config, dtype=torch.bfloat16)
    for layer in SWAPPED[kind]:
        mixer = model.get_submodule(mixer_path(model.config, layer))
        assert mixer.A_log.dtype == mixer.metaplasticity.beta_scale.dtype == torch.float32
        assert 0.1 <= mixer.metaplasticity.beta_scale.min() <= mixer.metaplasticity.beta_scale.max() <= 1.0
        assert not mixer.metaplasticity.log_prior.any()


def test_the_prior_is_frozen_when_the_config_says_so(kind, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, train_prior=False)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == [f"{mixer_path(model.config, layer)}.{GATE}.log_prior" for layer in SWAPPED[kind]]


def rewritten(folder, target, tensors=None, **keys):
    """A copy of a folder, its tensors passed through a function and its config changed."""
    target.mkdir()
    state = load_file(folder / "model.safetensors")
    save_file(tensors(state) if tensors else state, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **keys}))
    return target


def without(ending):
    return lambda state: {name: tensor for name, tensor in state.items() if not name.endswith(ending)}


def test_a_missing_tensor_is_an_error(kind, folder, tmp_path):
    for ending in ("beta_up.weight", "conv1d.weight" if kind in DELTAS else "in_proj.weight"):
        lacking = rewritten(folder, tmp_path / ending, without(ending))
        with pytest.raises(CheckpointError, match=rf"calls for tensors that are missing, \d in all \(.*{ending}"):
            AutoModelForCausalLM.from_pretrained(lacking)


def test_a_gate_that_no_layer_takes_is_an_error(kind, folder, tmp_path):
    with pytest.raises(CheckpointError, match="has importance gates for layers that palimpsa_layers"):
        AutoModelForCausalLM.from_pretrained(rewritten(folder, tmp_path / "out", palimpsa_layers=[]))


@pytest.mark.parametrize("variant", ["nemotron_h", "granitemoehybrid/experts"])
def test_tensors_are_called_in_files_as_the_hosts_are(variant, host, hybrid, tmp_path):
    """Not as in the model: there the experts of a layer are one tensor, and nemotron_h has no `backbone`."""
    host(variant).save_pretrained(tmp_path / "host")
    hybrid(variant).save_pretrained(tmp_path / "hybrid")
    names = {place: set(load_file(tmp_path / place / "model.safetensors")) for place in ("host", "hybrid")}
    assert {name for name in names["hybrid"] if GATE not in name} == names["host"] != set(host(variant).state_dict())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid")), logits(hybrid(variant)))


def test_layers_on_disk_are_fetched_when_they_run(kind, hybrid, folder, tmp_path):
    model = hybrid(kind)
    places = {name: "cpu" for name, _ in model.named_children() if name != "model"}
    places |= {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    places |= {f"model.layers.{layer}": "cpu" for layer in range(model.config.num_hidden_layers)}
    plain = max(set(mixer_paths(model.config)) - set(SWAPPED[kind]))
    places |= {f"model.layers.{layer}": "disk" for layer in (SWAPPED[kind][0], plain)}
    far = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path)
    assert same(kind, logits(far), logits(model))


def test_a_model_without_swapped_layers_is_the_host(kind, host, folder, tmp_path):
    gates = tuple(f"{GATE}.{name}" for name in GateSpec.TENSORS)
    plain = rewritten(folder, tmp_path / "plain", without(gates), palimpsa_layers=[])
    found, expected = logits(AutoModelForCausalLM.from_pretrained(plain)), logits(host(kind))
    assert same(kind, found, expected) if kind in DELTAS else (found - expected).norm() < FP32 * expected.norm()
