"""Tasks with their errors, the summary, and the record."""

import sweep_rows as sr
from coec.experiments.reporting import lists
from coec.experiments.reporting.frame import read_results


def results(folder, rows):
    return read_results(sr.write(folder, rows))


def test_tasks_have_errors_and_a_sentence_on_chance(tmp_path):
    rows = [
        sr.dense(zero_shot=sr.zero_shot(0.5, at_chance=["rte"])),
        sr.row(zero_shot=sr.zero_shot(0.25, at_chance=["rte", "boolq"]), grids=["main"]),
    ]
    (table,) = sr.tables(tmp_path, rows, "Zero-shot accuracy by task")
    assert sr.heads(table)[:4] == ["Method", "Cell", "Mean", "boolq"]
    assert sr.texts(table)[1][2:4] == ["25.0 ± 1.0", "25.0 ± 2.0"]
    assert table.notes == ("No better than guessing: rte in 2 of 2 cells, boolq in 1 of 2 cells.",)


def test_the_summary_counts_failures(tmp_path):
    rows = [
        sr.row(grids=["main"], environment={"coec": "0.1.0", "torch": "2"}),
        sr.row(samples=8, status="failed", error="out of memory"),
    ]
    found = results(tmp_path, rows)
    facts = dict(lists.facts(found))
    assert facts["Cells"] == "1 done, 1 failed"
    assert facts["Environment"] == "coec 0.1.0, torch 2"
    failures, *_ = sr.tables(tmp_path, rows, "Record")
    assert sr.texts(failures)[0][3] == "out of memory"


def test_the_best_is_the_lowest_perplexity_beside_the_dense_models(tmp_path):
    rows = [
        sr.dense(perplexity=sr.perplexity(10.0)),
        sr.row(perplexity=sr.perplexity(12.0), parameters={"before": 100, "after": 76}),
        sr.row(compensation="rcpu", perplexity=sr.perplexity(13.0)),
    ]
    (table,) = sr.tables(tmp_path, rows, "Best results")
    assert sr.texts(table)[0] == [
        "wt2-llama", "30 %", "rcpu", "coec", "12.00", "10.00", "1.200", "76.0",
    ]  # fmt: skip


def test_the_best_names_its_preset(tmp_path):
    best = sr.row(selection="obs", compensation="ridge-to-slice", perplexity=sr.perplexity(11.0))
    best["settings"]["preset"] = "best"
    (table,) = sr.tables(tmp_path, [sr.row(sparsity=0.2, perplexity=sr.perplexity(12.0)), best],
                         "Best results")  # fmt: skip
    assert [row[2:5] for row in sr.texts(table)] == [
        ["–", "rcpu", "coec"], ["best", "obs", "ridge-to-slice"],
    ]  # fmt: skip


def test_the_record_holds_digests_seconds_and_memory(whole_results):
    found = whole_results.rows
    first = next(row for row in found if row.model == "babyllama-1M" and row.dense)
    record = {table.title: table for table in lists.record(whole_results)}
    (cells,) = (table for title, table in record.items() if "Every cell" in title)
    line = dict(zip(sr.heads(cells), sr.texts(cells)[0]))
    assert line["Cell"] == first.cell
    assert line["Windows sha256"] == sr.DIGEST[:12]
    assert (line["Collecting, s"], line["Peak memory, GiB"]) == ("4.2", "0.88")
    (settings,) = (table for title, table in record.items() if "Settings that differ" in title)
    assert "seq_len = 256" in settings.notes[0]


def test_safeguards_are_counted(tmp_path):
    sites = [{"site": "mlp", "block": 0, "events": ["clamped"]}] * 3
    rows = [sr.row(sites=sites), sr.row(samples=8, sites=sites[:1])]
    (events,) = sr.tables(tmp_path, rows, "Record", "Safeguards")
    assert sr.texts(events) == [["clamped", "4", "2"]]
    assert sr.tables(tmp_path, [sr.row()], "Record", "Safeguards") == []


def test_a_dense_pass_that_cells_share_counts_once(tmp_path):
    shared = {"windows_sha256": "a"}
    rows = [
        sr.row(seed=0, options={"alpha": alpha}, calibration="x") | {
            "calibration": shared, "seconds": {"collecting": 100.0, "pruning": 4.0},
        }
        for alpha in (0.1, 0.2, 0.3)
    ]  # fmt: skip
    rows.append(sr.dense() | {"seconds": {"collecting": 0.0, "evaluating": 3.0}})
    facts = dict(lists.facts(read_results(sr.write(tmp_path, rows))))
    assert facts["Compute time"] == "115 s"


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


def test_a_cost_per_model_and_size_with_the_papers_rule(tmp_path):
    (table,) = sr.tables(tmp_path, qwen(), "Cost")
    assert [line[1:] for line in sr.texts(table)] == [
        ["dense", "dense", "7,620,000,000", "100.0", "15.240", "14.00", "15.00"],
        ["30 %", "coec, rcpu", "5,700,000,000", "74.8", "11.400", "10.00", "12.00"],
        ["30 %", "bias", "5,700,000,001", "74.8", "11.400", "10.00", "–"],
    ]
    assert "(cuda)" in table.notes[1]


def test_memory_that_nobody_measured_is_not_spoken_of(tmp_path):
    rows = [row | {"cost": {}} for row in qwen()]
    (table,) = sr.tables(tmp_path, rows, "Cost")
    assert table.notes == ("GFLOPs per token: 2 × parameters.",)
    assert sr.tables(tmp_path, rows[:1], "Cost") == []
