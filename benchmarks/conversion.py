"""Time and memory of a conversion, beside a plain copy of the same file.

    python benchmarks/conversion.py -o results.csv                  2.7b shapes, 5.4 GB of random bf16 weights
    python benchmarks/conversion.py --shape tiny --verify layers    seconds, to see that it runs

Each conversion is a process of its own. Memory is the peak of RssAnon, sampled every 10 ms: pages that are mapped from
the checkpoint belong to the file and do not count. Two copies stand beside it: `cp` of the weights to the same disk,
which leaves them in the page cache, and `cp` and `sync`, which waits for the disk as a conversion does. Start-up is the
time of the same command on a model of a few kilobytes. They take turns, as a machine's page cache is not the same from
minute to minute; the rows are medians.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from common import provenance

SHAPES = {
    "tiny": {"d_model": 64, "n_layer": 4, "vocab_size": 500},
    "130m": {"d_model": 768, "n_layer": 24, "vocab_size": 50277},
    "1.3b": {"d_model": 2048, "n_layer": 48, "vocab_size": 50277},
    "2.7b": {"d_model": 2560, "n_layer": 64, "vocab_size": 50277},
}
HEAD_DIM, STATE, PADDING = 64, 128, 16


@dataclass(frozen=True)
class Measurement:
    """Seconds of the process by the clock and of the processor (user and system), and the highest RssAnon in bytes."""

    seconds: float
    cpu: float
    peak: int = 0


def write_checkpoint(folder: Path, shape: dict[str, int]) -> Path:
    """A random checkpoint in mamba_ssm's own layout, bf16, one layer in memory at a time until it is saved."""
    folder.mkdir(parents=True)
    width, layers = shape["d_model"], shape["n_layer"]
    inner = 2 * width
    heads, convolved = inner // HEAD_DIM, inner + 2 * STATE
    rows = -(-shape["vocab_size"] // PADDING) * PADDING
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    tensors = {"backbone.embedding.weight": normal(rows, width)}
    for layer in range(layers):
        prefix = f"backbone.layers.{layer}."
        tensors |= {
            prefix + "norm.weight": 1 + normal(width),
            prefix + "mixer.in_proj.weight": normal(inner + convolved + heads, width),
            prefix + "mixer.conv1d.weight": normal(convolved, 1, 4),
            prefix + "mixer.conv1d.bias": normal(convolved),
            prefix + "mixer.dt_bias": normal(heads) - 4,
            prefix + "mixer.A_log": normal(heads) + 1,
            prefix + "mixer.D": 1 + normal(heads),
            prefix + "mixer.norm.weight": 1 + normal(inner),
            prefix + "mixer.out_proj.weight": normal(width, inner),
        }
    tensors["backbone.norm_f.weight"] = 1 + normal(width)
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")
    config = {
        **shape,
        "d_intermediate": 0,
        "ssm_cfg": {"layer": "Mamba2", "d_state": STATE, "headdim": HEAD_DIM},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": PADDING,
        "tie_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(command: list[str]) -> Measurement:
    """Runs a command to its end and watches its anonymous memory."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, anonymous_memory(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return Measurement(seconds, usage.ru_utime + usage.ru_stime, peak)


def anonymous_memory(pid: int) -> int:
    """RssAnon in bytes; 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def convert_command(source: Path, out: Path, layers: str, verify: str) -> list[str]:
    program = "from palimpsa_surgery.cli import main; main()"
    return [sys.executable, "-c", program, "convert", str(source), str(out), "--layers", layers, "--verify", verify]


def copy(source: Path, target: Path, *, synced: bool) -> Measurement:
    measured = run(["sh", "-c", 'cp "$0" "$1"' + (' && sync "$1"' if synced else ""), str(source), str(target)])
    target.unlink()
    os.sync()  # what is measured next does not wait for these pages
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="2.7b")
    parser.add_argument("--verify", nargs="+", default=["none", "layers"])
    parser.add_argument("--repeat", type=int, default=3, help="rounds of copy, start-up and conversion")
    parser.add_argument("--work", type=Path, help="folder on the disk to use; twice the model must fit")
    parser.add_argument("-o", "--out", type=Path, help="CSV to append to")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="palimpsa-conversion-", dir=options.work))
    try:
        rows = measure(work, options.shape, options.verify, options.repeat)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    writer = csv.DictWriter(sys.stdout, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    if options.out:
        new = not options.out.exists()
        with options.out.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, rows[0])
            if new:
                writer.writeheader()
            writer.writerows(rows)


def measure(work: Path, shape: str, modes: list[str], repeat: int) -> list[dict[str, object]]:
    """One row for each kind of verification, medians over the rounds."""
    tiny = write_checkpoint(work / "tiny", SHAPES["tiny"])
    source = write_checkpoint(work / "source", SHAPES[shape])
    weights = source / "pytorch_model.bin"
    layers = ",".join(str(layer) for layer in range(1, SHAPES[shape]["n_layer"], 8)) + ","
    os.sync()
    rows = []
    for mode in modes:
        copies, synced, starts, found = [], [], [], []
        for _ in range(repeat):
            copies.append(copy(weights, work / "copy", synced=False))
            synced.append(copy(weights, work / "copy", synced=True))
            starts.append(convert(tiny, work / "out", "1,", mode))
            found.append(convert(source, work / "out", layers, mode))
        copied, on_disk, start_up, seconds = (median(each) for each in (copies, synced, starts, found))
        rows.append(
            {
                **provenance(cpu=True),
                "shape": shape,
                "bytes": weights.stat().st_size,
                "verify": mode,
                "rounds": repeat,
                "seconds": round(seconds, 2),
                "start_up": round(start_up, 2),
                "copy": round(copied, 2),
                "copy_synced": round(on_disk, 2),
                "ratio": round((seconds - start_up) / copied, 2),
                "ratio_synced": round((seconds - start_up) / on_disk, 2),
                "cpu": round(median(found, "cpu"), 2),
                "start_up_cpu": round(median(starts, "cpu"), 2),
                "copy_cpu": round(median(copies, "cpu"), 2),
                "peak_rss_anon": max(one.peak for one in found),
                "cores": os.cpu_count(),
            }
        )
    return rows


def convert(source: Path, out: Path, layers: str, verify: str) -> Measurement:
    measured = run(convert_command(source, out, layers, verify))
    shutil.rmtree(out)
    return measured


def median(measured: list[Measurement], field: str = "seconds") -> float:
    return statistics.median(getattr(one, field) for one in measured)


if __name__ == "__main__":
    main()
