"""The script on hybrids, in its small forms."""

import csv

import pytest
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts

hybrids = pytest.importorskip("hybrids")

FP32 = 1e-5  # relative L2 of logits
BF16 = 2e-3  # nats of a loss of 4.9, products in bf16
FRESH = "granitemoehybrid, experts"
"""The branch that a new process loads; tests/modeling/hybrids/test_fresh_process.py has one of every kind."""


def rows_of(path):
    with path.with_suffix(".csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("branch", [one for one in hybrids.BRANCHES if one.partition(",")[0] in known_hosts()])
def test_a_hybrid_is_its_host_at_the_identity_start(tmp_path, monkeypatch, branch):
    if branch != FRESH:
        monkeypatch.setattr(hybrids, "in_new_process", lambda model, ids, folder: model(ids).logits)
    hybrids.main(["errors", "--branches", branch, "--out", str(tmp_path / "errors")])
    (row,) = rows_of(tmp_path / "errors")
    assert row["host"] == branch
    assert row["transformers"]
    for column in ("prefill", "left-padded", "generation", "fresh process"):
        assert float(row[column]) < FP32, column
    assert f"| {branch} |" in (tmp_path / "errors.md").read_text()


@pytest.mark.parametrize("shape", hybrids.SHAPES)
def test_a_step_with_mixers_swapped_begins_at_the_loss_without(tmp_path, shape):
    small = ["--tiny", "--length", "24", "--warmup", "0", "--steps", "1"]
    hybrids.main(["step", "--shapes", shape, *small, "--out", str(tmp_path / "step")])
    rows = rows_of(tmp_path / "step")
    host, before, swapped, after = rows
    assert [row["swapped"] for row in rows] == ["0", "0", "4", "0"]
    assert [row["plain_on"] for row in rows] == ["transformers, torch", *["torch"] * 3]
    assert abs(float(host["loss"]) - float(before["loss"])) < BF16
    assert before["loss"] == after["loss"]
    assert abs(float(swapped["loss"]) - float(before["loss"])) < BF16
    assert swapped["swapped_on"]
    assert not before["swapped_on"]
