"""A run that is killed at any moment, again and again, ends with the weights of one that was left alone."""

import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
from palimpsa_surgery.base import files
from palimpsa_surgery.recipes.training import checkpointing, loop
from palimpsa_surgery.recipes.training import finetune as finetune_module
from palimpsa_surgery.recipes.training import saving as export
from palimpsa_surgery.recipes.training.finetune import finetune
from safetensors.torch import load_file

KILLS = {"full": 20, "lora": 10}
"""Of a run in each mode."""
STEPS = 8
WATCHED = {module.__file__ for module in (files, checkpointing, loop, finetune_module)}
"""The files in whose lines a random kill may fall: everything that changes the run folder is called from there."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process"),
    # One thread each: a fork does not take over the others.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def uninterrupted(model_folder, text, tmp_path_factory):
    """A function: the recipe of a mode, and the final tensors of a run that nobody stops."""
    made = {}
    folder = tmp_path_factory.mktemp("whole")

    def of(mode: str) -> tuple[dict, dict[str, torch.Tensor]]:
        if mode not in made:
            data = {"train": str(text), "seq_len": 24, "val_fraction": 0.2, "cache": str(folder / "cache")}
            sizes = {"steps": STEPS, "batch_size": 4, "micro_batch_size": 2, "eval_windows": 2, "save_every": 1}
            rates = {"lr": 1e-3, "lr_new": 1e-2, "warmup": 2, "lora": {"rank": 2, "dropout": 0.1}}
            recipe = {"schema_version": 1, "mode": mode, "keep": 1, "data": data, **sizes, **rates}
            final = finetune(model_folder, recipe, folder / mode).final
            made[mode] = recipe, load_file(final / "model.safetensors")
        return made[mode]

    return of


@pytest.fixture(autouse=True)
def without_code(monkeypatch):
    """The remote code is not written: a second a run, and nothing of it is looked at here."""
    monkeypatch.setattr("palimpsa_surgery.modeling.bundle.bundle_remote_code", lambda folder, model_type: ())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_in_a_child(model_folder, recipe, out, prepare: Callable[[], None] | None = None) -> int:
    """Starts the run or goes on with it in a child process that first calls `prepare`; how the child ended."""
    child = os.fork()
    if not child:
        code = 1
        try:
            if prepare is not None:
                prepare()
            finetune(model_folder, recipe, out, resume=(out / "recipe.yaml").is_file())
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def was_killed(status: int) -> bool:
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed by itself"
    return os.WIFSIGNALED(status)


def assert_ends_as_if_nothing_had_happened(model_folder, recipe, expected, out, keep) -> None:
    assert not was_killed(run_in_a_child(model_folder, recipe, out))
    found = load_file(out / "final" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    kept = {f"step-{step}" for step in range(STEPS - keep + 1, STEPS + 1)}
    assert {path.name for path in (out / "checkpoints").iterdir()} == kept
    assert not [path for path in out.iterdir() if ".tmp-" in path.name], "nothing half-written is left"


def lines_of_watched_files(see: Callable[[FrameType], None]) -> Callable:
    """A trace function that calls `see` at every line of the watched files."""

    def line(frame, event, _):
        if event == "line":
            see(frame)
        return line

    return lambda frame, event, _: line if frame.f_code.co_filename in WATCHED else None


def die_at(step: int, line: int, witness: Path) -> None:
    """The process will die `line` watched lines after the start of `step`, or of the first step after it; where that
    was is written down."""
    begun, counter, original = [], itertools.count(), loop.optimizer_step

    def optimizer_step(run, now):
        if now >= step:
            begun.append(now)
        return original(run, now)

    def see(frame):
        if begun and next(counter) == line:
            with witness.open("a") as stream:
                stream.write(f"{begun[0]} {Path(frame.f_code.co_filename).name}:{frame.f_lineno}\n")
            die()

    loop.optimizer_step = optimizer_step
    sys.settrace(lines_of_watched_files(see))


def watched_lines_of_a_step(model_folder, recipe, folder) -> int:
    """How many lines a step runs through in the watched files, its checkpoint included."""
    count = itertools.count()
    before = sys.gettrace()
    sys.settrace(lines_of_watched_files(lambda frame: next(count)))
    try:
        finetune(model_folder, recipe, folder)
    finally:
        sys.settrace(before)
    return next(count) // STEPS


@pytest.mark.parametrize("mode", KILLS)
def test_kills_all_over_a_run_change_nothing(mode, model_folder, uninterrupted, tmp_path):
    """Kill number k of n falls into step k * 7 / n or, if that is done, the next: on any machine at the same line."""
    if mode == "lora":
        pytest.importorskip("peft")
    recipe, expected = uninterrupted(mode)
    lines = watched_lines_of_a_step(model_folder, recipe, tmp_path / "counted")
    dice, out, witness = random.Random(0), tmp_path / "run", tmp_path / "places"
    for kill in range(KILLS[mode]):
        step, line = kill * (STEPS - 1) // KILLS[mode], dice.randrange(lines)
        assert was_killed(
            run_in_a_child(model_folder, recipe, out, lambda step=step, line=line: die_at(step, line, witness))
        )
    places = [place.split() for place in witness.read_text().splitlines()]
    assert len(places) == KILLS[mode]
    assert {int(step) for step, _ in places} >= set(range(STEPS - 1)), "some kill in every step but perhaps the last"
    assert len({place for _, place in places}) > KILLS[mode] // 2, "at many different lines"
    assert {place.split(":")[0] for _, place in places} >= {"loop.py", "checkpointing.py", "files.py"}
    assert_ends_as_if_nothing_had_happened(model_folder, recipe, expected, out, keep=1)


def in_the_middle_of_writing(name: str) -> None:
    save = checkpointing.save_file

    def half(tensors, path):
        save(tensors, path)
        if path.parent.name.startswith(f".{name}."):
            os.truncate(path, path.stat().st_size // 2)
            die()

    checkpointing.save_file = half


def before_the_rename(name: str) -> None:
    take_place = files.take_place

    def stop(temporary, path):
        if path.name == name:
            die()
        take_place(temporary, path)

    files.take_place = stop


def after_the_rename(name: str) -> None:
    prune = checkpointing.prune

    def stop(folder, keep):
        if (folder / name).exists():
            die()
        prune(folder, keep)

    checkpointing.prune = stop


def in_the_middle_of_pruning(name: str, first: str) -> None:
    """After the file `first` of an outdated checkpoint is gone, the rest still there."""
    rmtree = checkpointing.shutil.rmtree

    def stop(path, **options):
        if (path.parent / name).exists() and (path / first).exists():
            (path / first).unlink()
            die()
        rmtree(path, **options)

    checkpointing.shutil = SimpleNamespace(rmtree=stop)


def between_two_steps(name: str) -> None:
    step = loop.optimizer_step

    def stop(run, now):
        if now == int(name.removeprefix("step-")):
            die()
        return step(run, now)

    loop.optimizer_step = stop


def in_the_middle_of_the_final_save(name: str) -> None:
    write = export.write_weights

    def stop(checkpoint, folder, specs, changed):
        write(checkpoint, folder, specs[: len(specs) // 2], changed)
        die()

    export.write_weights = stop


STAGES = {
    "half of training.safetensors": in_the_middle_of_writing,
    "written, not renamed": before_the_rename,
    "renamed, not pruned": after_the_rename,
    "pruned but for the tensors": lambda name: in_the_middle_of_pruning(name, "state.json"),
    "pruned but for the state": lambda name: in_the_middle_of_pruning(name, "training.safetensors"),
    "between two steps": between_two_steps,
    "half of the final model": in_the_middle_of_the_final_save,
}


@pytest.mark.parametrize(
    ("stage", "keep"), [(stage, 1) for stage in STAGES] + [(stage, 2) for stage in STAGES if "prune" in stage]
)
def test_a_kill_at_each_stage_changes_nothing(stage, keep, model_folder, uninterrupted, tmp_path):
    recipe, expected = uninterrupted("full")
    recipe, out = {**recipe, "keep": keep}, tmp_path / "run"
    assert was_killed(run_in_a_child(model_folder, recipe, out, lambda: STAGES[stage]("step-4")))
    assert not (out / "final").exists()
    assert_ends_as_if_nothing_had_happened(model_folder, recipe, expected, out, keep)


def test_a_kill_amid_the_final_save_of_an_adapter_changes_nothing(model_folder, uninterrupted, tmp_path):
    pytest.importorskip("peft")
    recipe, expected = uninterrupted("lora")
    out = tmp_path / "run"
    assert was_killed(run_in_a_child(model_folder, recipe, out, lambda: in_the_middle_of_the_final_save("step-8")))
    assert (out / "adapter").is_dir(), "the adapter was there already"
    assert_ends_as_if_nothing_had_happened(model_folder, recipe, expected, out, keep=1)
