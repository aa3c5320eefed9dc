"""Time the metaplastic scan and step on this machine's GPU, correctness first, one CSV row a measurement.

    python benchmarks/bench_scan.py --run short --out benchmarks/results/NAME.csv

Beside each shape stands mamba-ssm's scan of plain Mamba2 (a cheaper function) when that package is importable.
"""

import argparse
import csv
import json
import sys
import time
from pathlib import Path

import torch
from common import provenance
from palimpsa_surgery.kernels.metaplastic import scan as api
from palimpsa_surgery.kernels.ssd import mamba2_scan as ssd

HERE = Path(__file__).resolve().parent
COLUMNS = (
    *("card", "date", "commit", "torch", "triton", "layer", "B", "T", "H", "P", "N", "G", "g", "dtype"),
    *("what", "ms", "peak_gb", "error", "note"),
)


def make_inputs(B, T, H, P, N, G=1, g=None, dtype=torch.bfloat16, seed=0, device="cuda"):
    """Decays like a trained layer's: d_t log-normal around 0.06, A in 1..16, a third of the heads 50 times milder."""
    torch.manual_seed(seed)
    kw = {"device": device}
    step = torch.nn.functional.softplus(torch.randn(B, T, H, **kw) * 0.8 - 3.0)
    A = torch.rand(H, **kw) * 15 + 1
    A[::3] *= 0.02
    q, k = (torch.randn(B, T, G, N, **kw).to(dtype) for _ in range(2))
    v = (torch.randn(B, T, H, P, **kw) * step[..., None]).to(dtype)
    beta = (torch.rand(B, T, H, g or P, **kw) * step[..., None]).to(dtype)
    return {"q": q, "k": k, "v": v, "beta": beta, "log_decay": -A * step, "prior": torch.ones(H, **kw)}, step, A


def gradients(inputs, d_output, backend):
    """The output and the gradients of all six inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    output = api.metaplastic_scan(*leaves, backend=backend).output
    return output.detach(), dict(zip(inputs, torch.autograd.grad(output, leaves, d_output), strict=True))


def check(layer, g, backend) -> str:
    """Relative L2 errors to fp64 of the output, the worst gradient and that of the decays, on a shorter problem."""
    sizes = {**layer, "H": 4 * layer["G"]}
    inputs, _, _ = make_inputs(1, 700, **sizes, g=g, seed=1)
    d_output = torch.randn_like(inputs["v"])
    output, found = gradients(inputs, d_output, backend)
    exact_output, exact = gradients({n: x.double() for n, x in inputs.items()}, d_output.double(), "reference")
    error = lambda a, b: ((a.double() - b).norm() / b.norm()).item()  # noqa: E731
    decay = error(found.pop("log_decay"), exact.pop("log_decay"))
    worst = max(error(found[n], exact[n]) for n in found)
    return f"output {error(output, exact_output):.2e} gradients {worst:.2e} dla {decay:.2e}"


def milliseconds(f, repeat=100) -> float:
    """Median on the GPU; without one, the best of three by the clock, to see that it runs."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return do_bench(f, warmup=30, rep=repeat, return_mode="median")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def peak_bytes(f, held: int) -> int:
    """Peak of the GPU's memory while `f` runs, above `held`; 0 without a GPU."""
    if not torch.cuda.is_available():
        f()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    f()
    return torch.cuda.max_memory_allocated() - held


def scan_rows(layer, B, T, g, backend, device="cuda"):
    """(what, ms, peak GB above inputs and gradients, note) of forward, and forward + backward through autograd."""
    inputs, step, A = make_inputs(B, T, **layer, g=g, device=device)
    d_output = torch.randn_like(inputs["v"])
    with torch.no_grad():
        yield "forward", milliseconds(lambda: api.metaplastic_scan(*inputs.values(), backend=backend)), None, ""
    leaves = [x.requires_grad_() for x in inputs.values()]

    def both():
        for x in leaves:
            x.grad = None
        api.metaplastic_scan(*leaves, backend=backend).output.backward(d_output)

    ms = milliseconds(both)
    held = torch.cuda.memory_allocated()  # inputs and their gradients
    for x in leaves:
        x.grad = None
    yield "forward+backward", ms, peak_bytes(both, held) / 1e9, ""
    yield from ssd_rows(inputs, step, A, d_output)


def ssd_rows(inputs, step, A, d_output):
    """mamba-ssm's scan of plain Mamba2 on the same shapes, when it can be imported; on a CPU the project's own."""
    q, k, v = (inputs[n].detach() for n in "qkv")
    leaves = [x.detach().clone().requires_grad_() for x in (v, step, -A, k, q)]
    reason, note = ssd.MAMBA2_SCAN.reason("mamba_ssm", v.device), ""
    if reason and v.is_cuda:
        yield "ssd", None, None, reason
        return
    if reason:
        note, run = "plain torch", lambda: ssd.mamba2_scan(*leaves)[0]
    else:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        run = lambda: mamba_chunk_scan_combined(*leaves, chunk_size=256)  # noqa: E731
    with torch.no_grad():
        yield "ssd forward", milliseconds(run), None, note

    def both():
        for x in leaves:
            x.grad = None
        run().backward(d_output)

    yield "ssd forward+backward", milliseconds(both), None, note


def step_rows(layer, g, B=64):
    """One decode step, beside the time that a copy of the states' bytes takes."""
    H, P, N, G = (layer[x] for x in "HPNG")
    kw = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = torch.randn(B, G, N, **kw), torch.randn(B, G, N, **kw)
    v, beta = torch.randn(B, H, P, **kw), torch.rand(B, H, g or P, **kw)
    state = torch.randn(B, H, P, N, device="cuda"), torch.rand(B, H, g or P, N, device="cuda")
    log_decay, prior = -torch.rand(B, H, device="cuda"), torch.ones(H, device="cuda")
    bytes_moved = 2 * sum(x.numel() * x.element_size() for x in state)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3
    ms = milliseconds(lambda: api.metaplastic_step(q, k, v, beta, log_decay, prior, state))
    share = bytes_moved / (ms * 1e-3) / bandwidth
    yield "step", ms, None, f"{bytes_moved / ms / 1e9:.2f} TB/s, {share:.0%} of a copy's {bandwidth / 1e12:.2f} TB/s"


def describe(given_commit: str | None = None) -> dict:
    """What a row says about the machine and the code."""
    import triton

    facts = provenance(given_commit)
    return {"card": facts.pop("device"), **facts, "triton": triton.__version__, "dtype": "bf16"}


def main() -> int:
    shapes = json.loads((HERE / "shapes.json").read_text())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=shapes["runs"], default="short")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--commit", help="commit to note where git is not there")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    common = describe(options.commit)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for run in shapes["runs"][options.run]:
            layer, g = shapes["layers"][run["layer"]], run.get("g")
            error = check(layer, g, options.backend)
            measured = [*scan_rows(layer, run["B"], run["T"], g, options.backend)]
            if run is shapes["runs"][options.run][0] or g is not None:
                measured += [*step_rows(layer, g)]
            for what, ms, peak, note in measured:
                sizes = {
                    **layer,
                    "layer": run["layer"],
                    "B": 64 if what == "step" else run["B"],
                    "T": 1 if what == "step" else run["T"],
                }
                row = {**common, **sizes, "g": g or layer["P"], "what": what, "note": note}
                row["ms"] = "" if ms is None else f"{ms:.3f}"
                row["peak_gb"] = "" if peak is None else f"{peak:.2f}"
                row["error"] = error if what == "forward+backward" else ""
                writer.writerow(row)
                file.flush()
                print(
                    run["layer"],
                    sizes["B"],
                    sizes["T"],
                    "g",
                    row["g"],
                    what,
                    row["ms"],
                    row["peak_gb"],
                    row["error"],
                    note,
                    flush=True,
                )
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
