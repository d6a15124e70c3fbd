"""Prunes one model in several ways, in as many processes as `torchrun` started.

torchrun --nproc-per-node 2 several.py DENSE TOKENS FOLDER NAME …
"""

import sys
from pathlib import Path

CASES = {
    "paper": {"preset": "paper"},
    "fast": {"preset": "fast", "attention_sparsity": 0.3},
    "balanced": {"preset": "balanced"},
    "by block": {"preset": "fast", "by_block": True},
    "drop blocks": {"preset": "fast", "drop_blocks": 1},
}
HOW = {"samples": 40, "seq_len": 32, "device": "cpu"}
"""40 windows are eight parts."""


def prune(dense, tokens, folder: Path, names):
    """Writes a folder for every case."""
    import coec

    for name in names:
        coec.prune(dense, folder / name, calibration=tokens, **HOW, **CASES[name])


if __name__ == "__main__":
    prune(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
