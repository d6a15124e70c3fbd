"""A run holds one block at a time: what it takes does not grow with their number."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers

import tiny_models as tm

pytestmark = pytest.mark.slow

RUN = """
import json, resource, sys, threading
import coec, coec.pruning
from coec.checkpoint import checkpoint as writing
from coec.planning import memory

def data(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

writing.MAX_SHARD = "24MB"  # of 2 GB, as these models are of a terabyte
memory.SHARD_BYTES = 24 * 10**6
model, text, out, room = sys.argv[1:]
settings = dict(preset="paper", calibration=text, samples=4, seq_len=32, compensation="none")
settings["device"] = "cpu"
coec.prune(sys.argv[1] + "-1", out + "-1", **settings)  # libraries take what they take once
limit = data("VmData:") + int(room)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
peak, done = [0], threading.Event()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], data("RssAnon:"))

thread = threading.Thread(target=watch)
thread.start()
try:
    coec.prune(model, out, **settings)
finally:
    done.set()
    thread.join()
print(json.dumps({"peak": peak[0]}))
"""
STEADY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**17),
    "MALLOC_TRIM_THRESHOLD_": "0",
}
"""An allocator that keeps nothing of what is freed: what is counted is what the program holds.

Left alone, glibc moves its threshold with what was freed before, and two runs of one program differ
by up to a block (docs/lab/LOG.md); `hand_back` has a test of its own."""
HIDDEN, FFN, ROOM = 1024, 512, 256 * 2**20
BLOCK = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * FFN)
"""Bytes of a block."""


def saved(folder, blocks):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=blocks, vocab_size=512,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="24MB")
    return folder


def run(folder, out, text):
    command = [sys.executable, "-c", RUN, str(folder), text, str(out), str(ROOM)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment |= STEADY
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
def test_twice_the_blocks_take_no_more_memory(tmp_path):
    """Anonymous memory is counted: pages of the checkpoint's files are the kernel's to drop.

    Sixteen blocks more add less than one block to the peak; the limit is on all of a process's
    data, and the weights of the larger model alone are more than it leaves.
    """
    text = tm.token_file(tmp_path / "tokens.npy")
    found = {}
    for blocks in (16, 32):
        folder = saved(tmp_path / f"model-{blocks}", blocks)
        saved(tmp_path / f"model-{blocks}-1", 1)
        found[blocks] = run(folder, tmp_path / f"out-{blocks}", text)
    assert 32 * BLOCK > 2 * ROOM
    one, two = (found[blocks]["peak"] for blocks in (16, 32))
    assert two < 1.1 * one
    assert two - one < BLOCK
