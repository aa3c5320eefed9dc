"""Rates and windows against an independent fp64 computation; what must not change them, and what measuring must not."""

import math

import numpy as np
import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.modeling import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.measure.forgetting import FLOOR, measure, measure_forgetting, static_forgetting, window_of
from torch.nn.functional import silu, softplus

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "chunk_size": 16,
}


@torch.no_grad()
def make_model(seed=0, **over):
    torch.manual_seed(seed)
    model = PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(**{**SIZES, **over})).eval()
    for block in model.backbone.layers:
        for parameter in (block.mixer.in_proj.weight, block.mixer.out_proj.weight):
            parameter.normal_(0, 0.4)
        block.mixer.A_log.copy_(torch.tensor([-9.0, -3.0, 0.0, 3.0]))
        block.mixer.dt_bias.uniform_(-4, 1)
    model.backbone.embeddings.weight.normal_()
    return model


def texts(*lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, SIZES["vocab_size"], length) for length in lengths]


@torch.no_grad()
def oracle(model, windows):
    """Rate and window [layers][heads] in fp64, from a loop over tokens that shares no code with the package."""
    model = model.double()
    config = model.config
    heads, head_dim, groups, size = config.num_heads, config.head_dim, config.n_groups, config.state_size
    inner = heads * head_dim
    rates, reaches, count = [[[0.0] * heads for _ in model.backbone.layers] for _ in range(2)] + [0]
    for ids in windows:
        count += len(ids)
        stream = model.backbone.embeddings.weight[torch.as_tensor(ids)]
        for layer, block in enumerate(model.backbone.layers):
            mixer = block.mixer
            hidden = stream * stream.square().mean(-1, keepdim=True).add(config.layer_norm_epsilon).rsqrt()
            projected = hidden * block.norm.weight @ mixer.in_proj.weight.T
            z, mixed, raw = projected.split([inner, inner + 2 * groups * size, heads], -1)
            low, high = config.time_step_limit
            step = softplus(raw + mixer.dt_bias.double()).clamp(low, high)
            strength = mixer.A_log.double().exp()
            padded = torch.cat([mixed.new_zeros(3, mixed.shape[1]), mixed])
            kernel = mixer.conv1d.weight[:, 0].T
            mixed = torch.stack([(padded[t : t + 4] * kernel).sum(0) for t in range(len(ids))])
            mixed = silu(mixed + mixer.conv1d.bias)
            out = torch.zeros(len(ids), heads, head_dim, dtype=torch.float64)
            for head in range(heads):
                group = head // (heads // groups)
                keys = mixed[:, inner + group * size : inner + (group + 1) * size]
                queries = mixed[:, inner + (groups + group) * size : inner + (groups + group + 1) * size]
                values = mixed[:, head * head_dim : (head + 1) * head_dim]
                state = torch.zeros(head_dim, size, dtype=torch.float64)
                for t in range(len(ids)):
                    nats = (strength[head] * step[t, head]).item()
                    rates[layer][head] += nats
                    reaches[layer][head] += 1 / -math.expm1(-nats)
                    state = math.exp(-nats) * state + step[t, head] * torch.outer(values[t], keys[t])
                    out[t, head] = state @ queries[t] + mixer.D.double()[head] * values[t]
            gated = (out.flatten(1) * silu(z)).unflatten(1, (groups, -1))
            gated = (gated * gated.square().mean(-1, keepdim=True).add(config.layer_norm_epsilon).rsqrt()).flatten(1)
            stream = stream + (gated * mixer.norm.weight) @ mixer.out_proj.weight.T
    return [torch.tensor(sums, dtype=torch.float64) / count for sums in (rates, reaches)]


def figures(layers):
    rate = torch.tensor([layer.head_rate for layer in layers], dtype=torch.float64)
    return rate, torch.tensor([layer.head_window for layer in layers], dtype=torch.float64)


@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.05, 0.4)])
def test_figures_agree_with_an_independent_fp64_computation(limit):
    windows = texts(31, 7, 1)
    measured = measure_forgetting(make_model(time_step_limit=limit), windows)
    rate, window = oracle(make_model(time_step_limit=limit), windows)
    torch.testing.assert_close(figures(measured)[0], rate, rtol=1e-4, atol=0)
    torch.testing.assert_close(figures(measured)[1], window, rtol=1e-4, atol=0)
    for layer, mean_rate, mean_window in zip(measured, rate.mean(1), window.mean(1), strict=True):
        assert layer.rate == pytest.approx(mean_rate.item(), rel=1e-4)
        assert layer.window == pytest.approx(mean_window.item(), rel=1e-4)


def test_batch_size_and_order_change_nothing():
    windows = texts(40, 3, 17, 65, 1)
    model = make_model()
    expected = figures(measure_forgetting(model, windows, batch_size=1))
    for batch_size, order in ((2, windows), (5, windows), (5, windows[::-1]), (3, windows[2:] + windows[:2])):
        found = figures(measure_forgetting(model, order, batch_size=batch_size))
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=0)


def test_calibration_statistics_do_not_depend_on_batches_either():
    windows = texts(70, 130, 9)
    model = make_model()
    one, three = (measure_forgetting(model, windows, batch_size=size) for size in (1, 3))
    for left, right in zip(one, three, strict=True):
        assert left.calibration.input_rms == pytest.approx(right.calibration.input_rms, rel=1e-5)
        assert left.calibration.importance == pytest.approx(right.calibration.importance, rel=1e-5)
        for a, b in zip(left.calibration.spread, right.calibration.spread, strict=True):
            assert a == pytest.approx(b, rel=0.05)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float64, 1e-5)])
def test_dtype_changes_the_figures_by_its_rounding_only(dtype, tolerance):
    windows = texts(40, 25)
    expected = figures(measure_forgetting(make_model(), windows))
    found = figures(measure_forgetting(make_model().to(dtype), windows))
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=0)


@pytest.mark.parametrize("nats", [0.0, 1e-15, 1e-12, 1e-8, 1e-3, 1.0, 50.0, 1e4])
def test_windows_are_finite_and_ordered_at_any_decay(nats):
    decay = torch.tensor([nats, nats * 2 + 1e-11], dtype=torch.float64).clamp_min(FLOOR)
    window = window_of(decay)
    assert window.isfinite().all()
    assert window[0] >= window[1] >= 1
    if 1e-12 <= nats <= 1e-3:
        assert window[0].item() == pytest.approx(1 / nats + 0.5, rel=1e-6)


def test_a_head_that_never_forgets_or_always_does_stays_finite():
    model = make_model()
    with torch.no_grad():
        model.backbone.layers[0].mixer.A_log.copy_(torch.tensor([-80.0, -20.0, 8.0, 12.0]))
    layer = measure_forgetting(model, texts(20))[0]
    assert layer.head_rate[0] == pytest.approx(FLOOR, rel=1e-6)
    assert layer.head_window[0] == pytest.approx(1 / FLOOR, rel=1e-6)
    assert layer.head_window == sorted(layer.head_window, reverse=True)


def test_measuring_changes_nothing():
    model = make_model(palimpsa_layers=[1], beta_rank=2, beta_groups=8)
    ids = torch.as_tensor(texts(21)[0])[None]
    before, training = model(input_ids=ids).logits, model.train().training
    measure_forgetting(model, texts(9))
    assert model.training == training
    assert torch.equal(model.eval()(input_ids=ids).logits, before)
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_go_even_after_an_error(monkeypatch):
    model = make_model()

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.backbone.layers[2].mixer, "step_size", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_forgetting(model.train(), texts(9))
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_that_are_not_finite_are_named_by_layer():
    model = make_model()
    with torch.no_grad():
        model.backbone.layers[1].mixer.dt_bias[2] = math.nan
    with pytest.raises(CheckpointError, match="layer 1: its step sizes are not finite"):
        measure_forgetting(model, texts(9), calibrate=False)


def test_swapped_layers_are_measured_and_marked():
    layers = measure_forgetting(make_model(palimpsa_layers=[1], beta_rank=2, beta_groups=8), texts(9))
    assert [layer.swapped for layer in layers] == [False, True, False]


def test_static_figures_come_from_the_weights_alone():
    checkpoint = open_checkpoint(embedded_checkpoint_path())
    profile = static_forgetting(checkpoint)
    mixer = load_model(checkpoint, dtype=torch.float32).backbone.layers[3].mixer
    decay = mixer.A_log.double().exp() * softplus(mixer.dt_bias.double())
    assert profile.method == "static"
    assert (profile.data, profile.tokens) == ("", 0)
    assert profile.layers[3].head_rate == pytest.approx(decay.tolist(), rel=1e-6)
    assert profile.layers[3].head_window == pytest.approx((1 / (1 - torch.exp(-decay))).tolist(), rel=1e-6)
    assert profile.layers[3].calibration is None


@pytest.mark.parametrize(("name", "value"), [("A_log", 1e4), ("A_log", 3e38)])
def test_damaged_weights_have_no_static_figures(tmp_path, name, value):
    def damage(tensors):
        return {key: t.fill_(value) if key.endswith(f"layers.1.mixer.{name}") else t for key, t in tensors.items()}

    pico.write_mamba_ssm(tmp_path / "source", edit=damage)
    with pytest.raises(CheckpointError, match="source: layer 1: A_log or dt_bias gives a forget rate that is not fin"):
        static_forgetting(open_checkpoint(tmp_path / "source"))


def test_the_profile_names_text_source_and_amount():
    profile = measure(embedded_checkpoint_path(), tokens=300, seq_len=128, seed=3)
    assert (profile.data, profile.tokens, profile.seq_len, profile.seed) == ("embedded:sqlite-docs", 256, 128, 3)
    assert profile.source == "mamba2-docs-1m"
    assert profile.fingerprint == open_checkpoint(embedded_checkpoint_path()).fingerprint
    assert len(profile.layers) == 8
    assert all(layer.calibration for layer in profile.layers)


def test_a_folder_without_a_tokenizer_asks_for_one(tmp_path):
    pico.write_hf(tmp_path / "source")
    with pytest.raises(CheckpointError, match="source: has no tokenizer; give one with --tokenizer"):
        measure(tmp_path / "source", tokens=64, seq_len=32)


def test_the_shared_checkpoint_has_its_known_order(shared):
    # One window orders the extremes; the whole list needs more text than a test has time for.
    profile = measure(shared / "checkpoints" / "mamba2-docs-25m", tokens=1024, seq_len=1024)
    by_window = sorted(profile.layers, key=lambda layer: -layer.window)
    assert {layer.layer for layer in by_window[:4]} >= {16, 8}
