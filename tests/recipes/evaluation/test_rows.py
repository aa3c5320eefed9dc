"""eval.json: rows of two models with their differences, strict and without a path in it."""

import json

import numpy as np
import pytest
from palimpsa_surgery.base.console import table
from palimpsa_surgery.base.errors import EvaluationError, SchemaError
from palimpsa_surgery.recipes.evaluation.report import (
    EvalData,
    EvalReport,
    EvalSuite,
    EvaluatedModel,
    SeenText,
    read_report,
    write_report,
)
from palimpsa_surgery.recipes.evaluation.rows import compare
from palimpsa_surgery.recipes.evaluation.suites.suite import Measurement

NAMES = ("ours", "theirs")


def measurement(name="loss", samples=((20.0, 10.0), (31.0, 10.0)), **changes):
    return Measurement(name, "nats", np.array(samples), changes.pop("at", {"length": 8}), "lower", **changes)


def model(name):
    return EvaluatedModel(
        name=name, fingerprint="0" * 64, layout="mamba_ssm", parameters=7, dtype="float32", palimpsa_layers=[]
    )


def report(rows, against=True):
    return EvalReport(
        version="0",
        model=model("ours"),
        against=model("theirs") if against else None,
        data=EvalData(name="text.jsonl", tokens=20, tokenizer="ours"),
        device="cpu",
        suites={"loss": EvalSuite(rows=rows, notes=["short"]), "other": EvalSuite(rows=[], notes=["short", "odd"])},
    )


def test_a_difference_is_the_model_less_the_other():
    (row,) = compare("loss", [measurement()], [measurement(samples=((22.0, 10.0), (33.0, 10.0)))], NAMES)
    assert (row.model.value, row.against.value) == (2.55, 2.75)
    assert row.difference.value == pytest.approx(-0.2)
    assert row.difference.error == pytest.approx(0.0, abs=1e-12), "the same sequences are harder for both by the same"
    assert row.model.error > 0.1
    assert row.samples == 2


def test_one_model_has_no_differences():
    (row,) = compare("loss", [measurement()], None, NAMES)
    assert row.figures[1] is row.difference is None


def test_what_only_one_model_has_is_a_row_without_difference():
    rows = compare("x", [measurement("a")], [measurement("b"), measurement("a", at={"length": 9})], NAMES)
    assert [(r.name, r.at["length"]) for r in rows] == [("a", 8), ("b", 8), ("a", 9)]
    assert [(r.model is None, r.against is None) for r in rows] == [(False, True), (True, False), (True, False)]
    assert all(row.difference is None for row in rows)


def test_figures_that_come_with_their_own_errors_combine_them():
    one, other = (measurement(samples=((value, 1.0),), error=error) for value, error in ((0.5, 0.03), (0.4, 0.04)))
    (row,) = compare("lm_eval", [one], [other], NAMES)
    assert (row.model.error, row.against.error) == (0.03, 0.04)
    assert row.difference.error == pytest.approx(0.05)


def test_unpaired_samples_may_differ_in_number():
    fast = measurement(samples=((10.0, 1.0), (10.0, 1.1), (10.0, 0.9)), paired=False)
    (row,) = compare("speed", [fast], [measurement(samples=((10.0, 2.0), (10.0, 2.0)), paired=False)], NAMES)
    assert row.difference.value == pytest.approx(5.0)
    assert row.difference.error > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_names_model_and_suite(value):
    with pytest.raises(EvaluationError, match=r"theirs, suite needle: loss at \{'length': 8\} is (nan|inf)"):
        compare("needle", [measurement()], [measurement(samples=((value, 1.0),))], NAMES)


def test_the_table_leaves_details_out_and_shows_signs():
    rows = compare("loss", [measurement(), measurement("head", detail=True)], [measurement()], NAMES)
    lines = table(report(rows).table_rows(), report(rows).table_headers()).splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["suite", "measured", "at", "unit", "model", "+-", "against", "+-", "difference", "+-"]
    assert "length 8" in lines[2]
    assert "+0" in lines[2]
    alone = report(compare("loss", [measurement()], None, NAMES), against=False)
    assert len(alone.table_headers()) == len(alone.table_rows()[0]) == 6


def test_a_table_that_fills_screens_is_printed_in_short():
    made = [measurement(name, at={"length": length}) for name in ("loss", "recall") for length in range(1, 41)]
    found = report(compare("loss", made, None, NAMES), against=False)
    assert len(found.table_rows()) == 80
    printed = found.printed_rows()
    assert len(printed) == 40
    assert {row[1] for row in printed} == {"loss", "recall"}
    assert printed[-1] == found.table_rows()[-1]
    short = report(compare("loss", made[:40], None, NAMES), against=False)
    assert short.printed_rows() == short.table_rows()


def test_what_was_trained_on_is_the_first_note():
    found = report(compare("loss", [measurement()], None, NAMES))
    seen = SeenText(name="text.jsonl", documents=2, of=3)
    found = found.model_copy(update={"against": found.against.model_copy(update={"seen": seen})})
    sentence = "not held out: 2 of the 3 documents of the text are in text.jsonl, which theirs was trained on"
    assert found.notes == [sentence, "short", "odd"]


def test_a_row_is_found_by_name_and_place():
    found = report(compare("loss", [measurement()], None, NAMES))
    assert found.row("loss", "loss", length=8).model.value == 2.55
    with pytest.raises(KeyError, match="no row loss at"):
        found.row("loss", "loss", length=9)
    assert found.notes == ["short", "odd"]


def test_written_and_read_again(tmp_path):
    made = report(compare("loss", [measurement()], [measurement()], NAMES))
    write_report(made, tmp_path / "eval.json")
    assert read_report(tmp_path / "eval.json") == made
    assert str(tmp_path) not in (tmp_path / "eval.json").read_text()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema_version", 2, r"eval\.json:schema_version: is 2, newer than the 1"),
        ("schema_version", None, "schema_version: is missing"),
        ("modle", 1, r"eval\.json:modle: there is no such key; did you mean model\?"),
        ("device", None, r"eval\.json:device: is (None|missing)"),
        (
            "suites",
            {"loss": {"rows": [{"name": "loss", "unit": "nats", "samples": 3}]}},
            r"eval\.json:suites\.loss\.rows\.0: has neither `model` nor `against`",
        ),
    ],
)
def test_a_file_that_does_not_follow_the_schema_is_refused(tmp_path, key, value, message):
    content = {**report([]).model_dump(mode="json"), key: value}
    (tmp_path / "eval.json").write_text(json.dumps(content))
    with pytest.raises(SchemaError, match=message):
        read_report(tmp_path / "eval.json")
