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
import tiny_models as tm

CASES = {
    "paper": ("--preset", "paper"),
    "fast": ("--preset", "fast", "--attention-sparsity", "0.3"),
    "balanced": ("--preset", "balanced"),
    "by block": ("--preset", "fast", "--by-block"),
    "drop blocks": ("--preset", "fast", "--drop-blocks", "1"),
}
"""Flags of each kind of run, after the usual ones."""


@pytest.fixture
def command(tmp_path):
    """The command that prunes a model of three blocks into a folder; 40 windows are eight parts."""
    model = tm.tiny("llama", torch.float32, num_hidden_layers=3)
    dense = tm.save(model, tmp_path / "dense")
    tokens = tm.token_file(tmp_path / "tokens.npy", rows=40)

    def words(name, flags, dense=dense):
        return ["-m", "coec", "prune", str(dense), str(tmp_path / name), "--calibration", tokens,
                "--samples", "40", "--seq-len", "32", "--device", "cpu", *flags]  # fmt: skip

    return words


def started(words, processes=1, *options):
    """A started command, in several processes if more than one are asked for."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    before = [sys.executable, *(several if processes > 1 else []), *options]
    return subprocess.Popen(
        [*before, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )  # fmt: skip


def finished(words, *options):
    process = started(words, *options)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out


def weights(folder: Path) -> dict[str, str]:
    """The hash of every file of weights and of the kept indices."""
    found = sorted(folder.glob("*.safetensors"))
    assert found
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.mark.parametrize(
    ("case", "processes"),
    [("fast", 2)] + [pytest.param(case, count, marks=pytest.mark.slow) for case, count in
                     (("paper", 3), ("balanced", 2), ("by block", 3), ("drop blocks", 2))],
)  # fmt: skip
def test_any_number_of_processes_writes_the_same_weights(case, processes, command, tmp_path):
    finished(command("one", CASES[case]))
    out = finished(command("several", CASES[case]), processes)
    assert out.count("wrote ") == 1  # the first process speaks
    assert weights(tmp_path / "several") == weights(tmp_path / "one")


def killed(process, rank, folder, blocks):
    """Kills a process of a run once so many blocks are in its journal; whether it was in time."""
    journal = folder.with_name(f"{folder.name}.partial") / "journal.jsonl"
    while process.poll() is None:
        done = len(re.findall(r"units of block", journal.read_text())) if journal.exists() else -1
        if done >= blocks:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[rank]), signal.SIGKILL)
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "blocks"), [(0, 0), (1, 2)])
def test_torchrun_starts_again_after_a_process_was_killed(rank, blocks, command, tmp_path):
    flags = CASES["balanced"]
    finished(command("one", flags))
    process = started(command("again", flags), 2, "--max-restarts", "1")
    assert killed(process, rank, tmp_path / "again", blocks)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert weights(tmp_path / "again") == weights(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_same_command_goes_on_after_a_process_was_killed(rank, command, tmp_path):
    """Also with another number of processes."""
    flags = CASES["balanced"]
    finished(command("one", flags))
    process = started(command("again", flags), 2)
    assert killed(process, rank, tmp_path / "again", 1)
    process.communicate(timeout=200)
    assert process.returncode != 0
    assert not (tmp_path / "again").exists()
    process = started(command("again", flags), 3 - rank)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "of 3 blocks are done" in err
    assert weights(tmp_path / "again") == weights(tmp_path / "one")


@pytest.mark.slow
def test_processes_that_see_different_models_are_refused(command, tmp_path):
    tm.save(tm.tiny("qwen2", torch.float32), tmp_path / "other1")
    (tmp_path / "other0").symlink_to(tmp_path / "dense")
    words = command("out", CASES["fast"], dense=f"{tmp_path}/other$RANK")
    process = started(["bash", "-c", " ".join([sys.executable, *words])], 2, "--no-python")
    _, err = process.communicate(timeout=200)
    assert process.returncode != 0
    assert re.search(r"coec: process 1 on .* has model \w+, the first process \w+", err)
    assert not (tmp_path / "out").exists()


def test_one_module_alone_knows_of_several_processes():
    for path in Path(coec.__file__).parent.rglob("*.py"):
        if path.name != "parallel.py":
            assert "torch.distributed" not in path.read_text(encoding="utf-8"), path
