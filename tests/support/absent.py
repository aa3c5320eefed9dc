"""Processes in which this package and every optional one cannot be imported."""

import os
import subprocess
import sys
import textwrap

# What a machine with nothing but torch and transformers lacks, and the package itself.
ABSENT = ("palimpsa_surgery", "triton", "mamba_ssm", "causal_conv1d", "einops")
BLOCK = """
import sys, importlib.abc
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run(code, *arguments, home, absent=ABSENT):
    """Runs code in a process of its own where the absent packages cannot be imported."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"ABSENT = {absent!r}\n{BLOCK}" + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=240)
