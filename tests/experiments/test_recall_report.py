"""The tables of the recall experiments, from runs written by hand whose figures are known."""

import csv
import math

import pytest
from recall_report import best_lr, best_runs, over_seeds, report, steps_to

ARMS = ("mamba2", "palimpsa")


def run_of(arm, lr, seed, validation, test, ratio=None):
    layer = {"ratio": ratio, "mean": 2.0, "head_ratio": [ratio, 3.0], "head_mean": [1.5, 2.5]}
    importance = {} if ratio is None else {"0": layer}
    records = [
        {"step": 0, "train_loss": None, "validation": {"8/2": {"accuracy": 0.1}}, "importance": importance},
        {"step": 50, "train_loss": 1.0, "validation": {"8/2": {"accuracy": validation}}, "importance": importance},
    ]
    return {
        "arm": arm,
        "lr": lr,
        "seed": seed,
        "training_seconds": 2.0,
        "records": records,
        "windows": {"before": {"0": [5.0, 6.0]}, "after": {"0": [50.0, 60.0]}},
        "test": {"8/2": {"accuracy": test, "error": 0.01}, "16/4": {"accuracy": test / 2, "error": None}},
    }


RUNS = [
    *(run_of("mamba2", 0.01, seed, 0.5, 0.2 + 0.2 * seed) for seed in (0, 1)),
    *(run_of("mamba2", 0.001, seed, 0.3, 0.9) for seed in (0, 1)),
    *(run_of("palimpsa", 0.01, seed, 0.2, 0.9, ratio=4.0) for seed in (0, 1)),
    *(run_of("palimpsa", 0.001, seed, 0.6, 0.5 + 0.2 * seed, ratio=2.0) for seed in (0, 1)),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    report("mqar", ARMS, RUNS, folder)
    return folder


def cells(page, start):
    """The cells of the first row of the page that begins so."""
    lines = (page / "mqar.md").read_text().splitlines()
    return [cell.strip() for cell in next(line for line in lines if line.startswith(start)).strip("|").split("|")]


def test_the_learning_rate_is_chosen_by_validation_and_not_by_the_test():
    assert [best_lr([run for run in RUNS if run["arm"] == arm]) for arm in ARMS] == [0.01, 0.001]
    assert [(run["lr"], run["seed"]) for run in best_runs(RUNS, "palimpsa")] == [(0.001, 0), (0.001, 1)]


def test_seeds_that_only_the_chosen_rate_has_do_not_change_the_choice():
    unlucky = run_of("mamba2", 0.01, 2, 0.0, 0.0)
    assert best_lr([*(run for run in RUNS if run["arm"] == "mamba2"), unlucky]) == 0.01


def test_errors_are_standard_errors_of_the_mean():
    figure = over_seeds([0.1, 0.2, 0.6])
    assert figure.value == pytest.approx(0.3)
    assert figure.error == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2 / 3))
    assert over_seeds([0.4]) == (0.4, None)


def test_the_difference_is_taken_at_equal_seeds(page):
    # 0.2 and 0.4 against 0.5 and 0.7: the seeds differ by 0.1 (standard error), the difference not at all.
    assert cells(page, "| 8 | 2") == ["8", "2", "50.0", "30.0 ± 10.0", "60.0 ± 10.0", "+30.0 ± 0.0"]
    assert cells(page, "| mean")[3:] == ["22.5 ± 7.5", "45.0 ± 7.5", "+22.5 ± 0.0"]


def test_every_learning_rate_is_in_the_table(page):
    never = ["2", "10.0 ± 0.0", "30.0 ± 0.0", "67.5 ± 0.0", "never", "40", ""]
    assert cells(page, "| mamba2 | 0.001")[2:] == never
    # 0.1 at the start and 0.6 after 50 steps: 0.5 after 40.
    assert cells(page, "| palimpsa | 0.001")[-3:] == ["40 ± 0", "40", "chosen"]


def test_the_step_of_half_the_accuracy_is_interpolated():
    assert steps_to(run_of("a", 0.1, 0, 0.6, 0.0), 0.35) == pytest.approx(25)
    assert steps_to(run_of("a", 0.1, 0, 0.5, 0.0), 0.5) == pytest.approx(50)
    assert steps_to(run_of("a", 0.1, 0, 0.4, 0.0), 0.5) is None
    assert steps_to(run_of("a", 0.1, 0, 0.05, 0.0), 0.1) == 0  # there from the start


def test_runs_that_never_reach_half_are_counted(tmp_path):
    runs = [run_of("mamba2", 0.01, seed, accuracy, 0.5) for seed, accuracy in enumerate((0.9, 0.6, 0.3))]
    report("mqar", ARMS, runs, tmp_path)
    assert cells(tmp_path, "| mamba2 | 0.01")[-3] == "32 ± 8 (2 of 3)"


def test_heads_are_listed_with_windows_and_importance(page):
    assert cells(page, "| palimpsa | 0 | 1 |") == ["palimpsa", "0", "1", "6", "60", "3.00", "2.50"]
    assert cells(page, "| mamba2 | 0 | 0 |") == ["mamba2", "0", "0", "5", "50", "", ""]


def test_the_csv_has_a_row_for_each_run_and_task(page):
    with (page / "mqar.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 2 * len(RUNS)
    row = next(r for r in rows if (r["arm"], r["lr"], r["seed"], r["pairs"]) == ("mamba2", "0.01", "1", "4"))
    assert float(row["accuracy"]) == pytest.approx(0.2)


def test_a_third_arm_is_compared_with_the_control_and_left_out_of_the_plots(tmp_path):
    report("mqar", (*ARMS, "other"), [*RUNS, run_of("other", 0.01, 1, 0.5, 0.9)], tmp_path)
    assert cells(tmp_path, "| 8 | 2")[3:] == ["30.0 ± 10.0", "60.0 ± 10.0", "90.0", "+30.0 ± 0.0", "+50.0"]
    assert (tmp_path / "mqar-accuracy.png").is_file()


def test_one_arm_alone_is_reported_without_differences(tmp_path):
    report("mqar", ARMS, [run for run in RUNS if run["arm"] == "mamba2"], tmp_path)
    assert cells(tmp_path, "| 8 | 2")[3:] == ["30.0 ± 10.0"]
    assert not (tmp_path / "mqar-importance.png").exists()


def test_runs_that_were_cut_are_listed_and_counted_nowhere(page, tmp_path):
    cut = {key: value for key, value in run_of("mamba2", 0.5, 3, 0.9, 0.9).items() if key != "test"}
    report("mqar", ARMS, RUNS, tmp_path, [cut])
    before, after = (folder.joinpath("mqar.md").read_text() for folder in (page, tmp_path))
    assert after.startswith(before.rstrip())
    assert cells(tmp_path, "| mamba2 | 0.5")[2:] == ["3", "50", "90.0"]


def test_the_time_of_a_step_leaves_out_the_first_record_where_files_tell(page, tmp_path):
    assert cells(page, "| mamba2 | 0.01 ")[-2] == "40"
    run = run_of("mamba2", 0.01, 0, 0.5, 0.2)
    timed = [{**run["records"][1], "step": step, "seconds": seconds} for step, seconds in ((0, 0), (50, 90), (150, 93))]
    report("mqar", ARMS, [{**run, "records": timed}], tmp_path)
    assert cells(tmp_path, "| mamba2 | 0.01 ")[-2] == "30"
