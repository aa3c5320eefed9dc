"""Every way of running a model gives what the recurrences give: one pass, pieces, padding, packing, beams."""

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.modeling import metaplasticity_off
from tiny import HYBRID
from transformers import DynamicCache

TOLERANCE = 1e-4  # relative L2 in fp32, against fp64

SHAPES = [
    pytest.param({"n_groups": 1, "beta_groups": 1}, id="G1-shared-beta"),
    pytest.param({"n_groups": 2, "beta_groups": 2}, id="G2-two-betas"),
    pytest.param({"n_groups": 2, "beta_groups": 8, "beta_scale_form": "softplus"}, id="G2-beta-per-channel"),
    pytest.param({"palimpsa_layers": []}, id="plain-mamba2"),
    pytest.param({"palimpsa_layers": [0, 1, 2], "time_step_limit": [0.05, 0.6]}, id="all-swapped-dt-limit"),
    pytest.param(HYBRID, id="hybrid"),
    pytest.param({**HYBRID, "attn_cfg": {"causal": True, "num_heads": 3}, "d_intermediate": 0}, id="attention-alone"),
]


@pytest.fixture(params=SHAPES)
def model(request, lively_model):
    return lively_model(**request.param)


@pytest.fixture
def expected(model, oracle, ids):
    return torch.stack([oracle(model, row) for row in ids])


def test_metaplasticity_matters_in_these_tests(lively_model, ids, rel):
    model = lively_model()
    with torch.no_grad(), metaplasticity_off(model):
        off = model(ids).logits
    assert rel(off, model(ids).logits) > 0.1


def test_one_pass(model, ids, expected, rel):
    with torch.no_grad():
        assert rel(model(ids).logits, expected) < TOLERANCE
        assert rel(model.train()(ids).logits, expected) < TOLERANCE, "training mode must equal evaluation mode"


def test_fp64_model_reaches_fp64(model, ids, expected, rel):
    with torch.no_grad():
        assert rel(model.double()(ids).logits, expected) < 1e-10


@pytest.mark.parametrize("pieces", [(36, 1), (1, 36), (1, 1, 1, 34), (16, 5, 16), (2, 30, 3, 2), (1,) * 37], ids=str)
def test_pieces_through_a_cache(model, ids, expected, rel, pieces):
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        for piece in torch.split(ids, pieces, dim=1):
            logits.append(model(piece, cache=cache).logits)
    assert rel(torch.cat(logits, 1), expected) < TOLERANCE


@pytest.mark.parametrize("shape", [{}, HYBRID], ids=["mamba2", "hybrid"])
def test_decoding_with_gradients_on_equals_decoding_without(lively_model, ids, rel, shape):
    model = lively_model(**shape)
    a, b = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for piece in torch.split(ids[:, :8], [5, 1, 1, 1], dim=1):
        with torch.no_grad():
            expected = model(piece, cache=a).logits
        logits = model(piece, cache=b).logits
        assert logits.requires_grad
        assert rel(logits, expected) < 1e-5
    assert not b.layers[0].recurrent_states[0].requires_grad


def pad(rows, left):
    """Token ids and mask of rows of different lengths."""
    width = max(len(row) for row in rows)
    out, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        out[i, where], mask[i, where] = row, 1
    return out, mask


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padding_changes_no_real_token(model, ids, oracle, rel, left):
    rows = [ids[0, :3], ids[1, :11], ids[0]]
    batch, mask = pad(rows, left)
    with torch.no_grad():
        logits = model(batch, attention_mask=mask).logits
    for i, row in enumerate(rows):
        assert rel(logits[i][mask[i] == 1], oracle(model, row)) < TOLERANCE


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_pads_leave_the_states_where_they_are(model, ids, rel, left):
    rows = [ids[0, :2], ids[1, :11]]
    batch, mask = pad(rows, left)
    padded = DynamicCache(config=model.config)
    with torch.no_grad():
        model(batch, attention_mask=mask, cache=padded)
        for i, row in enumerate(rows):
            alone = DynamicCache(config=model.config)
            model(row[None], cache=alone)
            for a, b in zip(padded.layers, alone.layers, strict=True):
                if not hasattr(b, "keys"):  # attention keeps no state but the convolution's; its pads are masked
                    assert rel(a.recurrent_states[0][i], b.recurrent_states[0][0]) < 1e-5
                if b.conv_states[0] is not None:
                    torch.testing.assert_close(a.conv_states[0][i], b.conv_states[0][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pieces", [(20,), (4, 16), (1, 1, 1, 17), (7, 1, 12)], ids=str)
def test_pads_anywhere_and_in_pieces(model, ids, oracle, rel, pieces):
    """Holes in the middle of a row, all-pad pieces, and one-token pieces that are pads."""
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


def numbers(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize(
    "told",
    [
        lambda n: {"position_ids": positions(n)},
        lambda n: {"seq_idx": numbers(n).int()},
        lambda n: {"cu_seq_lens_q": bounds(n), "cu_seq_lens_k": bounds(n), "max_length_q": 19, "max_length_k": 19},
        lambda n: {"position_ids": positions(n), "attention_mask": torch.ones(1, sum(n)).long()},
    ],
    ids=["position_ids", "seq_idx", "cu_seq_lens", "position_ids-and-full-mask"],
)
def test_packed_documents_equal_separate_ones(model, ids, oracle, rel, told):
    lengths = [5, 1, 19, 2, 10]
    with torch.no_grad():
        logits = model(ids[:1], **told(lengths)).logits[0]
    for piece, document in zip(logits.split(lengths), ids[0].split(lengths), strict=True):
        assert rel(piece, oracle(model, document)) < TOLERANCE


@pytest.mark.parametrize("shape", [{}, HYBRID], ids=["mamba2", "hybrid"])
def test_packed_rows_and_padding_at_once(lively_model, ids, oracle, rel, shape):
    model = lively_model(**shape)
    seq_idx = torch.cat([numbers([20, 17]), numbers([4, 33])])
    mask = torch.ones_like(ids)
    mask[0, [18, 19]] = 0  # pads at the end of a document
    mask[1, [4, 9]] = 0  # at the start and in the middle of another
    with torch.no_grad():
        logits = model(ids, seq_idx=seq_idx, attention_mask=mask).logits
    for row in range(2):
        for document in seq_idx[row].unique():
            here = (seq_idx[row] == document) & (mask[row] == 1)
            assert rel(logits[row][here], oracle(model, ids[row][here])) < TOLERANCE


@pytest.mark.parametrize("shape", [{}, HYBRID], ids=["mamba2", "hybrid"])
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the newest release has a longer name for the same switch
def test_packed_gradients_equal_those_of_separate_documents(lively_model, ids, rel, checkpointing, shape):
    model, lengths = lively_model(**shape).double().train(), [5, 13, 19]
    labels = ids[:1].clone()
    starts = bounds(lengths)[1:-1].tolist()
    labels[0, starts] = -100

    def gradients(run):
        model.zero_grad()
        run().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    def separate():
        parts = zip(ids[:1].split(lengths, 1), labels.split(lengths, 1), strict=True)
        return sum(model(x, labels=y, num_items_in_batch=34).loss for x, y in parts)

    expected = gradients(separate)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    packed = {"position_ids": positions(lengths), "labels": labels, "num_items_in_batch": 34}
    actual = gradients(lambda: model(ids[:1], **packed).loss)
    assert len(actual) > 20
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert rel(actual[name], gradient) < 1e-9, name


@pytest.mark.parametrize("extra", [{"use_cache": True}, "cache"], ids=str)
def test_packed_documents_with_a_cache_are_refused(lively_model, ids, extra):
    model = lively_model()
    if extra == "cache":
        extra = {"cache": DynamicCache(config=model.config)}
    with pytest.raises(UsageError, match="packed documents were given together with a cache"):
        model(ids[:1], position_ids=positions([30, 7]), **extra)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 255, 256, 257])
def test_lengths_around_every_switch(lively_model, oracle, rel, length):
    model = lively_model(num_hidden_layers=2, palimpsa_layers=[1], chunk_size=64)
    ids = torch.randint(3, 53, (1, length), generator=torch.Generator().manual_seed(length))
    logits = model(ids).logits
    assert rel(logits[0], oracle(model, ids[0])) < TOLERANCE
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
