"""Overlap of an evaluation text with the calibration: shared token n-grams."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, UInt64
from torch import Tensor

from coec.calibration.tokens import Windows
from coec.errors import OptionError

FLAG_SHARE = 0.05
_CUSTOMARY, _VOCABULARY = 13, 32_000
"""Contamination studies count 13-grams, on vocabularies of about this size."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Overlap:
    """n-grams of the evaluation windows that occur in the calibration windows.

    Attributes:
        n: tokens per n-gram.
        windows: number of evaluation windows.
        shared: number of evaluation windows with at least one n-gram of the calibration.
        share: fraction of all evaluation n-grams that occur in the calibration.
    """

    n: int
    windows: int
    shared: int
    share: float

    @property
    def flagged(self) -> bool:
        """True if more than `FLAG_SHARE` of the evaluation n-grams occur in the calibration.

        The number of windows would grow with their length, and stock phrases give any two texts of
        one kind some n-grams in common (docs/EVALUATION.md).
        """
        return self.share > FLAG_SHARE


def overlap(
    calibration: Windows | Int[Tensor, "rows length"],
    evaluation: Windows | Int[Tensor, "windows width"],
    n: int = 13,
) -> Overlap:
    """Count the evaluation windows and n-grams of token ids that the calibration shares.

    No n-gram crosses from one window into the next. n-grams are compared by 64-bit hashes: with a
    calibration and b evaluation n-grams some pair collides with probability about ab/2⁶⁴, under
    1e-8 for 128 × 2048 calibration tokens and all of WikiText-2's test text. Memory is about 50
    bytes per token.

    Args:
        calibration, evaluation: windows made by one tokenizer.
        n: tokens per n-gram.

    Raises:
        OptionError: n is below 1, or longer than a window.
    """
    fitted, judged = _ids(calibration), _ids(evaluation)
    longest = min(fitted.shape[1], judged.shape[1])
    if not 1 <= n <= longest:
        raise OptionError(f"n must be between 1 and {longest}, the shorter window; got {n}")
    hits = np.isin(_hashes(judged, n), np.unique(_hashes(fitted, n)))
    return Overlap(n, len(judged), int(hits.any(axis=1).sum()), float(hits.mean()))


def passage_length(vocabulary: int) -> int:
    """The n with the information of 13 tokens of 32,000: `⌈13 log 32,000 / log V⌉`, at least 13.

    13 characters are three words, which any two texts share: small vocabularies need longer
    n-grams.
    """
    information = _CUSTOMARY * math.log(_VOCABULARY)
    return max(_CUSTOMARY, math.ceil(information / math.log(max(vocabulary, 2))))


def _ids(windows: Windows | Tensor) -> Int[Tensor, "rows length"]:
    ids = windows.ids if isinstance(windows, Windows) else windows
    if not len(ids):
        raise OptionError("an overlap needs at least one window of each text, got none")
    return ids


def _hashes(ids: Int[Tensor, "rows length"], n: int) -> UInt64[np.ndarray, "rows positions"]:
    """Polynomial hashes modulo 2⁶⁴ of every n-gram, one per position."""
    rows = ids.to(torch.int64).cpu().numpy().astype(np.uint64)
    powers = _MULTIPLIER ** np.arange(n, dtype=np.uint64)
    return np.lib.stride_tricks.sliding_window_view(rows, n, axis=1) @ powers
