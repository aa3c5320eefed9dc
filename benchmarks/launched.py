"""A command in processes of its own, watched: its metrics are printed as they come; it ends in time or is killed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

# Multicast over NVLink can put GPUs that others share out of service when a process dies in it, and some die here.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}
POLL_SECONDS = 0.05


class LaunchError(Exception):
    """The command failed, or did not end in time; the message ends with its last words."""


def run_command(
    command: Sequence[str],
    log: Path,
    *,
    timeout: float,
    metrics: Path | None = None,
    kill_when: Callable[[], bool] | None = None,
    environment: Mapping[str, str] | None = None,
) -> bool:
    """Runs `command` until it ends, its time is over, or `kill_when` says so.

    Args:
        command: to run; what it prints goes to `log`.
        log: a file.
        timeout: seconds after which all its processes are killed.
        metrics: a `metrics.jsonl` that it writes; lines that are new are printed in short.
        kill_when: asked again and again; once true, all processes of the command are killed without warning.
        environment: besides that of this process.

    Returns:
        Whether the command ended by itself; False when `kill_when` ended it.

    Raises:
        LaunchError: it failed, or its time is over.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    seen = len(_lines(metrics))
    deadline = time.monotonic() + timeout
    with log.open("w", encoding="utf-8") as stream:
        process = psutil.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env={**ENVIRONMENT, **os.environ, **(environment or {})}
        )
        try:
            while process.poll() is None:
                if kill_when is not None and kill_when():
                    kill_tree(process)
                    return False
                if time.monotonic() > deadline:
                    raise LaunchError(f"{log.name}: not done after {timeout:.0f} s\n{_last_words(log)}")
                seen = _print_new(metrics, seen)
                time.sleep(POLL_SECONDS)
        finally:
            kill_tree(process)
    _print_new(metrics, seen)
    if process.returncode:
        raise LaunchError(f"{log.name}: ended with {process.returncode}\n{_last_words(log)}")
    return True


def kill_tree(process: psutil.Process) -> None:
    """Kills a process and all that it started: workers lead sessions of their own, so a group does not hold them."""
    try:
        doomed = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for one in doomed:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(doomed, timeout=30)


def _lines(metrics: Path | None) -> list[str]:
    if metrics is None or not metrics.is_file():
        return []
    return metrics.read_text(encoding="utf-8").splitlines(keepends=True)


def _print_new(metrics: Path | None, seen: int) -> int:
    """Prints the complete lines after the first `seen`; returns how many there are now."""
    lines = [line for line in _lines(metrics) if line.endswith("\n")]
    for text in lines[seen:]:
        line = json.loads(text)
        shown = {key: line[key] for key in ("step", "processes", "loss", "tokens_per_second") if key in line}
        numbers = " ".join(f"{key} {value:,.5g}" for key, value in shown.items())
        print(f"  {metrics.parent.name}: {line['kind']} {numbers}", flush=True)
    return len(lines)  # fewer when a resumed run took back what came after its checkpoint


def _last_words(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]
