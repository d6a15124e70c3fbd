"""Native repair against COEC: what is bold, gaps and wins, by hand and on the paper's numbers."""

import pytest

import sweep_rows as sr
from coec.experiments.publications import publication

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
    assert table.heads == ("Selection", "Compensation", "a", "b")
    assert sr.texts(table) == [
        ["dense", "–", "10.00", "20.00"],
        ["wanda-sp", "none", "*15.00", "–"],
        ["wanda-sp", "coec", "15.50", "–"],
        ["rcpu", "rcpu", "*12.00", "31.50"],
        ["rcpu", "coec", "*12.00", "*30.00"],
    ]
    assert table.notes == (
        "wanda-sp: COEC lower on 0 of 1 model; mean gap +0.50 (COEC − none).",
        "rcpu: COEC lower on 1 of 2 models, equal on 1; mean gap −0.75 (COEC − rcpu).",
    )
    assert table.title == "Perplexity (lower is better) at 30 % sparsity"


def test_higher_accuracy_is_better(tmp_path):
    rows = [
        sr.row(compensation=name, grids=["main"], zero_shot=sr.zero_shot(value))
        for name, value in (("rcpu", 0.501), ("coec", 0.512))
    ]
    (table,) = sr.tables(tmp_path, rows, MAIN, "Zero-shot")
    assert sr.texts(table)[1:] == [["rcpu", "rcpu", "50.1"], ["rcpu", "coec", "*51.2"]]
    assert table.notes == ("rcpu: COEC higher on 1 of 1 model; mean gap +1.1 (COEC − rcpu).",)
    assert table.title.startswith("Zero-shot accuracy, mean of 7 tasks, %")


def test_a_failed_cell_says_why_and_takes_its_pair_along(tmp_path):
    failed = main("a", "flap", "bias", None, status="failed", error="the reason")
    (table,) = sr.tables(tmp_path, [failed, main("a", "flap", "coec", 12.0)], MAIN, "Perplexity")
    assert sr.texts(table)[1:] == [["flap", "bias", "faileda"], ["flap", "coec", "12.00"]]
    assert table.notes == ("a: a, flap + bias at 30 %: the reason",)


def test_seeds_are_averaged_and_marked(tmp_path):
    rows = [main("a", "rcpu", "coec", value, seed=seed) for seed, value in enumerate((10, 13))]
    (table,) = sr.tables(tmp_path, rows, MAIN, "Perplexity")
    assert sr.texts(table)[1:] == [["rcpu", "coec", "11.50a"]]
    assert table.notes == ("a: mean of 2 seeds",)


def test_cells_that_differ_in_more_than_the_seed_share_no_entry(tmp_path):
    rows = [main("a", "rcpu", "coec", 10.0, samples=samples) for samples in (8, 16)]
    assert sr.tables(tmp_path, rows, MAIN) == []
    (table,) = sr.tables(tmp_path, rows, "Grid main")
    assert table.heads == ("Model", "samples", "Perplexity")


def test_a_sparsity_has_a_table_of_its_own(tmp_path):
    rows = [sr.row(sparsity=s, grids=["main"], perplexity=sr.perplexity(9.0)) for s in (0.3, 0.1)]
    titles = [t.title for t in sr.tables(tmp_path, rows, MAIN, "Perplexity")]
    assert [title.split(" at ")[1] for title in titles] == ["10 % sparsity", "30 % sparsity"]


def test_settings_stand_under_the_table(tmp_path):
    (table,) = sr.tables(tmp_path, [main("a", "rcpu", "coec", 10.0)], MAIN, "Perplexity")
    assert table.settings == (
        f"Perplexity: test.txt (sha256 {sr.DIGEST[:12]}), 1,000 windows of 256 tokens. "
        "Calibration: train.txt, 64 windows of 256 tokens, seed 0."
    )


def of_the_paper(blocks):
    """The paper's own numbers as rows."""
    rows = {}
    for block in blocks:
        for selection, repairs in block.values.items():
            for pruning, values in repairs.items():
                for model, value in zip(block.models, values):
                    place = (model, block.sparsity, selection, pruning)
                    row = rows.setdefault(place, sr.row(*place, grids=["main"]))
                    if block.metric == "perplexity":
                        row["perplexity"] = sr.perplexity(value)
                    else:
                        row["zero_shot"] = sr.zero_shot(value / 100)
    return list(rows.values())


def test_the_papers_claims_follow_from_its_numbers(tmp_path):
    """Appendix A: mean gaps over RCPU 0.06, 0.20, 0.25; wins by selection and sparsity."""
    blocks = [b for b in publication("paper").comparison if "Llama-3-70B" in b.models]
    table = sr.tables(tmp_path, of_the_paper(blocks), MAIN)[0]
    shown = {(row[0].text, row[1].text): [cell.text for cell in row[3:]] for row in table.rows}
    assert [shown[f"{s} %", "rcpu"][0] for s in (10, 20, 30)] == [
        "5 of 6 (1 equal)", "6 of 6", "6 of 6",
    ]  # fmt: skip
    gaps = [row[4].value for row in table.rows if row[1].text == "rcpu"]
    assert gaps == pytest.approx([-0.06, -0.20, -0.25], abs=0.0051)  # 0.195 is printed as 0.20
    assert [shown[f"{s} %", "wanda-sp"][0] for s in (10, 20, 30)] == ["6 of 6"] * 3
    assert [shown[f"{s} %", "flap"][0] for s in (10, 20, 30)] == ["1 of 6", "1 of 6", "6 of 6"]
    assert [shown["30 %", name][3] for name in ("wanda-sp", "flap", "rcpu")] == [
        "6 of 6", "5 of 6", "5 of 6",
    ]  # fmt: skip


def test_the_mean_ratio_is_geometric(tmp_path):
    values = {("a", "rcpu"): 10.0, ("a", "coec"): 5.0, ("b", "rcpu"): 10.0, ("b", "coec"): 20.0}
    rows = [main(model, "rcpu", pruning, value) for (model, pruning), value in values.items()]
    table = sr.tables(tmp_path, rows, MAIN)[0]
    assert table.rows[0][5].value == pytest.approx(1)
    assert table.rows[0][4].text == "+2.50"
