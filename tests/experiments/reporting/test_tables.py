"""Tables that grids declare: what stands where, what is bold, means, and the paper's numbers."""

import pytest

import sweep_rows as sr
from coec.errors import OptionError
from coec.experiments.declarations import Declared
from coec.experiments.reporting.document import document
from coec.experiments.reporting.frame import read_results
from coec.experiments.reporting.published import PUBLISHED, with_published

MAIN = "Selections, repairs and sparsities"


def main(model, selection, compensation, value, **changes):
    measured = {"perplexity": None if value is None else sr.perplexity(value)}
    return sr.row(model, 0.3, selection, compensation, grids=["main"], **measured | changes)


def test_the_better_of_a_pair_is_bold_and_of_a_tie_both(tmp_path):
    rows = [
        sr.dense("a", perplexity=sr.perplexity(10.0)), sr.dense("b", perplexity=sr.perplexity(20)),
        main("a", "rcpu", "coec", 12.004), main("a", "rcpu", "rcpu", 11.996),
        main("b", "rcpu", "coec", 30.0), main("b", "rcpu", "rcpu", 31.5),
        main("a", "wanda-sp", "none", 15.0), main("a", "wanda-sp", "coec", 15.5),
    ]  # fmt: skip
    (table,) = sr.tables(tmp_path, rows, MAIN, "Perplexity")
    assert sr.heads(table) == ["Selection", "Compensation", "a", "b", "Mean", "Better on"]
    assert sr.texts(table) == [
        ["dense", "–", "10.00", "20.00", "–", "–"],
        ["wanda-sp", "none", "*15.00", "–", "15.00", "1 of 1"],
        ["wanda-sp", "coec", "15.50", "–", "15.50", "0 of 1"],
        ["rcpu", "rcpu", "*12.00", "31.50", "12.00", "1 of 2"],
        ["rcpu", "coec", "*12.00", "*30.00", "12.00", "2 of 2"],
    ]
    assert table.notes == ("Mean over the columns that have every row: a.",)
    assert table.title == "Perplexity (lower is better) at 30 % sparsity"


def test_higher_accuracy_is_better(tmp_path):
    rows = [
        sr.row(compensation=name, grids=["main"], zero_shot=sr.zero_shot(value))
        for name, value in (("rcpu", 0.501), ("coec", 0.512))
    ]
    (table,) = sr.tables(tmp_path, rows, MAIN, "Zero-shot")
    assert [row[2] for row in sr.texts(table)] == ["50.1", "*51.2"]


def test_a_failed_cell_says_so_and_takes_no_part(tmp_path):
    failed = main("a", "flap", "bias", None, status="failed", error="the reason")
    rows = [failed, main("a", "flap", "coec", 12.0)]
    (table,) = sr.tables(tmp_path, rows, MAIN, "Perplexity")
    assert [row[2] for row in sr.texts(table)] == ["failed", "12.00"]
    (failures, *_) = sr.tables(tmp_path, rows, "Record")
    assert sr.texts(failures)[0][1:] == ["a", "flap + bias at 30 %", "the reason"]


def test_seeds_are_averaged_and_a_note_says_so(tmp_path):
    rows = [main("a", "rcpu", "coec", value, seed=seed) for seed, value in enumerate((10, 13))]
    (table,) = sr.tables(tmp_path, rows, MAIN, "Perplexity")
    assert sr.texts(table)[0][:3] == ["rcpu", "coec", "11.50"]
    assert table.notes == ("Entries are means of up to 2 cells.",)


def test_cells_that_differ_in_more_than_the_seed_have_lines_of_their_own(tmp_path):
    rows = [main("a", "rcpu", "coec", 10.0 + n, samples=n) for n in (16, 8)]
    (table,) = sr.tables(tmp_path, rows, MAIN)
    assert sr.heads(table)[:4] == ["Selection", "Compensation", "Samples", "a"]
    assert [row[:4] for row in sr.texts(table)] == [
        ["rcpu", "coec", "8", "*18.00"], ["rcpu", "coec", "16", "26.00"],
    ]  # fmt: skip


def test_a_sparsity_has_a_table_of_its_own_and_the_section_its_conditions(tmp_path):
    rows = [sr.row(sparsity=s, grids=["main"], perplexity=sr.perplexity(9.0)) for s in (0.3, 0.1)]
    section = sr.section(tmp_path, rows, MAIN)
    assert [t.title.split(" at ")[1] for t in section.tables] == ["10 % sparsity", "30 % sparsity"]
    assert section.text[-1] == (
        f"Perplexity: test.txt (sha256 {sr.DIGEST[:12]}), 1,000 windows of 256 tokens. "
        "Calibration: train.txt, 64 windows of 256 tokens, seed 0."
    )


def labelled(model, label, value, rounds):
    measured = {"status": "failed", "error": "no"} if value is None else {}
    return sr.row(
        model, grids=["ablation"], labels={"ablation": label}, options={"rounds": rounds},
        perplexity=None if value is None else sr.perplexity(value), **measured,
    )  # fmt: skip


def test_the_ablation_is_in_the_papers_order_with_a_mean_over_whole_models(tmp_path):
    values = {
        "+ GCV rescale": (9.0, 11.0, None), "RCPU": (10.0, 12.0, 3.0), "one scale": (1.0, 2.0, 5.0),
    }  # fmt: skip
    rows = [
        labelled(model, label, by_model[i], rounds)
        for rounds, (label, by_model) in enumerate(values.items())
        for i, model in enumerate("abc")
    ]
    build_up, single = sr.tables(tmp_path, rows, "Ablation")
    assert sr.heads(build_up) == ["Configuration", "a", "b", "c", "Mean"]
    assert sr.texts(build_up) == [
        ["RCPU", "10.00", "12.00", "3.00", "11.00"],
        ["+ GCV rescale", "9.00", "11.00", "failed", "10.00"],
    ]
    assert build_up.notes == ("Mean over the columns that have every row: a, b.",)
    assert sr.texts(single) == [["one scale", "1.00", "2.00", "5.00", "2.67"]]


def test_a_curve_has_a_column_per_value_and_the_best_in_bold(tmp_path):
    rows = [
        sr.row(compensation=name, samples=n, grids=["calibration-size"],
               perplexity=sr.perplexity(value))
        for name, n, value in (("coec", 128, 9.0), ("coec", 32, 9.5), ("none", 32, 12.0))
    ]  # fmt: skip
    (table,) = sr.tables(tmp_path, rows, "Calibration size")
    assert sr.heads(table)[-2:] == ["32", "128"]
    assert sr.texts(table) == [
        ["30 %", "rcpu", "none", "12.00", "–"], ["30 %", "rcpu", "coec", "9.50", "*9.00"],
    ]  # fmt: skip


def test_spread_is_the_range_over_seeds(tmp_path):
    rows = [
        sr.row(sparsity=s, seed=seed, grids=["seeds"], perplexity=sr.perplexity(value))
        for s, values in ((0.1, (5.0, 5.25, 5.5)), (0.3, (9.0, 9.0, 9.1)))
        for seed, value in enumerate(values)
    ]
    (cells,) = sr.tables(tmp_path, rows, "Seeds")
    assert [row[-2:] for row in sr.texts(cells)] == [["5.25", "0.50"], ["9.00", "0.10"]]


def test_a_grid_of_a_users_own_shows_what_varies(tmp_path):
    rows = [
        sr.row(compensation=name, grids=["mine"], options=options, perplexity=sr.perplexity(9))
        for name, options in (
            ("coec", {"alpha": 0.9, "rounds": 1}), ("coec", {"alpha": 0.9, "rounds": 2}),
            ("none", {}),
        )
    ]  # fmt: skip
    (table,) = sr.tables(tmp_path, rows, "Grid mine")
    assert sr.heads(table) == ["Model", "compensation", "rounds", "Perplexity"]
    assert sr.texts(table)[2] == ["wt2-llama", "none", "–", "9.00"]


def test_what_else_varies_in_a_curve_has_lines_of_its_own(tmp_path):
    """The ready grid `delta` crosses the tolerance with the parameterization."""
    values = {
        (1e-2, "stiefel"): 9.0, (1e-2, "full"): 11.0, (1e-3, "stiefel"): 8.0, (1e-3, "full"): 12.0,
    }  # fmt: skip
    rows = [
        sr.row(grids=["delta"], options={"delta": d, "parameterization": p}, seed=seed,
               perplexity=sr.perplexity(value))
        for (d, p), value in values.items() for seed in (0, 1)
    ]  # fmt: skip
    section = sr.section(tmp_path, rows, "Stopping tolerance δ")
    (table,) = section.tables
    assert sr.heads(table) == [
        "Sparsity", "Selection", "Compensation", "Parameterization", "0.001", "0.01",
    ]  # fmt: skip
    assert sr.texts(table) == [
        ["30 %", "rcpu", "coec", "full", "12.00", "*11.00"],
        ["30 %", "rcpu", "coec", "stiefel", "*8.00", "9.00"],
    ]
    (figure,) = section.figures.values()
    (panel,) = figure.panels.values()
    assert {label: list(line) for (_, label), line in panel.items()} == {
        "coec, parameterization = full": [12, 11], "coec, parameterization = stiefel": [8.0, 9.0],
    }  # fmt: skip


def test_modules_that_ran_into_the_cap_are_counted(tmp_path):
    def capped(rounds, solver, *taken):
        sites = [{"site": "mlp", "block": 0, "rounds": n} for n in taken]
        return sr.row(grids=["rounds"], options={"rounds": rounds, "solver": solver}, sites=sites)

    rows = [
        capped(1, "joint", 1, 1), capped(50, "joint", 7, 50),
        capped(1, "gradient", 1, 0), capped(50, "gradient", 3, 9),
    ]  # fmt: skip
    (table,) = sr.tables(tmp_path, rows, "Cap on the rounds")
    assert sr.heads(table) == ["Model", "Solver", "1", "50"]
    assert sr.texts(table) == [
        ["wt2-llama", "gradient", "50", "0"], ["wt2-llama", "joint", "100", "50"],
    ]  # fmt: skip
    assert sr.tables(tmp_path, [sr.row(grids=["rounds"])], "Cap on the rounds") == []


def fitted(samples, compensation, fit, held, value=9.0, seed=0, **options):
    site = {"site": "mlp", "block": 0, "error_after": fit, "holdout_after": held}
    return sr.row(
        grids=["overfitting"], compensation=compensation, samples=samples, holdout=0.2, seed=seed,
        options=options, perplexity=sr.perplexity(value), sites=[site],
    )  # fmt: skip


def test_fit_and_held_out_errors_stand_side_by_side_by_windows(tmp_path):
    rows = [
        fitted(10, "least-squares", 0.05, 0.5, ridge=0.01),
        fitted(10, "coec", 0.1, 0.4, 8.0, solver="joint"),
        fitted(160, "coec", 0.2, 0.25, 6.0, solver="joint"),
        fitted(160, "coec", 0.2, 0.25, 6.004, seed=1, solver="joint"),
        fitted(10, "coec", 0.2, 0.3, 7.0, solver="gradient"),
    ]
    perplexities, errors = sr.tables(tmp_path, rows, "Fit and held-out error")
    assert errors.title == "wt2-llama, MLP: relative output error at 30 % sparsity"
    assert sr.heads(errors) == [
        "Compensation", "Solver", "samples = 10, Fit", "samples = 10, Held out",
        "samples = 160, Fit", "samples = 160, Held out",
    ]  # fmt: skip
    assert sr.texts(errors) == [
        ["least-squares", "–", "0.0500", "0.5000", "–", "–"],
        ["coec", "gradient", "0.2000", "*0.3000", "–", "–"],
        ["coec", "joint", "0.1000", "0.4000", "0.2000", "0.2500"],
    ]
    assert sr.heads(perplexities)[2:] == ["wt2-llama, samples = 10", "wt2-llama, samples = 160"]
    assert sr.texts(perplexities)[2] == ["coec", "joint", "8.00", "6.00"]


def test_errors_are_means_over_the_modules_of_a_site(tmp_path):
    sites = [
        {"site": "mlp", "block": b, "error_after": 0.1 + 0.1 * b, "holdout_after": 0.3}
        for b in range(2)
    ]
    (table,) = sr.tables(
        tmp_path, [sr.row(sites=sites, grids=["overfitting"])], "Fit and held-out error"
    )
    assert sr.texts(table) == [["coec", "0.1500", "0.3000"]]


def ridged(rule, ridge, value, rotation="left", **changes):
    options = {"rescale": rule, "rescale_ridge": ridge, "rotation": rotation}
    return sr.row(
        grids=["rescale-ridge"], options=options, perplexity=sr.perplexity(value), **changes
    )


def test_cross_validation_stands_beside_the_swept_ridges_and_is_a_level(tmp_path):
    chosen = [{"site": "mlp", "block": 0, "gcv_lambda": value} for value in (0.1, 0.8, 0.9)]
    rows = [
        ridged("gcv", 1.0, 9.1, sites=chosen),
        ridged("fixed", 0.0, 9.5), ridged("fixed", 10.0, 9.3), ridged("fixed", 1.0, 9.0),
        ridged("gcv", 1.0, 8.0, "two-sided"), ridged("fixed", 1.0, 8.0, "two-sided"),
    ]  # fmt: skip
    section = sr.section(tmp_path, rows, "Ridge of the rescale")
    swept, lambdas = section.tables
    assert sr.heads(swept)[3:] == ["Rotation", "0", "1", "10", "gcv"]
    assert [row[3:] for row in sr.texts(swept)] == [
        ["left", "9.50", "*9.00", "9.30", "9.10"], ["two-sided", "–", "8.00", "–", "8.00"],
    ]  # fmt: skip
    assert sr.texts(lambdas) == [["wt2-llama", "left", "0.60"]]
    (figure,) = section.figures.values()
    left = figure.panels["wt2-llama, 30 %, left"]
    assert list(left.index) == [0, 1, 10]
    assert list(left["coec", "coec"]) == [9.5, 9.0, 9.3]
    assert list(left["coec", "coec, gcv"]) == [9.1, 9.1, 9.1]


def printed(folder, *place):
    results = read_results(sr.write(folder, [sr.row(*place)]))
    return with_published(results, "paper").cells["published_perplexity"][0]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("Llama-3.1-8B", 0.3, "flap", "bias"), 11.89),  # 28.74 in a later draft
        (("meta-llama/Meta-Llama-3-70B", 0.1, "rcpu", "coec"), 3.72),
        (("Qwen/qwen2.5-32b", 0.2, "wanda-sp", "none"), 12.56),
        (("meta-llama/Llama-2-7b-hf", 0.3, "rcpu", "coec"), 7.21),
        (("Qwen/Qwen2.5-7B-Instruct", 0.3, "rcpu", "coec"), None),
        (("Llama-3.1-8B", 0.25, "rcpu", "coec"), None),
    ],
)
def test_a_model_is_found_by_its_hub_name(place, value, tmp_path):
    number = printed(tmp_path, *place)
    assert number == value or (value is None and number != number)


def test_ours_stands_beside_the_papers_with_its_protocol(tmp_path):
    rows = [main("meta-llama/Llama-3.1-8B", "rcpu", "coec", 11.5), main("other", "rcpu", "coec", 9)]
    results = read_results(sr.write(tmp_path, rows))
    made = document(results, compare="paper")
    (section,) = [one for one in made.sections if one.title == "Beside published numbers"]
    (table,) = section.tables
    assert sr.texts(table) == [["30 %", "rcpu", "coec", "11.50", "10.91", "50.2"]]
    assert "windows of 4096 tokens" in made.notes[0]
    assert "paper" not in str(document(results).as_dict()["notes"])
    assert "Beside published numbers" not in [one.title for one in document(results).sections]


def test_other_names_than_the_papers_are_refused(tmp_path):
    with pytest.raises(OptionError, match="no published numbers 'x': there is paper"):
        document(read_results(sr.write(tmp_path, [sr.row()])), compare="x")


def test_the_papers_claims_follow_from_its_numbers(tmp_path):
    """Table 1: of Llama-3, 3.1 and Qwen2.5, COEC is better than RCPU on 6 of 6 at 30 %."""
    import tomllib

    content = tomllib.loads(PUBLISHED["paper"].read_text(encoding="utf-8"))
    rows = [
        sr.row(model, block["sparsity"], selection, compensation, grids=["main"],
               perplexity=sr.perplexity(value))
        for block in content["comparison"]
        if block["metric"] == "perplexity" and "Llama-3-70B" in block["models"]
        for selection, repairs in block["values"].items()
        for compensation, values in repairs.items()
        for model, value in zip(block["models"], values, strict=True)
    ]  # fmt: skip
    by_sparsity = sr.tables(tmp_path, rows, MAIN)
    wins = [
        {row[0]: row[-1] for row in sr.texts(table) if row[1] == "coec"} for table in by_sparsity
    ]
    assert wins == [
        {"wanda-sp": "6 of 6", "flap": "1 of 6", "rcpu": "6 of 6"},  # one of rcpu is a tie
        {"wanda-sp": "6 of 6", "flap": "1 of 6", "rcpu": "6 of 6"},
        {"wanda-sp": "6 of 6", "flap": "6 of 6", "rcpu": "6 of 6"},
    ]
    means = [
        {row[1]: float(row[-2]) for row in sr.texts(table) if row[0] == "rcpu"}
        for table in by_sparsity
    ]
    gaps = [mean["coec"] - mean["rcpu"] for mean in means]
    assert gaps == pytest.approx([-0.06, -0.20, -0.25], abs=0.011)


def test_every_ready_grid_declares_what_can_be_read():
    assert all(Declared().items(grid) for grid in ("main", "ablation", "seeds", "overfitting"))
