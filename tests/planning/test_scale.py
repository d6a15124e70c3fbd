"""The table of docs/lab/SCALE.md is the one that the command makes."""

from pathlib import Path

import pytest

from benchmarks import record, scale

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/lab/SCALE.md").read_text(encoding="utf-8")
MODELS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name != "Llama-3-70B")) for name in scale.MODELS
]


@pytest.mark.parametrize("model", MODELS)
def test_the_document_has_the_rows_that_are_made(model):
    heads, rule, *rows = record.table(scale.COLUMNS, scale.rows(model)).splitlines()
    shown = DOCUMENT.split(scale.FIRST.format(""))[1].split(scale.LAST)[0].splitlines()
    assert [heads, rule] == shown[1:3]
    assert set(rows) <= set(shown)
