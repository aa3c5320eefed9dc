"""Runs `test_triton_cases.py` in a process of its own under Triton's interpreter, where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = [
    Path(__file__).parent / name
    for name in ("metaplastic/test_triton_cases.py", "conv/test_triton_conv.py", "common/test_scaling.py")
]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the cases themselves")
def test_the_plain_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, CASES)]
    result = subprocess.run(
        command, env=env, capture_output=True, text=True, cwd=CASES[0].parent.parent.parent, timeout=280
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout, result.stdout[-500:]
    assert "skipped" not in result.stdout.splitlines()[-1], result.stdout[-500:]
