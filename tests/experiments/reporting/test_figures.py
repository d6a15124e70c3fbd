"""Which points a figure draws, and what its files are."""

import pytest

import sweep_rows as sr
from coec.experiments.declarations import Declared, write_declarations
from coec.experiments.reporting.document import document
from coec.experiments.reporting.figures import draw
from coec.experiments.reporting.frame import read_results


@pytest.fixture(scope="module")
def whole(whole_report):
    """The figures of a whole report, by their titles."""
    return {f.title: f for section in whole_report.sections for f in section.figures.values()}


@pytest.mark.slow
def test_calibration_size_has_a_panel_per_model_and_sparsity(whole):
    figure = whole["Perplexity by samples"]
    assert len(figure.panels) == 3 * 3
    first = figure.panels["stories260K, 10 %"]
    assert [label for _, label in first] == ["none", "rcpu", "coec"]
    assert list(first.index) == [16, 32, 64, 128]


def test_axes_have_the_names_of_the_paper(whole):
    names = {title: figure.x_label for title, figure in whole.items()}
    assert names["Perplexity by alpha"] == "α"
    assert names["Perplexity by lambda_a"] == "λₐ"
    assert names["Perplexity by delta"] == "δ"
    assert names["Perplexity by samples"] == "Calibration sequences"
    assert {f.y_label for t, f in whole.items() if t.startswith("Perplexity by")} == {"Perplexity"}


@pytest.mark.parametrize("title", ["Perplexity by parameters", "Perplexity by lambda_a"])
def test_a_figure_is_a_file_of_every_type_with_all_panels_and_the_same_twice(title, whole):
    figure = whole[title]
    files = draw(figure)
    assert files["pdf"].startswith(b"%PDF")
    assert files["svg"].count(b'<g id="axes_') == len(figure.panels)
    assert files == draw(figure)


def test_the_dense_model_is_a_point_of_perplexity_by_parameters(whole):
    figure = whole["Perplexity by parameters"]
    assert (figure.x_label, figure.y_log) == ("Parameters, millions", True)
    star = figure.panels["babyllama-1M"]["dense", "dense"].dropna()
    assert list(star.index) == [3.05]


def test_blocks_compare_repairs_of_the_same_slice(whole):
    panel = whole["Error by block"].panels["stories260K, MLP"]
    assert [label for _, label in panel] == ["rcpu", "coec"]
    assert list(panel.index) == [0, 1, 2, 3]


def test_error_by_round_is_relative_and_a_module_that_stopped_keeps_its_last(tmp_path):
    sites = [
        {"site": "mlp", "block": 0, "errors_per_round": errors}
        for errors in ([0.4, 0.2, 0.1], [0.2, 0.1], [0.0, 0.0])
    ]
    section = sr.section(tmp_path, [sr.row(sites=sites, grids=["main"])], "Inside the modules")
    (figure,) = section.figures.values()
    assert list(figure.panels["wt2-llama, MLP"]["coec", "coec"]) == [1, 0.5, 0.375]


def test_figures_without_data_are_left_out(tmp_path):
    rows = [sr.row(grids=["main", "calibration-size", "rescale-ridge", "overfitting"])]
    made = document(read_results(sr.write(tmp_path, rows)))
    assert [figure for section in made.sections for figure in section.figures] == []


def test_figures_of_one_title_have_files_of_their_own(tmp_path):
    figure = {"section": "α", "figure": "β", "x": "samples"}
    rows = [sr.row(grids=["g"], samples=n, perplexity=sr.perplexity(9.0 + n)) for n in (8, 16)]
    folder = sr.write(tmp_path, rows)
    write_declarations(folder, Declared(grids={"g": [figure, figure]}))
    (section,) = [one for one in document(read_results(folder)).sections if one.title == "α"]
    assert len(section.figures) == 2
