"""Prunings of tiny models that several files of tests ask for."""

import json

import pytest

import coec
from coec import pruning
from problems import failing

CONTRACT = {
    "preset": "paper",
    "sparsity": 0.3,
    "samples": 24,
    "seq_len": 32,
    "forward_dtype": "float64",
}
"""Settings under which every architecture keeps its promises."""


def prunes(**settings):
    """A fixture that prunes the tiny model, or another, into a folder in `tmp_path`."""

    @pytest.fixture
    def prune(dense, tokens, tmp_path):
        def call(out="out", model=dense, **more):
            asked = {"calibration": tokens, **settings, **more}
            return coec.prune(model, tmp_path / out, **asked)

        return call

    return prune


def interrupt(monkeypatch, prune, *arguments, **settings):
    """Prunes until the first block is finished."""
    interrupted = failing(pruning.solve, KeyboardInterrupt(), 2)
    with monkeypatch.context() as patch:
        patch.setattr(pruning, "solve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prune(*arguments, **settings)


def content(folder):
    """Every file by its path, without times."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    record = json.loads(found.pop("coec.json"))
    del record["seconds"]
    for site in record["sites"]:
        del site["seconds"]
    return found, record
