"""The memory that a plan of a training states, against what a process of its own takes.

    python -m benchmarks.recover_memory [--blocks 6 24]

Random Llamas with 512 columns and a vocabulary of 8,000, pruned by 30 %, four windows of 256 tokens
at once, on the CPU in float32. Prints a Markdown table; the ratio is planned over taken.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

import coec

WAYS: dict[str, dict[str, object]] = {
    "all weights": {},
    "activations computed again": {"checkpointing": True},
    "additions of rank 8": {"lora": 8},
    "the same, teacher stored": {"lora": 8, "teacher": "stored"},
}
VOCABULARY, LENGTH = 8000, 256
RUN = """
import json, sys
import torch, coec, coec.recovery.recover, transformers.models.llama.modeling_llama
from coec.devices import peak
from coec.recovery import plan
from coec.settings.recovery import Recovery

dense, pruned, text = sys.argv[1:4]
settings = {"text": text, "seq_len": 256, "device": "cpu", "tokens": 2048, "batch_size": 4}
settings |= json.loads(sys.argv[4])
way = plan.footprints(dense, pruned, Recovery(**settings), torch.device("cpu"), None)[0]
coec.recover(dense, pruned, f"{pruned}-recovered", force=True, **settings)
print(json.dumps([way.bytes, peak(torch.device("cpu"))]))
"""


def main(arguments: list[str] | None = None) -> None:
    """Print planned and taken memory of every way to train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", nargs="+", type=int, default=[6, 24])
    print("| blocks | weights | planned, GB | taken, GB | ratio |\n" + "|---" * 5 + "|")
    for blocks in parser.parse_args(arguments).blocks:
        with tempfile.TemporaryDirectory() as folder:
            models = made(blocks, Path(folder))
            for way, settings in WAYS.items():
                planned, taken = measured(models, settings)
                print(
                    f"| {blocks} | {way} | {planned / 1e9:.2f} | {taken / 1e9:.2f} | "
                    f"{planned / taken:.2f} |",
                    flush=True,
                )


def made(blocks: int, folder: Path) -> list[str]:
    """Make a random model, its pruned one and a text; return their places."""
    dense, pruned, text = (str(folder / name) for name in ("dense", "pruned", "tokens.npy"))
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=blocks, vocab_size=VOCABULARY,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(dense)
    np.save(text, np.random.default_rng(0).integers(0, VOCABULARY, (10, LENGTH)))
    coec.prune(
        dense, pruned, calibration=text, samples=8, seq_len=LENGTH, preset="fast",
        compensation="none",
    )  # fmt: skip
    return [dense, pruned, text]


def measured(models: list[str], settings: dict[str, object]) -> tuple[int, int]:
    """Return the planned and the taken bytes of one training, in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", RUN, *models, json.dumps(settings)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    planned, taken = json.loads(ended.stdout.splitlines()[-1])
    return planned, taken


if __name__ == "__main__":
    main()
