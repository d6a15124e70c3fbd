"""What is said of a cluster before any work; what needs one that runs is in `tests/clusters`."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

import coec
from coec.distributed import cluster as module
from coec.distributed import workers
from coec.distributed.cluster import Cluster, ClusterJobs, joined, shared_folder
from coec.errors import CoecError, OptionError
from coec.events import recording
from outcomes import check_refused


def cluster(*nodes):
    """One that only says which nodes it has, as (CPUs, GPUs, bytes of the store)."""
    listed = [
        {
            "Alive": True, "NodeID": str(n), "NodeManagerAddress": f"10.0.0.{n}",
            "NodeManagerHostname": f"node-{n}",
            "Resources": {"CPU": float(cpus), "GPU": float(gpus), "object_store_memory": store},
        }
        for n, (cpus, gpus, store) in enumerate(nodes)
    ]  # fmt: skip
    dead = {"Alive": False, "NodeID": "dead", "NodeManagerAddress": "10.0.0.9", "Resources": {}}
    made = Cluster(SimpleNamespace(nodes=lambda: [*listed, dead]))
    made.threads = 2
    return made


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_without_ray_there_is_a_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'coec\[ray\]'"), joined(None):
        pass


@pytest.mark.parametrize(
    ("address", "match"),
    [(place, "no Ray cluster answers at") for place in ("127.0.0.1:1", "no.such.host.invalid:6379")]
    + [
        (none, "address is HOST:PORT") for none in ("head", "head:", ":", "ray://h:10001", "h:port")
    ],
)
def test_an_address_that_does_not_answer_or_is_none_is_refused_in_seconds(address, match):
    began = time.monotonic()
    with pytest.raises(OptionError, match=match), joined(address):
        pass
    assert time.monotonic() - began < 60  # Ray itself waits for minutes


def test_settings_of_a_cluster_need_one(tmp_path, run):
    for name, value in (("address", "auto"), ("workers", 2)):
        with pytest.raises(OptionError, match=f"{name} has no effect with executor = here"):
            coec.Recipe(**{name: value})
    answer = run("prune", "model", tmp_path / "out", "--workers", "2")
    check_refused(answer, "workers has no effect with executor = here")


def test_workers_take_half_of_a_gpu_or_of_a_process_and_leave_room_for_a_block():
    gpus = cluster((8, 4, 1), (8, 4, 1))
    assert gpus.device("auto") == CUDA
    assert gpus.workers(None, CUDA) == 8
    assert gpus.workers(15, CUDA) == 15
    with pytest.raises(OptionError, match=r"workers = 16 does not fit .* 8 GPUs.* at most 15"):
        gpus.workers(16, CUDA)
    cpus = cluster((4, 0, 1), (2, 0, 1))
    assert cpus.device("auto") == CPU
    assert cpus.workers(None, CPU) == 3  # of two threads each
    assert cpus.workers(5, CPU) == 5
    with pytest.raises(OptionError, match=r"6 CPUs, 2 for a process.* or set OMP_NUM_THREADS"):
        cpus.workers(6, CPU)
    small = cluster((1, 0, 1))
    with pytest.raises(OptionError, match=r"workers = 1 does not fit .* 1 CPUs, 2 for a process"):
        small.workers(None, CPU)


def test_where_a_node_is_lost_fewer_workers_leave_room_for_a_block(monkeypatch):
    """After a while in which it might come back; where there is no room for one, that is said."""
    nodes = [(2, 0, 1), (2, 0, 1)]
    made, now = cluster(), [0.0]
    monkeypatch.setattr(made.ray, "nodes", lambda: cluster(*nodes).ray.nodes())
    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])
    pool = workers.WorkerPool(made, CPU)
    monkeypatch.setattr(pool, "end", lambda: None)
    pool.workers = ["first", "second"]

    def after(seconds):
        now[0] += seconds
        return pool.end_if_crowded()

    with recording() as events:
        assert [after(10) for _ in range(9)] == [None] * 9
        nodes.pop()
        assert after(module.LOOK_S - 1) is None
        assert after(1) is None
        nodes.append((2, 0, 1))  # it is back
        assert after(60) is None
        nodes.pop()
        assert after(60) is None
        assert not events
        assert after(module.SHORT_S) == 1
        assert events.pop().endswith("so 1 go on with their windows")
        nodes.pop()
        assert after(10) is None
        assert "waiting for one with room for a worker and a block being solved, each" in events[0]
        with pytest.raises(CoecError, match="has had no room .* for 600 s: add a node; what is"):
            after(module.PATIENCE_S)


def test_a_job_of_a_sweep_needs_a_node_of_as_many_cores_as_threads():
    ClusterJobs(cluster((1, 0, 1), (2, 0, 1)), CPU)
    with pytest.raises(OptionError, match="no node of the cluster has 2 CPUs"):
        ClusterJobs(cluster((1, 0, 1), (1, 0, 1)), CPU)


def test_jobs_of_a_sweep_say_what_they_wait_for(monkeypatch):
    made, waits = cluster((2, 0, 1)), iter([[], ["done"], ["done"]])
    jobs = ClusterJobs(made, CPU)
    task = SimpleNamespace(remote=lambda *arguments: "reference")
    made.ray = SimpleNamespace(
        nodes=cluster((1, 0, 1)).ray.nodes, remote=lambda **options: lambda function: task,
        wait=lambda references, timeout: (next(waits), []), cancel=None,
    )  # fmt: skip
    monkeypatch.setattr(Cluster, "get", lambda self, reference: (3, "host"))
    with recording() as events:
        assert list(jobs.map(abs, [-3])) == [3]
    assert "waiting for a node, since one was lost: no node of the cluster has 2 CPUs" in events[0]


@pytest.mark.parametrize(
    ("device", "match"),
    [
        ("cuda", "no node of the cluster has a GPU"),
        ("cuda:1", "gives every worker its own"),
        ("mps", "gives every worker its own"),
        ("abacus", "cannot be used"),
    ],
)
def test_a_device_that_a_cluster_does_not_have(device, match):
    with pytest.raises(OptionError, match=match):
        cluster((4, 0, 1)).device(device)


def test_an_object_store_that_does_not_hold_a_block_twice():
    nodes = cluster((4, 0, 10**9), (4, 0, 10**8))
    nodes.check_store(5 * 10**7)
    said = r"of node-1 has 0\.10 GB.* 0\.06 GB twice.*--object-store-memory=120000000"
    with pytest.raises(OptionError, match=said):
        nodes.check_store(6 * 10**7)


def test_what_is_not_shared_is_seen_by_nobody(tmp_path):
    with shared_folder(tmp_path / "not" / "there") as look:
        assert look()
        [token] = tmp_path.iterdir()
        token.unlink()
        with pytest.raises(coec.CoecError, match="No such file"):
            look()
    assert not list(tmp_path.iterdir())


def test_what_one_process_does_is_not_handed_out(dense, tokens, tmp_path):
    coec.collect(dense, tmp_path / "stats", calibration=tokens, samples=4, seq_len=32)
    how = {"statistics": tmp_path / "stats", "executor": "ray", "preset": "paper"}
    with pytest.raises(OptionError, match="executor = ray has no effect with statistics"):
        coec.prune(dense, tmp_path / "out", **how)


def test_only_what_is_unfinished_is_cancelled():
    """Ray ends the driver where the reply of a task meets its cancellation."""
    cancelled = []
    made = cluster((2, 0, 0))
    made.ray.wait = lambda references, timeout: (
        (references, []) if references == ["finished"] else ([], references)
    )
    made.ray.cancel = cancelled.append
    made.cancel(["finished", "running", "finished", "waiting"])
    assert cancelled == ["running", "waiting"]
