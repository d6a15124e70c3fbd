"""What memory a run takes at 6 and at 24 blocks, planned and measured.

    python -m benchmarks.block_memory [--blocks 6 24] [--runs least-squares best]

Random Llamas of hidden size 512 (1,408 channels, 4,096 tokens, float32), token ids, 16 windows of
256 tokens, 30 %. Every run is a process of its own on the CPU; measured is the peak of its resident
set. Planned is what `coec prune --dry-run` says.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks import record

RUNS: dict[str, dict[str, Any]] = {
    "least-squares": {"preset": "paper", "compensation": "least-squares"},
    "best": {"preset": "best"},
}
VOCABULARY, LENGTH, SAMPLES = 4096, 256, 16

RUN = """
import json, sys
import coec.cli.commands, coec.pruning, coec, torch
from coec.devices import peak
coec.prune(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
print(peak(torch.device("cpu")))
"""
"""A run in a process of its own."""


def main(arguments: list[str] | None = None) -> None:
    """Prints a row per run, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", nargs="+", type=int, default=[6, 24])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    chosen = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    print(f"Memory by the number of blocks, MiB. {record.header()}\n", flush=True)
    rows: list[dict[str, Any]] = record.load("block_memory").get("rows", [])
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/tokens.npy", np.random.default_rng(0).integers(0, VOCABULARY, 50_000))
        for blocks in chosen.blocks:
            model = saved(Path(folder) / f"{blocks}", blocks)
            for name in chosen.runs:
                settings = {
                    "calibration": f"{folder}/tokens.npy", "samples": SAMPLES, "seq_len": LENGTH,
                    "sparsity": 0.3, "device": "cpu", **RUNS[name],
                }  # fmt: skip
                planned = planned_by(model, settings)
                found = measured(model, f"{folder}/{blocks}-{name}", settings)
                row = {"run": f"{name}, {blocks} blocks", "planned": planned, "measured": found}
                rows = record.merged(rows, [row], "run")
                record.save("block_memory", arguments, {"rows": rows})
                print(describe(row), flush=True)


def saved(folder: Path, blocks: int) -> Path:
    """A random model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=blocks, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=2048,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def planned_by(model: Path, settings: dict[str, Any]) -> int:
    """Bytes that the command plans, in a process that holds nothing else."""
    flags = [
        word
        for name, value in settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "coec", "prune", str(model), "--dry-run", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["memory_bytes"]["total"])


def measured(model: Path, out: str, settings: dict[str, Any]) -> int:
    """Bytes of a run's process at its peak."""
    command = [sys.executable, "-c", RUN, str(model), out, json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def describe(row: dict[str, Any]) -> str:
    """One run as a line."""
    planned, found = row["planned"], row["measured"]
    return (
        f"{row['run']:<26} planned {planned / 2**20:6.0f}   measured {found / 2**20:6.0f}   "
        f"ratio {planned / found:.2f}"
    )


if __name__ == "__main__":
    main()
