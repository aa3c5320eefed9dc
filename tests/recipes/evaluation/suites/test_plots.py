"""The pictures hold what they are given; how they look was looked at."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from palimpsa_surgery.base.statistics import Figure as Value
from palimpsa_surgery.recipes.evaluation.rows import compare
from palimpsa_surgery.recipes.evaluation.suites import needle as suite_needle
from palimpsa_surgery.recipes.evaluation.suites import plots as eval_plots
from palimpsa_surgery.recipes.evaluation.suites import positions as suite_positions
from palimpsa_surgery.recipes.evaluation.suites import recall as suite_recall
from palimpsa_surgery.recipes.evaluation.suites.plots import Line, draw_grids, draw_heads, draw_lines
from palimpsa_surgery.recipes.evaluation.suites.suite import Measurement

NAMES = ("ours", "theirs")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, kept instead of only written."""
    kept = []
    save = Figure.savefig

    def keep(figure, *arguments, **options):
        kept.append(figure)
        return save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def rows(name, places, values, shift=0.1):
    def made(level):
        return [
            Measurement(name, "nats", np.array([[v + level, 1.0]] * 2), at)
            for at, v in zip(places, values, strict=True)
        ]

    return compare("suite", made(0.0), made(shift), NAMES)


def test_positions_show_both_models_and_their_difference(tmp_path, drawn):
    places = [{"from": 1, "to": 4}, {"from": 4, "to": 16}]
    suite_positions.draw(rows("loss", places, [3.0, 2.5]), NAMES, tmp_path / "p.png")
    top, below = drawn[0].axes
    assert [line.get_label() for line in top.lines] == list(NAMES)
    assert list(top.lines[0].get_xdata()) == [2.0, 8.0]
    assert list(top.lines[1].get_ydata()) == pytest.approx([3.1, 2.6])
    assert list(below.lines[1].get_ydata()) == pytest.approx([-0.1, -0.1])
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_positions_of_one_model_have_one_panel(tmp_path, drawn):
    made = compare("p", [Measurement("loss", "nats", np.array([[2.0, 1.0]]), {"from": 1, "to": 1})], None, NAMES)
    suite_positions.draw(made, NAMES[:1], tmp_path / "p.png")
    assert len(drawn[0].axes) == 1


def test_recall_has_a_line_for_each_model_and_number_of_pairs(tmp_path, drawn):
    places = [{"pairs": pairs, "distance": distance} for pairs in (4, 8) for distance in (0, 64)]
    made = rows("accuracy", places, [0.9, 0.7, 0.5, 0.3])
    suite_recall.draw([row.model_copy(update={"chance": 0.25}) for row in made], NAMES, tmp_path / "r.png")
    labels = [line.get_label() for line in drawn[0].axes[0].lines]
    assert {"ours, 4 pairs", "theirs, 8 pairs", "guessing"} <= set(labels)
    assert len(labels) == 6
    assert list(drawn[0].axes[0].lines[0].get_ydata()) == pytest.approx([0.9, 0.7])


def test_the_needle_grid_puts_depth_down_and_length_across(tmp_path, drawn):
    places = [{"length": length, "depth": depth} for length in (64, 128) for depth in (0.0, 1.0)]
    made = rows("accuracy", places, [0.1, 0.2, 0.3, 0.4], shift=0.0) + rows("key loss", places, [1, 2, 3, 4])
    suite_needle.draw(made, NAMES, tmp_path / "n.png")
    grids = [axes.images[0].get_array() for axes in drawn[0].axes if axes.images]
    assert len(grids) == 4
    np.testing.assert_allclose(grids[0], [[0.1, 0.3], [0.2, 0.4]])
    assert drawn[0].axes[0].images[0].get_clim() == (0.0, 1.0)
    limits = {axes.images[0].get_clim() for axes in drawn[0].axes[2:4]}
    assert len(limits) == 1, "panels of a row share their colors"


def test_missing_figures_leave_gaps():
    line = Line.of("a", [1, 2], [Value(1.0, None), None])
    assert line.y[0] == 1.0
    assert np.isnan([line.y[1], *line.error]).all()


def test_a_single_point_and_a_constant_grid_can_be_drawn(tmp_path):
    draw_lines(tmp_path / "l.png", [Line.of("a", [1], [Value(1.0, None)])], title="t", x="x", y="y", log_x=True)
    grid = [("viridis", None, [("a", np.array([[2.0, np.nan]]))])]
    draw_grids(tmp_path / "g.png", grid, title="t", x=("x", [1, 2]), y=("y", [0]))
    assert all((tmp_path / name).is_file() for name in ("l.png", "g.png"))


@pytest.mark.parametrize(("means", "scale"), [([1.01, 1.2], "linear"), ([1.0, 400.0], "log")])
def test_heads_and_growth_of_every_layer(tmp_path, drawn, means, scale):
    grid = {3: [1.0, 10.0], 7: [100.0, 1.0]}
    draw_heads(tmp_path / "i.png", [("ours", grid, {layer: ([64, 512], means) for layer in grid})])
    left, right = drawn[0].axes[:2]
    np.testing.assert_allclose(left.images[0].get_array(), [[0, 1], [2, 0]])
    assert [label.get_text() for label in left.get_yticklabels()] == ["3", "7"]
    assert [line.get_label() for line in right.lines] == ["layer 3", "layer 7"]
    assert right.get_yscale() == scale


@pytest.mark.parametrize("means", [[1.0, 1.0], [1.0, 1.0000001], [1.0, 1.02], [1000.0, 1000.3], [0.0, 0.0]])
def test_ticks_are_the_numbers_themselves(tmp_path, drawn, means):
    """Importance at the identity start is one to seven digits: ticks of 1e-7 beside a lonely +1 say nothing."""
    draw_heads(tmp_path / "i.png", [("ours", {3: [1.0, 1.0]}, {3: ([64, 512], means)})])
    draw_lines(tmp_path / "l.png", [Line.of("a", [1, 2], [Value(m, None) for m in means])], title="t", x="x", y="y")
    for axes in (drawn[0].axes[1], drawn[1].axes[0]):
        assert "+" not in axes.yaxis.get_offset_text().get_text()
        assert axes.get_ylim()[0] <= min(means)
        assert axes.get_ylim()[1] >= max(means)
    assert drawn[0].axes[0].images[0].get_clim() == (0.0, eval_plots._FLAT)
    assert all(float(tick).is_integer() for tick in drawn[0].axes[0].get_xticks())
    low, high = drawn[0].axes[1].get_ylim()
    assert high - low > 1e-3 * means[0], "what cannot be seen apart is not blown up"


def test_text_on_a_cell_can_be_read(tmp_path, drawn):
    grid = [("viridis", (0.0, 1.0), [("a", np.array([[0.0, 1.0]]))])]
    draw_grids(tmp_path / "g.png", grid, title="t", x=("x", [1, 2]), y=("y", [0]))
    assert [text.get_color() for text in drawn[0].axes[0].texts] == ["white", eval_plots.INK]
