"""How much of an evaluation text the calibration has already seen: shared token n-grams."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, UInt64
from torch import Tensor

from coec.calibration.tokens import Windows
from coec.errors import OptionError

FLAG_SHARE = 0.05
TOKENS_PER_CHUNK = 2**20
CUSTOMARY, VOCABULARY = 13, 32_000
"""13-grams are what contamination studies count, on vocabularies of about this size."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Overlap:
    """n-grams of the evaluation windows that the calibration windows hold too.

    Attributes:
        n: tokens per n-gram.
        windows: evaluation windows.
        shared: of these, the ones with at least one n-gram of the calibration.
        share: the fraction of all evaluation n-grams that the calibration holds.
    """

    n: int
    windows: int
    shared: int
    share: float

    @property
    def flagged(self) -> bool:
        """Whether more than `FLAG_SHARE` of the evaluation n-grams were seen in calibration.

        The share decides, not the number of windows: that grows with their length, and stock
        phrases give any two texts of one kind some n-grams in common (docs/EVALUATION.md).
        """
        return self.share > FLAG_SHARE


def overlap(
    calibration: Windows | Int[Tensor, "rows length"],
    evaluation: Windows | Int[Tensor, "windows width"],
    n: int = 13,
) -> Overlap:
    """How many evaluation windows, and n-grams of token ids, the calibration windows share.

    No n-gram crosses from one window into the next. n-grams are compared by 64-bit hashes: with a
    calibration and b evaluation n-grams some pair collides with probability about ab/2⁶⁴, under
    1e-8 for 128 × 2048 calibration tokens and all of WikiText-2's test text. Memory is 16 bytes
    per calibration token, and a constant for the evaluation.

    Args:
        calibration, evaluation: windows made by one tokenizer.
        n: tokens per n-gram; 13 is what contamination studies of language models use.

    Raises:
        OptionError: n is below 1, or longer than a window.
    """
    seen, asked = _ids(calibration), _ids(evaluation)
    longest = min(seen.shape[1], asked.shape[1])
    if not 1 <= n <= longest:
        raise OptionError(f"n must be between 1 and {longest}, the shorter window; got {n}")
    known = np.unique(np.concatenate([_hashes(rows, n).ravel() for rows in _chunks(seen)]))
    shared = common = 0
    for rows in _chunks(asked):
        hits = _contains(known, _hashes(rows, n))
        shared += int(hits.any(axis=1).sum())
        common += int(hits.sum())
    windows, length = asked.shape
    return Overlap(n, windows, shared, common / (windows * (length - n + 1)))


def passage_length(vocabulary: int) -> int:
    """The n that says as much as 13 tokens of a vocabulary of 32,000: `⌈13 log 32,000 / log V⌉`.

    13 characters are three words, which any two texts share: small vocabularies need longer
    n-grams. At least 13.
    """
    return max(
        CUSTOMARY, math.ceil(CUSTOMARY * math.log(VOCABULARY) / math.log(max(vocabulary, 2)))
    )


def _ids(windows: Windows | Tensor) -> Int[Tensor, "rows length"]:
    ids = windows.ids if isinstance(windows, Windows) else windows
    if not len(ids):
        raise OptionError("an overlap needs at least one window of each text, got none")
    return ids


def _chunks(ids: Int[Tensor, "rows length"]) -> tuple[Int[Tensor, "_ length"], ...]:
    return ids.split(max(1, TOKENS_PER_CHUNK // ids.shape[1]))


def _hashes(rows: Int[Tensor, "rows length"], n: int) -> UInt64[np.ndarray, "rows positions"]:
    """Polynomial hashes modulo 2⁶⁴ of every n-gram, one per position."""
    mixed = _mixed(rows.to(torch.int64).cpu().numpy().astype(np.uint64))
    positions = rows.shape[1] - n + 1
    total = np.zeros((len(rows), positions), dtype=np.uint64)
    for offset in range(n):
        total = total * _MULTIPLIER + mixed[:, offset : offset + positions]
    return total


def _mixed(ids: UInt64[np.ndarray, "rows length"]) -> UInt64[np.ndarray, "rows length"]:
    """A bijection that spreads small ids over 64 bits (the finaliser of SplitMix64)."""
    x = ids + _MULTIPLIER
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _contains(
    known: UInt64[np.ndarray, " n"], hashes: UInt64[np.ndarray, "rows positions"]
) -> np.ndarray:
    """Where a sorted array holds each hash."""
    place = np.searchsorted(known, hashes).clip(max=len(known) - 1)
    return known[place] == hashes
