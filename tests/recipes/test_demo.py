"""The demo in small: every stage runs, the files are there, the commands are ones that the command line takes."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from palimpsa_surgery.base.errors import OutputExistsError
from palimpsa_surgery.recipes import demo as module
from palimpsa_surgery.recipes import demo_plots
from palimpsa_surgery.recipes.demo import DemoOptions, demo_commands, run_demo
from palimpsa_surgery.recipes.training.metrics import read_metrics

SMALL = DemoOptions(layers=2, tokens=512, seq_len=64, steps=2, batch_size=1, loss_tokens=256, new_tokens=3)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp("demo") / "out", options=SMALL)


def test_every_stage_leaves_its_files(demo):
    for name in (
        "profile.json",
        "profile.png",
        "plan.yaml",
        "report.md",
        "losses.png",
        "importance.png",
        "run/metrics.jsonl",
    ):
        assert (demo.folder / name).is_file(), name
    for model in ("converted", "run/final"):
        assert (demo.folder / model / "model.safetensors").is_file()
    assert set(demo.seconds) == {"measure", "convert", "finetune", "evaluate", "generate"}


def test_surgery_changes_nothing_and_fine_tuning_something(demo):
    source, converted, tuned = (demo.losses[name].loss for name in ("source", "converted", "tuned"))
    assert converted == pytest.approx(source, abs=1e-4)
    assert tuned != pytest.approx(source, abs=1e-6)
    assert [row[0] for row in demo.rows()] == ["source", "converted", "tuned"]


def test_the_pictures_show_the_source_the_steps_and_every_head(demo, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(demo_plots, "_save", lambda figure, path: drawn.append(figure))
    history = read_metrics(demo.folder / "run" / "metrics.jsonl")
    demo_plots.plot_losses(history, {"converted": demo.gain("converted"), "tuned": demo.gain("tuned")}, tmp_path)
    demo_plots.plot_importance(history, demo.head_ratios, tmp_path)
    (source, tuned), (importance, grid) = drawn[0].axes[0].lines, drawn[1].axes[:2]
    assert list(tuned.get_xdata()) == [0, 1, 2]
    assert set(source.get_ydata()) == {tuned.get_ydata()[0]}
    assert [line.get_label() for line in importance.lines] == [f"layer {layer}" for layer in demo.layers]
    assert grid.images[0].get_array().shape == (2, 8)


def test_held_out_documents_are_no_training_text(demo):
    train = set((demo.folder / "text" / "train.jsonl").read_text().splitlines())
    held_out = set((demo.folder / "text" / "held-out.jsonl").read_text().splitlines())
    assert held_out
    assert not train & held_out


def test_a_difference_that_rounds_to_nothing_has_no_minus(demo):
    source = demo.losses["source"]
    near = replace(source, per_sequence=tuple((total - 1e-6, count) for total, count in source.per_sequence))
    rows = replace(demo, losses={"source": source, "converted": near}).rows()
    assert rows[1][2] == "+0.0000 ± 0.0000"


def test_the_report_shows_losses_texts_and_commands(demo):
    report = (demo.folder / "report.md").read_text()
    assert all(command in report for command in demo.commands)
    assert "![losses](losses.png)" in report
    assert "![importance](importance.png)" in report
    assert "The CREATE TABLE statement" in report
    assert f"Layers {', '.join(map(str, demo.layers))} " in report


def test_each_command_is_one_that_the_command_line_parses(tmp_path):
    import typer
    from palimpsa_surgery.cli import app

    group = typer.main.get_command(app)
    for command in demo_commands(tmp_path / "with space", DemoOptions()):
        program, verb, *rest = shlex.split(command)
        assert program == "palimpsa"
        context = group.commands[verb].make_context(verb, list(rest))
        assert any("with space" in str(value) for value in context.params.values()), command


def test_the_folder_is_refused_when_it_holds_something(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="--force"):
        run_demo(tmp_path, options=SMALL)
    assert Path(tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["plan.yaml", "profile.json", "text/train.jsonl", "report.md"])
def test_force_does_not_replace_what_no_demo_has_written(tmp_path, name):
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("mine")
    with pytest.raises(OutputExistsError, match=f"holds {name.split('/')[0]}, which no demo has written"):
        run_demo(tmp_path, options=SMALL, force=True)
    assert own.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_force_replaces_what_an_interrupted_demo_has_left(tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "measure", stop)
        run_demo(tmp_path, options=SMALL)
    assert (tmp_path / "text").is_dir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "convert", stop)
        run_demo(tmp_path, options=SMALL, force=True)
    assert (tmp_path / "plan.yaml").is_file()
