"""The paper's numbers as data, and beside ours."""

import pytest

import sweep_rows as sr
from coec.errors import OptionError
from coec.experiments.declarations import Declared
from coec.experiments.publications import publication
from coec.experiments.reporting.document import document
from coec.experiments.reporting.published import printed
from coec.experiments.reporting.results import read_results

PAPER = publication("paper")


def test_every_table_of_the_paper_is_whole():
    blocks = PAPER.comparison
    assert all(
        len(values) == len(block.models)
        for block in blocks for by_repair in block.values.values() for values in by_repair.values()
    )  # fmt: skip
    costs = [vars(cost) for cost in PAPER.efficiency.models.values()]
    assert {len(numbers) for cost in costs for numbers in cost.values()} == {2}
    assert sorted({(b.metric, b.sparsity) for b in blocks}) == [
        (metric, s) for metric in ("perplexity", "zero_shot") for s in (0.1, 0.2, 0.3)
    ]
    values = [v for b in blocks for by in b.values.values() for vs in by.values() for v in vs]
    assert len(values) == 2 * 3 * 2 * 6 * 6
    (table,) = Declared().items("ablation")
    for column in PAPER.columns["ablation"].columns:
        assert tuple(column.values) == table.groups["Build-up"]


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
    (row,) = read_results(sr.write(tmp_path, [sr.row(*place)])).rows
    assert printed(row, "perplexity", PAPER) == value


def compared(folder, rows):
    made = document(read_results(sr.write(folder, rows)), compare="paper")
    return {section.title: section for section in made.sections}


def test_ours_stands_beside_the_papers_with_both_protocols(tmp_path):
    row = sr.row("meta-llama/Llama-3.1-8B", perplexity=sr.perplexity(11.5))
    table = compared(tmp_path, [row])["Compared with the paper"].tables[0]
    assert table.heads[2:] == ("Perplexity", "Perplexity, paper", "Zero-shot, paper, %")
    assert [cell.text for cell in table.rows[0]] == [
        "meta-llama/Llama-3.1-8B", "rcpu + coec at 30 %", "11.50", "10.91", "50.2",
    ]  # fmt: skip
    assert "1,000 windows of 256 tokens" in table.settings
    assert "windows of 4096 tokens" in table.settings
    assert "128 windows of 2048 tokens of WikiText-2 train, seed 0" in table.settings


def test_without_a_model_of_the_paper_its_ablation_is_shown_as_other_models(tmp_path):
    label = {"labels": {"ablation": "+ tempering"}, "grids": ["ablation"]}
    sections = compared(tmp_path, [sr.row(perplexity=sr.perplexity(30.0), **label)])
    table = sections["Ablation"].tables[0]
    assert table.heads[-1] == "Paper, 5 other models"
    assert table.rows[0][-1].text == "9.65"
    assert "Mistral-7B" in table.notes[-1]
    own = sections["Compared with the paper"]
    assert own.text == ("No model of this sweep is in the paper's tables.",)
    assert own.tables[0].rows[0][1].text == "10.06"


def test_spread_and_size_have_the_papers_beside_them(tmp_path):
    seeds = [
        sr.row(seed=s, grids=["seeds"], perplexity=sr.perplexity(9.0 + s / 10)) for s in range(3)
    ]
    size = sr.row("Qwen2.5-7B", parameters={"before": 7_615_000_000, "after": 5_700_000_000})
    sections = compared(tmp_path, [*seeds, size])
    assert [cell.text for cell in sections["Seeds"].tables[0].rows[0]][-2:] == ["0.08", "0.89"]
    table = sections["Compared with the paper"].tables[1]
    assert [cell.text for cell in table.rows[0]][2:] == [
        "7.62", "5.70", "74.9 %", "7.62", "5.70", "74.8 %",
    ]  # fmt: skip


def test_nothing_of_the_paper_is_shown_unasked(tmp_path):
    made = document(read_results(sr.write(tmp_path, [sr.row("Llama-3.1-8B")])))
    assert "paper" not in str(made.as_dict()).lower()


def test_cells_that_differ_in_more_than_the_seed_are_not_averaged(tmp_path):
    rows = [
        sr.row("Llama-2-7B", options={"alpha": a}, seed=s, perplexity=sr.perplexity(value))
        for a, value in ((0.5, 9.0), (0.9, 7.0))
        for s in (0, 1)
    ]
    table = compared(tmp_path, rows)["Compared with the paper"].tables[0]
    assert [(r[1].text, r[2].text, r[3].text) for r in table.rows] == [
        ("rcpu + coec at 30 %, alpha = 0.5", "9.00", "7.21"),
        ("rcpu + coec at 30 %, alpha = 0.9", "7.00", "7.21"),
    ]
    assert table.notes == ("a: mean of 2 seeds",)


def test_of_a_main_grid_only_its_own_cells_are_set_beside_the_paper(tmp_path):
    rows = [
        sr.row("Llama-2-7B", grids=grids, options={"alpha": a}, perplexity=sr.perplexity(value))
        for grids, a, value in ((["main"], 0.9, 7.0), (["alpha"], 0.5, 9.0))
    ]
    table = compared(tmp_path, rows)["Compared with the paper"].tables[0]
    assert [(r[1].text, r[2].text) for r in table.rows] == [("rcpu + coec at 30 %", "7.00")]


def test_other_names_than_the_papers_are_refused(tmp_path):
    with pytest.raises(OptionError, match="no published numbers 'x': there is paper"):
        document(read_results(sr.write(tmp_path, [sr.row()])), compare="x")
