"""On a Ray cluster as in one process: the same files, whatever befalls a node or the driver."""

import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from nodes import STORE, weights

import coec
from coec.distributed import cluster as module
from coec.distributed.cluster import Cluster, shared_folder
from coec.distributed.ray_group import RayGroup
from coec.errors import OptionError
from outcomes import one_line
from places import SHARED

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is not here"),
]
MODEL = SHARED / "models/wt2-llama"
TEXT = SHARED / "data/wikitext-2/valid.raw.txt"
SMALL = SHARED / "models/stories260K"
STORIES = SHARED / "data/tinystories/train.txt"
SETTINGS = {
    "preset": "paper", "calibration": TEXT, "samples": 72, "seq_len": 512, "holdout": 0.125,
    "rounds": 1,
}  # fmt: skip
"""Four batches to fit on: as many as there are workers at most."""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """What one process makes."""
    out = tmp_path_factory.mktemp("here") / "out"
    torch.set_num_threads(1)
    coec.prune(MODEL, out, **SETTINGS)
    return weights(out)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_makes_the_same_files(workers, cluster, here, tmp_path):
    seen = []
    report = coec.prune(
        MODEL, tmp_path / "out", executor="ray", workers=workers,
        progress=lambda *state: seen.append(state), **SETTINGS,
    )  # fmt: skip
    assert weights(tmp_path / "out") == here
    shares = report.calibration["workers"]
    assert len(shares) == workers
    assert sum(share["windows"] for share in shares) == 63
    assert sum(share["held_out"] for share in shares) == 9
    assert all(row["host"] for row in report.sites)
    assert ("solving", 6, 6) in seen
    assert max(done for phase, done, _ in seen if phase == "calibrating") > 0


def test_a_node_that_is_lost_costs_time_alone(cluster, here, tmp_path):
    [other] = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    began = []

    def lose(phase, done, total):
        if phase == "solving" and done == 2 and not began:
            began.append(done)
            cluster.remove_node(other, allow_graceful=False)

    coec.prune(MODEL, tmp_path / "out", executor="ray", workers=2, progress=lose, **SETTINGS)
    assert began
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    assert weights(tmp_path / "out") == here


def test_a_driver_that_is_killed_goes_on_with_what_was_not_finished(cluster, here, tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "coec", "prune", str(MODEL), str(out), "--executor", "ray",
        "--address", cluster.address, "--workers", "2", "--calibration", str(TEXT),
        "--samples", "72", "--seq-len", "512", "--holdout", "0.125", "--rounds", "1",
        "--preset", "paper",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    journal = out.with_name("out.partial") / "journal.jsonl"
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as driver:
        while not (journal.is_file() and journal.read_text().count("units of block") >= 2):
            assert driver.poll() is None
            time.sleep(0.1)
        driver.send_signal(signal.SIGKILL)
    done = journal.read_text().count("units of block")
    solved = []
    report = coec.prune(
        MODEL, out, executor="ray", workers=2,
        progress=lambda *state: solved.append(state), **SETTINGS,
    )  # fmt: skip
    assert max(total for phase, _, total in solved if phase == "solving") == 6 - done
    assert weights(out) == here
    assert len(report.sites) == 12


def test_the_pruned_model_runs_along_on_a_cluster_as_in_one_process(cluster, tmp_path, monkeypatch):
    """Propagated statistics, reconstruction; a worker dies in the middle, and a block's process."""
    import ray

    settings = {
        "calibration": STORIES, "samples": 24, "seq_len": 128, "preset": "best", "reconstruct": 1,
        "kv_groups": "uniform",
    }  # fmt: skip
    coec.prune(SMALL, tmp_path / "here", **settings)
    solve, died, lost = RayGroup.solve, tmp_path / "died", tmp_path / "lost"

    def befallen(self, work):
        """Runs where blocks are solved."""
        worker = self._pool.workers[0]

        def once():
            # The second attempt gets no windows to train on.
            if died.exists() and not lost.exists():
                lost.touch()

                def losing(self, method, *args, each=RayGroup.each, **options):
                    if method.__name__ == "examples":
                        ray.kill(worker, no_restart=False)
                    return each(self, method, *args, **options)

                with mock.patch.object(RayGroup, "each", losing):
                    return work()
            solved = work()
            if not died.exists():  # the first attempt: all is done, and lost with its process
                died.touch()
                os._exit(1)
            return solved

        return solve(self, once)

    monkeypatch.setattr(RayGroup, "solve", befallen)
    report = coec.prune(SMALL, tmp_path / "there", executor="ray", workers=2, **settings)
    assert weights(tmp_path / "there") == weights(tmp_path / "here")
    assert died.exists()
    assert lost.exists()
    assert all(row["host"] for row in report.sites)
    assert len(report.calibration["workers"]) == 2


def test_statistics_of_a_cluster_are_those_of_one_process(cluster, tmp_path):
    settings = {name: SETTINGS[name] for name in ("calibration", "samples", "seq_len", "holdout")}
    for name, where in (("here", {}), ("there", {"executor": "ray", "workers": 2})):
        coec.collect(MODEL, tmp_path / name, **settings, **where)
    assert weights(tmp_path / "here") == weights(tmp_path / "there")


def test_a_node_that_computes_otherwise_or_sees_something_else_is_named(
    cluster, tmp_path, monkeypatch
):
    import ray

    host = Cluster(ray).nodes[0].host
    with shared_folder(tmp_path) as look:
        Cluster(ray).check_nodes(look, look(), "the folder")

        def refused(match, here):
            with one_line(OptionError, match=match):
                Cluster(ray).check_nodes(look, here, "the folder")

        refused(f"node {host} does not see the folder .it has another one there", "other")
        for owner, name in ((module, "coec"), (torch, "torch")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, "__version__", "9.9")
                refused(rf"node {host} has {name} .*, this one has 9\.9", look())
        token = look()
        (tmp_path / token).unlink()
        refused(f"node {host} does not see the folder .*No such file", token)
