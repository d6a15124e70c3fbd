"""Reading what a sweep wrote."""

import json

import pytest

import sweep_rows as sr
from coec.errors import ResultsError
from coec.experiments.files import RESULTS
from coec.experiments.reporting.frame import read_results


def test_a_row_has_what_was_measured(tmp_path):
    entry = sr.row(perplexity=sr.perplexity(48.7), zero_shot=sr.zero_shot(0.35), grids=["main"])
    (row,) = read_results(sr.write(tmp_path, [entry])).rows
    assert row.measured("perplexity") == 48.7
    assert row.measured("zero_shot") == pytest.approx(35)
    assert (row.settings.sparsity, row.setting("selection"), row.setting("alpha")) == (
        0.3,
        "rcpu",
        0.9,
    )
    assert row.setting("no such setting") is None


def test_absent_fields_are_empty(tmp_path):
    settings = {"sparsity": 0.3, "compensation": "none"}
    entry = {"cell": "a", "status": "done", "model": "m", "settings": settings}
    entry |= {"grids": [], "labels": {}}
    (row,) = read_results(sr.write(tmp_path, [entry])).rows
    assert (row.grids, row.sites, row.measured("perplexity")) == ([], [], None)
    assert row.measured("zero_shot") is None


def test_grids_leave_the_dense_model_out(tmp_path):
    rows = [sr.dense(grids=["main"]), sr.row(grids=["main"]), sr.row(samples=8, grids=["other"])]
    results = read_results(sr.write(tmp_path, rows))
    assert list(results.of_grid("main")["samples"]) == [64]
    assert list(results.dense["model"]) == ["wt2-llama"]


@pytest.mark.parametrize("tail", ['{"cell": "a', "{", '{"cell": "\u03b1'])
def test_a_last_line_cut_short_is_dropped_with_a_note(tail, tmp_path):
    results = read_results(sr.write(tmp_path, [sr.row()], tail))
    assert len(results.rows) == 1
    assert results.notes == ("The last line of results.jsonl was cut short and is left out.",)


def test_a_whole_last_line_without_its_newline_counts(tmp_path):
    results = read_results(sr.write(tmp_path, [sr.row()], json.dumps(sr.row(samples=8))))
    assert len(results.rows) == 2
    assert results.notes == ()


def test_a_cell_run_again_counts_once_in_the_grids_of_both_runs(tmp_path):
    first = sr.row(status="failed", error="no", grids=["main"], labels={"main": "x"})
    again = sr.row(perplexity=sr.perplexity(5.0), grids=["seeds"])
    (row,) = read_results(sr.write(tmp_path, [first, again])).rows
    assert (row.status, row.measured("perplexity")) == ("done", 5.0)
    assert (row.grids, row.labels) == (["main", "seeds"], {"main": "x"})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{torn\n{}\n", r"results.jsonl, line 1 is not JSON \(.*\): mend the line, or remove it"),
        ("{torn\n", "line 1 is not JSON"),
        ("\n[1]\n", r"line 2: Row must be a valid dictionary or instance of Row, got \[1\]"),
        ('{"status": "odd"}\n', r"line 1: cell is missing, got \['status'\]"),
        ("\n", "holds no finished cell: run the sweep first"),
    ],
)
def test_what_is_no_row_is_an_error_of_one_line(lines, message, tmp_path):
    """What is wrong with a field is in tests/experiments/test_rows.py."""
    (tmp_path / RESULTS).write_text(lines)
    with pytest.raises(ResultsError, match=message) as caught:
        read_results(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_of_no_sweep_is_an_error(tmp_path):
    with pytest.raises(ResultsError, match="no results.jsonl in .*: OUT must be the folder"):
        read_results(tmp_path)
