"""What a figure draws along which axis, and what its files are."""

import pytest

import sweep_rows as sr
from coec.experiments.reporting.figures import draw, swept
from coec.experiments.reporting.frame import averages, axes_of, frame_of, of_grid, read_rows


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """All cells of a made-up sweep of every ready grid."""
    return frame_of(read_rows(sr.write(tmp_path_factory.mktemp("whole"), sr.sweep()))[0])


def lines_of(cells, grid):
    own = of_grid(cells, grid)
    axes = axes_of(own)
    return averages(own, axes), axes


@pytest.mark.parametrize(
    ("grid", "axis", "panels"),
    [
        ("main", "sparsity", 3), ("calibration-size", "samples", 9), ("alpha", "alpha", 1),
        ("rescale-ridge", "rescale_ridge", 1), ("rounds", "rounds", 1),
        ("overfitting", "samples", 3), ("seeds", None, 0),
    ],
)  # fmt: skip
def test_a_figure_is_drawn_along_what_is_swept_with_a_panel_per_place(grid, axis, panels, cells):
    lines, axes = lines_of(cells, grid)
    assert swept(lines, axes) == axis
    files = draw(lines, axes, "perplexity")
    assert set(files) == ({"pdf", "svg"} if panels else set())
    if panels:
        assert files["pdf"].startswith(b"%PDF")
        assert files["svg"].count(b'<g id="axes_') == panels


def test_a_figure_is_the_same_twice(cells):
    lines, axes = lines_of(cells, "alpha")
    assert draw(lines, axes, "perplexity") == draw(lines, axes, "perplexity")


def test_points_are_in_order_and_what_has_no_place_is_a_level(cells, monkeypatch):
    """The dense model along sparsity, and cross-validation along a swept ridge."""
    from matplotlib.axes import Axes

    plotted, levels = [], []
    plot, level = Axes.plot, Axes.axhline
    monkeypatch.setattr(
        Axes, "plot", lambda self, x, y, **how: plotted.append(list(x)) or plot(self, x, y, **how)
    )
    monkeypatch.setattr(
        Axes, "axhline", lambda self, y, **how: levels.append(y) or level(self, y, **how)
    )
    draw(*lines_of(cells, "main"), "perplexity")
    assert (plotted.count([0.1, 0.2, 0.3]), len(levels)) == (17, 3)
    assert [x for x in plotted if x != [0.1, 0.2, 0.3]] == [[0.1, 0.2]]  # one cell failed
    plotted.clear(), levels.clear()
    draw(*lines_of(cells, "rescale-ridge"), "perplexity")
    assert (plotted, len(levels)) == ([[0.0, 0.1, 1.0, 10.0]] * 2, 2)


def test_a_metric_that_nobody_measured_is_not_drawn(cells):
    lines, axes = lines_of(cells, "alpha")
    assert draw(lines.assign(zero_shot=float("nan")), axes, "zero_shot") == {}
