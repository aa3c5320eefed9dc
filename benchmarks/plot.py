"""Draw the rows of a benchmark CSV as bars: `python benchmarks/plot.py results/NAME.csv results/NAME.png`."""

import csv
import sys

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt


def main(source: str, target: str) -> None:
    with open(source, newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["ms"] and r["what"] != "step"]
    labels = list(dict.fromkeys(f"{r['layer']} B{r['B']} T{r['T']} g{r['g']}" for r in rows))
    kinds = list(dict.fromkeys(r["what"] for r in rows))
    figure, axis = plt.subplots(figsize=(11, 1.3 + 0.8 * len(labels)))
    height = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        mine = {f"{r['layer']} B{r['B']} T{r['T']} g{r['g']}": float(r["ms"]) for r in rows if r["what"] == kind}
        at = [j + i * height for j, label in enumerate(labels) if label in mine]
        bars = axis.barh(at, list(mine.values()), height, label=kind)
        axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axis.set_yticks([j + 0.4 - height / 2 for j in range(len(labels))], labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.margins(x=0.12)
    axis.set_xlabel("milliseconds")
    axis.set_title(f"{rows[0]['card']}, {rows[0]['date']}, {rows[0]['commit']}")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
