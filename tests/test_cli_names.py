"""Names of outputs, rules and repositories that make no sense are refused before anything is read or written."""

import shutil
from pathlib import Path

import pytest
from palimpsa_surgery import cli
from palimpsa_surgery.base.text import embedded_checkpoint_path
from typer.testing import CliRunner

SOURCE = str(embedded_checkpoint_path())
LIST = ["--layers", "1,"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure", SOURCE, "-o", "p.png"], "p.png: is no name for this output; expected a file that ends in .json"),
        (["measure", SOURCE, "-o", "p"], "such as p.json"),
        (["measure", SOURCE, "-o", "nodir/"], "nodir/: is a folder; expected a file that ends in .json"),
        (["measure", SOURCE, "-o", ".", "--force"], ".: is a folder; expected a file"),
        (["evaluate", SOURCE, "-o", "eval.png"], "eval.png: is no name for this output"),
        (["evaluate", SOURCE, "-o", "nodir/"], "nodir/: is a folder"),
        (["plan", SOURCE, *LIST, "-o", "plan.json"], "expected a file that ends in .yaml or .yml, such as plan.yaml"),
        (["plan", SOURCE, *LIST, "-o", "nodir/"], "nodir/: is a folder"),
        (["plan", SOURCE, *LIST, "--rule", "bogus"], "--rule bogus: there is no such rule; choose one of window"),
        (["plan", SOURCE, *LIST, "--rule", "windw"], "--rule windw: there is no such rule; did you mean window?"),
        (["convert", SOURCE, "out", *LIST, "--rule", "windw"], "did you mean window?"),
        (["plan", SOURCE, "--layers", "9" * 5000], "--layers 999999999999...: has a number of 5,000 digits"),
        (["plan", SOURCE, "--layers", "1," + "9" * 5000], "--layers 1,9999999999...: has a number of 5,000 digits"),
        (["push", SOURCE, "bad name!", "--to-folder", "up"], "bad name!: is no name of a repository, expected owner/"),
        (["push", SOURCE, "bad name!"], "bad name!: is no name of a repository, expected owner/name"),
        (["push", SOURCE, "a/b/c", "--to-folder", "up"], "a/b/c: is no name of a repository"),
    ],
)
def test_a_name_that_makes_no_sense_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, arguments, message):
    def refuse(*arguments, **options):
        raise AssertionError("a model was run")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("palimpsa_surgery.surgery.measure.forgetting.measure", refuse)
    monkeypatch.setattr("palimpsa_surgery.recipes.evaluation.evaluate.load_model", refuse)
    result = CliRunner().invoke(cli.app, [*arguments, "-q"])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure", "model", "-o", "model/config.json", "--force"], "would delete config.json, which is in use"),
        (["measure", "model", "-o", "text.json", "--data", "text.json", "--force"], "would delete text.json, which"),
        (["measure", "model", "-o", "p.json"], "p.png: is a file; choose another output, or give --force"),
        (["plan", "model", "--profile", "p.yaml", "-o", "p.yaml", "--force"], "would delete p.yaml, which is in use"),
    ],
)
def test_a_stage_does_not_replace_what_it_reads(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SOURCE, "model")
    for name in ("text.json", "p.yaml", "p.png"):
        Path(name).write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = CliRunner().invoke(cli.app, [*arguments, "-q"])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
