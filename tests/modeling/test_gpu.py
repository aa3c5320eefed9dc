"""The same forms on a GPU, with the kernels that "auto" takes there."""

import pytest
import torch
from palimpsa_surgery.kernels.ssd import mamba_ssm_unavailable
from transformers import DynamicCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# (type, relative L2 of outputs, of gradients), against fp64 on the CPU. mamba-ssm rounds the states between chunks and
# the products of queries and keys to bf16 as well, which the torch form keeps in fp32.
BF16 = (3e-2, 6e-2) if mamba_ssm_unavailable() else (4.5e-2, 8e-2)
TOLERANCES = [(torch.float32, 1e-4, 1e-3), (torch.bfloat16, *BF16)]


@pytest.fixture(params=[{"palimpsa_layers": [0, 2]}, {"beta_groups": 2}, {"palimpsa_layers": []}], ids=str)
def models(request, lively_model):
    """A model in fp64 on the CPU, and a function that makes the same one on the GPU."""
    over = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "beta_groups": 16, **request.param}
    return lively_model(**over).double(), lambda dtype: lively_model(**over).cuda().to(dtype)


@pytest.mark.parametrize(("dtype", "forward", "_backward"), TOLERANCES, ids=str)
def test_forms(models, ids, rel, dtype, forward, _backward):
    oracle, build = models
    model, device_ids = build(dtype), ids.cuda()
    with torch.no_grad():
        expected = oracle(ids).logits
        assert rel(model(device_ids).logits.cpu(), expected) < forward
        cache, pieces = DynamicCache(config=model.config), []
        for piece in device_ids.split([30, 1, 1, 5], dim=1):
            pieces.append(model(piece, cache=cache).logits)
        assert rel(torch.cat(pieces, 1).cpu(), expected) < forward
        mask = torch.ones_like(ids)
        mask[0, :9], mask[1, 20:] = 0, 0
        padded = model(device_ids, attention_mask=mask.cuda()).logits.cpu()
        for row in range(2):
            real = mask[row] == 1
            assert rel(padded[row][real], oracle(ids[row : row + 1, real]).logits[0]) < forward
        packed = model(device_ids.reshape(1, -1), cu_seq_lens_q=torch.tensor([0, 37, 74], device="cuda")).logits
        assert rel(packed.view(2, 37, -1).cpu(), expected) < forward


@pytest.mark.parametrize(("dtype", "_forward", "backward"), TOLERANCES, ids=str)
def test_gradients(models, ids, rel, dtype, _forward, backward):
    oracle, build = models
    model = build(dtype)
    oracle.train()(ids, labels=ids).loss.backward()
    model.train()(ids.cuda(), labels=ids.cuda()).loss.backward()
    expected = torch.cat([p.grad.flatten() for p in oracle.parameters()])
    actual = torch.cat([p.grad.double().cpu().flatten() for p in model.parameters()])
    assert rel(actual, expected) < backward


@torch.no_grad()
def test_generation_with_padding_and_beams(models, ids):
    _, build = models
    model = build(torch.float32)
    batch = torch.zeros(2, 11, dtype=torch.long)
    batch[0, 8:], batch[1] = ids[0, :3], ids[1, :11]
    batch = batch.cuda()
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "attention_mask": (batch != 0).long()}
    for beams in (1, 3):
        with_cache = model.generate(batch, num_beams=beams, **options)
        assert torch.equal(with_cache, model.generate(batch, num_beams=beams, use_cache=False, **options))
