"""Windows of tokens: drawn for calibration, set apart for validation, cut for evaluation."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from coec.config import OWN, is_own
from coec.errors import CalibrationError, OptionError
from coec.events import Progress, record
from coec.models.dense import Dense
from coec.models.files import JsonDict, sha256
from coec.text.packing import packed
from coec.text.sources import Documents, is_named, mixture, read_parts
from coec.text.tokens import (
    PIECE,
    Extent,
    Stream,
    digest,
    holds_tokens,
    load_tokenizer,
    read_stream,
    token_ids,
)

DEFAULT_SEQ_LEN = 2048
"""Tokens of a calibration window, if the model has so many positions."""
CHOICE = 9
"""A long text is read until it has this many times the tokens of the sampled windows.

`sources.HUB_CHARACTERS` is chosen by the same number, for the default recipe.
"""
TRIED_TOKENS = 4096
"""Tokens on which widths by block and blocks to leave out are decided."""
_CHARACTERS = 16
"""Characters of a data set that are read for each token that is needed; English has about 4, and of
chats twice the tokens are read."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of equal length, and their origin; other fields as in `Stream`.

    Attributes:
        available: number of tokens in the source.
        text_sha256: as in `Stream`; of a mixture, the digests of its texts, separated by commas.
        bos: true if every window that was cut from a text begins with the tokenizer's start.
        bos_cross_entropy: of the dense model on the same text, in nats per token, with the start
            (`on`) and without (`off`); None where nothing was measured.
    """

    ids: Int[Tensor, "n length"]
    source: str
    available: int
    text_sha256: str
    special_tokens: int = 0
    characters: int = 0
    in_pieces: bool = False
    chats: int = 0
    answers: int = 0
    answers_kept: int = 0
    bos: bool = False
    bos_cross_entropy: dict[str, float] | None = None

    @property
    def sha256(self) -> str:
        """Digest of the token ids."""
        return digest(self.ids)

    @classmethod
    def of_record(cls, ids: Int[Tensor, "n length"], record: JsonDict) -> "Windows":
        """Rebuild the windows of a record."""
        kept = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        return cls(ids, available=record["tokens_available"], **kept)

    def record(self) -> JsonDict:
        """Describe the windows for the report."""
        apart = {"ids", "source", "available", "text_sha256"}
        return {
            "source": self.source,
            "windows": self.ids.shape[0],
            "seq_len": self.ids.shape[1],
            "tokens_available": self.available,
            **{name: value for name, value in vars(self).items() if name not in apart},
            "text_sha256": self.text_sha256,
            "windows_sha256": self.sha256,
            "window_digests": window_digests(self.ids),
        }


def window_digests(ids: Int[Tensor, "n length"]) -> list[str]:
    """Return a short digest of every window, by which a training knows what calibrated."""
    return [digest(window)[:12] for window in ids]


def text_notes(calibration: JsonDict) -> list[str]:
    """Return sentences on chats, and on the measurements with the start and without, by a record of
    windows.
    """
    notes = []
    if chats := calibration.get("chats", 0):
        note = f"{chats:,} chats were rendered by the tokenizer's chat template"
        if answers := calibration.get("answers", 0):
            note += f", with {calibration['answers_kept'] / answers:.0%} of the assistants' text"
        notes.append(note)
    if entropies := calibration.get("bos_cross_entropy"):
        windows = "every window begins with" if calibration["bos"] else "no window is given"
        notes.append(
            f"{windows} the tokenizer's start: with it the dense model's cross-entropy on a few of "
            f"them is {entropies['on']:.3f} nats, without it {entropies['off']:.3f}"
        )
    return notes


def shares(source: Any, samples: int) -> list[tuple[Any, int]]:
    """Share windows out to the sources of a mixture, at least one to each, by largest remainder.

    Raises:
        CalibrationError: it is no mixture that windows can be drawn of.
    """
    sources = mixture(source)
    if len(sources) == 1:
        return [(source, samples)]
    names, weights = zip(*sources, strict=True)
    if not all(names) or not all(weights) or len(set(names)) < len(names):
        raise CalibrationError(
            f"'{source}' is no mixture: write SOURCE=SHARE,SOURCE=SHARE, with every share above 0 "
            "and every source once"
        )
    if samples < len(names):
        raise CalibrationError(
            f"'{source}' has {len(names)} sources, and samples={samples} is less than a window of "
            "each: take more windows"
        )
    # Shares → whole numbers rounded down, one at least → one more or less where the remainder is
    # largest, until they add up
    exact = [samples * weight / sum(weights) for weight in weights]
    counts = [max(1, int(count)) for count in exact]
    while missing := samples - sum(counts):
        step = 1 if missing > 0 else -1
        changeable = [number for number, count in enumerate(counts) if count + step]
        counts[max(changeable, key=lambda n: step * (exact[n] - counts[n]))] += step
    return list(zip(names, counts, strict=True))


def mixed(drawn: Sequence[Windows], source: str) -> Windows:
    """Merge the windows of several texts, so that any beginning has all texts in their shares."""
    if len(drawn) == 1:
        return drawn[0]
    # Window i of n stands at (i + ½)/n: sorted by place, the sources alternate by their shares.
    places = [(torch.arange(len(windows.ids)) + 0.5) / len(windows.ids) for windows in drawn]
    order = torch.cat(places).argsort(stable=True)
    counts = ("available", "special_tokens", "characters", "chats", "answers", "answers_kept")
    return replace(
        drawn[0],
        ids=torch.cat([windows.ids for windows in drawn])[order],
        source=source,
        text_sha256=",".join(windows.text_sha256 for windows in drawn),
        in_pieces=any(windows.in_pieces for windows in drawn),
        bos=any(windows.bos for windows in drawn),
        bos_cross_entropy=next((w.bos_cross_entropy for w in drawn if w.bos_cross_entropy), None),
        **{name: sum(getattr(windows, name) for windows in drawn) for name in counts},
    )


def sample_windows(
    stream: Stream,
    *,
    samples: int,
    seq_len: int,
    seed: int,
    bos: bool = False,
    in_mixture: bool = False,
) -> Windows:
    """Draw `samples` distinct windows of `seq_len` tokens at random, without overlap.

    Args:
        bos: begin each with the start of the stream, after which it has so much less text.
        in_mixture: the text is one of several, and an error says so.
    """
    rows = _cut(stream, seq_len, bos)
    if len(rows) < samples:
        available = stream.ids.numel()
        if in_mixture:
            fewer = f"a smaller share of the mixture: it has {len(rows)} windows"
        elif len(rows):
            fewer = f"at most samples={len(rows)}"
        else:
            fewer = (
                f"windows of at most seq_len={available}" if available > 1 else "shorter windows"
            )
        width = seq_len - bos * len(stream.start)
        raise CalibrationError(
            f"too little calibration text: '{stream.source}' has {available} tokens, {samples} "
            f"windows of {width} need {samples * width}; give more text, or {fewer}"
        )
    # All windows of the text, shuffled by the seed → the first ones, in the text's order
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return _windows(stream, rows[order[:samples].sort().values], bos)


def all_windows(stream: Stream, *, seq_len: int, bos: bool = False) -> Windows:
    """Cut a text into full windows in order, without the tail: the evaluation of METHODS §7.

    `bos` is as in `sample_windows`.
    """
    rows = _cut(stream, seq_len, bos)
    if len(rows) == 0:
        raise CalibrationError(
            f"'{stream.source}' has {stream.ids.numel()} tokens, less than one window of "
            f"{seq_len}; give more text, or shorter windows (seq_len=N)"
        )
    return _windows(stream, rows, bos)


def first_windows(windows: Int[Tensor, "n length"], tokens: int) -> Int[Tensor, "m length"]:
    """Return the first windows: of no more than `tokens` tokens together, and one at least."""
    return windows[: max(1, tokens // windows.shape[1])]


def split_windows(windows: Windows, fraction: float, seed: int) -> tuple[Tensor, Tensor | None]:
    """Split windows at random into those to fit on and those for validation, or None for none."""
    n = len(windows.ids)
    count = validation_count(n, fraction)
    if count == 0:
        return windows.ids, None
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    fit, validation = order[count:].sort().values, order[:count].sort().values
    return windows.ids[fit], windows.ids[validation]


def validation_count(n: int, fraction: float) -> int:
    """Number of validation windows among n: `round(fraction · n)`, at least 1 unless that is 0."""
    if not fraction:
        return 0
    count = max(1, round(fraction * n))
    if count >= n:
        raise CalibrationError(
            f"holdout={fraction:g} of {n} windows leaves {count} for validation and {n - count} to "
            "fit on: both need at least one; take more windows (samples=N)"
        )
    return count


def _windows(stream: Stream, rows: Int[Tensor, "n length"], bos: bool) -> Windows:
    origin = {n: value for n, value in vars(stream).items() if n not in ("start", "whole")}
    begun = bos and len(stream.start) > 0
    return Windows(**origin | {"ids": rows, "available": stream.ids.numel(), "bos": begun})


def _cut(stream: Stream, seq_len: int, bos: bool) -> Int[Tensor, "n length"]:
    ids, start = stream.ids, stream.start[: None if bos else 0]
    if ids.ndim == 2:
        if ids.shape[1] != seq_len:
            raise CalibrationError(
                f"'{stream.source}' holds rows of {ids.shape[1]} tokens; "
                f"pass seq_len={ids.shape[1]}, or save one long row"
            )
        return ids
    if stream.whole:
        windows, cut = packed(stream.whole, seq_len)
        if cut:
            record(
                f"{cut} of {len(windows)} windows of '{stream.source}' end in a user's turn, since "
                "its answers are short: chats of other lengths, or another seq_len, would fill them"
            )
        return windows
    # The tokenizer's start comes before every window, which has so much less text.
    check_start(seq_len, len(start))
    width, ids = seq_len - len(start), ids[len(start) :]
    count = len(ids) // width
    rows = ids[: count * width].reshape(count, width)
    return torch.cat([start.expand(count, -1), rows], dim=1) if bos else rows


def check_start(seq_len: int, start: int) -> None:
    """Raise CalibrationError if windows have no room for text after the tokenizer's start."""
    if seq_len <= start:
        raise CalibrationError(
            f"windows of {seq_len} tokens hold nothing but the {start} that the tokenizer starts a "
            "text with; take longer ones (seq_len=N)"
        )


def resolve_seq_len(seq_len: int | None, positions: int, default: int) -> int:
    """Resolve the window length: the default is capped at the model's positions."""
    if positions < 2:
        raise OptionError(
            f"the model has {positions} positions (max_position_embeddings): a window needs two"
        )
    if seq_len is None:
        return min(default, positions)
    if seq_len > positions:
        raise OptionError(
            f"seq_len={seq_len} is beyond the model's {positions} positions; "
            f"use {positions} or less"
        )
    return seq_len


def source_digest(source: str | Path | Tensor | np.ndarray | Documents) -> str:
    """Identify a calibration text by the SHA-256 of the content of a file, tensor or documents.

    A data set of the hub, and text sampled from the model, are identified by name. Of documents
    the first `HUB_CHARACTERS` count. A mixture is identified by its texts and their shares.
    """
    if len(sources := mixture(source)) > 1:
        return ",".join(f"{source_digest(name)}={share}" for name, share in sources)
    if isinstance(source, Documents):
        text = "".join(read_parts(source, split="train", rendered=_written))
        return hashlib.sha256(text.encode()).hexdigest()
    if not isinstance(source, str | Path):
        return digest(token_ids(source))
    name = str(source)
    if source == OWN or (is_named(name) and not holds_tokens(name)):
        return name  # a file of that name in the working folder is not read
    if is_own(name):
        return f"{OWN}:{source_digest(name.removeprefix(f'{OWN}:'))}"
    try:
        return sha256(Path(source))
    except FileNotFoundError:
        return name
    except OSError as error:
        raise CalibrationError(f"'{source}' cannot be read: {error.strerror}") from error


def _written(document: str | list[Any]) -> str:
    return document if isinstance(document, str) else json.dumps(document)


def text_stream(
    dense: Dense,
    source: Any,
    column: str,
    extent: Extent,
    *,
    trust_remote_code: bool,
    progress: Progress | None,
) -> Stream:
    """Read the tokens of a text; of a long text, only the number that the extent states."""
    tokenizer = partial(load_tokenizer, dense.folder, trust_remote_code=trust_remote_code)
    if not holds_tokens(source):
        tokenizer()  # a folder without one is refused before the text is read
    stream = read_stream(
        source, tokenizer, split="train", text_column=column, extent=extent, progress=progress
    )
    return stream.within(dense.vocabulary)


def windows_in_order(
    dense: Dense,
    source: Any,
    column: str,
    *,
    count: int,
    seq_len: int,
    bos: bool = False,
    trust_remote_code: bool,
    progress: Progress | None = None,
) -> Windows:
    """Cut the first `count` windows of a text, or all that it has; `bos` as in `sample_windows`."""
    tokens = count * seq_len
    extent = Extent(tokens, characters=_CHARACTERS * tokens, at_once=PIECE)
    stream = text_stream(
        dense, source, column, extent, trust_remote_code=trust_remote_code, progress=progress
    )
    windows = all_windows(stream, seq_len=seq_len, bos=bos)
    return replace(windows, ids=windows.ids[:count])
