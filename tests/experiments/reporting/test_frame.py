"""From rows to the frame of cells, and from it to averages and tables."""

import pytest

import sweep_rows as sr
from coec.errors import ResultsError
from coec.experiments.files import RESULTS
from coec.experiments.reporting.frame import axes_of, frame_of, of_grid, read_rows
from outcomes import one_line


def frame(folder, rows):
    return frame_of(read_rows(sr.write(folder, rows))[0])


def cell(value, *place, **changes):
    """A cell of the grid `g`, of a perplexity; none where the cell failed."""
    measured = (
        {"status": "failed", "error": "the reason"} if value is None
        else {"perplexity": sr.perplexity(value)}
    )  # fmt: skip
    return sr.row(*place, grids=["g"], **measured | changes)


def test_a_cell_run_again_counts_once_in_the_grids_of_both_runs(tmp_path):
    first = sr.row(status="failed", error="no", grids=["main"], labels={"main": "x"})
    again = sr.row(perplexity=sr.perplexity(5.0), grids=["seeds"])
    ((row,), _) = read_rows(sr.write(tmp_path, [first, again]))
    assert (row.status, row.perplexity.perplexity) == ("done", 5.0)
    assert (row.grids, row.labels) == (["main", "seeds"], {"main": "x"})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("\n[1]\n", r"line 2: Row must be a valid dictionary or instance of Row, got \[1\]"),
        ('{"status": "odd"}\n', r"line 1: cell is missing, got \['status'\]"),
        ("\n", "holds no finished cell: run the sweep first"),
    ],
)
def test_what_is_no_row_is_an_error_of_one_line(lines, message, tmp_path):
    """What is wrong with a field is in tests/experiments/test_rows.py."""
    with pytest.raises(ResultsError, match="no results.jsonl in .*: OUT must be the folder"):
        read_rows(tmp_path)
    (tmp_path / RESULTS).write_text(lines)
    with one_line(ResultsError, match=message):
        read_rows(tmp_path)


def test_a_line_of_the_frame_holds_settings_metrics_and_conditions(tmp_path):
    sites = [{"error_after": 0.1, "rounds": 50}, {"error_after": 0.2, "rounds": 7}, {}]
    row = sr.row(
        zero_shot=sr.zero_shot(0.35), perplexity=sr.perplexity(48.7), sites=sites,
        parameters={"before": 200, "after": 150}, environment={"torch": "2"},
        seconds={"collecting": 4.0, "pruning": 2.0}, peak_memory_bytes=2**29,
    )  # fmt: skip
    line = frame(tmp_path, [row]).iloc[0]
    assert (line["method"], line["alpha"], line["sparsity"]) == ("rcpu + coec", 0.9, 0.3)
    assert (line["perplexity"], line["zero_shot"], line["seconds"]) == (48.7, 35, 6)
    assert line["error"] == pytest.approx(0.15)
    assert (line["modules_at_cap"], line["parameters_kept"], line["peak_memory"]) == (50, 75, 0.5)
    assert (line["evaluation.text_sha256"], line["environment.torch"]) == (sr.DIGEST, "2")
    assert line["zero_shot.tasks.rte.stderr"] == 0.02


def test_a_row_without_measurements_is_a_line(tmp_path):
    row = {"cell": "a", "status": "done", "model": "m", "grids": ["g"], "labels": {}}
    row |= {"settings": {"sparsity": 0.3, "compensation": "none"}}
    assert len(frame(tmp_path, [row])) == 1
    assert sr.table(tmp_path, [row], "Grid g") == [["Model", "Method"], ["m", "None + none"]]


def test_the_best_of_a_model_is_bold_as_printed_and_of_a_tie_all(tmp_path):
    rows = [
        sr.dense("a", grids=["g"], perplexity=sr.perplexity(10.0)),
        cell(12.004, "a", 0.1, "rcpu", "coec"), cell(11.996, "a", 0.1, "rcpu", "rcpu"),
        cell(15.0, "a", 0.1, "flap", "bias"), cell(31.5, "a", 0.3, "rcpu", "rcpu"),
        cell(30.0, "a", 0.3, "rcpu", "coec"), cell(1234.0, "b", 0.3, "rcpu", "coec"),
    ]  # fmt: skip
    assert sr.table(tmp_path, rows, "Grid g") == [
        ["Model", "Method", "Perplexity, 10 %", "Perplexity, 30 %"],
        ["a", "dense", "10.00", "10.00"],
        ["a", "rcpu + coec", "*12.00", "*30.00"],
        ["a", "rcpu + rcpu", "*12.00", "31.50"],
        ["a", "flap + bias", "15.00", "–"],
        ["b", "rcpu + coec", "–", "1,234.00"],
    ]


def test_higher_accuracy_is_better(tmp_path):
    rows = [
        sr.row(compensation=name, grids=["g"], zero_shot=sr.zero_shot(value))
        for name, value in (("rcpu", 0.501), ("coec", 0.512))
    ]
    heads, *lines = sr.table(tmp_path, rows, "Grid g")
    assert heads[2:] == ["Zero-shot, %, 30 %"]
    assert [line[2] for line in lines] == ["50.1", "*51.2"]


def test_a_failed_cell_says_so_and_takes_no_part(tmp_path):
    rows = [cell(None, "a", 0.3, "flap", "bias"), cell(12.0, "a", 0.3, "flap", "coec")]
    assert [line[2] for line in sr.table(tmp_path, rows, "Grid g")[1:]] == ["failed", "12.00"]
    alone = sr.table(tmp_path, rows[:1], "Grid g")
    assert alone == [["Model", "Method", "Perplexity, 30 %"], ["a", "flap + bias", "failed"]]


def test_seeds_are_averaged_with_their_spread(tmp_path):
    rows = [cell(value, seed=seed) for seed, value in enumerate((10, 13, None, 11.5))]
    assert sr.table(tmp_path, rows, "Grid g")[1:] == [
        ["wt2-llama", "rcpu + coec", "11.50 (spread 3.00)"]
    ]


def test_a_setting_that_varies_is_a_column_and_its_numbers_are_in_order(tmp_path):
    rows = [cell(10.0 + n, samples=n) for n in (16, 8, 128)]
    assert sr.table(tmp_path, rows, "Grid g") == [
        ["Model", "Method", "Samples", "Perplexity, 30 %"],
        ["wt2-llama", "rcpu + coec", "8", "*18.00"],
        ["wt2-llama", "rcpu + coec", "16", "26.00"],
        ["wt2-llama", "rcpu + coec", "128", "138.00"],
    ]


def test_only_what_tells_cells_apart_is_an_axis(tmp_path):
    """Options follow from a label, and from another option."""
    rows = [
        cell(9.0, options={"solver": solver, "delta": delta}, labels={"g": label})
        for solver, delta, label in (("joint", 1, "x"), ("gradient", 2, "y"), ("gradient", 3, "y"))
    ]
    assert axes_of(of_grid(frame(tmp_path, rows), "g")) == ["model", "method", "sparsity", "delta"]
    unnamed = [row | {"labels": {}} for row in rows[:2]]
    assert axes_of(of_grid(frame(tmp_path, unnamed), "g"))[3:] == ["solver"]


def test_a_label_is_the_method_in_its_grid_alone(tmp_path):
    rows = [cell(9.0, labels={"g": "hot"}) | {"grids": ["g", "h"]}]
    assert sr.table(tmp_path, rows, "Grid g")[1][1] == "hot"
    assert sr.table(tmp_path, rows, "Grid h")[1][1] == "rcpu + coec"


def test_methods_begin_with_their_preset_where_there_are_several(tmp_path):
    rows = [cell(9.0, samples=n) for n in (1, 2)]
    for row, preset in zip(rows, ("paper", "fast"), strict=True):
        row["settings"]["preset"] = preset
    lines = sr.table(tmp_path, rows, "Grid g")
    assert [line[1] for line in lines[1:]] == ["paper: rcpu + coec", "fast: rcpu + coec"]
    assert sr.table(tmp_path, rows[:1], "Grid g")[1][1] == "rcpu + coec"


def test_texts_of_one_name_in_two_folders_are_two_texts(tmp_path):
    rows = [cell(9.0 + n, calibration=f"{n}/train.txt") for n in (1, 2)]
    lines = sr.table(tmp_path, rows, "Grid g")
    assert [line[2] for line in lines] == ["Calibration", "1/train.txt", "2/train.txt"]
