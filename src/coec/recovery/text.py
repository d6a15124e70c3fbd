"""The windows that a recovery is trained and validated on, and what is kept of the teacher's
predictions, all in files beside the unfinished output.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from coec.calibration.sources import mixture
from coec.calibration.tokens import PIECE, Extent
from coec.calibration.windows import (
    Windows,
    all_windows,
    by_source,
    mixed,
    text_stream,
    window_digests,
)
from coec.errors import CalibrationError
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import JsonDict, opened, write_tensors
from coec.recovery.distillation import TopTokens
from coec.settings import Calibration, Runtime
from coec.settings.recovery import Recovery

PASSES = 4
"""How often a text is read at most; what more passes over few windows give is lost on others."""
TOP = 64
"""Most probable next tokens that are kept of a teacher."""
_VALIDATION_SHARE, _MOST_VALIDATION = 1 / 8, 16
"""Validation windows: this fraction of all, and no more than so many."""
_CHARACTERS = 8
"""Characters of a data set that are read for each token that is needed; English has about 4."""
GROUP = 32
"""Windows that the dense model writes, or predicts, for one file."""


def windows_for_validation(windows: int) -> int:
    """Return how many of `windows` windows are for validation."""
    return max(1, min(round(_VALIDATION_SHARE * windows), _MOST_VALIDATION))


def windows_needed(tokens: int, seq_len: int) -> int:
    """Return the number of windows for a budget of tokens, the validation windows included."""
    # All windows are about trained / (1 − share), the validation windows among them.
    trained = math.ceil(tokens / seq_len)
    return trained + windows_for_validation(round(trained / (1 - _VALIDATION_SHARE)))


def most_tokens(windows: int, seq_len: int) -> int:
    """Return the number of tokens that a training reads of so many windows at most."""
    return PASSES * windows * seq_len


@dataclass(frozen=True)
class WindowFile:
    """Windows in a file, some of them for validation.

    Attributes:
        path: the file, an array of int32, windows × length.
        seed: chooses the validation windows.
        calibrated: digests of windows that the pruning was fitted on; they are validation windows
            only where others are too few.
    """

    path: Path
    seed: int
    calibrated: frozenset[str] = frozenset()

    @property
    def windows(self) -> np.ndarray:
        """Array of all windows, read from the disk as they are used."""
        return np.load(self.path, mmap_mode="r")

    @staticmethod
    def write(ids: Int[Tensor, "windows length"], path: Path) -> None:
        """Write windows as they are read here."""
        with path.open("wb") as file:
            np.save(file, ids.to(torch.int32).numpy())

    @property
    def groups(self) -> list[Int[Tensor, "group length"]]:
        """The windows in groups, for each of which the teacher's predictions are one file."""
        return list(torch.from_numpy(self.windows.astype(np.int64)).split(GROUP))

    def split(self) -> tuple[list[int], list[int]]:
        """Indices of the windows to train on, and of those for validation, both ascending."""
        count = len(self.windows)
        # Drawn by the seed alone: a resumed run has the same validation windows.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed)).tolist()
        if self.calibrated:
            digests = window_digests(torch.from_numpy(self.windows.astype(np.int64)))
            order.sort(key=lambda n: digests[n] in self.calibrated)  # stable: others come first
        validation = windows_for_validation(count)
        return sorted(order[validation:]), sorted(order[:validation])


def read_windows(
    dense: Dense,
    recovery: Recovery,
    seq_len: int,
    count: int,
    *,
    trust_remote_code: bool,
    progress: Progress | None = None,
) -> tuple[Int[Tensor, "windows length"], JsonDict]:
    """Cut the first `count` windows of a text, or all that it has; and their origin.

    Of a mixture, every source gives its share of these, or all that it has.

    Raises:
        CalibrationError: the text has no two windows, or is of another vocabulary.
    """
    # Every source of a mixture needs a window at least.
    samples = max(count, len(mixture(recovery.text)))
    calibration = Calibration(
        source=recovery.text, text_column=recovery.text_column, samples=samples
    )
    runtime = Runtime(trust_remote_code=trust_remote_code)

    def beginning(portion: Calibration) -> Windows:
        needed = portion.samples * seq_len
        # No more of a long text is read than is needed.
        extent = Extent(needed, characters=_CHARACTERS * needed, at_once=PIECE)
        windows = all_windows(
            text_stream(dense, portion, runtime, extent, progress), seq_len=seq_len
        )
        return replace(windows, ids=windows.ids[: portion.samples])

    windows = mixed(list(map(beginning, by_source(calibration))), str(recovery.text))
    if len(windows.ids) < 2:
        raise CalibrationError(
            f"'{windows.source}' has one window of {seq_len} tokens, and validation needs a "
            f"second one: give more text, or shorter windows (seq_len={max(2, seq_len // 2)})"
        )
    ids = windows.ids[:count]
    origin = {"source": windows.source, "windows": len(ids), "text_sha256": windows.text_sha256}
    return ids, origin


class Examples(Dataset[dict[str, Tensor]]):
    """Windows of a text as a Trainer takes them, with the teacher's predictions if those are kept.

    Args:
        rows: which windows, in this order.
        stored: files of predictions, each of `GROUP` windows of the text; none where the
            teacher predicts as it goes.
    """

    def __init__(self, text: WindowFile, rows: list[int], stored: list[Path]) -> None:
        self._windows, self._rows, self._stored = text.windows, rows, stored

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = self._rows[number]
        example = {"input_ids": torch.from_numpy(self._windows[row].astype(np.int64))}
        if self._stored:  # the file of the row's group
            with opened(self._stored[row // GROUP]) as file:
                for name in TopTokens._fields:
                    example[name] = file.get_slice(name)[row % GROUP]
        return example


@torch.no_grad()
def save_predictions(network: Any, ids: Int[Tensor, "windows length"], path: Path) -> None:
    """Write a teacher's most probable next tokens of some windows, logarithms in float16."""
    windows = ids.to(network.device).split(1)
    tops = [TopTokens.of(network(input_ids=w, use_cache=False).logits, TOP) for w in windows]
    log_p, token = (torch.cat(rows) for rows in zip(*tops, strict=True))
    write_tensors({"log_p": log_p.half().cpu(), "token": token.int().cpu()}, path)
