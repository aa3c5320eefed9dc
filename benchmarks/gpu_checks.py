"""What the kernels must also satisfy besides speed, one row a check, at the shapes of published models.

    python benchmarks/gpu_checks.py -o benchmarks/results/checks-NAME            everything, on a GPU
    python benchmarks/gpu_checks.py -o OUT --only long,one-beta                  some of it
    python benchmarks/gpu_checks.py -o OUT --toy                                 tiny, on a CPU: to see that this runs

    fp32        inputs in fp32 against fp64: output and every gradient, at the full shape
    long        one sequence of 128k tokens equals the run split in two with carried states, forward and backward
    first-step  seconds of a model's first step with an empty cache of compiled kernels
    one-beta    one beta per head against mamba-ssm's scan of plain Mamba2, in the same run
    sanitizer   compute-sanitizer's memcheck, racecheck, synccheck and initcheck, side by side, over every kernel

A check that cannot run says why in its row. Writes OUT.csv and OUT.md; ends with 1 when a limit is not kept.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_scan import make_inputs, peak_bytes, scan_rows
from common import command_line, markdown_table, provenance, write_csv
from palimpsa_surgery.kernels.common.scaling import scale_rows
from palimpsa_surgery.kernels.conv import causal_conv as conv
from palimpsa_surgery.kernels.metaplastic import scan as api

HERE = Path(__file__).resolve().parent
REFERENCE = "2.7b"
TOY = {"layers": {"toy": {"H": 4, "P": 8, "N": 16, "G": 2}}, "runs": {"full": [{"layer": "toy", "B": 2, "T": 150}]}}
FP32 = 1e-5
SPLIT = {"output": 2.2e-3, "state": 2.2e-3, "gradients": 6e-3, "dla": 1e-2}  # bf16, as against fp64
SSD_RATIO, FIRST_STEP_SECONDS = 1.8, 60
Row = dict[str, Any]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error."""
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)).item()


def verdict(errors: dict[str, float], limits: dict[str, float]) -> Row:
    """The figures of a row and whether each keeps its limit."""
    ok = all(errors[name] <= limits[name] for name in errors)  # a NaN does not
    return {"found": ", ".join(f"{name} {value:.1e}" for name, value in errors.items()), "ok": "yes" if ok else "NO"}


def shapes_of(toy: bool) -> tuple[dict, list[dict]]:
    """Layers by name, and of each the first run of `full` in shapes.json, the reference shape first."""
    shapes = TOY if toy else json.loads((HERE / "shapes.json").read_text())
    first: dict[tuple, dict] = {}
    for run in sorted(shapes["runs"]["full"], key=lambda run: run["layer"] != REFERENCE):
        first.setdefault((run["layer"], run.get("g")), run)
    return shapes["layers"], list(first.values())


def one_head_pair(inputs: dict, d_output: torch.Tensor, groups: int) -> tuple[dict, torch.Tensor]:
    """The problem of two neighboring heads of the last row, alone and in fp64, for an oracle that is a slow loop."""
    heads = d_output.shape[2]
    first = heads - heads // groups  # the first head of the last group
    part = {name: x[-1:, :, -1:] for name, x in inputs.items() if name in ("q", "k")}
    part |= {name: inputs[name][-1:, :, first : first + 2] for name in ("v", "beta", "log_decay")}
    part["prior"] = inputs["prior"][first : first + 2]
    exact = {name: part[name].detach().double() for name in inputs}
    return exact, d_output[-1:, :, first : first + 2].double()


def check_fp32(toy: bool, device: str, backend: str) -> Iterator[Row]:
    """Gradients reach only two heads, so that those of the shared queries and keys have an oracle as well."""
    layers, runs = shapes_of(toy)
    for run in runs:
        layer, B, T, g = layers[run["layer"]], run["B"], run["T"], run.get("g")
        inputs, _, _ = make_inputs(B, T, **layer, g=g, dtype=torch.float32, device=device)
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        output = api.metaplastic_scan(*leaves.values(), backend=backend).output
        first, d_output = layer["H"] - layer["H"] // layer["G"], torch.zeros_like(output)
        d_output[-1:, :, first : first + 2] = torch.randn_like(d_output[-1:, :, first : first + 2])
        found = dict(zip(leaves, torch.autograd.grad(output, leaves.values(), d_output), strict=True))
        exact, d_exact = one_head_pair(inputs, d_output, layer["G"])
        exact = {name: x.requires_grad_() for name, x in exact.items()}
        oracle = api.metaplastic_scan(*exact.values(), backend="reference").output
        expected = dict(zip(exact, torch.autograd.grad(oracle, exact.values(), d_exact), strict=True))
        there, _ = one_head_pair(found, d_output, layer["G"])
        errors = {"output": relative(output.detach()[-1:, :, first : first + 2], oracle.detach())}
        errors |= {f"d{name}": relative(there[name], expected[name]) for name in expected}
        row = {"check": "fp32", "shape": f"{run['layer']} B{B} T{T} g{g or layer['P']}", "limit": f"{FP32:g}"}
        yield {**row, **verdict(errors, dict.fromkeys(errors, FP32))}


def scan_in_pieces(leaves: dict, cuts: list[int], backend: str) -> tuple[torch.Tensor, api.ScanState]:
    """The scan over each piece of time with the states of the piece before it."""
    outputs, state = [], None
    for start, stop in itertools.pairwise(cuts):
        piece = [x if name == "prior" else x[:, start:stop] for name, x in leaves.items()]
        result = api.metaplastic_scan(*piece, initial_state=state, backend=backend)
        outputs.append(result.output)
        state = result.state
    return torch.cat(outputs, 1), state


def check_long(toy: bool, device: str, backend: str) -> Iterator[Row]:
    """The output's and the final states' gradients both flow; the cut is at no block's end."""
    layers, runs = shapes_of(toy)
    layer, T = layers[runs[0]["layer"]], 512 if toy else 131_072
    inputs, _, _ = make_inputs(1, T, **layer, device=device)
    torch.manual_seed(1)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    d_output, kept, peaks = torch.randn_like(inputs["v"]), [], []
    for cuts in ([0, T], [0, T // 2 + 37, T]):
        for x in leaves.values():
            x.grad = torch.zeros_like(x)  # held before the run, and so no part of its peak

        def run(cuts=cuts):
            output, state = scan_in_pieces(leaves, cuts, backend)
            torch.autograd.backward([output, *state], [d_output, *(torch.ones_like(x) for x in state)])
            kept.append((output.detach(), [x.detach() for x in state]))

        peaks.append(peak_bytes(run, torch.cuda.memory_allocated() if device == "cuda" else 0) / 1e9)
        kept[-1] = (*kept[-1], {name: x.grad.clone() for name, x in leaves.items()})
    (output, state, found), (output2, state2, found2) = kept
    errors = {"output": relative(output2, output)}
    errors["state"] = max(relative(b, a) for a, b in zip(state, state2, strict=True))
    errors["dla"] = relative(found2.pop("log_decay"), found.pop("log_decay"))
    errors["gradients"] = max(relative(found2[name], found[name]) for name in found)
    row = {"check": "long", "shape": f"{runs[0]['layer']} B1 T{T} g{layer['P']}, cut at {T // 2 + 37}"}
    row["limit"] = ", ".join(f"{name} {value:g}" for name, value in SPLIT.items())
    peak = f"peak above inputs and gradients {peaks[0]:.2f} GB whole, {peaks[1]:.2f} GB in two"
    yield {**row, **verdict(errors, SPLIT), "note": peak}


def check_one_beta(toy: bool, device: str, backend: str) -> Iterator[Row]:
    layers, runs = shapes_of(toy)
    run = runs[0]
    rows = {
        what: (ms, note)
        for what, ms, _, note in scan_rows(layers[run["layer"]], run["B"], run["T"], 1, backend, device)
    }
    row = {"check": "one-beta", "shape": f"{run['layer']} B{run['B']} T{run['T']} g1", "limit": f"{SSD_RATIO:g} x SSD"}
    ours = rows["forward+backward"][0]
    if "ssd forward+backward" not in rows:
        yield {**row, "found": f"{ours:.2f} ms", "ok": "not compared", "note": rows["ssd"][1]}
        return
    theirs, note = rows["ssd forward+backward"]
    forward = f"forward {rows['forward'][0]:.2f} against {rows['ssd forward'][0]:.2f} ms"
    found = f"{ours:.2f} against {theirs:.2f} ms: {ours / theirs:.2f} x"
    yield {
        **row,
        "found": found,
        "ok": "yes" if ours <= SSD_RATIO * theirs else "NO",
        "note": f"{forward} {note}".strip(),
    }


def first_step(shape: str, swapped: int, device: str) -> list[float]:
    """Seconds of the first two whole training steps of a model in this process."""
    from training_step import build

    module = build(shape, swapped, None, device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    ids = torch.randint(0, module.causal.config.vocab_size, (1, 513 if shape != "tiny" else 33), device=device)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        module(input_ids=ids[:, :-1], targets=ids[:, 1:]).backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def check_first_step(toy: bool, device: str, backend: str) -> Iterator[Row]:
    """In new processes; the unswapped model's step shows how much of it the kernels of plain layers compile."""
    shape = "tiny" if toy else "mamba2_2.7b"
    for swapped in (2 if toy else 8, 0):
        with tempfile.TemporaryDirectory() as cache:
            arguments = [sys.executable, __file__, "--first-step", shape, str(swapped), device]
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=400)
        row = {"check": "first-step", "shape": f"{shape}, {swapped} layers swapped"}
        if done.returncode:
            yield {**row, "ok": "failed", "note": done.stderr.strip().splitlines()[-1]}
            continue
        first, second = json.loads(done.stdout.splitlines()[-1])
        row["limit"] = f"{FIRST_STEP_SECONDS} s" if swapped else ""
        ok = ("yes" if first <= FIRST_STEP_SECONDS else "NO") if swapped else ""
        yield {**row, "found": f"{first:.1f} s, the second {second:.2f} s", "ok": ok}


SMALL_RUNS = (
    ("gluon", torch.bfloat16, 64),
    ("triton", torch.bfloat16, 64),
    ("triton", torch.bfloat16, 16),
    ("triton", torch.bfloat16, 1),
    ("triton", torch.float32, 64),
    ("triton", torch.float32, 1),
)


SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZER_SECONDS = 400


def launched() -> dict[str, bool]:
    """Each Triton and Gluon kernel by `file.name`, and whether this process has launched it on a GPU."""
    folder, package = Path(api.__file__).parent.parent, api.__package__.rpartition(".")[0]
    found = {}
    for file in sorted([*folder.glob("*/triton_*.py"), *folder.glob("*/gluon_*.py")]):
        module = importlib.import_module(f"{package}.{file.parent.name}.{file.stem}")
        for key, kernel in vars(module).items():
            if key.endswith("_kernel") and getattr(kernel, "__module__", "") == module.__name__:
                caches = getattr(kernel, "device_caches", {})
                found[f"{file.stem}.{key}"] = any(compiled for compiled, *_ in caches.values())
    return found


def small_run(device: str) -> None:
    """Every kernel, forward and backward: carried states, packed documents, steep decays, a step, what is around it.

    Prints how many kernels that were on a GPU, and the names of those that did not run.
    """
    documents = torch.tensor([0, 7, 7, 150, 200], device=device)
    for name, dtype, g in SMALL_RUNS:
        backend = name if api.METAPLASTIC_SCAN.reason(name, device) is None else "auto"
        inputs, _, _ = make_inputs(1, 200, H=2, P=64, N=128, g=g, dtype=dtype, device=device)
        inputs["log_decay"][:, 90:93] = -1e4
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        output, state = scan_in_pieces(leaves, [0, 130, 200], backend)
        packed = api.metaplastic_scan(*leaves.values(), cu_seqlens=documents, backend=backend).output
        results = (output, *state, packed)
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
        now = [x.detach() if name == "prior" else x.detach()[:, 0] for name, x in leaves.items()]
        api.metaplastic_step(*now, api.ScanState(*(x.detach().clone() for x in state)), backend=backend)
        channels = leaves["v"].flatten(2)
        weight = torch.randn(channels.shape[2], 4, device=device, dtype=dtype, requires_grad=True)
        triton = conv.CAUSAL_CONV.reason("triton", device) is None
        y, _ = conv.causal_conv(channels, weight, cu_seqlens=documents, backend="triton" if triton else "auto")
        y.sum().backward()
        for sigmoid in (False, True):
            steps = torch.rand(1, 200, 2, device=device, requires_grad=True)
            scale_rows(leaves["v"], steps, dtype, sigmoid=sigmoid).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
        kernels = launched()
        missed = [name for name, ran in kernels.items() if not ran]
        print(f"{len(kernels) - len(missed)} of {len(kernels)} kernels", *missed, flush=True)


def sanitizer_errors(text: str) -> int | None:
    """The number in compute-sanitizer's last summary, None when it wrote none."""
    found = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)", text)
    return int(found[-1]) if found else None


def run_under(tool: str, device: str) -> Row:
    """The small run under one tool of compute-sanitizer."""
    row = {"check": "sanitizer", "shape": f"{tool}, a small run of every kernel", "limit": "0 errors"}
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {**row, "ok": "not run", "note": "compute-sanitizer is not on the PATH"}
    command = [program, "--tool", tool, "--print-limit", "2000", "--show-backtrace", "no"]
    command += [sys.executable, __file__, "--small-run", device]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # or neighbors hide writes beyond an end
    limit = {"env": environment, "capture_output": True, "text": True, "timeout": SANITIZER_SECONDS}
    start = time.monotonic()
    try:
        done = subprocess.run(command, **limit)
    except subprocess.TimeoutExpired:
        return {**row, "ok": "not run", "note": f"not done after {SANITIZER_SECONDS} s"}
    text = done.stdout + done.stderr
    errors = sanitizer_errors(text)
    if errors is None or (done.returncode and not errors):
        return {**row, "ok": "not run", "note": (text.strip().splitlines() or [""])[-1]}
    if errors:  # where they are, for whoever looks for them
        print(*[line for line in text.splitlines() if line.startswith("=========")][:60], sep="\n", flush=True)
    which = re.search(r"^\d+ of \d+ kernels.*$", text, re.MULTILINE)
    guilty = ", ".join(f"{name} {count}" for name, count in Counter(re.findall(r" at (\w+)\+0x", text)).items())
    note = f"{which[0] if which else 'on a CPU'}; {time.monotonic() - start:.0f} s{guilty and '; at ' + guilty}"
    return {**row, "found": f"{errors} errors", "ok": "NO" if errors else "yes", "note": note}


def check_sanitizer(toy: bool, device: str, backend: str) -> Iterator[Row]:
    """Compiles in a run before, so that the tools watch kernels and not compilers."""
    if shutil.which("compute-sanitizer"):
        subprocess.run(
            [sys.executable, __file__, "--small-run", device], capture_output=True, timeout=SANITIZER_SECONDS
        )
    with ThreadPoolExecutor(len(SANITIZER_TOOLS)) as pool:
        yield from pool.map(partial(run_under, device=device), SANITIZER_TOOLS)


CHECKS = {
    "fp32": check_fp32,
    "one-beta": check_one_beta,
    "long": check_long,
    "first-step": check_first_step,
    "sanitizer": check_sanitizer,
}


def write(out: Path, rows: Sequence[Row], facts: dict[str, str], command: str) -> None:
    """The rows so far as CSV and as a page."""
    write_csv(out.with_suffix(".csv"), [{**facts, **row} for row in rows])
    columns = ("check", "shape", "found", "limit", "ok", "note")
    table = markdown_table([{column: row.get(column, "") for column in columns} for row in rows])
    head = f"{facts['device']}, {facts['date']}, commit {facts['commit']}, torch {facts['torch']}."
    out.with_suffix(".md").write_text(f"{head} Errors are relative L2.\n\n    {command}\n\n{table}", encoding="utf-8")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("gpu_checks"), help="path of both files, no suffix")
    parser.add_argument("--only", default=",".join(CHECKS), help="checks, with commas between them")
    parser.add_argument("--sanitizer", action="store_true", help="that check alone")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--toy", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--commit", help="to note where git is not there")
    parser.add_argument("--first-step", nargs=3, metavar=("SHAPE", "SWAPPED", "DEVICE"), help=argparse.SUPPRESS)
    parser.add_argument("--small-run", metavar="DEVICE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.only = ["sanitizer"] if options.sanitizer else options.only.split(",")
    unknown = set(options.only) - set(CHECKS)
    if unknown:
        parser.error(f"there is no check {', '.join(sorted(unknown))}; expected {', '.join(CHECKS)}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.first_step:
        shape, swapped, device = options.first_step
        return print(json.dumps(first_step(shape, int(swapped), device)))
    if options.small_run:
        return small_run(options.small_run)
    if not options.toy and not torch.cuda.is_available():
        sys.exit("gpu_checks: needs a CUDA device; --toy shows on a CPU that the checks run")
    facts, rows = provenance(options.commit, cpu=options.toy), []
    device = "cpu" if options.toy else "cuda"
    for name in options.only:
        try:
            for row in CHECKS[name](options.toy, device, options.backend):
                rows.append(row)
                print(row, flush=True)
                write(options.out, rows, facts, command_line("gpu_checks.py", argv))  # a run may be cut in any check
        except Exception as error:  # the other checks go on: time on a GPU is dear
            rows.append(
                {"check": name, "ok": "failed", "note": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
            )
            print(rows[-1], flush=True)
        write(options.out, rows, facts, command_line("gpu_checks.py", argv))
        if device == "cuda":
            torch.cuda.empty_cache()
    sys.exit(1 if any(row["ok"] in ("NO", "failed") for row in rows) else 0)


if __name__ == "__main__":
    main()
