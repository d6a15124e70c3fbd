"""Prunings of tiny models that several files of tests ask for."""

import json

import pytest

from coec.pipeline import prune as pruning

CONTRACT = {
    "preset": "paper",
    "sparsity": 0.3,
    "samples": 24,
    "seq_len": 32,
    "forward_dtype": "float64",
}
"""Settings under which every architecture keeps its promises."""


def interrupt(monkeypatch, prune, *arguments, **settings):
    """Prunes until the first block is finished."""
    solve = pruning.solve_block

    def interrupted(measured, **options):
        if measured.block.index:
            raise KeyboardInterrupt
        return solve(measured, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pruning, "solve_block", interrupted)
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
