"""The ridge chosen by cross-validation beside one swept for all modules."""

import pytest

import sweep_rows as sr


def ridged(rule, ridge, value, rotation="left", **changes):
    options = {"rescale": rule, "rescale_ridge": ridge, "rotation": rotation}
    return sr.row(
        grids=["rescale-ridge"], options=options, perplexity=sr.perplexity(value), **changes
    )


@pytest.fixture
def section(tmp_path):
    chosen = [{"site": "mlp", "block": 0, "gcv_lambda": value} for value in (0.1, 0.8, 0.9)]
    made = [
        ridged("gcv", 1.0, 9.1, sites=chosen),
        ridged("fixed", 0.0, 9.5), ridged("fixed", 10.0, 9.3), ridged("fixed", 1.0, 9.0),
        ridged("gcv", 1.0, 8.0, "two-sided"), ridged("fixed", 1.0, 8.0, "two-sided"),
    ]  # fmt: skip
    return sr.section(tmp_path, made, "Ridge of the rescale")


def test_the_gap_is_to_the_best_swept_ridge(section):
    (table,) = section.tables
    assert table.heads == (
        "Method", "Sparsity", "λ = 0", "λ = 1", "λ = 10", "GCV", "GCV − best swept",
        "GCV's λ, median",
    )  # fmt: skip
    assert [[cell.text for cell in line] for line in table.rows] == [
        ["rcpu + coec, rotation = left", "30 %", "9.50", "9.00", "9.30", "9.10", "+0.10", "0.8"],
        ["rcpu + coec, rotation = two-sided", "30 %", "–", "8.00", "–", "8.00", "0.00", "–"],
    ]


def test_the_swept_ridges_are_a_curve_and_cross_validation_is_a_level(section):
    left, both = section.figures[0].panels
    swept, level = left.curves
    assert [text for _, text in left.x_ticks] == ["0", "1", "10"]
    assert list(swept.y) == [9.5, 9.0, 9.3]
    assert list(level.y) == [9.1, 9.1]
    assert list(level.x) == [min(swept.x), max(swept.x)]
    assert both.title == "wt2-llama, 30 %, rcpu + coec, rotation = two-sided"
