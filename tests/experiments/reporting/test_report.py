"""`coec report`: four files and figures, or one line that says why not."""

import json
import sys

import pandas
import pytest

import sweep_rows as sr
from coec.errors import OptionError, OutputError
from coec.experiments import files
from coec.experiments.reporting.report import write_report
from outcomes import raising, succeeded

SMALL = [
    sr.row(grids=["main"], compensation=c, perplexity=sr.perplexity(p))
    for c, p in (("rcpu", 12.0), ("coec", 11.0))
]


def test_four_files_are_written_and_named(tmp_path, run):
    shown, _ = succeeded(run("report", sr.write(tmp_path, SMALL)))
    assert "2 cells done, 0 failed." in shown
    for name in ("report.csv", "report.md", "report.tex", "report.html"):
        assert str(tmp_path / name) in shown
        assert "11.0" in (tmp_path / name).read_text(encoding="utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "report.csv", "report.html", "report.md", "report.tex", "results.jsonl",
    ]  # fmt: skip


def test_json_holds_files_and_cells(tmp_path, run):
    printed = json.loads(run("report", sr.write(tmp_path, SMALL), "--json")[1])
    assert printed["files"]["md"] == str(tmp_path / "report.md")
    assert [cell["perplexity"] for cell in printed["cells"]] == [12.0, 11.0]
    assert printed["figures"] == []


def test_csv_has_a_line_per_cell(tmp_path):
    folder = sr.write(tmp_path, [*SMALL, sr.row(samples=8, perplexity=sr.perplexity(9.0))])
    write_report(folder)
    lines = pandas.read_csv(folder / "report.csv")
    assert list(lines["perplexity"]) == [12.0, 11.0, 9.0]
    assert list(lines["method"]) == ["rcpu + rcpu", "rcpu + coec", "rcpu + coec"]


def test_figures_have_files_that_the_documents_name(tmp_path):
    rows = [sr.row(grids=["α"], samples=n, perplexity=sr.perplexity(9.0 + n)) for n in (8, 16)]
    folder = sr.write(tmp_path, [*rows, *(row | {"grids": ["β"]} for row in rows)])
    written = write_report(folder)
    assert [path.name for path in written.figures] == [
        "1-perplexity.pdf", "1-perplexity.svg", "2-perplexity.pdf", "2-perplexity.svg",
    ]  # fmt: skip
    assert "(figures/2-perplexity.svg)" in (folder / "report.md").read_text(encoding="utf-8")


def test_a_last_line_that_was_cut_short_is_spoken_of(tmp_path):
    folder = sr.write(tmp_path, SMALL, '{"cell": "a')
    said = "The last line of results.jsonl was cut short and is left out."
    assert said in write_report(folder).summary
    assert said in (folder / "report.html").read_text(encoding="utf-8")


def test_what_cannot_be_read_is_one_line(tmp_path, run):
    said = f"coec: no results.jsonl in {tmp_path}: OUT must be the folder that a sweep wrote to\n"
    assert run("report", tmp_path) == (1, "", said)


def test_the_same_results_give_the_same_bytes(tmp_path):
    folder = sr.write(tmp_path, SMALL)
    first = [path.read_bytes() for path in write_report(folder).files]
    assert [path.read_bytes() for path in write_report(folder).files] == first


@pytest.mark.parametrize("library", ["pandas", "tabulate", "matplotlib", "jinja2"])
def test_a_missing_library_names_the_extra(library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(OptionError, match=rf"needs {library}: pip install 'coec\[report\]'"):
        write_report(sr.write(tmp_path, SMALL))
    assert not (tmp_path / "report.md").exists()


def test_a_failed_write_leaves_the_old_report(tmp_path, monkeypatch):
    folder = sr.write(tmp_path, SMALL)
    (folder / "report.csv").write_text("old")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(files.os, "replace", raising(full))
    with pytest.raises(OutputError, match=r"report.csv \(No space left on device\): make"):
        write_report(folder)
    assert (folder / "report.csv").read_text() == "old"
    assert sorted(p.name for p in folder.iterdir()) == ["report.csv", "results.jsonl"]
