"""`evaluate` from folders to eval.json and pictures."""

import json
import shutil
import struct

import pytest
import torch
from palimpsa_surgery.base.errors import OutputError, OutputExistsError, UsageError
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.cli import app
from palimpsa_surgery.recipes.evaluation.evaluate import evaluate
from palimpsa_surgery.recipes.evaluation.report import read_report
from palimpsa_surgery.recipes.evaluation.suites.suite import SUITES
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from tiny import make_model, save_folder
from typer.testing import CliRunner

SMALL = {"lengths": (32, 48), "tokens": 400, "trials": 2}
FEW = {"pairs": (2,), "depths": (0.0, 1.0), "repeats": 2, "decode_tokens": 2, "chunk": 64}


@pytest.fixture(scope="module")
def source_folder(tmp_path_factory):
    return save_folder(make_model(layers=()), tmp_path_factory.mktemp("source") / "source")


@pytest.fixture(scope="module")
def written(model_folder, source_folder, tmp_path_factory):
    """Every suite on a converted model and a plain one."""
    out = tmp_path_factory.mktemp("out") / "eval.json"
    return evaluate(model_folder, source_folder, **SMALL, options=FEW, out=out), out


def test_every_suite_is_in_one_report(written, model_folder, source_folder):
    report, out = written
    assert read_report(out) == report
    assert set(report.suites) == set(SUITES)
    assert (report.model.name, report.against.name) == ("model", "source")
    assert report.model.palimpsa_layers == [1]
    assert report.model.fingerprint == open_checkpoint(model_folder).fingerprint
    assert report.data.name == "embedded:sqlite-docs"
    assert report.options["lengths"] == [32, 48]
    assert str(source_folder.parent) not in out.read_text()
    assert set(report.backends) == {"metaplastic scan", "mamba2 scan"}


def test_differences_are_there_where_both_models_have_the_figure(written):
    for suite, content in written[0].suites.items():
        for row in content.rows:
            assert row.model is not None
            assert (row.difference is None) == (suite == "importance")
    loss = written[0].row("loss", "loss", length=48)
    assert loss.difference.value == pytest.approx(loss.model.value - loss.against.value)
    assert 0 < loss.difference.error < loss.model.error + loss.against.error


def test_pictures_lie_beside_the_report(written):
    report, out = written
    for suite, content in report.suites.items():
        assert (content.plot is not None) == (suite in ("positions", "recall", "needle", "importance"))
        if content.plot:
            assert content.plot == f"eval-{suite}.png"
            data = (out.parent / content.plot).read_bytes()
            assert data.startswith(b"\x89PNG")
            width, height = struct.unpack(">II", data[16:24])
            assert min(width, height) > 300
    assert {path.name for path in out.parent.iterdir()} == {
        "eval.json",
        *(content.plot for content in report.suites.values() if content.plot),
    }


def test_a_model_does_not_differ_from_itself(model_folder):
    report = evaluate(model_folder, open_checkpoint(model_folder), suites=("loss", "recall"), **SMALL, options=FEW)
    for content in report.suites.values():
        assert all(row.difference.value == row.difference.error == 0 for row in content.rows)


def test_the_same_figures_twice(model_folder, text):
    first, second = (evaluate(model_folder, suites=("loss", "needle"), data=text, **SMALL) for _ in range(2))
    assert first == second
    assert first.data.name == "text.jsonl"


def test_the_dtype_is_that_of_the_weights(model_folder):
    exact = evaluate(model_folder, suites=("loss",), **SMALL, dtype="float64")
    usual = evaluate(model_folder, suites=("loss",), **SMALL)
    rough = evaluate(model_folder, suites=("loss",), **SMALL, dtype="bfloat16")
    assert [r.model.dtype for r in (exact, usual, rough)] == ["float64", "float32", "bfloat16"]
    losses = [r.row("loss", "loss", length=48).model.value for r in (exact, usual, rough)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] == pytest.approx(losses[0], abs=0.05)
    assert losses[2] != losses[1]


def test_one_model_is_in_memory_at_a_time(model_folder, source_folder, monkeypatch):
    import gc
    import weakref

    from palimpsa_surgery.recipes.evaluation import evaluate as evaluation

    alive = []

    def load(*arguments, **options):
        gc.collect()
        assert not [model for model in alive if model() is not None]
        model = original(*arguments, **options)
        alive.append(weakref.ref(model))
        return model

    original = evaluation.load_model
    monkeypatch.setattr(evaluation, "load_model", load)
    evaluate(model_folder, source_folder, suites=("loss",), **SMALL)
    assert len(alive) == 2


def test_a_tokenizer_of_one_model_serves_both(model_folder, tmp_path):
    bare = tmp_path / "bare"
    make_model(layers=()).save_pretrained(bare)
    report = evaluate(bare, model_folder, suites=("loss",), **SMALL)
    assert report.data.tokenizer == "model"
    named = evaluate(bare, suites=("loss",), **SMALL, tokenizer=embedded_checkpoint_path())
    assert named.row("loss", "loss", length=48).model == report.row("loss", "loss", length=48).model


def test_models_with_different_tokenizers_are_not_compared(model_folder, tmp_path):
    other = save_folder(make_model(), tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="model and other have different tokenizers"):
        evaluate(model_folder, other, suites=("loss",), **SMALL)


def test_an_output_that_exists_is_kept(model_folder, tmp_path):
    (tmp_path / "eval.json").write_text("mine")
    with pytest.raises(OutputExistsError, match="--force"):
        evaluate(model_folder, suites=("loss",), **SMALL, out=tmp_path / "eval.json")
    assert (tmp_path / "eval.json").read_text() == "mine"
    evaluate(model_folder, suites=("loss",), **SMALL, out=tmp_path / "eval.json", force=True)
    assert read_report(tmp_path / "eval.json").model.name == "model"


@pytest.mark.parametrize(
    ("out", "force"),
    [("model/config.json", True), ("other/tokenizer.json", True), ("text.json", True), ("eval.json", False)],
)
def test_neither_an_input_nor_a_picture_of_the_users_own_is_replaced(model_folder, tmp_path, out, force):
    for name in ("model", "other"):
        shutil.copytree(model_folder, tmp_path / name)
    (tmp_path / "text.json").write_text(json.dumps(["a text of some words"] * 9))
    (tmp_path / "eval-positions.png").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = {"suites": ("positions",), "data": tmp_path / "text.json", **SMALL}
    with pytest.raises(OutputExistsError, match=r"which is in use and is it|eval-positions\.png: is a file;"):
        evaluate(tmp_path / "model", tmp_path / "other", **given, out=tmp_path / out, force=force)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suites": ("loss", "speeed")}, "suite 'speeed' does not exist"),
        ({"suites": ()}, "no suite was asked for"),
        ({"options": {"pears": (2,)}}, "options: there is no pears; expected some of lengths"),
        ({"dtype": "int8"}, "--dtype int8: there is no such dtype; choose one of float32"),
        ({"lengths": (1,)}, "a sequence of 1 token predicts nothing"),
    ],
)
def test_requests_that_make_no_sense(model_folder, changes, message):
    with pytest.raises(UsageError, match=message):
        evaluate(model_folder, **{**SMALL, "suites": ("loss",), **changes})


def test_a_converted_model_with_importance_off_equals_its_source(tmp_path, source_folder):
    """The same weights as the source, a scale of zero and a prior of one."""
    model = make_model()
    plain = make_model(layers=())
    with torch.no_grad():
        own = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            if name in own:
                parameter.copy_(own[name])
            elif name.endswith(("beta_scale", "log_prior")):
                parameter.zero_()
    folder = save_folder(model, tmp_path / "converted")
    report = evaluate(folder, source_folder, suites=("loss", "positions", "recall"), **SMALL, options=FEW)
    for content in report.suites.values():
        assert all(abs(row.difference.value) < 1e-3 for row in content.rows)


@pytest.mark.parametrize("json_asked", [False, True])
def test_a_full_disk_costs_no_figures(json_asked, model_folder, tmp_path, monkeypatch):
    def full(report, path):
        raise OutputError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr("palimpsa_surgery.recipes.evaluation.evaluate.write_report", full)
    options = [
        "--suite",
        "loss",
        "--lengths",
        "32",
        "--tokens",
        "64",
        "-o",
        str(tmp_path / "e.json"),
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(app, ["evaluate", str(model_folder), *options, *(["--json"] if json_asked else [])])
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    if json_asked:
        assert json.loads(result.stdout)["suites"]["loss"]["rows"][0]["model"]["value"] > 0
    else:
        assert "nats" in result.stdout
        assert "wrote" not in result.stdout
