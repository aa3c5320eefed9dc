"""Every way of running a Palimpsa-D model gives what the time loop gives: values and all gradients."""

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.modeling import metaplasticity_off, record_importance
from transformers import DynamicCache

TOLERANCE = 1e-4  # relative L2 in fp32, against fp64

SHAPES = [
    pytest.param({}, id="G3-beta-per-channel"),
    pytest.param({"n_groups": 1, "beta_groups": 1, "beta_scale_form": "abs"}, id="G1-shared-beta-abs"),
    pytest.param({"n_groups": None, "beta_groups": 2, "train_prior": True}, id="G6-two-betas"),
]


@pytest.fixture(params=SHAPES)
def model(request, lively_d):
    return lively_d(**request.param)


@pytest.fixture
def expected(model, oracle, ids):
    return torch.stack([oracle(model, row) for row in ids])


def test_one_pass(model, ids, expected, rel):
    with torch.no_grad():
        assert rel(model(ids).logits, expected) < TOLERANCE
        assert rel(model.train()(ids).logits, expected) < TOLERANCE, "training mode must equal evaluation mode"
        assert rel(model.double()(ids).logits, expected) < 1e-10


def test_all_gradients_are_those_of_the_time_loop(model, ids, oracle, rel):
    model = model.double()
    for parameter in model.parameters():
        parameter.requires_grad_()
    parameters = dict(model.named_parameters())
    weights = torch.randn(20, 53, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad((model(ids[:1, :20]).logits[0] * weights).sum(), list(parameters.values()))
    want = torch.autograd.grad((oracle(model, ids[0, :20], parameters) * weights).sum(), list(parameters.values()))
    assert len(parameters) == 2 + 2 * 19
    for name, a, b in zip(parameters, got, want, strict=True):
        assert b.abs().max() > 0, name
        assert rel(a, b) < 1e-10, name


@pytest.mark.parametrize("pieces", [(36, 1), (1, 36), (1, 1, 1, 34), (16, 5, 16), (1,) * 37], ids=str)
def test_pieces_through_a_cache(model, ids, expected, rel, pieces):
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        for piece in torch.split(ids, pieces, dim=1):
            logits.append(model(piece, cache=cache).logits)
    assert rel(torch.cat(logits, 1), expected) < TOLERANCE


def test_the_cache_holds_one_convolutional_and_one_recurrent_state_a_layer(lively_d, ids):
    cache = DynamicCache(config=lively_d(beta_groups=2).config)
    lively_d(beta_groups=2)(ids, cache=cache)
    for layer in cache.layers:
        assert tuple(layer.conv_states[0].shape) == (2, 2 * 30 + 48, 3)
        assert tuple(layer.recurrent_states[0].shape) == (2, 6, 8 + 2, 10)
        assert layer.recurrent_states[0].dtype == torch.float32


def test_decoding_with_gradients_on_equals_decoding_without(lively_d, ids, rel):
    model = lively_d()
    a, b = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for piece in torch.split(ids[:, :8], [5, 1, 1, 1], dim=1):
        with torch.no_grad():
            expected = model(piece, cache=a).logits
        logits = model(piece, cache=b).logits
        assert logits.requires_grad
        assert rel(logits, expected) < 1e-5


@pytest.mark.parametrize("pieces", [(20,), (4, 16), (1, 1, 1, 17), (7, 1, 12)], ids=str)
def test_pads_anywhere_and_in_pieces(model, ids, oracle, rel, pieces):
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :9] = 0
    mask[1, [0, 3, 4, 8, 19]] = 0
    batch = torch.where(mask == 1, ids[:, :20], 0)
    cache, logits, start = DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for piece in torch.split(batch, pieces, dim=1):
            start += piece.shape[1]
            logits.append(model(piece, attention_mask=mask[:, :start], cache=cache).logits)
    logits = torch.cat(logits, 1)
    for i in range(2):
        assert rel(logits[i][mask[i] == 1], oracle(model, batch[i][mask[i] == 1])) < TOLERANCE


def positions(lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def test_packed_documents_equal_separate_ones(model, ids, oracle, rel):
    lengths = [5, 1, 19, 2, 10]
    with torch.no_grad():
        logits = model(ids[:1], position_ids=positions(lengths)).logits[0]
    for piece, document in zip(logits.split(lengths), ids[0].split(lengths), strict=True):
        assert rel(piece, oracle(model, document)) < TOLERANCE
    with pytest.raises(UsageError, match="packed documents were given together with a cache"):
        model(ids[:1], position_ids=positions(lengths), use_cache=True)


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}], ids=str)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the newest release has a longer name for the same switch
def test_packed_gradients_equal_those_of_separate_documents(lively_d, ids, rel, checkpointing):
    model, lengths = lively_d().double().train(), [5, 13, 19]
    labels = ids[:1].clone()
    labels[0, [5, 18]] = -100

    def gradients(run):
        model.zero_grad()
        run().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    parts = list(zip(ids[:1].split(lengths, 1), labels.split(lengths, 1), strict=True))
    expected = gradients(lambda: sum(model(x, labels=y, num_items_in_batch=34).loss for x, y in parts))
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    packed = {"position_ids": positions(lengths), "labels": labels, "num_items_in_batch": 34}
    actual = gradients(lambda: model(ids[:1], **packed).loss)
    for name, gradient in expected.items():
        assert rel(actual[name], gradient) < 1e-9, name


def test_importance_matters_can_be_switched_off_and_is_recorded(lively_d, ids, rel):
    model = lively_d()
    with torch.no_grad():
        with record_importance(model) as recorder:
            on = model(ids).logits
        with metaplasticity_off(model):
            off = model(ids).logits
    assert rel(off, on) > 0.05
    assert all(layer.ratio > 1 for layer in recorder.layers().values())
    assert recorder.layers().keys() == {0, 1}


def test_without_importance_it_is_gated_linear_attention_and_no_delta_rule(lively_d, ids, layer_loop, rel):
    """The reason why a Gated DeltaNet is not converted: what is left erases nothing."""
    model = lively_d().double()
    mixer, h = model.backbone.layers[0].mixer, torch.randn(1, 12, 24, dtype=torch.float64)
    with torch.no_grad(), metaplasticity_off(model):
        off = mixer(h)[0]
    p = {name: x.detach() for name, x in mixer.named_parameters()}
    p["metaplasticity.beta_scale"] = torch.full_like(p["metaplasticity.beta_scale"], -1e3)
    p["metaplasticity.log_prior"] = torch.zeros_like(p["metaplasticity.log_prior"])
    assert rel(off, layer_loop(model.config, p, h[0])) < 1e-12


def test_bf16_is_near_fp64(lively_d, ids, expected_of, rel):
    model = lively_d()
    want = expected_of(model, ids)
    with torch.no_grad():
        assert rel(model.to(torch.bfloat16)(ids).logits, want) < 5e-2
    assert model.backbone.layers[0].mixer.A_log.dtype == torch.float32


@pytest.fixture
def expected_of(oracle):
    return lambda model, ids: torch.stack([oracle(model, row) for row in ids])
