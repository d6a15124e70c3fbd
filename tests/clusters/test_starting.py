"""A cluster of this machine that is started by a run, and ended while it starts."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from coec.distributed.cluster import joined
from places import SHARED

pytestmark = pytest.mark.ray


def listening(process):
    """The addresses at which a process and its children wait for others."""
    return {
        connection.laddr.ip
        for one in [process, *process.children(recursive=True)]
        for connection in one.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_what_is_started_listens_to_this_machine_alone():
    before = signal.getsignal(signal.SIGTERM), os.environ.copy()
    with joined(None) as cluster:
        task = cluster.ray.remote(num_cpus=1)(lambda: os.getpid())
        assert cluster.ray.get(task.remote()) != os.getpid()
        assert listening(psutil.Process()) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        assert signal.getsignal(signal.SIGTERM) is before[0]
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ.keys() - before[1].keys()


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is not here")
@pytest.mark.parametrize("working", [False, True])
def test_sigterm_is_a_line_while_ray_starts_and_while_it_works(working, tmp_path):
    """Ray takes the signal for itself: it ended with status 15, or with 1 while it was waited for.

    Between the two, for a second in which Ray's own code in C++ starts, it may still abort (-6).
    """
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "coec", "prune", SHARED / "models/stories260K", out,
        "--calibration", SHARED / "data/tinystories/train.txt", "--executor", "ray",
        "--workers", "1",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def begun(process):
        if working:
            return (tmp_path / "out.partial/journal.jsonl").exists()
        return any("gcs_server" in one.name() for one in process.children())

    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as run:
        while not begun(psutil.Process(run.pid)):
            assert run.poll() is None
            time.sleep(0.02)
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=60)[1]
    assert run.returncode == 128 + signal.SIGTERM, said
    assert "coec: interrupted" in said
    assert not out.exists()
