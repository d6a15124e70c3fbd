"""Worker processes end with the one that started them, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # programs of their own, each with workers that import torch

PROGRAM = """
import os, time
from coec.execution.workers import Workers

def work(seconds):
    print(os.getpid(), flush=True)
    time.sleep(seconds)

if __name__ == "__main__":
    with Workers(2) as workers:
        list(workers.map(work, [600, 600]))
"""


def program(folder, text, *arguments):
    """How a program is run by itself."""
    path = folder / "program.py"
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return {"args": [sys.executable, path, *arguments], "env": environment}


def test_workers_end_when_their_parent_is_killed(tmp_path):
    """They would wait for more jobs for ever, each with its memory."""
    parent = subprocess.Popen(**program(tmp_path, PROGRAM), stdout=subprocess.PIPE, text=True)
    workers = [Path("/proc") / parent.stdout.readline().strip() / "stat" for _ in range(2)]
    assert all(map(alive, workers))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))


def alive(stat):
    """Whether there is such a process; one that nobody has asked about since it ended is none."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


TOLD = """
import os, signal, sys, time
from coec.execution.workers import Workers

def work(number):
    if number == 1:
        os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with Workers(2) as workers:
            list(workers.map(work, range(4)))
    except KeyboardInterrupt:
        raise SystemExit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_workers_alone_tell_of_ends_the_program_as_it_would_have(number, tmp_path):
    """Python may swallow what a handler of this process raises; memory is not lacking then."""
    child = subprocess.run(
        **program(tmp_path, TOLD, str(int(number))), capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 128 + number, child.stderr
    assert "Traceback" not in child.stderr


INTERRUPTED = """
import os, signal, threading, time
from multiprocessing import util
from coec.execution.workers import Workers

start = util.spawnv_passfds

def start_and_interrupt(*arguments):
    '''Before a worker has been told what it is for: it would find its pipe at an end.'''
    pid = start(*arguments)
    if "spawn_main" in str(arguments[1]):  # not for what keeps track of shared memory
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)  # until another thread has taken it
    return pid

def work(seconds):
    time.sleep(seconds)

if __name__ == "__main__":
    # As torch has: a signal that one thread holds back is another's.
    threading.Thread(target=time.sleep, args=[600], daemon=True).start()
    util.spawnv_passfds = start_and_interrupt
    try:
        with Workers(2) as workers:
            list(workers.map(work, [600, 600]))
    except KeyboardInterrupt:
        raise SystemExit(130)
"""


def test_a_signal_waits_until_workers_have_been_told_what_they_are_for(tmp_path):
    ended = subprocess.run(
        **program(tmp_path, INTERRUPTED), capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (130, "")
