import csv

import bench_delta
import pytest
import torch
from palimpsa_surgery.kernels.metaplastic_delta.scan import metaplastic_delta_scan


def test_every_variant_has_a_row_and_times(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(bench_delta.SHAPES, "toy", {"B": 1, "T": 20, "G": 1, "H": 2, "P": 4, "N": 3})
    bench_delta.main(["--turns", "1", "-o", str(tmp_path / "out.csv"), "--commit", "abc"])
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["what"] for row in rows] == list(bench_delta.calls(bench_delta.make_inputs(1, 1, 1, 1, 1, 1, "cpu")))
    assert all(float(row["forward ms"]) > 0 and float(row["forward + backward ms"]) > 0 for row in rows)
    said = capsys.readouterr().out
    assert "commit abc" in said
    assert all(f"| toy | {row['what']} |" in said for row in rows)


@pytest.mark.parametrize("shape", bench_delta.SHAPES)
def test_inputs_fit_the_operator(shape):
    sizes = bench_delta.SHAPES[shape] | {"T": 3}
    inputs = bench_delta.make_inputs(**sizes, device="cpu")
    assert torch.isfinite(metaplastic_delta_scan(**inputs).output).all()
