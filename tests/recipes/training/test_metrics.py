"""A run tells a log file what it does, often enough and not too often."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from palimpsa_surgery.recipes.training import metrics as run_log
from palimpsa_surgery.recipes.training.finetune import finetune
from palimpsa_surgery.recipes.training.metrics import RunLog, announcement
from palimpsa_surgery.recipes.training.recipe import load_recipe


def training(step=0, processes=1, main=True, **recipe):
    """As much of a run as its log looks at."""
    settings = {"steps": 40, "batch_size": 4, "data": {"seq_len": 256}, **recipe}
    module = torch.nn.Linear(10, 100)
    module.bias.requires_grad_(False)
    return SimpleNamespace(
        recipe=load_recipe(settings),
        position=SimpleNamespace(step=step),
        module=module,
        accelerator=SimpleNamespace(device=torch.device("cpu"), num_processes=processes, is_main_process=main),
    )


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when told to."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(run_log.time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(run_log, "bars_are_drawn", lambda: False)
    return now


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "40 steps of 1,024 tokens on cpu, mode full, 1 k parameters train"),
        ({"steps": 1}, "1 step of 1,024 tokens on cpu"),
        ({"step": 30}, r"10 steps \(30 of 40 are done\) of 1,024 tokens on cpu"),
        ({"step": 40}, r"0 steps \(40 of 40 are done\)"),
        ({"processes": 2, "mode": "new"}, "40 steps of 1,024 tokens on 2 x cpu, mode new"),
        (
            {"data": {"seq_len": 256, "curriculum": [{"until": 0.5, "seq_len": 64}]}},
            "40 steps of 256 to 1,024 tokens on",
        ),
    ],
)
def test_the_first_line_says_what_is_about_to_happen(changes, text):
    assert re.match(f"fine-tuning: {text}", announcement(training(**changes)))


def steps_said(caplog):
    found = (re.match(r"step (\d+) of \d+: loss", message) for message in caplog.messages)
    return [int(match.group(1)) for match in found if match]


def go(run, clock, seconds):
    log = RunLog(run)
    for step in range(run.position.step + 1, run.recipe.total_steps() + 1):
        clock.seconds += seconds
        run.position.step = step
        log.step(2.5, round(100 * seconds), seconds, 1 << 30)


@pytest.mark.parametrize(
    ("seconds", "changes", "said"),
    [
        (0.1, {}, [1, 40]),
        (10.0, {}, [1, *range(4, 41, 3)]),
        (10.0, {"log_every": 20}, [1, 20, 40]),
        (100.0, {"log_every": 10}, [1, 10, 20, 30, 40]),
        (100.0, {"step": 37}, [38, 39, 40]),
    ],
)
def test_lines_come_at_a_rate_that_can_be_read(clock, caplog, seconds, changes, said):
    caplog.set_level(logging.INFO, logger="palimpsa_surgery")
    go(training(**changes), clock, seconds)
    assert steps_said(caplog) == said


def test_a_line_says_how_far_and_how_long_still(clock, caplog):
    caplog.set_level(logging.INFO, logger="palimpsa_surgery")
    go(training(), clock, 10.0)
    assert "step 4 of 40: loss 2.5000, 100 tokens/s, 1.0 GiB, 6 min 0 s left" in caplog.messages


@pytest.mark.parametrize(("main", "bars", "lines"), [(False, False, 0), (True, True, 1), (True, False, 41)])
def test_other_processes_are_silent_and_a_bar_needs_no_lines(clock, caplog, monkeypatch, main, bars, lines):
    caplog.set_level(logging.INFO, logger="palimpsa_surgery")
    monkeypatch.setattr(run_log, "bars_are_drawn", lambda: bars)
    go(training(main=main), clock, 100.0)
    assert len(caplog.records) == lines


def test_a_real_run_is_announced_before_its_first_validation(model_folder, recipe, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(run_log, "bars_are_drawn", lambda: False)
    caplog.set_level(logging.INFO, logger="palimpsa_surgery")
    finetune(model_folder, recipe, tmp_path / "run")
    lines = caplog.messages
    announced = next(i for i, line in enumerate(lines) if line.startswith("fine-tuning: 4 steps of 96 tokens on cpu"))
    assert announced < next(i for i, line in enumerate(lines) if line.startswith("step 0: validation loss"))
    assert steps_said(caplog) == [1, 4]
