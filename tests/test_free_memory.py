"""What memory is free, and that what is freed is handed back."""

import sys

import pytest
import torch

import coec
import tiny_models as tm
from coec import free_memory
from coec.devices import resident_bytes
from coec.free_memory import FreeMemory, hand_back


def test_limits_of_control_groups_count(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 200\n")
    assert free_memory._of_cgroup(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory._of_cgroup(tmp_path) is None
    old = tmp_path / "old/memory"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("1000\n")
    (old / "memory.usage_in_bytes").write_text("900\n")
    (old / "memory.stat").write_text("total_inactive_file 50\n")
    assert free_memory._of_cgroup(tmp_path / "old") == 150
    assert free_memory._of_cgroup(tmp_path / "nothing") is None


def test_there_is_some_room_here():
    found = FreeMemory.of(torch.device("cpu"))
    assert found.device is None
    assert found.host is None or found.host > 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_freed_memory_between_pieces_that_stay_is_handed_back():
    if free_memory._malloc_trim() is None:
        pytest.skip("not glibc")
    pieces = [torch.ones(2**14) for _ in range(1024)]  # 64 KiB each, too small for a map
    pieces = pieces[::8]
    kept = resident_bytes()
    hand_back()
    assert kept - resident_bytes() > 0.8 * 2**26
    assert len(pieces) == 128


def test_a_run_hands_it_back_behind_every_block(tmp_path, monkeypatch):
    """Behind the pass and the solve of each, and where errors propagate behind both passes."""
    handed = []
    monkeypatch.setattr(free_memory, "_malloc_trim", lambda: handed.append)
    dense = tm.save(tm.tiny("llama", torch.float32), tmp_path / "dense")
    own = {"calibration": tm.token_file(tmp_path / "tokens.npy"), "samples": 4, "seq_len": 32}
    coec.prune(dense, tmp_path / "out", compensation="none", **own)
    assert len(handed) == 1 + 2 * 2  # once where the text was read
    handed.clear()
    coec.prune(dense, tmp_path / "far", propagate=True, compensation="none", **own)
    assert len(handed) == 1 + 2 * 2
