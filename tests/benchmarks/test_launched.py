"""Commands that are watched: they end, fail, are late or are killed, and leave no process behind."""

import json
import sys
import time

import psutil
import pytest
from launched import LaunchError, run_command

CHILD = "import subprocess,sys,time; p=subprocess.Popen([sys.executable,'-c','import time; time.sleep(60)'],"
PARENT = f"{CHILD}start_new_session=True); open(sys.argv[1],'w').write(str(p.pid)); time.sleep(60)"


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_metrics_are_printed_as_they_come(tmp_path, capsys):
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text(json.dumps({"kind": "start", "step": 0}) + "\n")
    line = json.dumps({"kind": "train", "step": 1, "loss": 2.5})
    program = f"open({str(metrics)!r}, 'a').write({line + chr(10)!r} + 'half a li')"
    assert run_command([sys.executable, "-c", program], tmp_path / "log", timeout=30, metrics=metrics)
    assert capsys.readouterr().out == "  run: train step 1 loss 2.5\n"


def test_a_failure_ends_with_its_last_words(tmp_path):
    with pytest.raises(LaunchError, match=r"(?s)run.log: ended with 3.*the reason"):
        run_command([sys.executable, "-c", "print('the reason'); exit(3)"], tmp_path / "run.log", timeout=30)


@pytest.mark.parametrize("late", [True, False])
def test_processes_in_other_sessions_are_killed_too(tmp_path, late):
    pid = tmp_path / "pid"
    command, log = [sys.executable, "-c", PARENT, str(pid)], tmp_path / "run.log"
    if late:
        with pytest.raises(LaunchError, match="not done after 3 s"):
            run_command(command, log, timeout=3)
    else:
        assert run_command(command, log, timeout=60, kill_when=lambda: pid.exists() and pid.read_text()) is False
    deadline = time.monotonic() + 10
    while not gone(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)
