"""Ablation, curves, seeds, and grids of a user's own."""

import sweep_rows as sr
from coec.experiments.reporting.document import document
from coec.experiments.reporting.modules import falling, non_increasing
from coec.experiments.reporting.results import read_results
from coec.experiments.reporting.values import varying


def grid(folder, rows, name):
    return read_results(sr.write(folder, rows)).grid(name)


def labelled(model, label, value, rounds):
    measured = {"status": "failed", "error": "no"} if value is None else {}
    return sr.row(
        model, grids=["ablation"], labels={"ablation": label}, options={"rounds": rounds},
        perplexity=None if value is None else sr.perplexity(value), **measured,
    )  # fmt: skip


def test_the_ablation_is_in_the_papers_order_with_a_mean_over_whole_models(tmp_path):
    values = {"+ GCV rescale": (9.0, 11.0, None), "RCPU": (10.0, 12.0, 3.0), "odd": (1.0, 2.0, 5.0)}
    rows = [
        labelled(model, label, by_model[i], rounds)
        for rounds, (label, by_model) in enumerate(values.items())
        for i, model in enumerate("abc")
    ]
    build_up, single = sr.tables(tmp_path, rows, "Ablation")
    assert build_up.heads == ("Configuration", "a", "b", "c", "Mean")
    assert sr.texts(build_up) == [
        ["RCPU", "10.00", "12.00", "3.00", "11.00"],
        ["+ GCV rescale", "9.00", "11.00", "faileda", "10.00"],
    ]
    assert build_up.notes[0] == "Mean over the models that have every row: a, b."
    assert sr.texts(single) == [["odd", "1.00", "2.00", "5.00", "2.67"]]


def test_a_curve_has_a_column_per_value_and_the_best_in_bold(tmp_path):
    rows = [
        sr.row(
            compensation=pruning,
            samples=n,
            grids=["calibration-size"],
            perplexity=sr.perplexity(value),
        )
        for pruning, n, value in (("coec", 128, 9.0), ("coec", 32, 9.5), ("none", 32, 12.0))
    ]
    (table,) = sr.tables(tmp_path, rows, "Calibration size")
    assert table.heads[-2:] == ("32", "128")
    assert sr.texts(table) == [
        ["30 %", "rcpu", "none", "12.00", "–"], ["30 %", "rcpu", "coec", "9.50", "*9.00"],
    ]  # fmt: skip
    assert "windows, as many as shown, of 256 tokens" in table.settings


def test_spread_is_the_range_over_seeds(tmp_path):
    rows = [
        sr.row(sparsity=s, seed=seed, grids=["seeds"], perplexity=sr.perplexity(value))
        for s, values in ((0.1, (5.0, 5.25, 5.5)), (0.3, (9.0, 9.0, 9.1)))
        for seed, value in enumerate(values)
    ]
    spreads, cells = sr.tables(tmp_path, rows, "Seeds")
    assert sr.texts(spreads) == [["coec", "2", "0.30", "0.50"]]
    assert [row[-2:] for row in sr.texts(cells)] == [["5.25", "0.50"], ["9.00", "0.10"]]


def test_a_grid_of_a_users_own_shows_what_varies(tmp_path):
    rows = [
        sr.row(compensation=pruning, grids=["mine"], options=options, perplexity=sr.perplexity(9))
        for pruning, options in (
            ("coec", {"alpha": 0.9, "rounds": 1}), ("coec", {"alpha": 0.9, "rounds": 2}),
            ("none", {}),
        )
    ]  # fmt: skip
    found = grid(tmp_path, rows, "mine")
    assert varying(found) == ("compensation", "rounds")
    (table,) = sr.tables(tmp_path, rows, "Grid mine")
    assert table.heads == ("Model", "compensation", "rounds", "Perplexity")
    assert sr.texts(table)[2] == ["wt2-llama", "none", "–", "9.00"]


def test_a_main_grid_that_varies_more_falls_back_to_what_varies(tmp_path):
    rows = [sr.row(samples=n, grids=["main"], perplexity=sr.perplexity(9.0)) for n in (8, 16)]
    made = document(read_results(sr.write(tmp_path, rows)))
    assert "Grid main" in [section.title for section in made.sections]


def test_only_rises_beyond_rounding_count():
    assert non_increasing([1.0, 0.5, 0.5])
    assert non_increasing([1.0, 0.5, 0.5 + 1e-10])
    assert not non_increasing([1.0, 0.5, 0.5 + 1e-8])
    assert non_increasing([1e-7, 1e-8, 1e-8 + 1e-15])  # rounding of a difference of ones
    assert not non_increasing([1e-7, 1e-8, 1e-8 + 1e-14])


def test_rounding_is_that_of_the_dtype_it_was_solved_in(tmp_path):
    sites = [{"site": "mlp", "block": 0, "errors_per_round": [1.0, 0.5, 0.5 + 1e-7]}]
    for dtype, fell in (("float64", 0), ("float32", 1)):
        row = sr.row(sites=sites, grids=["g"])
        row["settings"]["solve_dtype"] = dtype
        assert falling(grid(tmp_path, [row], "g"), "errors_per_round") == (fell, 1)


def tolerance(delta, parameterization, value, seed=0):
    options = {"delta": delta, "parameterization": parameterization}
    return sr.row(grids=["delta"], options=options, seed=seed, perplexity=sr.perplexity(value))


def test_what_else_varies_in_a_curve_has_lines_of_its_own(tmp_path):
    """The ready grid `delta` crosses the tolerance with the parameterization."""
    rows = [
        tolerance(d, p, value, seed)
        for (d, p), value in {
            (1e-2, "stiefel"): 9.0, (1e-2, "full"): 11.0, (1e-3, "stiefel"): 8.0,
            (1e-3, "full"): 12.0,
        }.items()
        for seed in (0, 1)
    ]  # fmt: skip
    section = sr.section(tmp_path, rows, "Stopping tolerance δ")
    (table,) = section.tables
    assert table.heads == (
        "Sparsity", "Selection", "Compensation", "parameterization", "0.001", "0.01",
    )  # fmt: skip
    assert sr.texts(table) == [
        ["30 %", "rcpu", "coec", "stiefel", "*8.00a", "9.00a"],
        ["30 %", "rcpu", "coec", "full", "12.00a", "*11.00a"],
    ]
    assert table.notes == ("a: mean of 2 seeds",)
    lines = {curve.label: list(curve.y) for curve in section.figures[0].panels[0].curves}
    assert lines == {
        "coec, parameterization = stiefel": [8.0, 9.0], "coec, parameterization = full": [12, 11],
    }  # fmt: skip


def test_a_mean_over_more_than_seeds_says_over_what(tmp_path):
    rows = [
        sr.row(grids=["seeds"], seed=seed, options={"alpha": alpha}, perplexity=sr.perplexity(9.0))
        for seed in (0, 1)
        for alpha in (0.5, 0.9)
    ]
    notes = sr.tables(tmp_path, rows, "Seeds")[1].notes
    assert "a: mean of 2 cells that differ in alpha" in notes


def test_modules_that_ran_into_the_cap_are_counted(tmp_path):
    def capped(rounds, solver, *taken):
        sites = [{"site": "mlp", "block": 0, "rounds": n} for n in taken]
        return sr.row(grids=["rounds"], options={"rounds": rounds, "solver": solver}, sites=sites)

    rows = [
        capped(1, "joint", 1, 1), capped(50, "joint", 7, 50),
        capped(1, "gradient", 1, 0), capped(50, "gradient", 3, 9),
    ]  # fmt: skip
    (table,) = sr.tables(tmp_path, rows, "Cap on the rounds")
    assert table.heads == ("Model", "solver", "Cap 1", "Cap 50")
    assert sr.texts(table) == [
        ["wt2-llama", "joint", "2 of 2", "1 of 2"], ["wt2-llama", "gradient", "1 of 2", "0 of 2"],
    ]  # fmt: skip
    assert sr.tables(tmp_path, [sr.row(grids=["rounds"])], "Cap on the rounds") == []
