"""The CPU backend's own: threads, pieces of work, memory that is written in full, where compiled code is kept."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from palimpsa_surgery.kernels.metaplastic import scan as api

numba_scan = pytest.importorskip("palimpsa_surgery.kernels.metaplastic.numba_scan")
from palimpsa_surgery.kernels.metaplastic import numba_kernels  # noqa: E402

NAMES = ("q", "k", "v", "beta", "log_decay", "prior")
SHAPES = {
    "one head, few channels": {"H": 1, "G": 1, "P": 4, "g": 4},
    "one head, cut into ranges of channels": {"H": 1, "G": 1, "P": 32, "g": 32},
    "more heads than shares": {"H": 19, "G": 1, "P": 2, "g": 2},
    "groups of heads": {"H": 6, "G": 3, "P": 8, "g": 8},
    "one beta per head": {"H": 4, "G": 2, "P": 8, "g": 1},
    "two betas per head, more keys than one vector": {"H": 2, "G": 1, "P": 8, "g": 2, "N": 40},
}


@pytest.fixture
def threads(monkeypatch):
    """threads(n): as many as torch would use, also for small problems."""
    before = torch.get_num_threads()
    monkeypatch.setattr(numba_scan, "_WORTH_THREADS", 0)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_threads_gives_the_same_bits(problem, cast, relative, results, threads, shape, packed):
    lengths = [5, 0, 40, 1] if packed else [23]
    p = problem(sum(lengths), B=1 if packed else 2, rows=len(lengths) if packed else 2, **SHAPES[shape])
    cu = torch.tensor([0, *lengths]).cumsum(0) if packed else None
    want = results(p, "reference", cu_seqlens=cu)
    half = cast(p, torch.float32)
    first = results(half, "numba", cu_seqlens=cu, chunk_size=16)
    for name, value in want.items():
        assert relative(first[name], value) < 1e-5, name
    for count in (2, 3, 8):
        threads(count)
        again = results(half, "numba", cu_seqlens=cu, chunk_size=16)
        assert all(torch.equal(again[name], first[name]) for name in first), count


@pytest.mark.parametrize("variance", [False, True])
def test_nothing_is_read_before_it_was_written(problem, results, variance):
    """torch fills fresh memory with NaN here: outputs, states at chunk starts and gradients hold none."""
    p = problem(50, B=2, dtype=torch.float32, decays=(-3, 0))
    plain = results(p, "numba", variance=variance, chunk_size=16)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        filled = results(p, "numba", variance=variance, chunk_size=16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(filled[name], plain[name]) for name in plain)


def test_half_precision_computes_in_fp32(problem, cast, relative, results):
    p = cast(problem(40, decays=(-3, 0)), torch.bfloat16)
    got, want = results(p, "numba"), results(cast(p, torch.float32), "numba")
    assert got["M"].dtype == torch.float32
    assert torch.equal(got["output"], want["output"].bfloat16())
    assert relative(got["M"], want["M"]) == 0


def test_infinities_and_nan_are_not_hidden(problem):
    """No fast-math: what is not finite stays so, and only where it belongs."""
    p = problem(6, H=2, G=1, dtype=torch.float32, decays=(-3, -1))
    p.v[0, 3, 0, 1] = float("inf")
    p.q[0, 5, 0, 0] = float("nan")
    for backend in ("numba", "reference"):
        out = api.metaplastic_scan(*(getattr(p, name) for name in NAMES), backend=backend).output
        assert torch.isfinite(out[0, :3]).all()
        assert not torch.isfinite(out[0, 3:, 0, 1]).any()
        assert torch.isfinite(out[0, 3:5, 1]).all()
        assert out[0, 5].isnan().all()


def test_without_a_folder_to_write_the_compiled_code_is_not_kept(monkeypatch):
    seen = []

    def refuse(**options):
        seen.append(options.pop("cache", False))
        if seen[-1]:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: SimpleNamespace(function=function, **options)

    monkeypatch.setattr(numba_kernels, "njit", refuse)
    assert numba_kernels._compiled(len).function is len
    assert seen == [True, False]


def test_where_numba_is_absent_the_torch_form_runs():
    code = """
import sys
sys.modules["numba"] = None
import torch
from palimpsa_surgery.kernels.metaplastic import scan as api
assert api.METAPLASTIC_SCAN.resolve("auto", "cpu") == "torch"
x = torch.rand(1, 3, 1, 4)
print(api.metaplastic_scan(x, x, x, x, -x[..., 0], torch.ones(1)).output.shape)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[1, 3, 1, 4]" in run.stdout
