"""Ablation, curves, seeds, and grids of a user's own."""

import sweep_rows as sr
from coec.experiments.reporting.document import document
from coec.experiments.reporting.inside import falling, non_increasing, overfitting_table
from coec.experiments.reporting.results import read_results
from coec.experiments.reporting.variation import (
    ablation_tables,
    curve_tables,
    generic_table,
    seed_tables,
    varying,
)


def grid(folder, rows, name):
    return read_results(sr.write(folder, rows)).grid(name)


def texts(table):
    return [[("*" if c.bold else "") + c.text + c.mark for c in row] for row in table.rows]


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
    build_up, single = ablation_tables(grid(tmp_path, rows, "ablation"), "ablation", "perplexity")
    assert build_up.heads == ("Configuration", "a", "b", "c", "Mean")
    assert texts(build_up) == [
        ["RCPU", "10.00", "12.00", "3.00", "11.00"],
        ["+ GCV rescale", "9.00", "11.00", "faileda", "10.00"],
    ]
    assert build_up.notes[0] == "Mean over the models that have every row: a, b."
    assert texts(single) == [["odd", "1.00", "2.00", "5.00", "2.67"]]


def test_a_curve_has_a_column_per_value_and_the_best_in_bold(tmp_path):
    rows = [
        sr.row(compensation=repair, samples=n, grids=["g"], perplexity=sr.perplexity(value))
        for repair, n, value in (("coec", 128, 9.0), ("coec", 32, 9.5), ("none", 32, 12.0))
    ]
    (table,) = curve_tables(grid(tmp_path, rows, "g"), "samples", "perplexity")
    assert table.heads[-2:] == ("32", "128")
    assert texts(table) == [
        ["30 %", "rcpu", "none", "12.00", "–"], ["30 %", "rcpu", "coec", "9.50", "*9.00"],
    ]  # fmt: skip
    assert "as shown windows" in table.settings


def test_spread_is_the_range_over_seeds(tmp_path):
    rows = [
        sr.row(sparsity=s, seed=seed, grids=["seeds"], perplexity=sr.perplexity(value))
        for s, values in ((0.1, (5.0, 5.25, 5.5)), (0.3, (9.0, 9.0, 9.1)))
        for seed, value in enumerate(values)
    ]
    spreads, cells = seed_tables(grid(tmp_path, rows, "seeds"))
    assert texts(spreads) == [["coec", "2", "0.30", "0.50"]]
    assert [row[-2:] for row in texts(cells)] == [["5.25", "0.50"], ["9.00", "0.10"]]


def test_a_grid_of_a_users_own_shows_what_varies(tmp_path):
    rows = [
        sr.row(compensation=repair, grids=["mine"], options=options, perplexity=sr.perplexity(9))
        for repair, options in (
            ("coec", {"alpha": 0.9, "rounds": 1}), ("coec", {"alpha": 0.9, "rounds": 2}),
            ("none", {}),
        )
    ]  # fmt: skip
    found = grid(tmp_path, rows, "mine")
    assert varying(found) == ("compensation", "rounds")
    table = generic_table(found, "mine")
    assert table.heads == ("Model", "compensation", "rounds", "Perplexity", "Parameters")
    assert texts(table)[2] == ["wt2-llama", "none", "–", "9.00", "–"]


def test_a_main_grid_that_varies_more_falls_back_to_what_varies(tmp_path):
    rows = [sr.row(samples=n, grids=["main"], perplexity=sr.perplexity(9.0)) for n in (8, 16)]
    made = document(read_results(sr.write(tmp_path, rows)))
    assert "Grid main" in [section.title for section in made.sections]


def test_fit_and_held_out_errors_are_means_over_modules(tmp_path):
    sites = [
        {"site": "mlp", "block": b, "error_after": 0.1 + 0.1 * b, "holdout_after": 0.3}
        for b in range(2)
    ]
    table = overfitting_table(grid(tmp_path, [sr.row(sites=sites, grids=["g"])], "g"))
    assert texts(table)[0][5:] == ["mlp", "0.1500", "0.3000", "2.00", "–"]


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
