"""The benchmark of the training modes: what each run gets, and the table at the end."""

import json

import modes
import pytest
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.recipes.training.validation import LossResult


def test_each_mode_gets_the_common_changes_and_its_own():
    changes = ["lora:lr=1e-3", "steps=3", "data.train=c:/text.txt", "new+swapped:lr=2"]
    assert modes.overrides_for("lora", changes) == ["steps=3", "data.train=c:/text.txt", "lr=1e-3", "mode=lora"]
    assert modes.overrides_for("new", changes) == ["steps=3", "data.train=c:/text.txt", "mode=new"]


@pytest.mark.parametrize("change", ["lora:data.seq_len=8", "full:steps=9", "new:seed=1"])
def test_modes_that_could_not_be_compared_are_refused(change):
    with pytest.raises(UsageError, match="must be the same in all modes"):
        modes.overrides_for("full", [change])


def test_an_unknown_mode_is_refused():
    with pytest.raises(UsageError, match="no mode 'lore'; expected one of full, new"):
        modes.overrides_for("full", ["lore:lr=1"])


def test_a_row_leaves_the_step_that_compiles_out_of_the_speed():
    line = {"kind": "train", "memory_bytes": 1 << 20}
    lines = [{**line, "tokens": 8 * n, "tokens_per_second": speed} for n, speed in enumerate((1.0, 500.0, 700.0), 1)]
    start = LossResult(2.0, 0.1, 2, 20, 10, ((20.0, 10), (20.0, 10)))
    end = LossResult(1.9, 0.1, 2, 20, 10, ((19.0, 10), (19.0, 10)))
    row = modes.mode_row([{"kind": "start"}, *lines], start, end, 1_470_000)
    assert (row["tokens/s"], row["tokens"], row["trained parameters"]) == ("600", "24", "1.47 M")
    assert row["paired difference"] == "-0.1000 ± 0.0000"
    assert row["peak memory"] == "1.0 MiB"


def test_all_modes_are_run_and_compared_and_none_twice(tiny_folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    monkeypatch.setattr("palimpsa_surgery.modeling.bundle.bundle_remote_code", lambda folder, model_type: ())
    monkeypatch.setenv("PALIMPSA_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"row {n} of the table of rows " * 6}) + "\n" for n in range(12)))
    calls = []

    def directly(function, *arguments, **options):
        calls.append(arguments[-1].name)
        return function(*arguments, **options)

    monkeypatch.setattr(modes, "in_child", directly)
    arguments = [str(tiny_folder), "-o", str(tmp_path / "out"), "steps=2", "batch_size=2", "data.seq_len=16"]
    arguments += [f"data.train={text}", "eval_windows=2", "data.val_fraction=0.3"]
    modes.main(arguments)
    modes.run_mode(tiny_folder, None, tmp_path / "out" / "new")
    assert calls == list(modes.MODES)
    page = (tmp_path / "out" / "modes.md").read_text()
    assert [line.split(" | ")[0] for line in page.splitlines()[-4:]] == [f"| {mode}" for mode in modes.MODES]
    assert str(tmp_path) not in page
    assert all((tmp_path / "out" / name).stat().st_size > 10_000 for name in ("modes.png", "curves.png"))


def test_what_differs_is_drawn_less_the_reference(tmp_path, monkeypatch):
    import plot_runs

    for name, losses in {"a": (3.0, 2.0), "b": (2.5, 1.75)}.items():
        lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        lines += [{"kind": "validation", "step": step, "loss": 4.0 - step, "stderr": 0.5} for step in (0, 2)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = []
    monkeypatch.setattr(plot_runs, "_finish", lambda figure, *_: figures.append(figure))
    plot_runs.draw_changes([tmp_path / "a", tmp_path / "b"], "a", tmp_path / "out.png", "", {"b": 0.1})
    left, right = figures[0].axes
    assert [list(line.get_ydata()) for line in left.get_lines()] == [[0, 0], plot_runs.smoothed([-0.5, -0.25])]
    assert list(right.get_lines()[0].get_ydata()) == [0.0, -2.0]
