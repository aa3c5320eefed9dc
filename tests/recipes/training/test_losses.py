"""The chunked loss equals the plain one, value and gradients, and never holds a sequence's logits."""

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.recipes.data.packing import IGNORED
from palimpsa_surgery.recipes.training import losses
from palimpsa_surgery.recipes.training.losses import CausalLoss, chunked_losses, resolve_loss
from torch.nn import functional


def batch(length=13, rows=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4096, (rows, length + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, 3] = IGNORED
    return ids[:, :-1], targets


@pytest.mark.parametrize("rows", [1, 5, 7, 100])
def test_chunks_of_any_size_give_the_plain_loss_and_gradients(rows, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * 11 * rows)
    hidden = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(6, 11, bias=False, dtype=torch.float64)
    targets = torch.randint(0, 11, (17,))
    targets[2] = IGNORED
    plain = functional.cross_entropy(head(hidden).float(), targets, ignore_index=IGNORED, reduction="none")
    expected = torch.autograd.grad(plain.sum(), (hidden, head.weight))
    chunked = chunked_losses(hidden, head, targets)
    found = torch.autograd.grad(chunked.sum(), (hidden, head.weight))
    torch.testing.assert_close(chunked, plain)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)  # the softmax is in fp32


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * 11 * 3)
    head = torch.nn.Linear(6, 11)
    rows = []
    head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    chunked_losses(torch.randn(10, 6, requires_grad=True), head, torch.zeros(10, dtype=torch.long)).sum().backward()
    assert max(rows) == 3


def test_the_loss_is_that_of_the_models_own_forward(model):
    ids, targets = batch()
    logits = model(input_ids=ids).logits
    expected = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    torch.testing.assert_close(CausalLoss(model)(ids, targets), expected, rtol=1e-5, atol=1e-5)


class Int8Head(torch.nn.Linear):
    """Stands in for the quantized layers of other packages: whole numbers and a scale."""

    def __init__(self, source):
        super().__init__(source.in_features, source.out_features, bias=False)
        self.scale = source.weight.detach().abs().max() / 127
        self.weight = torch.nn.Parameter((source.weight.detach() / self.scale).round().to(torch.int8), False)

    def forward(self, hidden):
        return functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


def test_a_quantized_head_casts_by_itself(model):
    ids, targets = batch()
    plain, exact = model(input_ids=ids).logits.detach(), CausalLoss(model)(ids, targets).detach()
    model.lm_head = Int8Head(model.lm_head)
    assert (model(input_ids=ids).logits - plain).norm() <= 2e-2 * plain.norm()  # 8 bits
    torch.testing.assert_close(CausalLoss(model)(ids, targets), exact, rtol=1e-2, atol=0)


def test_losses_by_token_add_up_and_ignored_ones_are_zero(model):
    ids, targets = batch()
    module = CausalLoss(model)
    by_token = module(ids, targets, per_token=True)
    assert by_token.shape == targets.shape
    assert by_token[0, 3] == 0
    torch.testing.assert_close(by_token.sum(), module(ids, targets))


def test_packed_documents_have_the_losses_of_separate_ones(model):
    ids, targets = batch(length=20, rows=1)
    segments = torch.tensor([[0] * 7 + [1] * 13])
    packed = CausalLoss(model)(ids, targets, segments, per_token=True)
    apart = [CausalLoss(model)(ids[:, part], targets[:, part], per_token=True) for part in (slice(0, 7), slice(7, 20))]
    torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=1e-5, atol=1e-5)


def test_bf16_keeps_master_weights_and_gradients_in_fp32(model):
    ids, targets = batch()
    loss = CausalLoss(model, precision="bf16")(ids, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    exact = CausalLoss(model)(ids, targets)
    assert loss.item() != exact.item()
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)  # bf16


def test_gradient_checkpointing_changes_nothing(model):
    ids, targets = batch(length=20, rows=1)
    segments = torch.tensor([[0] * 7 + [1] * 13])
    model.train()
    CausalLoss(model)(ids, targets, segments).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    CausalLoss(model)(ids, targets, segments).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    ("installed", "reason"),
    [(True, "it needs a CUDA device"), (False, r"liger_kernel is not installed \(palimpsa-surgery\[liger\]\)")],
)
def test_liger_by_name_is_refused_where_it_cannot_run(monkeypatch, installed, reason):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    with pytest.raises(UsageError, match=f"liger was asked for, but {reason}; set loss=chunked"):
        resolve_loss("liger", torch.device("cpu"))
    assert resolve_loss("auto", torch.device("cpu")) == "chunked"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_liger_gives_the_chunked_loss_and_gradients(model):
    pytest.importorskip("liger_kernel")
    model = model.cuda()
    ids, targets = (tensor.cuda() for tensor in batch(length=65))
    grads = {}
    for backend in ("chunked", "liger"):
        model.zero_grad()
        loss = CausalLoss(model, backend)(ids, targets)
        loss.backward()
        grads[backend] = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    for one, other in zip(*grads.values(), strict=True):
        assert (one - other).norm() <= 1e-3 * other.norm()
