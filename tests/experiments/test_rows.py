"""What counts as a row of results.jsonl, for the sweep that goes on and for the report."""

import json
import random
from copy import deepcopy

import pytest

import sweep_rows as sr
from coec.errors import ResultsError
from coec.experiments.files import RESULTS, Store, read_lines
from coec.experiments.reporting.frame import read_rows
from coec.experiments.reporting.report import write_report
from coec.experiments.rows import read
from outcomes import one_line

READERS = pytest.mark.parametrize("reader", [Store, read_rows])


def measured() -> dict:
    """A row with everything in it, which a test may change."""
    place = ("wt2-llama", 0.3, "rcpu", "coec")
    row = sr.measured(*place, random.Random(0), grids=["main"], labels={"main": "hot"})
    return deepcopy(row)


def changed(place: str, value) -> dict:
    """That row with another value at a place like `sites.0.rounds`."""
    row = holder = measured()
    *path, last = [int(name) if name.isdigit() else name for name in place.split(".")]
    for name in path:
        holder = holder[name]
    holder[last] = value
    return row


WRONG = [
    ("cell", 7, "cell must be a valid string, got 7"),
    ("status", "odd", "status must be 'done' or 'failed', got 'odd'"),
    ("model", "a\0b", r"model must be text without control characters, got 'a\x00b'"),
    ("model", "\ud800", "model must be text"),
    ("error", ["no"], "error must be a valid string, got ['no']"),
    ("grids", "main", "grids must be a valid list, got 'main'"),
    ("grids.0", 3, "grids[0] must be a valid string, got 3"),
    ("labels", [], "labels must be a valid dictionary, got []"),
    ("labels.main", 1, "labels.main must be a valid string"),
    ("labels", {"a\nb": "c"}, r"labels.a\nb.[key] must be text without control characters"),
    ("settings", None, "settings is missing, got ['cell'"),
    ("settings.sparsity", "x", "settings.sparsity must be a valid number, got 'x'"),
    ("settings.sparsity", 1e30, "settings.sparsity must be less than or equal to 1, got 1e+30"),
    ("settings.seed", [1], "settings.seed must be a number, text, true or false, got [1]"),
    ("settings.of_mine", {}, "settings.of_mine must be a number, text, true or false, got {}"),
    ("settings.options", 3, "settings.options must be a valid dictionary, got 3"),
    ("settings.options.alpha", {}, "settings.options.alpha must be a number, text, true or false"),
    ("perplexity", 5.0, "perplexity must be a valid dictionary or instance of PerplexityOfRow"),
    ("perplexity.perplexity", -3.0, "perplexity.perplexity must be greater than 0.999, got -3"),
    ("perplexity.perplexity", 1e308, "perplexity.perplexity must be a finite number"),
    ("perplexity.text_sha256", 1, "perplexity.text_sha256 must be a valid string"),
    ("zero_shot.tasks.rte", "x", "zero_shot.tasks.rte must be a valid dictionary"),
    ("zero_shot.tasks.rte.stderr", "x", "zero_shot.tasks.rte.stderr must be a valid number"),
    ("parameters.after", 1.5, "parameters.after must be a valid integer, got 1.5"),
    ("cost.weight_bytes", 10**400, "cost.weight_bytes must be less than 18446744073709551616"),
    ("sites", {}, "sites must be a valid list, got {}"),
    ("sites.1", None, "sites[1] must be a valid dictionary or instance of Module, got None"),
    ("sites.1.rounds", "9", "sites[1].rounds must be a valid integer, got '9'"),
    ("sites.1.error_after", "x", "sites[1].error_after must be a valid number"),
    ("sites.1.events", [{}], "sites[1].events[0] must be a valid string"),
    ("sites.1.geometry", "x", "sites[1].geometry must be a valid dictionary"),
    ("calibration.windows", float("nan"), "calibration.windows must be a"),
    ("seconds.pruning", float("inf"), "seconds.pruning must be a finite number, got inf"),
    ("environment.coec", 0.1, "environment.coec must be a valid string"),
    ("identity", {"model": 3}, "identity.model must be a valid string"),
]


@pytest.mark.parametrize(("place", "value", "message"), WRONG, ids=[w[0] for w in WRONG])
def test_a_field_of_another_kind_is_an_error_that_names_line_and_field(
    place, value, message, tmp_path
):
    folder = sr.write(tmp_path, [sr.row(), changed(place, value)])
    with pytest.raises(ResultsError) as caught:
        read_lines(folder / RESULTS)
    said = str(caught.value)
    assert said.startswith(f"{folder / RESULTS}, line 2: {message}")
    assert said.endswith(": mend the line, or remove it and run the sweep again")
    assert "\n" not in said


@READERS
def test_sweep_and_report_refuse_the_same(reader, tmp_path):
    folder = sr.write(tmp_path, [changed("sites.1.rounds", "9")])
    with pytest.raises(ResultsError, match=r"line 1: sites\[1\]\.rounds must be a valid integer"):
        reader(folder)


@READERS
@pytest.mark.parametrize("line", ["[" * 3000, "[" * 3000 + "]" * 3000, "{torn", "\ufeff{}"])
def test_what_is_no_json_is_an_error_of_one_line(reader, line, tmp_path):
    (tmp_path / RESULTS).write_text(f"{line}\n", encoding="utf-8")
    with one_line(ResultsError, match="line 1 is not JSON .*: mend the line"):
        reader(tmp_path)


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    line = json.dumps(measured()).encode().replace(b"rcpu", b"\xff")
    (tmp_path / RESULTS).write_bytes(line + b"\n")
    with pytest.raises(ResultsError, match="line 1 is not JSON .*codec can't decode"):
        read_lines(tmp_path / RESULTS)


def test_a_whole_row_is_read_as_it_is(tmp_path):
    made = measured() | {"of another version": [1, {}]}
    (row,) = read_lines(sr.write(tmp_path, [made]) / RESULTS).rows
    assert row.record == made
    assert row.sites[0].error_after == made["sites"][0]["error_after"]


def test_a_row_that_is_written_again_keeps_what_nobody_reads(tmp_path):
    """Fields of another version, whole or within a part, outlive a change beside them."""
    made = measured() | {"of another version": [1, {}], "error": "odd"}
    made["perplexity"]["kl"] = 0.5
    changed = read(made).changed(grids=["main", "mine"], error=None)
    assert (changed.grids, changed.error) == (["main", "mine"], None)
    assert changed.record == made | {"grids": ["main", "mine"], "error": None}
    with pytest.raises(ResultsError, match="grids must be a valid list"):
        changed.changed(grids=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "labels.main", "perplexity.text_sha256", "zero_shot.tasks",
        "zero_shot.tasks.rte", "parameters.after", "cost.weight_bytes", "sites.1.rounds",
        "sites.1.error_after", "sites.1.geometry", "calibration.windows_sha256",
        "seconds.pruning", "environment.coec", "settings.options", "settings.selection",
        "settings.samples", "settings.seed", "settings.options.rounds", "error",
    ],
)  # fmt: skip
def test_a_field_that_is_null_is_as_one_that_is_not_there(place, tmp_path):
    row = changed(place, None) | {"grids": ["main", "rounds", "rescale-ridge", "ablation"]}
    write_report(sr.write(tmp_path, [row, sr.dense(), row | {"cell": "another"}]))


def test_settings_that_are_null_are_kept(tmp_path):
    """No holdout is a value of its own: it varies beside a holdout of 0.2."""
    ((row,), _) = read_rows(sr.write(tmp_path, [sr.row()]))
    assert row.values["holdout"] is None


@pytest.mark.parametrize(
    ("tail", "rows", "torn"),
    [(json.dumps(sr.row(samples=8)), 2, False)]
    + [(tail, 1, True) for tail in ('{"cell": "a', "{", '{"cell": "\u03b1')],
)
def test_a_last_line_without_its_newline_gets_it_or_is_cut_off(tail, rows, torn, tmp_path):
    sr.write(tmp_path, [sr.row()], tail)
    found, cut_off = read_rows(tmp_path)
    assert (len(found), cut_off) == (rows, torn)
    with Store(tmp_path).writing() as store:
        assert (len(store.rows), store.torn) == (rows, torn)
        store.append(read(sr.row(samples=9)))
    assert len(read_rows(tmp_path)[0]) == rows + 1
