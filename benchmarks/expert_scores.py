"""Scores that select whole experts, on small mixtures that are trained here.

    python -m benchmarks.expert_scores [--seeds 0 1]

Each mixture has 3 blocks of 16 experts, 4 of them for a token; `benchmarks.tiny_moe` trains it in
about five minutes of one core. A quarter and a half of the experts are removed, nothing else is,
and nothing compensates. Perplexity and KL to the dense mixture, in nats per token, are measured on
256 windows of the test text. Rows are kept in benchmarks/results/expert_scores.json.
"""

import argparse
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import coec
from benchmarks import record
from benchmarks.instances import SHARED
from benchmarks.tiny_moe import train
from coec.methods.selection import expert_scores
from coec.types import Gram

SIZES = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 64}
WIKI = ("wt2-llama", "wikitext-2/train.tokens.txt", "wikitext-2/valid.raw.txt",
        "wikitext-2/test.raw.txt")  # fmt: skip
STORIES = ("stories260K", "tinystories/train.txt", "tinystories/train.txt", "tinystories/test.txt")
TEXTS = {"WikiText-2": WIKI, "stories": STORIES}
"""The tokenizer's folder, and the texts that train, calibrate and measure."""
REMOVED = 0.25, 0.5


def tokens(experts: Sequence[Gram]) -> Tensor:
    """Return the number of tokens of every expert."""
    return torch.tensor([gram.tokens for gram in experts], dtype=torch.float64)


def reap(experts: Sequence[Gram]) -> Tensor:
    """Return `mean_t ‖p(t) W h(t)‖₂` over the tokens of every expert (Lasby et al. 2025)."""
    return expert_scores(experts) / tokens(experts).clamp(min=1)


SCORES = {"sum": expert_scores, "mean": reap, "tokens": tokens}


def main(arguments: list[str] | None = None) -> None:
    """Measure the scores, print and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--shared", type=Path, default=SHARED)
    chosen = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for text, seed in product(TEXTS, chosen.seeds):
        for row in measured(text, chosen.shared, seed):
            print(*row.values(), sep="\t", flush=True)
            rows.append(row)
        record.save("expert_scores", arguments, {"rows": rows})


def measured(text: str, shared: Path, seed: int) -> list[dict[str, Any]]:
    """Train a mixture and return a row for every share of its experts and every score."""
    tokenizer, *texts = TEXTS[text]
    learned, calibration, test = (shared / "data" / name for name in texts)
    rows = []
    with tempfile.TemporaryDirectory() as work:
        dense, pruned = Path(work) / "dense", Path(work) / "pruned"
        train(learned, shared / "models" / tokenizer, dense, seed=seed, sizes=SIZES)
        settings: dict[str, Any] = {
            "preset": "paper", "compensation": "none", "sparsity": 1e-6, "attention_sparsity": 0,
            "calibration": calibration, "samples": 64, "seq_len": 256, "force": True,
        }  # fmt: skip
        for removed, score in product(REMOVED, SCORES):
            with mock.patch("coec.solve.expert_scores", SCORES[score]):
                coec.prune(dense, pruned, expert_sparsity=removed, **settings)
            found = coec.perplexity(pruned, test, baseline=dense, seq_len=256, max_windows=256)
            rows.append({"text": text, "seed": seed, "removed": removed, "score": score,
                         "dense": found.baseline_perplexity, "perplexity": found.perplexity,
                         "kl": found.kl})  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
