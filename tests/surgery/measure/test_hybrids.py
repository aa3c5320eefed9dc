"""Hybrids measured from their files against what the host's own class hands to its scan."""

import shutil
import sys

import numpy as np
import pytest
import tiny_hybrids
import torch
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.modeling.hybrids.hosts import mixer_paths, norm_path
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.measure.forgetting import measure, measure_forgetting
from palimpsa_surgery.surgery.measure.layerwise import LayerFiles
from palimpsa_surgery.surgery.measure.plots import plot_profile
from palimpsa_surgery.surgery.planning.plan import make_plan
from torch.nn.functional import softplus

LENGTHS = (40, 40, 40, 33, 7)
RATES = 1e-5  # fp32, relative: layers come after layers that round differently


def texts():
    generator = np.random.default_rng(0)
    return [generator.integers(2, tiny_hybrids.VOCABULARY, length) for length in LENGTHS]


@pytest.fixture(params=tiny_hybrids.VARIANTS)
def variant(request):
    return request.param


@pytest.fixture
def checkpoint(variant, tmp_path):
    return open_checkpoint(tiny_hybrids.save_host(variant, tmp_path / "host"))


@torch.no_grad()
def by_the_host(variant, monkeypatch):
    """By layer: the mean of A d_t [H] that the host hands to its scan, and the rms of what its mixer is given."""
    host = tiny_hybrids.with_true_bounds(tiny_hybrids.make_host(variant))
    layers, steps, squares = list(mixer_paths(host.config)), [], []
    module = sys.modules[type(host).__module__]
    scan = getattr(module, "mamba2_chunk_scan", None)
    if variant in tiny_hybrids.DELTAS:
        rule = module.torch_chunk_gated_delta_rule

        def watched(*inputs, g, **kwargs):
            steps.append(-g.double().sum(1)[0])
            return rule(*inputs, g=g, **kwargs)

        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", watched)

    def spy(x, dt, A, B, C, **kwargs):
        step = softplus(dt + kwargs["dt_bias"]).clamp(*kwargs["dt_limit"])
        steps.append((step.double() * -A.double()).sum(1)[0])
        return scan(x, dt, A, B, C, **kwargs)

    if scan is not None:
        monkeypatch.setattr(module, "mamba2_chunk_scan", spy)
    for layer in layers:
        norm = host.get_submodule(norm_path(host.config, layer))
        norm.register_forward_hook(lambda _module, _inputs, output: squares.append(output.double().square().sum()))
    for sequence in texts():
        host.get_decoder()(input_ids=torch.as_tensor(sequence)[None], use_cache=False)
    sums = [sum(values[place :: len(layers)]) for values in (steps, squares) for place in range(len(layers))]
    rates, energies = sums[: len(layers)], sums[len(layers) :]
    tokens = sum(LENGTHS)
    rms = [(energy / (tokens * host.config.hidden_size)).sqrt().item() for energy in energies]
    return {layer: (rate / tokens, size) for layer, rate, size in zip(layers, rates, rms, strict=True)}


def test_rates_are_those_that_the_host_hands_to_its_scan(variant, checkpoint, monkeypatch):
    files = LayerFiles(checkpoint)
    measured = measure_forgetting(files.model, texts(), files=files)
    expected = by_the_host(variant, monkeypatch)
    assert [layer.layer for layer in measured] == list(expected) == list(checkpoint.sites)
    for layer in measured:
        rate, rms = expected[layer.layer]
        torch.testing.assert_close(torch.tensor(layer.head_rate).double(), rate, rtol=RATES, atol=0)
        if variant in tiny_hybrids.DELTAS:
            assert layer.calibration is None
        else:
            assert layer.calibration.input_rms == pytest.approx(rms, rel=RATES)


def test_figures_from_files_are_those_of_the_whole_model_to_the_bit(checkpoint):
    files = LayerFiles(checkpoint)
    whole = load_model(checkpoint, dtype=torch.float32)
    assert measure_forgetting(files.model, texts(), files=files) == measure_forgetting(whole, texts())


def test_a_model_is_as_before(checkpoint):
    model = load_model(checkpoint, dtype=torch.float32)
    before = list(model.named_modules())
    logits = model(tiny_hybrids.token_ids(), use_cache=False).logits
    measure_forgetting(model, texts())
    assert list(model.named_modules()) == before
    assert torch.equal(model(tiny_hybrids.token_ids(), use_cache=False).logits, logits)


def test_a_profile_of_a_hybrid_is_planned_and_drawn(tmp_path):
    folder = tiny_hybrids.save_host("nemotron_h", tmp_path / "host", vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded_checkpoint_path() / name, folder / name)
    checkpoint = open_checkpoint(folder)
    profile = measure(checkpoint, tokens=128, seq_len=64)
    assert [layer.layer for layer in profile.layers] == [0, 4, 5]
    profile.check_source(checkpoint)
    plan = make_plan(checkpoint, profile, layers=2)
    assert set(plan.layers) < {0, 4, 5}
    plot_profile(profile, tmp_path / "marked.png", chosen=plan.layers)
    plot_profile(profile, tmp_path / "plain.png")
    assert (tmp_path / "marked.png").read_bytes() != (tmp_path / "plain.png").read_bytes()
