"""The starts: what they are, that they are reproducible, that the calibrated one keeps scales, that identity moves."""

import math

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.base.text import embedded_checkpoint_path, token_sequences
from palimpsa_surgery.mixers.geometry import GateSpec, MixerGeometry
from palimpsa_surgery.mixers.metaplasticity import Metaplasticity
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
from palimpsa_surgery.surgery.conversion.convert import convert
from palimpsa_surgery.surgery.conversion.initialization import IDENTITY_SCALE, STARTS, StartContext, scale_parameter
from palimpsa_surgery.surgery.measure.forgetting import measure
from palimpsa_surgery.surgery.measure.profile import LayerCalibration

HEADS, RANK, WIDTH, GROUPS = 4, 6, 24, 8
GEOMETRY = MixerGeometry(WIDTH, HEADS, 8, 1, 4, 4, False, True, 1e-5, (0.0, math.inf), 16)


def weight(seed=0):
    return torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(seed))


def context(layer=3, *, seed=0, form="abs", strength=0.3, spread=1.0, importance=2.0):
    calibration = LayerCalibration(input_rms=2.0, importance=[importance] * HEADS, spread=[[spread] * 8] * HEADS)
    return StartContext(
        layer=layer,
        geometry=GEOMETRY,
        gate=GateSpec(RANK, GROUPS, form, True),
        seed=seed,
        strength=strength,
        calibration=calibration,
        load_in_proj=weight,
    )


@pytest.mark.parametrize("name", sorted(STARTS))
def test_shapes_and_reproducibility(name):
    one, again = STARTS[name](context()), STARTS[name](context())
    assert one.down.shape == (RANK, WIDTH)
    assert one.up.shape == (HEADS * GROUPS, RANK)
    assert one.scale.shape == one.log_prior.shape == (HEADS,)
    for field in ("down", "up", "scale", "log_prior"):
        assert getattr(one, field).dtype == torch.float32
        assert torch.equal(getattr(one, field), getattr(again, field))


@pytest.mark.parametrize("name", sorted(STARTS))
def test_each_layer_and_seed_has_numbers_of_its_own(name):
    ups = [STARTS[name](context(layer, seed=seed)).up for layer, seed in ((3, 0), (4, 0), (3, 1), (0, 3))]
    assert all(not torch.equal(a, b) for i, a in enumerate(ups) for b in ups[:i])


@pytest.mark.parametrize("value", [1e-12, 1e-5, 0.3, 1.0, 25.0])
@pytest.mark.parametrize(("form", "inverse"), [("abs", torch.abs), ("softplus", torch.nn.functional.softplus)])
def test_the_parameter_gives_back_the_scale(form, inverse, value):
    parameter = scale_parameter(torch.tensor([value]), form).double()
    assert inverse(parameter).item() == pytest.approx(value, rel=3e-6)


def test_paper_start_has_the_ranges_of_the_paper():
    many = [STARTS["paper"](context(layer, form="softplus")) for layer in range(200)]
    scale = torch.cat([start.scale for start in many])
    down, up = (torch.cat([getattr(start, name).flatten() for start in many]) for name in ("down", "up"))
    assert 0.1 <= scale.min() < 0.13
    assert 0.97 < scale.max() <= 1.0
    assert down.std().item() == pytest.approx(0.02, rel=0.02)
    assert up.abs().max().item() == pytest.approx(RANK**-0.5, rel=1e-3)
    assert up.var().item() == pytest.approx(1 / (3 * RANK), rel=0.02)
    assert all(not start.log_prior.any() for start in many)


def test_paper_start_is_the_same_function_in_either_form():
    soft, absolute = (STARTS["paper"](context(form=form)) for form in ("softplus", "abs"))
    assert torch.equal(soft.up, absolute.up)
    torch.testing.assert_close(torch.nn.functional.softplus(soft.scale), absolute.scale)


def test_identity_is_small_and_refuses_the_form_that_cannot_leave_it():
    start = STARTS["identity"](context())
    assert torch.equal(start.scale, torch.full((HEADS,), IDENTITY_SCALE))
    assert start.down.any()
    assert start.up.any()
    with pytest.raises(UsageError, match="the identity start needs abs"):
        STARTS["identity"](context(form="softplus"))


def test_calibrated_needs_statistics():
    with pytest.raises(UsageError, match=r"layer 3 has no calibration statistics; measure the source on text"):
        STARTS["calibrated"](StartContext(3, GEOMETRY, GateSpec(RANK, GROUPS, "abs", True), 0, strength=0.3))


def test_calibrated_prior_of_an_even_spread_undoes_the_growth():
    # J = strength I_prior everywhere: M / (I_prior (1 + strength)) = M when I_prior = 1 / (1 + strength).
    start = STARTS["calibrated"](context(strength=0.3, spread=1.0))
    assert start.log_prior.exp().tolist() == pytest.approx([1 / 1.3] * HEADS, rel=1e-6)
    assert start.scale.tolist() == pytest.approx([0.3 / 1.3 / (0.5 * 2.0)] * HEADS, rel=1e-6)


def test_calibrated_directions_are_the_leading_ones_at_a_known_size():
    start = STARTS["calibrated"](context())
    _, sizes, rows = torch.linalg.svd(weight(), full_matrices=False)
    cosine = (start.down * (2.0 / 0.25) @ rows.T).abs()
    torch.testing.assert_close(cosine[:, :RANK], torch.eye(RANK), atol=1e-4, rtol=0)
    assert sizes[RANK - 1] > sizes[RANK]


@pytest.fixture(scope="module")
def profile():
    return measure(embedded_checkpoint_path(), tokens=1024, seq_len=512)


@pytest.fixture(scope="module")
def sequences():
    tokenizer = load_tokenizer(embedded_checkpoint_path())
    return token_sequences(None, tokenizer, tokens=1024, seq_len=512)[0]


@pytest.mark.parametrize("strength", [0.1, 1.0])
def test_calibrated_start_keeps_the_scale_of_each_head_on_real_text(tmp_path, profile, sequences, strength):
    """Runs both recurrences token by token: mean growth is the strength, and M / I fits M with a slope of one."""
    convert(
        embedded_checkpoint_path(), tmp_path / "out", layers=(4,), init="calibrated", strength=strength, profile=profile
    )
    mixer = load_model(tmp_path / "out", dtype=torch.float32).backbone.layers[4].mixer
    growth, fit, square = (torch.zeros(mixer.geometry.num_heads, dtype=torch.float64) for _ in range(3))
    count = 0
    for x, keys, step, beta, prior in _inputs(tmp_path / "out", sequences, mixer):
        M = torch.zeros(*x.shape[1:], keys.shape[-1], dtype=torch.float64)
        J = torch.zeros(*beta.shape[1:], keys.shape[-1], dtype=torch.float64)
        for t in range(len(x)):
            decay = torch.exp(-mixer.decay_rate().double() * step[t])[:, None, None]
            M = decay * M + (step[t][:, None] * x[t])[..., None] * keys[t]
            J = decay * J + beta[t][..., None] * keys[t] ** 2
            if t % 64 == 63:
                read = M / (prior[:, None, None] + J)
                growth += (J / prior[:, None, None]).mean((1, 2))
                fit += (read * M).sum((1, 2))
                square += (read * read).sum((1, 2))
                count += 1
    assert (growth / count).mean().item() == pytest.approx(strength, rel=0.15)
    assert ((growth / count) / strength - 1).abs().max() < 0.5
    assert (fit / square).tolist() == pytest.approx([1.0] * len(fit), abs=0.02)


@torch.no_grad()
def _inputs(folder, sequences, mixer):
    """What reaches the scan of layer 4, in fp64, sequence by sequence."""
    model = load_model(folder, dtype=torch.float32)
    seen = []
    model.backbone.layers[4].mixer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    for sequence in sequences:
        seen.clear()
        model.backbone(input_ids=torch.as_tensor(sequence)[None], use_cache=False)
        _, channels, raw = mixer.split_projection(mixer.in_proj(seen[0]))
        x, keys, _ = mixer.split_channels(mixer.conv1d(channels)[0])
        step = mixer.step_size(raw)
        beta, prior = mixer.metaplasticity(seen[0], step)
        keys = keys.repeat_interleave(x.shape[2] // keys.shape[2], 2)
        yield x[0].double(), keys[0, :, :, None].double(), step[0].double(), beta[0].double(), prior.double()


def test_identity_start_moves_within_fifty_steps(tmp_path, sequences):
    """Scale tenfold and more, W_down and W_up visibly, at the learning rate of the recipes; the prior stays above 0."""
    convert(embedded_checkpoint_path(), tmp_path / "out", layers=(1, 4), verify="none")
    model = load_model(tmp_path / "out", dtype=torch.float32).train()
    gates = [module for module in model.modules() if isinstance(module, Metaplasticity)]
    before = [{name: p.detach().clone() for name, p in gate.named_parameters()} for gate in gates]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = [parameter.requires_grad_() for gate in gates for parameter in gate.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    ids = torch.as_tensor(sequences[0][:128]).view(2, 64)
    losses = []
    for _ in range(50):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    for gate, old in zip(gates, before, strict=True):
        grown = gate.scale() / old["beta_scale"].abs()
        assert grown.median() > 1e3
        assert (grown > 10).float().mean() > 0.9
        assert (gate.prior() > 0).all()
        for name in ("beta_down.weight", "beta_up.weight"):
            moved = (gate.get_parameter(name) - old[name]).norm() / old[name].norm()
            assert moved > 0.01, name


def test_identity_gradient_of_the_scale_does_not_vanish(tmp_path, sequences):
    convert(embedded_checkpoint_path(), tmp_path / "out", layers=(4,), verify="none")
    model = load_model(tmp_path / "out", dtype=torch.float32).train()
    ids = torch.as_tensor(sequences[0][:200])[None]
    model(input_ids=ids, labels=ids).loss.backward()
    gate = model.backbone.layers[4].mixer.metaplasticity
    assert gate.beta_scale.grad.abs().median() > 1e-6
    assert math.isfinite(gate.beta_up.weight.grad.norm())


def test_the_checkpoint_is_only_read(tmp_path):
    source = open_checkpoint(embedded_checkpoint_path())
    before = {name: source.load(name).clone() for name in source.tensors}
    convert(source, tmp_path / "out", layers=(4,), verify="none")
    assert all(torch.equal(source.load(name), tensor) for name, tensor in before.items())
