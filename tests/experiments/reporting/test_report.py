"""`coec report`: three files, or one line that says why not."""

import builtins
import json
import sys

import pytest

import sweep_rows as sr
from coec import cli
from coec.errors import OptionError, OutputError
from coec.experiments import files
from coec.experiments.reporting.report import write_report


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["coec", "report", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as error:
        return error.code
    return 0


SMALL = [
    sr.row(grids=["main"], compensation=c, perplexity=sr.perplexity(p))
    for c, p in (("rcpu", 12.0), ("coec", 11.0))
]


def test_three_files_are_written_and_named(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, sr.write(tmp_path, SMALL)) == 0
    shown = capsys.readouterr().out
    for name in ("report.md", "report.tex", "report.html"):
        assert str(tmp_path / name) in shown
        assert "11.00" in (tmp_path / name).read_text(encoding="utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "report.html", "report.md", "report.tex", "results.jsonl",
    ]  # fmt: skip


def test_json_holds_files_and_tables(tmp_path, monkeypatch, capsys):
    run(monkeypatch, sr.write(tmp_path, SMALL), "--json", "--compare", "paper")
    printed = json.loads(capsys.readouterr().out)
    assert printed["files"]["md"] == str(tmp_path / "report.md")
    assert printed["facts"]["Cells"] == "2 done, 0 failed"
    best = printed["sections"]["Best results"][0]
    assert best["values"][0][4] == 11.0
    assert printed["notes"][0].startswith("Numbers of the paper")


def test_what_cannot_be_read_is_one_line(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, tmp_path) == 1
    assert capsys.readouterr().err == (
        f"coec: no results.jsonl in {tmp_path}: OUT must be the folder that a sweep wrote to\n"
    )


def test_the_same_results_give_the_same_bytes(tmp_path):
    folder = sr.write(tmp_path, SMALL)
    first = [path.read_bytes() for path in write_report(folder).files]
    assert [path.read_bytes() for path in write_report(folder).files] == first


@pytest.mark.parametrize("library", ["pandas", "tabulate", "matplotlib", "jinja2"])
def test_a_missing_library_names_the_extra(library, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(OptionError, match=rf"needs {library}: pip install 'coec\[report\]'"):
        write_report(sr.write(tmp_path, SMALL))
    assert not (tmp_path / "report.md").exists()


def test_a_failed_write_leaves_the_old_report(tmp_path, monkeypatch):
    folder = sr.write(tmp_path, SMALL)
    (folder / "report.md").write_text("old")

    def refused(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", refused)
    with pytest.raises(OutputError, match=r"report.md \(No space left on device\): make"):
        write_report(folder)
    assert (folder / "report.md").read_text() == "old"
    assert sorted(p.name for p in folder.iterdir()) == ["report.md", "results.jsonl"]
