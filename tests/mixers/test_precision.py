import pytest
import torch
from palimpsa_surgery.kernels.common.precision import compute_dtype
from palimpsa_surgery.mixers.precision import KeepFp32Mixin
from torch import nn

KEPT = ("A_log", "dt_bias", "mixer.D", "beta_scale", "log_prior")


class Module(KeepFp32Mixin, nn.Module):
    keep_fp32 = ("kept",)

    def __init__(self):
        super().__init__()
        self.kept = nn.Parameter(torch.tensor([1.0 + 2**-20]))
        self.other = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.bfloat16,), torch.float32),
        ((torch.float16, torch.float32), torch.float32),
        ((torch.bfloat16, torch.float64), torch.float64),
    ],
)
def test_compute_dtype(dtypes, expected):
    assert compute_dtype(*(torch.zeros(1, dtype=dtype) for dtype in dtypes)) == expected


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_short_types_leave_the_kept_ones_alone(cast):
    module = Module()
    (module.kept * module.other).sum().backward()
    cast(module)
    assert module.kept.dtype == module.kept.grad.dtype == torch.float32
    assert module.kept.item() == 1.0 + 2**-20
    assert module.other.dtype != torch.float32


def test_double_converts_them_too_and_back():
    module = Module().double()
    assert module.kept.dtype == torch.float64
    assert module.to(torch.bfloat16).kept.dtype == torch.float32
    assert module.to("meta").kept.device.type == "meta"


def test_which_parameters_of_a_model_stay_in_fp32(lively_model):
    model = lively_model().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        kept = name.endswith(KEPT)
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name


def test_exponentials_step_and_decay_are_fp32_in_a_bf16_model(lively_model):
    mixer = lively_model().to(torch.bfloat16).backbone.layers[0].mixer
    raw = torch.randn(2, 5, 6).bfloat16()
    assert mixer.step_size(raw).dtype == mixer.decay_rate().dtype == torch.float32
    beta, prior = mixer.metaplasticity(torch.randn(2, 5, 24).bfloat16(), mixer.step_size(raw))
    assert beta.dtype == prior.dtype == torch.float32


def test_a_bf16_model_is_as_near_as_bf16_allows(lively_model, ids, rel):
    model = lively_model()
    with torch.no_grad():
        expected = model(ids).logits
        assert rel(model.to(torch.bfloat16)(ids).logits, expected) < 3e-2


def test_bf16_autocast_keeps_the_scan_in_fp32(lively_model, ids, rel):
    model = lively_model()
    with torch.no_grad():
        expected = model(ids).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids).logits
    assert logits.dtype == torch.float32
    assert rel(logits, expected) < 3e-2
