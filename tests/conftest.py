"""What every test may use. The suite needs no network, no GPU and nothing outside the repository."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny tensors are slower on many threads, and a worker per core needs no more than one."""
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Skip what is marked `gpu` where no CUDA device is."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Large inputs that a checkout may have beside it; what needs them is skipped where they are absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "checkpoints").is_dir():
        pytest.skip("the folder ../shared is not here")
    return folder


@pytest.fixture(autouse=True)
def restored_settings():
    """A test of the command line changes log handlers and quietness; the next test starts from the usual ones."""
    import logging

    from palimpsa_surgery.base import console

    logger = logging.getLogger("palimpsa_surgery")
    before = (list(logger.handlers), logger.level, logger.propagate, dict(console._settings))
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
    console._settings.update(before[3])
