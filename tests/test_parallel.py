"""A run of several processes, as `torchrun` starts them, writes the bits of one."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import coec
import several
import tiny_models as tm

KILLS = min(10, int(os.environ.get("COEC_CRASH_RUNS", "1")))
"""How often processes of one run are killed."""


@pytest.fixture
def dense(tmp_path):
    """A folder of a random Llama of four blocks."""
    return tm.save(tm.tiny("llama", torch.float32, num_hidden_layers=4), tmp_path / "dense")


@pytest.fixture
def tokens(tmp_path):
    """A file of 40 rows of 32 token ids."""
    return tm.token_file(tmp_path / "tokens.npy", rows=40)


@pytest.fixture
def command(dense, tokens, tmp_path):
    """The command that prunes the model into a folder."""

    def words(name, *flags, dense=dense):
        return ["-m", "coec", "prune", str(dense), str(tmp_path / name), "--calibration", tokens,
                "--samples", "40", "--seq-len", "32", "--device", "cpu", *flags]  # fmt: skip

    return words


def started(words, processes, *options):
    """A started program in several processes."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.Popen(
        [sys.executable, *several, *options, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )  # fmt: skip


def finished(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out, err


def weights(folder: Path) -> dict[str, str]:
    """The hash of every file of weights and of the kept indices."""
    found = sorted(folder.glob("*.safetensors"))
    assert found
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "cases"), [(2, ["fast", "balanced", "drop blocks"]), (3, ["paper", "by block"])]
)
def test_any_number_of_processes_writes_the_same_weights(processes, cases, dense, tokens, tmp_path):
    words = [several.__file__, str(dense), tokens, str(tmp_path / "several"), *cases]
    (tmp_path / "several").mkdir()
    process = started(words, processes)
    several.prune(dense, tokens, tmp_path / "one", cases)
    finished(process)
    for case in cases:
        assert weights(tmp_path / "several" / case) == weights(tmp_path / "one" / case)


def lines_of(folder):
    journal = folder.with_name(f"{folder.name}.partial") / "journal.jsonl"
    return journal.read_text().count("\n") if journal.exists() else 0


def killed(process, rank, folder, lines):
    """Kills a process once the journal has so many lines; whether the run had not ended before."""
    while process.poll() is None:
        if lines_of(folder) >= lines:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[rank]), signal.SIGKILL)
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
def test_torchrun_starts_again_whenever_a_process_was_killed(command, dense, tokens, tmp_path):
    """At every few new lines of the journal, the first process and the second in turn."""
    process = started(
        command("again", "--preset", "balanced"), 2, "--max-restarts", str(KILLS),
        "--monitor-interval", "0.1",
    )  # fmt: skip
    lines = 1
    for number in range(KILLS):
        assert killed(process, number % 2, tmp_path / "again", lines), number
        lines = lines_of(tmp_path / "again") + 1
        time.sleep(0.5)  # until the other process has ended too
    finished(process)
    several.prune(dense, tokens, tmp_path / "one", ["balanced"])
    assert weights(tmp_path / "again") == weights(tmp_path / "one" / "balanced")


@pytest.mark.slow
def test_the_same_command_goes_on_with_another_number_of_processes(
    command, dense, tokens, run, tmp_path
):
    words = command("again", "--preset", "balanced")
    process = started(words, 2)
    assert killed(process, 1, tmp_path / "again", 5)
    process.communicate(timeout=200)
    assert process.returncode != 0
    assert not (tmp_path / "again").exists()
    status, _, err = run(*words[2:])
    assert status == 0, err
    assert re.search(r"[12] of 4 blocks are done", err)
    several.prune(dense, tokens, tmp_path / "one", ["balanced"])
    assert weights(tmp_path / "again") == weights(tmp_path / "one" / "balanced")


@pytest.mark.slow
def test_processes_that_see_different_models_are_refused(command, tmp_path):
    tm.save(tm.tiny("qwen2", torch.float32), tmp_path / "other1")
    (tmp_path / "other0").symlink_to(tmp_path / "dense")
    words = command("out", dense=f"{tmp_path}/other$RANK")
    process = started(["bash", "-c", " ".join([sys.executable, *words])], 2, "--no-python")
    _, err = process.communicate(timeout=200)
    assert process.returncode != 0
    assert re.search(r"coec: process 1 on .* has model \w+, the first process \w+", err)
    assert not (tmp_path / "out").exists()


def test_one_module_alone_knows_of_several_processes():
    for path in Path(coec.__file__).parent.rglob("*.py"):
        if path.name != "parallel.py":
            assert "torch.distributed" not in path.read_text(encoding="utf-8"), path
