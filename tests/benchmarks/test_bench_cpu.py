import csv

import pytest


def test_every_figure_has_a_row(monkeypatch, tmp_path, capsys):
    cpu = pytest.importorskip("bench_cpu")
    sizes = {"H": 2, "P": 4, "N": 6}
    monkeypatch.setattr(cpu, "LAYERS", {"tiny": (sizes, (4, 1))})
    monkeypatch.setattr(cpu, "LENGTH", 20)
    monkeypatch.setattr(cpu, "SWAPPED", 1)
    monkeypatch.setattr("sys.argv", ["bench_cpu.py", "-o", str(tmp_path / "out"), "--turns", "1", "--commit", "abc"])
    cpu.main()
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["what"] for row in rows] == [
        *["scan forward", "scan forward+backward"] * 2,
        *("training step, unswapped", "training step, 1 of 8 layers swapped, numba"),
        "training step, 1 of 8 layers swapped, torch",
    ]
    assert all(row["commit"] == "abc" and row["device"].startswith("CPU (") for row in rows)
    assert all(float(row["numba ns"]) > 0 and float(row["ratio"]) > 0 for row in rows[:4])
    assert float(rows[4]["speed of unswapped"]) == 1
    assert (tmp_path / "out.md").read_text() in capsys.readouterr().out
