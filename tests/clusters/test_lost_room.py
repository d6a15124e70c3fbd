"""A node that is lost, and with it the room for a block that is solved beside the workers."""

import threading
import time

import pytest
import torch
from nodes import two_nodes, weights

import coec
from coec.events import recording
from places import SHARED

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is not here"),
]
SMALL = SHARED / "models/stories260K"
TEXT = SHARED / "data/tinystories/train.txt"
SETTINGS = {"preset": "paper", "calibration": TEXT, "samples": 160, "seq_len": 256}
BEST = {"samples": 24, "seq_len": 128, "preset": "best", "reconstruct": 1, "kv_groups": "uniform"}


@pytest.fixture
def cluster():
    """Two nodes of one core, which two workers and two blocks fill."""
    with two_nodes(1) as made:
        yield made


@pytest.mark.parametrize("run", ["dense statistics", "beside"])
def test_fewer_workers_go_on_where_a_lost_node_leaves_no_room_for_a_block(run, cluster, tmp_path):
    """Both workers begin again on the node that is left, which has no other slot."""
    torch.set_num_threads(1)
    settings = SETTINGS | (BEST if run == "beside" else {"rounds": 1})
    coec.prune(SMALL, tmp_path / "here", **settings)
    [other] = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    lost = []

    def lose(phase, done, total):
        if phase in ("solving", "reconstructing") and done == 1 and not lost:
            lost.append(time.monotonic())
            threading.Thread(target=cluster.remove_node, args=(other,),
                             kwargs={"allow_graceful": False}).start()  # fmt: skip

    with recording() as events:
        report = coec.prune(
            SMALL, tmp_path / "there", executor="ray", workers=2, progress=lose, **settings
        )
    print(f"{run}: {time.monotonic() - lost[0]:.0f} s from the loss of the node to the end")
    assert any("2 workers leave no room for a block being solved, so 1 go on" in e for e in events)
    assert weights(tmp_path / "there") == weights(tmp_path / "here")
    assert len(report.calibration["workers"]) == 1
