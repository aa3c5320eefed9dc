"""A run that is killed at any moment, again and again, ends with the weights of one that was left alone."""

import os
import random
import signal
import time

import pytest
import torch
from palimpsa_surgery.recipes import export
from palimpsa_surgery.recipes.finetune import finetune
from safetensors.torch import load_file

KILLS = 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process"),
    # One thread each: a fork does not take over the others.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def forked(model_folder, recipe, out) -> int:
    """A child process that runs, or goes on with, the run; its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        finetune(model_folder, recipe, out, resume=True)
        code = 0
    finally:
        os._exit(code)


def ended(child: int) -> bool:
    """Whether the process has ended; it stays there to be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def step_of(out) -> int:
    """The step of the newest checkpoint by its name alone: the run may be replacing it this moment."""
    folder = out / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name.removeprefix("step-")) for name in names if name.startswith("step-")), default=0)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_kills_at_random_moments_change_nothing(mode, model_folder, recipe, tmp_path, monkeypatch):
    if mode == "lora":
        pytest.importorskip("peft")
    monkeypatch.setattr(export, "bundle_remote_code", lambda folder: ())
    recipe = {**recipe, "mode": mode, "steps": 8, "save_every": 1, "keep": 1, "lora": {"rank": 2, "dropout": 0.1}}
    finetune(model_folder, recipe, tmp_path / "warm")  # imports and the token cache
    started = time.perf_counter()
    whole = finetune(model_folder, recipe, tmp_path / "whole")
    seconds = time.perf_counter() - started
    dice, interrupted = random.Random(0), 0
    out = tmp_path / "run"
    for kill in range(KILLS):
        child = forked(model_folder, recipe, out)
        # Later kills wait for later checkpoints, so that they fall all over the run however fast the machine is.
        while step_of(out) < kill * recipe["steps"] // KILLS and not ended(child):
            time.sleep(0.001)
        time.sleep(dice.uniform(0, seconds / recipe["steps"]))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        interrupted += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    assert interrupted, "no kill came before the end of its run"
    _, status = os.waitpid(forked(model_folder, recipe, out), 0)
    assert os.WEXITSTATUS(status) == 0
    expected = load_file(whole.final / "model.safetensors")
    found = load_file(out / "final" / "model.safetensors")
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-8"]
