"""Statistics, tables and pictures of the experiment on language, on made-up results whose answers are known."""

import numpy as np
import pytest
from language_arms import CONTROL, MAIN, SOURCE
from language_board import Board
from language_report import markdown, report, shown
from language_results import (
    ArmResult,
    Gate,
    Row,
    best_rates,
    change,
    change_over_seeds,
    loss,
    losses,
    probe,
    read_results,
    swept,
    to_row,
)
from palimpsa_surgery.base.errors import DataError
from palimpsa_surgery.base.schemas import write_model
from palimpsa_surgery.base.statistics import Figure
from palimpsa_surgery.recipes.evaluation.suites.suite import Measurement

WINDOWS = 6
BUCKETS = ((1, 15), (16, 31), (32, 63))
HARDNESS = np.linspace(2.0, 4.0, WINDOWS)
"""Loss of each window: far wider than what the arms differ by."""


def bucket(value, low, high, suite="positions"):
    width = high - low + 1
    return Row(
        suite=suite, name="loss", at={"from": low, "to": high}, sums=list((HARDNESS + value) * width), weight=width
    )


def result(variant, lr=1e-3, seed=0, *, offset=0.0, dev=3.0, layers=(1,), **changes):
    """An arm whose loss is that of the window plus `offset`, twice that beyond 31 tokens."""
    rows = [bucket(offset if low < 32 else 2 * offset, low, high) for low, high in BUCKETS]
    hits = [float(i % 2) for i in range(4)]
    rows.append(Row(suite="recall", name="accuracy", at={"pairs": 2, "distance": 0}, sums=hits, weight=2, chance=0.5))
    rows.append(Row(suite="needle", name="key loss", at={"length": 64, "depth": 0.5}, sums=[9.0, 7.0], weight=4))
    operated = variant not in (CONTROL, SOURCE)
    values = {
        "arm": SOURCE if variant == SOURCE else f"{variant}-lr{lr:g}-s{seed}",
        "variant": variant,
        "lr": lr,
        "lr_new": 1e-2,
        "seed": seed,
        "seq_len": 32,
        "steps": 2,
        "tokens": 64,
        "train_seconds": 2.0,
        "tokens_per_second": 40.0,
        "seconds": 3.0,
        "preset": "cpu",
        "version": "0",
        "device": "cpu",
        "source": "pico",
        "train": "train.jsonl",
        "held_out": "val.jsonl",
        "dev": [] if variant == SOURCE else [(0, 3.5, 0.1), (2, dev, 0.1)],
        "windows": [[4.0, 8.0], [16.0, 2.0]],
        "rates": [[0.1, 0.2], [0.3, 0.4]],
        "rows": rows,
    }
    if operated:
        at = {str(layer): {"ratio": 1.5, "mean": 1.1, "head_spread": 1.2} for layer in layers}
        values |= {
            "palimpsa_layers": list(layers),
            "importance": [{"step": 1, "layers": at}, {"step": 2, "layers": at}],
            "gates": {layer: Gate(scale=[0.1, 0.2], prior=[0.9, 1.0]) for layer in layers},
        }
        values["rows"] = [*rows, *(bucket(offset + 0.5, low, high, "off") for low, high in BUCKETS)]
    return ArmResult(**{**values, **changes})


def experiment():
    arms = [
        result(SOURCE, 0.0, offset=0.3),
        result(CONTROL, 1e-3, dev=2.9),
        result(CONTROL, 3e-4, dev=3.1, offset=0.05),
        result(MAIN, 1e-3, dev=3.2, offset=0.04),
        result(MAIN, 3e-4, dev=2.8, offset=-0.01),
        result(CONTROL, 1e-3, 1),
        result(MAIN, 3e-4, 1, offset=-0.03),
        result("all", 3e-4, offset=0.02, layers=(0, 1)),
    ]
    return {arm.arm: arm for arm in arms}


@pytest.fixture
def board():
    return Board(experiment())


def test_each_arm_takes_the_rate_that_the_choosing_text_prefers(board):
    assert board.best == best_rates(board.results) == {CONTROL: 1e-3, MAIN: 3e-4}
    assert [found.lr for found in swept(board.results, MAIN)] == [3e-4, 1e-3]
    assert board.control.lr == 1e-3
    assert board.get(MAIN).lr == 3e-4
    assert board.get(MAIN, 7) is None
    assert [arm.variant for arm in board.operated] == [MAIN, "all"]
    assert [(one.seed, other.seed) for one, other in board.pairs] == [(0, 0), (1, 1)]


def test_no_rate_is_chosen_without_the_runs_that_choose_it():
    only = {name: arm for name, arm in experiment().items() if arm.variant == CONTROL}
    with pytest.raises(DataError, match="window: has no result, so no learning rate can be chosen"):
        best_rates(only)


def test_losses_are_summed_over_whole_buckets():
    arm = result(CONTROL, offset=0.5)
    assert losses(arm)[:, 1].tolist() == [63] * WINDOWS
    assert losses(arm, 32)[:, 1].tolist() == [32] * WINDOWS
    assert losses(arm, 0, 32)[:, 1].tolist() == [31] * WINDOWS
    assert loss(arm, 0, 32).value == pytest.approx(HARDNESS.mean() + 0.5)
    assert loss(arm, 32).value == pytest.approx(HARDNESS.mean() + 1.0)
    with pytest.raises(DataError, match="has no loss of suite positions from 64"):
        losses(arm, 64)


def test_what_makes_a_window_hard_cancels_in_a_difference():
    one, other = result(MAIN, offset=-0.01), result(CONTROL)
    found = change(one, other, 0, 32)
    assert found.value == pytest.approx(-0.01)
    assert found.error == pytest.approx(0.0, abs=1e-12)
    assert loss(one).error > 0.1


def test_the_error_over_seeds_is_that_of_the_mean_of_the_seeds():
    pairs = [(result(MAIN, seed=s, offset=o), result(CONTROL, seed=s)) for s, o in enumerate((-0.01, -0.03, 0.01))]
    mean, over_seeds = change_over_seeds(pairs, 0, 32)
    assert mean.value == pytest.approx(-0.01)
    assert mean.error == pytest.approx(0.0, abs=1e-12), "every window says the same here"
    assert over_seeds == pytest.approx(0.02 / np.sqrt(3))
    assert change_over_seeds(pairs[:1], 0, 32)[1] is None


def test_a_probe_is_summed_over_the_arms_that_have_it():
    arms = [result(MAIN), result(MAIN, seed=1)]
    at = {"pairs": 2, "distance": 0}
    assert probe(arms, "recall", "accuracy", at).tolist() == [[0, 4], [2, 4], [0, 4], [2, 4]]
    with pytest.raises(DataError, match=r"no recall accuracy at .*distance.: 9"):
        probe(arms, "recall", "accuracy", {"pairs": 2, "distance": 9})


def test_a_measurement_becomes_a_row_and_comes_back():
    samples = np.array([[1.0, 4], [2.123456789123, 4]])
    row = to_row("recall", Measurement("accuracy", "fraction", samples, {"pairs": 4}, "higher", 0.25))
    assert np.allclose(row.samples, samples, rtol=1e-8, atol=0)
    assert row.value == pytest.approx(3.123456789123 / 8)
    assert row.chance == 0.25
    samples[1, 1] = 5
    with pytest.raises(DataError, match="samples of unequal weight"):
        to_row("recall", Measurement("accuracy", "fraction", samples))


def test_results_are_files_that_read_back(tmp_path):
    for name, arm in experiment().items():
        write_model(arm, tmp_path / f"{name}.json")
    assert read_results(tmp_path) == experiment()
    with pytest.raises(DataError, match="holds no result; run the experiment first"):
        read_results(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("figure", "text"),
    [(Figure(0.01234, 0.00056), "+0.01234 ± 0.00056"), (Figure(-1.0, None), "-1.00000"), (None, "-")],
)
def test_figures_are_shown_with_sign_and_error(figure, text):
    assert shown(figure) == text


def test_a_table_in_markdown():
    assert markdown(("a", "b"), [(1, "x")]) == "| a | b |\n| --- | --- |\n| 1 | x |"


@pytest.fixture
def page(tmp_path):
    for name, arm in experiment().items():
        write_model(arm, tmp_path / "raw" / f"{name}.json")
    return report(tmp_path)


def test_the_report_says_what_the_results_say(page):
    text = page.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert [MAIN, "0.0003", "3.5000", "2.8000", "chosen"] in rows
    assert [CONTROL, "0.0003", "3.5000", "3.1000", ""] in rows
    over_seeds = next(row for row in rows if row[0] == "error over seeds")
    assert over_seeds[4] == "0.01000", "offsets of -0.01 and -0.03 within the training length"
    everything = next(row for row in rows if row[0] == "all" and row[1] == "0 1")
    assert everything[5:7] == ["+0.02000 ± 0.00000", "+0.04000 ± 0.00000"]
    assert everything[7].startswith("+0.4"), "what switching off changes"
    assert any(row[:3] == ["needle", "key loss", "length 64, depth 0.5"] for row in rows)


def test_the_report_draws_its_pictures(page):
    for name in ("arms", "positions", "importance", "windows"):
        assert (page.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name


def test_a_report_of_the_pair_with_one_seed_and_no_source_is_made_too(tmp_path):
    for arm in (result(CONTROL), result(MAIN, offset=0.01)):
        write_model(arm, tmp_path / "raw" / f"{arm.arm}.json")
    text = report(tmp_path).read_text(encoding="utf-8")
    assert "| error over seeds |  |  | - | - | - |" in text
