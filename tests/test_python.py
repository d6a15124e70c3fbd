"""The package as a notebook shows it: bars, tables, help."""

import ast
import io
import pydoc
import sys
from pathlib import Path

import pytest

import coec

SETTINGS = {"preset": "fast", "sparsity": 0.3, "samples": 4, "seq_len": 16}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("progress", [None, False, True])
@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_shows_a_bar_by_itself(progress, stream, dense, text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    coec.prune(dense, tmp_path / "out", calibration=text, progress=progress, **SETTINGS)
    shown = "solving" in sys.stderr.getvalue()
    assert shown == (progress or (progress is None and stream is Terminal))


def test_a_callback_takes_the_place_of_the_bar(dense, text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    seen = []
    coec.prune(dense, tmp_path / "out", calibration=text, progress=lambda *step: seen.append(step),
               **SETTINGS)  # fmt: skip
    assert seen
    assert sys.stderr.getvalue() == ""


def test_a_plan_is_a_table_of_ten_lines_at_most(dense):
    plan = coec.plan(dense, **SETTINGS)
    lines = repr(plan).splitlines()
    assert 5 < len(lines) <= 10
    assert lines[0].split()[:4] == [
        "parameters", f"{plan.parameters_before:,}", "→", f"{plan.parameters_after:,}",
    ]  # fmt: skip
    assert plan._repr_html_().count("<tr>") == len(lines)


@pytest.mark.parametrize("name", ["prune", "recover", "perplexity"])
def test_help_lists_the_settings(name):
    text = pydoc.render_doc(getattr(coec, name))
    wanted = {"prune": "    multiple_of: Kept MLP channels", "recover": "    lora: ",
              "perplexity": "    seq_len: "}  # fmt: skip
    assert wanted[name] in text
    assert "Args:" in text


def test_help_names_the_default_of_every_preset():
    assert "obs; rcpu in paper" in coec.prune.__doc__


UNIX = {"fcntl", "resource", "pwd", "grp", "termios", "pty"}


def test_no_module_needs_what_windows_lacks():
    """At its head; inside a function such an import may stand after a check of the system."""
    source = Path(coec.__file__).parent
    for path in source.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not UNIX.intersection(names), path
