"""Which points a figure draws, and what the drawing is."""

import re

import pytest

import sweep_rows as sr
from coec.experiments.reporting import drawing, modules
from coec.experiments.reporting.document import document
from coec.experiments.reporting.drawing import Curve, Panel
from coec.experiments.reporting.results import read_results


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The figures of a whole report, by their titles."""
    made = document(read_results(sr.write(tmp_path_factory.mktemp("sweep"), sr.sweep())))
    return {figure.title: figure for section in made.sections for figure in section.figures}


def inside(folder, rows):
    return {f.title: f for f in sr.section(folder, rows, "Inside the modules").figures}


def curved(**series):
    return {"site": "mlp", "block": 0, **series}


def test_convergence_is_relative_to_the_slice_and_counted(tmp_path):
    sites = [
        curved(errors_per_round=[0.4, 0.2, 0.1], objectives_per_round=[0.4, 0.3, 0.3]),
        curved(errors_per_round=[0.2, 0.1], objectives_per_round=[0.2, 0.1]),
        curved(errors_per_round=[1.0, 0.5, 0.6], objectives_per_round=[1.0, 0.5, 0.5]),
        curved(errors_per_round=[0.0, 0.0]),
        curved(errors_per_round=[0.5]),
    ]
    figure = inside(tmp_path, [sr.row(sites=sites)])["Convergence of every module"]
    *grey, mean = figure.panels[0].curves
    assert [list(c.y) for c in grey] == [[1, 0.5, 0.25], [1, 0.5], [1, 0.5, 0.6]]
    assert mean.y == pytest.approx([1, 0.5, (0.25 + 0.5 + 0.6) / 3])  # a finished module stays
    assert {c.role for c in grey} == {"faint"}
    assert mean.role == "mean"
    assert figure.caption[0].startswith("Tempered errors: 3 of 4 modules never rise")
    assert figure.caption[1].startswith("Objectives, with the alignment penalty: 3 of 3 modules")
    assert figure.caption[2] == "Not drawn, because their slice has no error: 1."


def test_more_modules_than_a_panel_takes_are_thinned_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(modules, "_CURVES", 2)
    sites = [curved(errors_per_round=[1.0, 0.5 + i / 100]) for i in range(5)]
    figure = inside(tmp_path, [sr.row(sites=sites)])["Convergence of every module"]
    *grey, mean = figure.panels[0].curves
    assert len(grey) == 2
    assert mean.y[-1] == pytest.approx(0.52)
    assert figure.caption[-1].startswith("Of more than 2 modules, evenly spaced ones are drawn")


def test_calibration_size_has_a_panel_per_model_and_sparsity(whole):
    figure = whole["Perplexity by samples"]
    assert len(figure.panels) == 3 * 3
    first = figure.panels[0]
    assert first.title == "stories260K, 10 %"
    assert [c.label for c in first.curves] == ["none", "rcpu", "coec"]
    assert [text for _, text in first.x_ticks] == ["16", "32", "64", "128"]
    assert first.x_scale == "log"


def test_axes_have_the_names_of_the_paper(whole):
    names = {title: figure.panels[0].x_label for title, figure in whole.items()}
    assert names["Perplexity by alpha"] == "α"
    assert names["Perplexity by lambda_a"] == "λₐ"
    assert names["Perplexity by delta"] == "δ"
    assert names["Perplexity by samples"] == "Calibration sequences"
    assert {f.panels[0].y_label for t, f in whole.items() if t.startswith("Perplexity by")} == {
        "Perplexity"
    }


def test_a_figure_is_a_file_of_every_type_with_all_panels_and_the_same_twice(whole):
    figure = whole["Perplexity by parameters"]
    files = drawing.pictures(figure)
    assert files["pdf"].startswith(b"%PDF")
    assert files["svg"].count(b'<g id="axes_') == len(figure.panels) == 3
    assert files == drawing.pictures(figure)


def test_a_range_with_a_zero_is_evenly_spaced(whole):
    (panel,) = whole["Perplexity by lambda_a"].panels
    assert panel.curves[0].x == [0, 1, 2, 3, 4, 5]
    assert panel.x_ticks[-1] == (5, "1000")


def test_blocks_compare_repairs_of_the_same_slice(whole):
    figure = whole["Error by block"]
    labels = [curve.label for curve in figure.panels[0].curves]
    assert labels == ["slice", "rcpu", "coec"]
    assert figure.panels[0].curves[0].x == [0, 1, 2, 3]
    assert figure.caption[0].startswith("Units kept by rcpu at 30 % sparsity")


def test_the_dense_model_is_a_point_of_perplexity_by_parameters(whole):
    figure = whole["Perplexity by parameters"]
    star = figure.panels[1].curves[-1]
    assert (star.label, star.x) == ("dense", [3.05])
    assert figure.panels[1].y_scale == "log"
    assert figure.panels[1].x_label == "Parameters, millions"


def test_figures_without_data_are_left_out(tmp_path):
    rows = [sr.row(grids=["main", "calibration-size", "rescale-ridge", "overfitting"])]
    made = document(read_results(sr.write(tmp_path, rows)))
    assert [figure for section in made.sections for figure in section.figures] == []


PANEL = Panel('a "b" <&> 0.00071', (Curve([1, 2], [3, 4], "x", "coec", marker="o"),), "x", "y")


def test_a_drawing_takes_colours_and_fonts_from_the_page():
    drawn = drawing.page_svg(PANEL, "one")
    assert not re.search(r"#[0-9a-f]{6}\b", drawn.replace("#000000", ""))
    assert "var(--plot-coec)" in drawn
    assert "font-family" not in drawn
    assert "<style" not in drawn
    assert "http" not in drawn
    assert "0.00071" in drawn  # texts keep their digits, places are rounded
    assert not re.search(r' d="[^"]*\d\.\d{3}', drawn)


def test_ids_of_two_drawings_do_not_clash():
    one, two = drawing.page_svg(PANEL, "one"), drawing.page_svg(PANEL, "two")
    ids = [set(re.findall(r'\bid="([^"]*)"', text)) for text in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for text, own in zip((one, two), ids):
        assert set(re.findall(r'href="#([^"]*)"', text)) <= own
        assert set(re.findall(r"url\(#([^)]*)\)", text)) <= own


def test_the_same_panel_is_drawn_the_same():
    assert drawing.page_svg(PANEL, "one") == drawing.page_svg(PANEL, "one")


def test_of_several_cells_of_a_repair_the_best_is_drawn_on_units_all_share(tmp_path):
    def sliced(value, digest, before, after, compensation="coec"):
        site = {"site": "mlp", "block": 0, "error_before": before, "error_after": after}
        made = sr.row(compensation=compensation, perplexity=sr.perplexity(value), sites=[site])
        return made | {"cell": str(value), "calibration": {"windows_sha256": digest}}

    rows = [
        sliced(9.0, "few", 0.9, 0.8), sliced(8.0, "many", 0.5, 0.4), sliced(7.0, "many", 0.5, 0.3),
        sliced(9.5, "few", 0.9, 0.7, "rcpu"),
    ]  # fmt: skip
    figure = inside(tmp_path, rows)["Error by block"]
    (panel,) = figure.panels
    assert {curve.label: list(curve.y) for curve in panel.curves} == {"slice": [0.5], "coec": [0.3]}
