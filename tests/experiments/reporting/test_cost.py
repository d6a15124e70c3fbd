"""What a model costs to run, from the rows."""

import sweep_rows as sr

GIB = 2**30


def sized(after, *place, weights=None, peak=None, **changes):
    cost = {"weight_bytes": weights, "peak_memory_bytes": peak}
    return sr.row(
        *place, parameters={"before": 7_620_000_000, "after": after}, cost=cost,
        environment={"device": "cuda"}, **changes,
    )  # fmt: skip


def qwen():
    model = "Qwen/Qwen2.5-7B"
    return [
        sized(7_620_000_000, model, 0.0, None, "dense", weights=14 * GIB, peak=15 * GIB),
        sized(5_700_000_000, model, 0.3, weights=10 * GIB, peak=11 * GIB),
        sized(5_700_000_000, model, 0.3, "rcpu", "rcpu", weights=10 * GIB, peak=12 * GIB),
        sized(5_700_000_001, model, 0.3, "flap", "bias", weights=10 * GIB),
    ]


def test_a_line_per_model_and_size_with_the_papers_rule(tmp_path):
    (table,) = sr.tables(tmp_path, qwen(), "Cost")
    assert [[cell.text for cell in line[1:]] for line in table.rows] == [
        ["dense", "dense", "7,620,000,000", "100.0 %", "15.2", "14", "15"],
        ["30 %", "coec, rcpu", "5,700,000,000", "74.8 %", "11.4", "10", "12"],
        ["30 %", "bias", "5,700,000,001", "74.8 %", "11.4", "10", "–"],
    ]
    assert "(cuda)" in table.notes[1]


def test_memory_that_nobody_measured_is_not_spoken_of(tmp_path):
    rows = [row | {"cost": {}} for row in qwen()]
    (table,) = sr.tables(tmp_path, rows, "Cost")
    assert table.notes == ("GFLOPs per token: 2 × parameters, the paper's rule.",)
    assert sr.tables(tmp_path, rows[:1], "Cost") == []


def test_ours_stands_beside_the_papers(tmp_path):
    _, table = sr.tables(tmp_path, qwen()[:2], "Compared with the paper", compare="paper")
    assert [[cell.text for cell in line[1:]] for line in table.rows] == [
        ["Parameters, billions", "7.62", "5.70", "74.8 %", "7.62", "5.70", "74.8 %"],
        ["GFLOPs per token", "15.24", "11.40", "74.8 %", "15.20", "11.40", "75.0 %"],
        ["Memory, GiB (the paper: GB)", "15.00", "11.00", "73.3 %", "15.00", "11.50", "76.7 %"],
    ]
