"""The checks of the kernels: they pass here at toy size, and fail when something is wrong."""

import os

import gpu_checks
import pytest
import torch
from palimpsa_surgery.kernels.metaplastic import scan as api


@pytest.fixture(autouse=True)
def smaller(monkeypatch):
    monkeypatch.setitem(gpu_checks.TOY, "runs", {"full": [{"layer": "toy", "B": 2, "T": 37}]})


def test_every_layer_is_checked_and_the_reference_first():
    layers, runs = gpu_checks.shapes_of(toy=False)
    assert (runs[0]["layer"], runs[0]["B"], runs[0]["T"]) == ("2.7b", 4, 4096)
    assert {run["layer"] for run in runs} == layers.keys()
    assert len({(run["layer"], run.get("g")) for run in runs}) == len(runs)


@pytest.mark.parametrize(("error", "ok"), [(0.5, "yes"), (2.0, "NO"), (float("nan"), "NO")])
def test_a_figure_that_is_not_a_number_keeps_no_limit(error, ok):
    assert gpu_checks.verdict({"a": error}, {"a": 1.0})["ok"] == ok


def test_fp32_inputs_pass_and_rounded_ones_do_not(monkeypatch):
    (row,) = gpu_checks.check_fp32(True, "cpu", "torch")
    assert row["ok"] == "yes"
    assert all(f"d{name} " in row["found"] for name in ("q", "k", "v", "beta", "log_decay", "prior"))
    scan = api.metaplastic_scan

    def rounded(q, *rest, backend):
        return scan(q.bfloat16().float() if backend == "torch" else q, *rest, backend=backend)

    monkeypatch.setattr(api, "metaplastic_scan", rounded)
    (row,) = gpu_checks.check_fp32(True, "cpu", "torch")
    assert row["ok"] == "NO"


def test_a_lost_state_is_seen(monkeypatch):
    (row,) = gpu_checks.check_long(True, "cpu", "torch")
    assert row["ok"] == "yes"
    scan = api.metaplastic_scan
    monkeypatch.setattr(api, "metaplastic_scan", lambda *inputs, initial_state, backend: scan(*inputs, backend=backend))
    (row,) = gpu_checks.check_long(True, "cpu", "torch")
    assert row["ok"] == "NO"


@pytest.mark.parametrize(("ours", "ok"), [(1.7, "yes"), (1.9, "NO")])
def test_one_beta_is_held_against_the_plain_scan_of_the_same_run(monkeypatch, ours, ok):
    rows = [("forward", 1.0, None, ""), ("forward+backward", ours, 0.0, ""), ("ssd forward", 1.0, None, "")]
    monkeypatch.setattr(gpu_checks, "scan_rows", lambda *_: [*rows, ("ssd forward+backward", 1.0, None, "torch")])
    (row,) = gpu_checks.check_one_beta(True, "cpu", "auto")
    assert (row["ok"], row["note"]) == (ok, "forward 1.00 against 1.00 ms torch")
    monkeypatch.setattr(gpu_checks, "scan_rows", lambda *_: [*rows[:2], ("ssd", None, None, "not installed")])
    (row,) = gpu_checks.check_one_beta(True, "cpu", "auto")
    assert (row["ok"], row["note"]) == ("not compared", "not installed")


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 12 errors", 12),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)", 3),
        ("Device not supported", None),
    ],
)
def test_summaries_of_the_sanitizer(text, errors):
    assert gpu_checks.sanitizer_errors(text) == errors


def without_small_run(run):
    """subprocess.run, but for the plain small run before the tools: it takes seconds."""
    return lambda command, **options: None if "--small-run" in command[:3] else run(command, **options)


def test_the_sanitizer_runs_where_it_is_and_is_named_where_it_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert {row["ok"] for row in gpu_checks.check_sanitizer(True, "cpu", "auto")} == {"not run"}
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        '#!/bin/sh\ncase "$2" in memcheck) echo "21 of 22 kernels a_kernel"; echo "ERROR SUMMARY: 0 errors";;\n'
        'racecheck) echo "========= Race between Write access at b_kernel+0x9 in b.py"\n'
        'echo "RACECHECK SUMMARY: 2 hazards displayed";;\n'
        '*) echo "not supported";; esac\n'
    )
    monkeypatch.setattr(gpu_checks.subprocess, "run", without_small_run(gpu_checks.subprocess.run))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    rows = list(gpu_checks.check_sanitizer(True, "cpu", "auto"))
    assert [row["ok"] for row in rows] == ["yes", "NO", "not run", "not run"]
    assert rows[0]["note"].startswith("21 of 22 kernels a_kernel; ")
    assert rows[2]["note"] == "not supported"
    assert capsys.readouterr().out == "========= Race between Write access at b_kernel+0x9 in b.py\n"
    assert rows[1]["note"].endswith("; at b_kernel 1")


def test_a_check_that_breaks_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    def broken(*arguments):
        raise torch.OutOfMemoryError("too little memory")
        yield

    monkeypatch.setitem(gpu_checks.CHECKS, "long", broken)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        gpu_checks.main(["--toy", "-o", str(tmp_path / "found"), "--only", "long,sanitizer"])
    assert stop.value.code == 1
    page = (tmp_path / "found.md").read_text()
    assert "| long |  |  |  | failed | OutOfMemoryError: too little memory |" in page
    assert page.count("not on the PATH") == len(gpu_checks.SANITIZER_TOOLS)


def test_every_kernel_is_looked_for_and_none_has_run_here():
    pytest.importorskip("triton.experimental.gluon")
    kernels = gpu_checks.launched()
    assert {"gluon_backward.inside_loop_kernel", "triton_scaling.scale_kernel", "triton_step.step_kernel"} <= set(
        kernels
    )
    assert not any(kernels.values())


def test_unknown_checks_are_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_checks.parse(["--only", "speed"])
    assert "there is no check speed" in capsys.readouterr().err


def test_the_run_for_the_sanitizer_runs_without_a_gpu():
    gpu_checks.small_run("cpu")
