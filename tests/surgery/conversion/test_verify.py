"""Verification catches what it is for: each kind of damage, by each kind of check, before anything gets its name."""

import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError, UsageError, VerificationError
from palimpsa_surgery.base.files import load_json, write_json
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.conversion import verify
from palimpsa_surgery.surgery.conversion.convert import convert
from palimpsa_surgery.surgery.planning.plan import make_plan
from safetensors.torch import load_file, save_file

SIZES = {"groups": 2, "width": 16, "tied": False}
MIXER = "backbone.layers.1.mixer."


@pytest.fixture
def pair(tmp_path):
    """(source, plan, written folder) with layer 1 swapped."""
    pico.write_mamba_ssm(tmp_path / "source", **SIZES)
    source = open_checkpoint(tmp_path / "source")
    plan = make_plan(source, layers=(1,))
    convert(source, tmp_path / "out", plan=plan, verify="none")
    return source, plan, tmp_path / "out"


def damage(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def ids(source):
    return torch.randint(0, source.config.vocab_size, (1, 50), generator=torch.Generator().manual_seed(1))


def check_logits(source, plan, folder):
    return verify.verify_logits(source, folder, plan, ids(source))


def check_layers(source, plan, folder):
    return verify.verify_layers(source, folder, plan)


def swap(tensors, name, permutation):
    tensors[name] = tensors[name][permutation].contiguous()


def swap_groups(tensors):
    """Keys of the two groups exchanged: what a wrong order of groups does."""
    rows = tensors[MIXER + "in_proj.weight"]
    inner, state = 32, 8
    start = 2 * inner
    order = torch.arange(len(rows))
    order[start : start + 2 * state] = torch.cat(
        [torch.arange(start + state, start + 2 * state), torch.arange(start, start + state)]
    )
    swap(tensors, MIXER + "in_proj.weight", order)


def one_number(tensors):
    tensors[MIXER + "out_proj.weight"][0, 0] += 1.0


def swap_norms(tensors):
    a, b = "backbone.layers.0.mixer.norm.weight", MIXER + "norm.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def reverse_heads(tensors):
    swap(tensors, MIXER + "A_log", torch.arange(3, -1, -1))


DAMAGES = [one_number, swap_norms, swap_groups, reverse_heads]


@pytest.mark.parametrize("check", [check_logits, check_layers])
def test_an_undamaged_model_passes(pair, check):
    check(*pair)


@pytest.mark.parametrize("change", DAMAGES)
@pytest.mark.parametrize("check", [check_logits, check_layers])
def test_a_damaged_mixer_is_caught(pair, check, change):
    damage(pair[2], change)
    with pytest.raises(VerificationError, match="with metaplasticity off, what was written differs from the source by"):
        check(*pair)


@pytest.mark.parametrize("change", DAMAGES)
def test_the_comparison_of_tensors_names_the_damaged_one(pair, change):
    damage(pair[2], change)
    with pytest.raises(VerificationError, match=r"^backbone\.layers\.[01]\.mixer\..*differs from the source's tensor"):
        verify.verify_tensors(pair[0], pair[2])


@pytest.mark.parametrize("mode", ["logits", "layers"])
def test_a_value_that_is_not_finite_is_no_match(pair, mode):
    source, plan, folder = pair
    damage(folder, lambda tensors: tensors[MIXER + "D"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"tensor backbone\.layers\.1\.mixer\.D holds values that are not finite"):
        verify.verify(source, folder, plan, mode=mode)


def test_damage_outside_the_swapped_layers_is_caught_too(pair):
    source, plan, folder = pair
    damage(folder, lambda tensors: tensors["backbone.embeddings.weight"][-1].zero_())
    with pytest.raises(VerificationError, match=r"^backbone\.embeddings\.weight: what was written differs"):
        verify.verify(source, folder, plan, mode="layers")


def test_a_start_that_is_no_identity_is_caught(pair):
    def grow(tensors):
        tensors[MIXER + "metaplasticity.beta_scale"].fill_(0.5)

    damage(pair[2], grow)
    for check in (check_logits, check_layers):
        with pytest.raises(VerificationError, match="the identity start differs from the source by"):
            check(*pair)


def test_a_prior_other_than_one_is_no_identity(pair):
    damage(pair[2], lambda tensors: tensors[MIXER + "metaplasticity.log_prior"].fill_(0.3))
    with pytest.raises(VerificationError, match="layer 1: the identity start differs"):
        check_layers(*pair)


@pytest.mark.parametrize(
    ("key", "value"), [("layer_norm_epsilon", 1e-3), ("time_step_limit", [0.0, 0.01]), ("eos_token_id", 7)]
)
def test_a_config_that_changed_on_the_way_is_caught(pair, key, value):
    source, plan, folder = pair
    write_json(folder / "config.json", {**load_json(folder / "config.json"), key: value})
    with pytest.raises(VerificationError, match=rf"config\.json:{key}: "):
        verify.verify(source, folder, plan, mode="layers")


def test_an_infinite_output_is_never_a_pass(pair):
    source, _, folder = pair
    paper = make_plan(source, layers=(1,), init="paper", beta_scale_form="abs")
    damage(folder, lambda tensors: tensors[MIXER + "metaplasticity.beta_down.weight"].fill_(3e38))
    with pytest.raises(VerificationError, match="layer 1: not finite with the start paper"):
        check_layers(source, paper, folder)


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [([1.0, 2.0], [1.0, 2.0], 0.0), ([3.0, 4.0], [0.0, 0.0], float("inf")), ([0.0], [0.0], 0.0), ([1.1], [1.0], 0.1)],
)
def test_relative_l2(value, reference, expected):
    found = verify.relative_l2(torch.tensor(value, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("other", [float("nan"), float("inf"), 0.0, 1.0])
def test_relative_l2_of_what_is_not_finite_is_infinite(bad, other):
    assert verify.relative_l2(torch.tensor([1.0, bad]), torch.tensor([1.0, other])) == float("inf")
    assert verify.relative_l2(torch.tensor([1.0, other]), torch.tensor([1.0, bad])) == float("inf")


def test_auto_takes_logits_when_the_model_fits_and_layers_when_not(pair, monkeypatch):
    assert verify.choose_mode(pair[0], "auto") == "logits"
    monkeypatch.setattr(verify, "_free_memory", lambda: 1000)
    assert verify.choose_mode(pair[0], "auto") == "layers"
    assert verify.choose_mode(pair[0], "none") == "none"
    with pytest.raises(UsageError, match="--verify all: there is no such check; choose one of auto, logits, layers"):
        verify.choose_mode(pair[0], "all")


def test_rounding_to_a_shorter_dtype_is_no_damage(tmp_path):
    pico.write_hf(tmp_path / "source", dtype=torch.float32, **SIZES)
    for mode in ("logits", "layers"):
        report = convert(tmp_path / "source", tmp_path / mode, layers=(1,), dtype="bfloat16", verify=mode)
        assert report.verification.off_error < 1e-5


def test_transformers_progress_bars_stay_as_they_were(pair):
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.is_progress_bar_enabled()
    check_logits(*pair)
    assert transformers_logging.is_progress_bar_enabled() == before
