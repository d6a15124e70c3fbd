"""The notebook runs, cell by cell, as it is in the repository."""

import json
from pathlib import Path

import matplotlib
import pytest

from coec.models.dense import Dense

NOTEBOOK = Path(__file__).parents[1] / "examples/quickstart.ipynb"


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)  # which say where they were made
    assert max(len(line.rstrip("\n")) for cell in cells for line in cell["source"]) <= 120
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    said = capsys.readouterr().out
    assert "3,049,920 → 2,496,960 parameters" in said
    assert names["validation"]["after"] < names["validation"]["before"]
    written = [line.split(": ", 1) for line in said.splitlines() if ": " in line][-3:]
    assert [name for name, _ in written] == ["dense", "pruned", "recovered"]
    for _, text in written:  # which reads as text: no marks of headings, few words again and again
        words = text.split()
        assert not set(text) & set("=@<")
        assert len(words) >= 25
        assert len(set(words)) > 0.6 * len(words)
    assert len(names["axes"].lines) == 4
    assert Dense.open(tmp_path / "quickstart-output/recovered").parameters == 2_496_960
