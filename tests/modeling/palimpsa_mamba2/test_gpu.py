"""The same forms on a GPU, with the kernels that "auto" takes there."""

import pytest
import torch
from transformers import DynamicCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = (torch.float32, torch.bfloat16)
FP32 = {"forward": 1e-4, "backward": 1e-3}  # relative L2 to fp64 on the CPU
# These models are lively: rounding to bf16 alone moves their logits by 1 to 4 % and their gradients by
# 7 to 26 %. What kernels add is held against that: at most twice the error of the same model in plain torch on the CPU,
# for single rows, too, and for mamba-ssm, which also rounds states between chunks to bf16.
BF16_OVER_TORCH = 2.0


@pytest.fixture(params=[{"palimpsa_layers": [0, 2]}, {"beta_groups": 2}, {"palimpsa_layers": []}], ids=str)
def models(request, lively_model):
    """A model in fp64 on the CPU, and a function that makes the same one elsewhere."""
    over = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "beta_groups": 16, **request.param}
    return lively_model(**over).double(), lambda dtype, device="cuda": lively_model(**over).to(device, dtype)


@pytest.fixture
def limit(models, ids, rel):
    """limit(dtype, "forward" or "backward")."""
    oracle, build = models

    def of(dtype, what):
        if dtype == torch.float32:
            return FP32[what]
        plain = build(dtype, "cpu")
        if what == "forward":
            with torch.no_grad():
                return BF16_OVER_TORCH * rel(plain(ids).logits, oracle(ids).logits)
        return BF16_OVER_TORCH * rel(gradients(plain, ids), gradients(oracle, ids))

    return of


def gradients(model, ids):
    """All of them in one vector."""
    model.zero_grad()
    model.train()(ids, labels=ids).loss.backward()
    return torch.cat([p.grad.double().cpu().flatten() for p in model.parameters()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forms(models, ids, rel, limit, dtype):
    oracle, build = models
    model, device_ids, forward = build(dtype), ids.cuda(), limit(dtype, "forward")
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(models, ids, rel, limit, dtype):
    oracle, build = models
    found = gradients(build(dtype), ids.cuda())
    assert rel(found, gradients(oracle, ids)) < limit(dtype, "backward")


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
