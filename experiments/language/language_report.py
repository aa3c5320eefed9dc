"""Tables of the experiment on language, made from the raw results."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
from language_arms import CONTROL, MAIN
from language_board import Board
from language_plots import draw_all
from language_results import LOSS, ArmResult, change, change_over_seeds, loss, losses, probe, read_results, swept
from palimpsa_surgery.base.files import load_json, write_text
from palimpsa_surgery.base.statistics import Figure, difference, estimate

logger = logging.getLogger("palimpsa_surgery.experiments")


def report(out: Path) -> Path:
    """Writes `tables.md` and the pictures of the results in `out/raw`; returns the page."""
    board = Board(read_results(out / "raw"))
    sections = [
        ("Set-up", setup_table(board, out / "overlap.json")),
        ("Learning rates", sweep_table(board)),
        ("Main arm and control over seeds", seeds_table(board)),
        ("Every arm, first seed", arms_table(board)),
        ("Nothing but what surgery added is trained: less the source", new_only_table(board)),
        ("By position", positions_table(board)),
        ("Probes", probes_table(board)),
        ("Importance over training", importance_table(board)),
        ("Windows and gates", windows_table(board)),
    ]
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections)
    write_text(out / "tables.md", f"# Tables of the experiment on language\n\n{text}\n")
    draw_all(board, out)
    logger.info("wrote %s", out / "tables.md")
    return out / "tables.md"


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def shown(figure: Figure | None, *, sign: bool = True, digits: int = 5) -> str:
    """`+0.0012 ± 0.0003`; a dash for what is not there."""
    if figure is None:
        return "-"
    error = "" if figure.error is None else f" ± {figure.error:.{digits}f}"
    return f"{figure.value:{'+' if sign else ''}.{digits}f}{error}"


def setup_table(board: Board, overlap: Path) -> str:
    """What was run, on what, and how long it took."""
    control = board.control
    windows = len(losses(control))
    longest = max(row.at["to"] for row in control.of(LOSS)) + 1
    seconds = sum(result.seconds for result in board.results.values())
    rows = [
        ("source", control.source),
        ("preset, version", f"{control.preset}, {control.version}"),
        ("device", control.device),
        ("arms", len(board.results)),
        ("training of each", f"{control.tokens:,} tokens of {control.train}, sequences of {control.seq_len:,}"),
        ("losses", f"{windows} sequences of {longest:,} tokens of {control.held_out}"),
        ("time of all arms", f"{seconds / 60:.0f} minutes, {_training_minutes(board):.0f} of them training"),
    ]
    if overlap.is_file():
        found = load_json(overlap)
        rows += [
            (f"measured text in runs of {length} tokens that the training file has", f"{fraction:.1%}")
            for length, fraction in found["in_runs_of"].items()
        ]
    return markdown(("what", "value"), rows)


def _training_minutes(board: Board) -> float:
    return sum(result.train_seconds for result in board.results.values()) / 60


def sweep_table(board: Board) -> str:
    """Loss on the choosing text before and after, by learning rate."""
    rows = []
    for variant in (CONTROL, MAIN):
        for result in swept(board.results, variant):
            chosen = "chosen" if result.lr == board.best[variant] else ""
            rows.append((variant, f"{result.lr:g}", f"{result.dev[0][1]:.4f}", f"{result.dev[-1][1]:.4f}", chosen))
    return markdown(("arm", "learning rate", "before", "after", ""), rows)


def _ranges(board: Board) -> tuple[tuple[int, int | None], ...]:
    """All positions, those within the length of training, those beyond."""
    return (0, None), (0, board.seq_len), (board.seq_len, None)


RANGE_NAMES = ("all positions", "within training length", "beyond")


def seeds_table(board: Board) -> str:
    """Main arm less control for each seed, and the mean with both errors."""
    rows = []
    for one, control in board.pairs:
        cells = [shown(change(one, control, *bounds)) for bounds in _ranges(board)]
        rows.append((one.seed, f"{loss(control).value:.4f}", f"{loss(one).value:.4f}", *cells))
    means = [change_over_seeds(board.pairs, *bounds) for bounds in _ranges(board)]
    losses_of = [f"{mean(loss(pair[side]).value for pair in board.pairs):.4f}" for side in (1, 0)]
    rows.append(("mean", *losses_of, *(shown(figure) for figure, _ in means)))
    rows.append(("error over seeds", "", "", *("-" if error is None else f"{error:.5f}" for _, error in means)))
    return markdown(("seed", CONTROL, MAIN, *(f"difference, {name}" for name in RANGE_NAMES)), rows)


def arms_table(board: Board) -> str:
    """Every variant beside the control of the same seed."""
    rows = []
    if board.source is not None:
        cells = [shown(change(board.source, board.control, *bounds)) for bounds in _ranges(board)]
        rows.append(("source, not trained", "", "", f"{loss(board.source).value:.4f}", *cells, ""))
    rows.append((CONTROL, "", "", f"{loss(board.control).value:.4f}", "", "", "", ""))
    for result in board.compared:
        cells = [shown(change(result, board.control, *bounds)) for bounds in _ranges(board)]
        start = result.dev[0][1] - board.control.dev[0][1]
        layers = " ".join(str(layer) for layer in result.palimpsa_layers)
        figures = (f"{start:+.4f}", f"{loss(result).value:.4f}", *cells, shown(_off(result)))
        rows.append((result.variant, layers, *figures))
    headers = ("arm", "layers", "at the start", "loss", *(f"less control, {name}" for name in RANGE_NAMES))
    return markdown((*headers, "switched off: change"), rows)


def new_only_table(board: Board) -> str:
    """Arms that leave the source's parameters alone, beside the source: nothing else differs."""
    rows = []
    for result in board.new_only if board.source is not None else ():
        cells = [shown(change(result, board.source, *bounds)) for bounds in _ranges(board)]
        rows.append((result.variant, f"{result.lr_new:g}", *cells))
    return markdown(("arm", "learning rate of what is new", *RANGE_NAMES), rows)


def _off(result: ArmResult) -> Figure | None:
    """What switching metaplasticity off changes after training."""
    if not result.of("off"):
        return None
    return difference(losses(result), losses(result, suite="off"))


def positions_table(board: Board) -> str:
    """Losses by the number of tokens before the target, of the first seed, and the difference over seeds."""
    rows = []
    for row in board.control.of(LOSS):
        low, high = row.at["from"], row.at["to"] + 1
        figure, error = change_over_seeds(board.pairs, low, high)
        arms = [board.source, board.control, board.get(MAIN)]
        cells = ["-" if arm is None else f"{loss(arm, low, high).value:.4f}" for arm in arms]
        rows.append((f"{low:,}-{high - 1:,}", *cells, shown(figure), "-" if error is None else f"{error:.5f}"))
    return markdown(("tokens before", "source", CONTROL, MAIN, f"{MAIN} - {CONTROL}, seeds", "over seeds"), rows)


def probes_table(board: Board) -> str:
    """Recall and needle, summed over seeds, without figures that are zero everywhere."""
    rows = []
    mains, controls = ([pair[side] for pair in board.pairs] for side in (0, 1))
    for row in board.control.of("recall") + board.control.of("needle"):
        where = ", ".join(f"{key} {value:g}" for key, value in row.at.items())
        one, other = (probe(arms, row.suite, row.name, row.at) for arms in (mains, controls))
        if not one.any(axis=0)[0] and not other.any(axis=0)[0]:
            continue
        source = (
            "-"
            if board.source is None
            else shown(estimate(probe([board.source], row.suite, row.name, row.at)), sign=False, digits=3)
        )
        cells = [shown(estimate(samples), sign=False, digits=3) for samples in (other, one)]
        chance = "" if row.chance is None else f"{row.chance:.3f}"
        rows.append((row.suite, row.name, where, chance, source, *cells, shown(difference(other, one), digits=3)))
    return markdown(("probe", "figure", "at", "chance", "source", CONTROL, MAIN, "difference"), rows)


def importance_table(board: Board) -> str:
    """Metaplasticity ratio, mean importance and spread between heads, at the first and last logged step."""
    rows = []
    for result in board.operated:
        if not result.importance:
            continue
        first, last = result.importance[0], result.importance[-1]
        for layer in result.palimpsa_layers:
            a, b = (line["layers"][str(layer)] for line in (first, last))
            cells = [f"{a[key]:.4g} → {b[key]:.4g}" for key in ("ratio", "mean", "head_spread")]
            rows.append((result.variant, layer, *cells))
    return markdown(("arm", "layer", "metaplasticity ratio", "mean importance", "spread between heads"), rows)


def windows_table(board: Board) -> str:
    """Windows of the source, after training without and with surgery, and what the gates learned."""
    rows = []
    for result in board.operated:
        for layer in result.palimpsa_layers:
            arms = (board.source, board.control, result)
            windows = ["-" if arm is None else f"{np.mean(arm.windows[layer]):.1f}" for arm in arms]
            gate = result.gates[layer]
            scale, prior = (f"{min(x):.3g} to {max(x):.3g}" for x in (gate.scale, gate.prior))
            rows.append((result.variant, layer, *windows, scale, prior))
    return markdown(("arm", "layer", "window: source", CONTROL, "this arm", "scale of heads", "prior of heads"), rows)
