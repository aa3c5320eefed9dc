"""What every test may use. The suite needs no network, no GPU and nothing outside the repository."""

import gc
import logging
import os
from collections import Counter
from pathlib import Path

import pytest
from palimpsa_surgery.base import console

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny tensors are slower on many threads, and a worker per core needs no more than one."""
    import torch

    torch.set_num_threads(1)


def pytest_configure(config):
    """Of several processes, none begins the longest file when the others are done: see the order below."""
    config.option.loadscopereorder = False  # xdist would put files with few tests last, whatever these take


def pytest_collection_modifyitems(items):
    """Files with something `slow` first, then those with many tests; skip what is `gpu` where no CUDA device is."""
    slow, tests = {item.path for item in items if item.get_closest_marker("slow")}, Counter(i.path for i in items)
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish():
    """What is imported by now stays: looking through it takes a third of a second whenever a run frees its memory."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk():
    """No test cuts the power, and a conversion would wait for each of a hundred files, some of them twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: os.fstat(handle))  # what is no open file is an error as ever
        yield


@pytest.fixture(scope="session", autouse=True)
def each_picture_is_drawn_once():
    """Most of a tiny model's conversion is the drawing of its profile, and most profiles here are the same few."""
    from palimpsa_surgery.surgery.conversion import convert

    drawn, draw = {}, convert.plot_profile

    def plot_profile(profile, path, *, chosen):
        key = profile.model_dump_json(exclude={"fingerprint"}), tuple(chosen)
        if key not in drawn:
            draw(profile, path, chosen=chosen)
            drawn[key] = path.read_bytes()
        path.write_bytes(drawn[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "plot_profile", plot_profile)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Large inputs that a checkout may have beside it; what needs them is skipped where they are absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "checkpoints").is_dir():
        pytest.skip("the folder ../shared is not here")
    return folder


@pytest.fixture(autouse=True)
def usual_settings():
    """The command line changes log handlers and quietness, in fixtures of a whole module too; no test inherits that."""
    logger = logging.getLogger("palimpsa_surgery")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    console._settings["quiet"] = False


@pytest.fixture
def tiny_config():
    """Makes a config of a tiny model."""
    from tiny import make_tiny_config

    return make_tiny_config


@pytest.fixture
def lively_model():
    """Makes a tiny model whose importance gates really matter from `tiny_config` arguments."""
    from tiny import make_lively_model, make_tiny_config

    return lambda seed=0, **over: make_lively_model(make_tiny_config(**over), seed)


@pytest.fixture
def rel():
    """Relative L2 distance of `a` from `b`."""
    return lambda a, b: ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.fixture
def ids():
    """Two sequences of token ids [2, 37]; neither padding nor end of text among them."""
    import torch

    return torch.randint(3, 53, (2, 37), generator=torch.Generator().manual_seed(5))
