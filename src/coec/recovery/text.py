"""The windows that a recovery is trained and validated on, and the stored predictions of the
teacher, all in files next to the unfinished output.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset

from coec.config import is_own
from coec.config.recovery import Recovery
from coec.errors import CalibrationError
from coec.events import Progress, record
from coec.models.dense import Dense
from coec.models.files import opened, write_tensors
from coec.streams.answers import Prompts
from coec.text.sources import mixture
from coec.text.tokens import load_tokenizer
from coec.text.windows import Windows, mixed, shares, window_digests, windows_in_order

PASSES = 4
"""Largest number of times that a text is read; more passes over few windows make others worse."""
TOP = 64
"""Number of most probable next tokens that are kept of a teacher."""
GROUP = 32
"""Number of windows that the teacher predicts for one file."""
_VALIDATION_SHARE, _MOST_VALIDATION = 1 / 8, 16
"""Validation windows: this fraction of all, at most this many."""


class TopTokens(NamedTuple):
    """A teacher's k most probable next tokens, and the logarithms of their probabilities."""

    log_p: Float[Tensor, "*tokens k"]
    token: Int[Tensor, "*tokens k"]

    @classmethod
    def of(cls, logits: Float[Tensor, "*tokens v"], k: int) -> "TopTokens":
        """Return the k most probable tokens of every position; all if the vocabulary is smaller."""
        log_p, token = logits.float().log_softmax(dim=-1).topk(min(k, logits.shape[-1]), dim=-1)
        return cls(log_p, token)


def windows_for_validation(windows: int) -> int:
    """Return the number of validation windows among `windows` windows."""
    return max(1, min(round(_VALIDATION_SHARE * windows), _MOST_VALIDATION))


def windows_needed(tokens: int, seq_len: int) -> int:
    """Return the number of windows for a budget of tokens, the validation windows included."""
    # All windows are about trained / (1 − share), the validation windows among them.
    trained = math.ceil(tokens / seq_len)
    return trained + windows_for_validation(round(trained / (1 - _VALIDATION_SHARE)))


def most_tokens(windows: int, seq_len: int) -> int:
    """Return the largest number of tokens that a training reads of `windows` windows."""
    return PASSES * windows * seq_len


def read_windows(
    model: Dense,
    recovery: Recovery,
    seq_len: int,
    count: int,
    *,
    bos: bool = False,
    trust_remote_code: bool,
    write: Callable[[int, int], Windows] | None = None,
    progress: Progress | None = None,
) -> Windows | None:
    """Cut the first `count` windows of the text, or all that it has, by a model's tokenizer.

    Args:
        model: the model that learns.
        recovery: names the text.
        seq_len: tokens of a window.
        count: number of windows.
        bos: begin windows of text with the tokenizer's start.
        trust_remote_code: lets the tokenizer run its own code.
        write: makes the windows of a part that the teacher writes, given the part's number and
            their number; None to leave these parts out.
        progress: called with (phase, done, total).

    Returns:
        Windows, or None if nothing is left of the text.

    Raises:
        CalibrationError: the text has less than two windows, or is of another vocabulary.
    """
    parts, sources = list[Windows](), shares(recovery.text, max(count, len(mixture(recovery.text))))
    for number, (source, size) in enumerate(sources):
        if is_own(source):
            parts += [write(number, size)] if write else []
            continue
        windows = windows_in_order(
            model, source, recovery.text_column, count=size, seq_len=seq_len, bos=bos,
            trust_remote_code=trust_remote_code, progress=progress,
        )  # fmt: skip
        if len(sources) > 1 and len(windows.ids) < size:
            record(f"'{source}' has {len(windows.ids)} windows, and its share is {size}")
        parts.append(windows)
    if not parts:
        return None
    windows = mixed(parts, str(recovery.text))
    if len(windows.ids) < 2 and len(parts) == len(sources):
        longer = ", or longer answers (answer_tokens=N)" if recovery.own else ""
        raise CalibrationError(
            f"'{windows.source}' has one window of {seq_len} tokens, and validation needs a second "
            f"one: give more text, or shorter windows (seq_len={max(2, seq_len // 2)}){longer}"
        )
    return replace(windows, ids=windows.ids[:count])


def read_prompts(
    model: Dense, recovery: Recovery, seq_len: int, positions: int, *, trust_remote_code: bool
) -> list[Prompts | None]:
    """Read the prompts of every part of the text, by a model's tokenizer; None for other text.

    `positions` are of the teacher, which answers, and of the model that learns: the fewer.
    """
    tokenizer = load_tokenizer(model.folder, trust_remote_code=trust_remote_code)
    longest = recovery.answer_tokens or seq_len
    return [
        Prompts.read(source, recovery.text_column, tokenizer, longest, positions)
        for source, _ in mixture(recovery.text)
    ]


def save_windows(ids: Int[Tensor, "windows length"], path: Path) -> None:
    """Write windows to a file."""
    with path.open("wb") as file:
        np.save(file, ids.to(torch.int32).numpy())


def load_windows(path: Path) -> Int[Tensor, "windows length"]:
    """Read the windows of a file."""
    return torch.from_numpy(np.load(path)).long()


def split(
    ids: Int[Tensor, "windows length"], seed: int, calibrated: Collection[str] = ()
) -> tuple[list[int], list[int]]:
    """Return the indices of the windows to train on, and of those for validation, both ascending.

    Args:
        ids: all windows.
        seed: chooses the validation windows: a resumed run has the same ones.
        calibrated: digests of windows that the pruning was fitted on; they are validation windows
            only if there are too few others.
    """
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)).tolist()
    if calibrated:
        digests = window_digests(ids)
        order.sort(key=lambda n: digests[n] in calibrated)  # stable: others come first
    validation = windows_for_validation(len(ids))
    return sorted(order[validation:]), sorted(order[:validation])


class Examples(Dataset[dict[str, Tensor]]):
    """Windows of a text as a Trainer takes them, with the stored predictions of the teacher.

    Args:
        path: file of all windows, read from the disk as they are used.
        rows: indices of the windows, in this order.
        stored: files of predictions, each of `GROUP` windows of the text; empty if the teacher
            predicts during training.
    """

    def __init__(self, path: Path, rows: list[int], stored: list[Path]) -> None:
        self._path, self._rows, self._stored = path, rows, stored
        self._windows = np.load(path, mmap_mode="r")

    def shuffled(self, count: int, seed: int) -> "Examples":
        """Return `count` windows in random order; all are read before one is read again."""
        rng, windows = torch.Generator().manual_seed(seed), len(self._rows)
        passes = [torch.randperm(windows, generator=rng) for _ in range(math.ceil(count / windows))]
        rows = [self._rows[n] for n in torch.cat(passes)[:count].tolist()]
        return Examples(self._path, rows, self._stored)

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
