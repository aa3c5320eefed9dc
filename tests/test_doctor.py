import json

import pytest
import torch
from palimpsa_surgery import doctor
from palimpsa_surgery.base.files import dump_json
from palimpsa_surgery.kernels import backends
from palimpsa_surgery.kernels.conv import torch_conv
from palimpsa_surgery.kernels.conv.causal_conv import CAUSAL_CONV
from palimpsa_surgery.kernels.metaplastic import torch_chunk
from palimpsa_surgery.kernels.metaplastic.scan import METAPLASTIC_SCAN
from palimpsa_surgery.kernels.ssd import torch_scan
from palimpsa_surgery.kernels.ssd.mamba2_scan import MAMBA2_SCAN

OPERATORS = (METAPLASTIC_SCAN, MAMBA2_SCAN, CAUSAL_CONV)
ON_CPUS = {b.name for operator in OPERATORS for b in operator.backends.values() if b.devices in ((), ("cpu",))}


@pytest.fixture(scope="module")
def healthy():
    return doctor.diagnose("cpu")


def test_a_healthy_machine(healthy):
    assert healthy.ok
    assert healthy.device.startswith("cpu: ")
    assert {check.tolerance for check in healthy.checks} == {1e-4, 1e-3}
    assert all(0 < check.error < 1e-5 for check in healthy.checks)


def test_every_part_of_a_model_is_covered(healthy):
    assert [part.part.partition(":")[0] for part in healthy.backends] == [
        "swapped layers",
        "plain layers",
        "all layers",
    ]
    for part in healthy.backends:
        assert part.chosen == ("numba" if part.part.startswith("swapped") else "torch")
        assert part.unavailable["torch"] is None
        assert all(reason for name, reason in part.unavailable.items() if name not in ON_CPUS)
        assert "the fastest that runs here (" in part.why


def test_the_report_is_strict_json(healthy):
    found = json.loads(dump_json(healthy.to_dict()))
    assert found["ok"] is True
    assert found["versions"]["python"]


def test_an_absent_package_has_no_version(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    found = doctor.versions()
    assert found["torch"] == torch.__version__
    assert found["no-such-package"] is None


@pytest.mark.parametrize(
    ("module", "name", "failing"),
    [
        (torch_scan, "scan", "Mamba2 scan, torch, float32"),
        (torch_conv, "conv", "convolution, torch, float32"),
    ],
)
def test_a_wrong_kernel_is_found(monkeypatch, module, name, failing):
    right = getattr(module, name)

    def wrong(*arguments):
        found = right(*arguments)
        return found * 1.01 if isinstance(found, torch.Tensor) else (found[0] * 1.01, *found[1:])

    monkeypatch.setattr(module, name, wrong)
    found = doctor.diagnose("cpu")
    assert not found.ok
    assert failing in [check.name for check in found.checks if not check.ok]


def test_a_wrong_gradient_is_found(monkeypatch):
    right = torch_chunk.scan

    def wrong(x):  # the output is right, the gradient of q a tenth too large
        return right(x._replace(q=x.q + 0.1 * (x.q - x.q.detach())))

    monkeypatch.setattr(torch_chunk, "scan", wrong)
    failed = [check.name for check in doctor.diagnose("cpu").checks if not check.ok]
    assert failed == ["metaplastic scan, torch, float32, gradients"]


@pytest.mark.parametrize("value", [float("nan"), None])
def test_a_kernel_that_crashes_or_gives_nan_is_a_finding(monkeypatch, value):
    right = torch_chunk.step

    def wrong(*arguments, **options):
        if value is None:
            raise RuntimeError("the compiler\nis missing")
        output, variance = right(*arguments, **options)
        return output * value, variance

    monkeypatch.setattr(torch_chunk, "step", wrong)
    found = doctor.diagnose("cpu")
    (check,) = [check for check in found.checks if not check.ok]
    assert check.name == "metaplastic decode, torch, float32"
    assert check.error is None
    assert check.note == ("RuntimeError: the compiler is missing" if value is None else "")
    dump_json(found.to_dict())


def test_a_kernel_that_does_not_take_these_sizes_is_not_wrong(monkeypatch):
    monkeypatch.setattr(torch_chunk, "unsupported", lambda problem: f"it takes no {problem.dtype}", raising=False)
    problem = doctor._Problem(torch.device("cpu"), torch.float32)
    checks = list(problem.check_scan("torch"))
    assert len(checks) == 3
    assert all(check.ok and check.error is None for check in checks)
    assert all("not used: " in check.note and "it takes no torch.float32" in check.note for check in checks)


def test_required_kernels_that_are_missing_fail(monkeypatch):
    monkeypatch.setattr(backends, "_required", True)
    found = doctor.diagnose("cpu")
    assert not found.ok
    assert [part.chosen for part in found.backends] == ["numba", None, None]
    assert "none can run the Mamba2 scan on cpu (mamba_ssm: it runs on cuda" in found.backends[1].why


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_checked_in_both_dtypes():
    found = doctor.diagnose("cuda")
    assert found.ok, [check for check in found.checks if not check.ok]
    assert any(check.name.endswith("bfloat16") for check in found.checks)
