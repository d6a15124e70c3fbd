"""Fit against held-out error: a line per repair, with what tells it from the others."""

import sweep_rows as sr

TITLE = "Fit and held-out error"


def fitted(samples, compensation, fit, held, value=9.0, seed=0, **options):
    return sr.row(
        grids=["overfitting"], compensation=compensation, samples=samples, holdout=0.2,
        seed=seed, options=options, perplexity=sr.perplexity(value),
        sites=[{"site": "mlp", "block": 0, "error_after": fit, "holdout_after": held,
                "holdout_before": 1.0}],
    )  # fmt: skip


def test_solvers_and_ridges_name_their_lines_and_every_size_has_its_columns(tmp_path):
    """Means over ridges or numbers of windows would say nothing."""
    rows = [
        fitted(10, "coec", 0.1, 0.4, 8.0, solver="joint"),
        fitted(10, "coec", 0.2, 0.3, 7.0, solver="gradient"),
        fitted(10, "least-squares", 0.05, 0.5, ridge=0.01),
        fitted(10, "least-squares", 0.07, 0.3, ridge=1.0),
        fitted(160, "coec", 0.2, 0.25, 6.0, solver="joint"),
        fitted(160, "coec", 0.2, 0.25, 6.004, seed=1, solver="joint"),
        fitted(160, "least-squares", 0.15, 0.26, ridge=0.01),
    ]
    perplexities, errors = sr.tables(tmp_path, rows, TITLE)
    assert errors.title == "wt2-llama, MLP: relative output error at 30 % sparsity"
    assert errors.heads == (
        "Repair", "Fit, 10 windows", "Held out, 10 windows", "Fit, 160 windows",
        "Held out, 160 windows",
    )  # fmt: skip
    assert sr.texts(errors) == [
        ["least-squares, ridge = 0.01", "0.0500", "0.5000", "0.1500", "0.2600"],
        ["least-squares, ridge = 1", "0.0700", "*0.3000", "–", "–"],
        ["coec, solver = joint", "0.1000", "0.4000", "0.2000", "*0.2500"],
        ["coec, solver = gradient", "0.2000", "*0.3000", "–", "–"],
    ]
    assert perplexities.heads == ("Repair", "wt2-llama, 10 windows", "wt2-llama, 160 windows")
    assert sr.texts(perplexities)[2:] == [
        ["coec, solver = joint", "8.00", "*6.00a"], ["coec, solver = gradient", "*7.00", "–"],
    ]  # fmt: skip
    assert perplexities.notes == ("a: mean of 2 seeds",)


def test_errors_are_means_over_the_modules_of_a_site(tmp_path):
    sites = [
        {"site": "mlp", "block": b, "error_after": 0.1 + 0.1 * b, "holdout_after": 0.3}
        for b in range(2)
    ]
    (table,) = sr.tables(tmp_path, [sr.row(sites=sites, grids=["overfitting"])], TITLE)
    assert table.heads == ("Repair", "Fit", "Held out")
    assert sr.texts(table) == [["coec", "0.1500", "0.3000"]]


def test_selections_are_told_apart(tmp_path):
    rows = [fitted(10, "coec", 0.1, 0.4), fitted(10, "coec", 0.1, 0.3)]
    rows[1]["settings"]["selection"], rows[1]["cell"] = "flap", "other"
    errors = sr.tables(tmp_path, rows, TITLE)[-1]
    assert [line[0] for line in sr.texts(errors)] == ["flap + coec", "rcpu + coec"]


def test_fit_and_held_out_are_joined_by_a_bar_in_a_panel_of_every_size(tmp_path):
    (figure,) = sr.section(tmp_path, sr.sweep(), TITLE).figures
    assert len(figure.panels) == 3 * 2 * 3  # models, sites, sizes
    panel = figure.panels[-1]
    assert panel.title == "wt2-llama, 30 %, MLP, 160 windows"
    assert [text for _, text in panel.y_ticks][-4:] == [
        "rcpu", "coec, solver = joint", "coec, solver = conjugate", "coec, solver = gradient",
    ]  # fmt: skip
    assert len(panel.y_ticks) == 12
    bar, *_, fits, helds = panel.curves
    assert list(bar.x) == [fits.x[0], helds.x[0]]


def test_errors_far_above_the_slices_leave_the_picture_and_are_named(tmp_path):
    rows = [
        fitted(10, "coec", 0.1, 0.4),
        fitted(10, "least-squares", 0.2, 0.5, ridge=1.0),
        fitted(10, "least-squares", 1.3, 1.3, ridge=10.0),
    ]
    (figure,) = sr.section(tmp_path, rows, TITLE).figures
    (panel,) = figure.panels
    assert [text for _, text in panel.y_ticks] == ["least-squares, ridge = 1", "coec"]
    assert figure.caption[1] == (
        "Where a held-out error is above 1.25 times the slice's it is in the table only: "
        "least-squares, ridge = 10."
    )
