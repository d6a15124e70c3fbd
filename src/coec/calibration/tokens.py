"""Token windows for calibration and evaluation, from text (`sources`) or token files."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coec.calibration.ids import token_ids
from coec.calibration.sources import Split, is_file, one_line, read_parts
from coec.calibration.tokenizer import encode, encode_later_piece, special_ends
from coec.errors import CalibrationError
from coec.events import Progress
from coec.models.files import JsonDict

TOKEN_SUFFIXES = (".npy", ".safetensors")
LONG_TEXT = 12_000_000
"""Texts of up to so many characters are tokenised at once, as the train split of WikiText-2 is."""
_PIECE = 1_000_000
"""Approximate number of characters of a longer text that are tokenised at once, in 0.2 GB."""
_CUTS = ("\n\n", "\n", " ")
CHOICE = 9
"""A long text is read until it has this many times the tokens of the sampled windows.

`sources.HUB_CHARACTERS` is chosen by the same number, for the default recipe.
"""


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of equal length, and their origin.

    Attributes:
        ids: token ids, int64.
        source: the source, as the user gave it.
        available: number of tokens in the source.
        text_sha256: digest of the source text, or of its first `LONG_TEXT` characters; of the token
            ids if there is no text.
        special_tokens: number of special tokens that the tokenizer added to the text.
        characters: number of characters that were tokenised, which for a large data set or file are
            its beginning; 0 if there is no text.
        in_pieces: whether the source was longer than `LONG_TEXT` characters, and therefore
            tokenised in pieces, and no further than the windows need.
        sampled: number of windows, the last ones, that were sampled from the model in addition.
    """

    ids: Int[Tensor, "n length"]
    source: str
    available: int
    text_sha256: str
    special_tokens: int = 0
    characters: int = 0
    in_pieces: bool = False
    sampled: int = 0

    @property
    def sha256(self) -> str:
        """Digest of the token ids."""
        return digest(self.ids)

    @classmethod
    def of_record(cls, ids: Int[Tensor, "n length"], record: JsonDict) -> "Windows":
        """Rebuild the windows of a record."""
        return cls(
            ids,
            source=record["source"],
            available=record["tokens_available"],
            text_sha256=record["text_sha256"],
            special_tokens=record["special_tokens"],
            characters=record["characters"],
            in_pieces=record["in_pieces"],
            sampled=record["sampled"],
        )

    def and_sampled(self, ids: Int[Tensor, "m length"]) -> "Windows":
        """Append windows that were sampled from the model."""
        return replace(self, ids=torch.cat([self.ids, ids]), sampled=self.sampled + len(ids))

    def record(self) -> JsonDict:
        """Describe the windows for the report."""
        return {
            "source": self.source,
            "windows": self.ids.shape[0],
            "seq_len": self.ids.shape[1],
            "tokens_available": self.available,
            "special_tokens": self.special_tokens,
            "characters": self.characters,
            "in_pieces": self.in_pieces,
            "sampled": self.sampled,
            "text_sha256": self.text_sha256,
            "windows_sha256": self.sha256,
        }


@dataclass(frozen=True, eq=False)
class Stream:
    """A long run of token ids, or rows that are windows already; fields as in `Windows`."""

    ids: Int[Tensor, " n"] | Int[Tensor, "rows length"]
    source: str
    text_sha256: str
    special_tokens: int = 0
    characters: int = 0
    in_pieces: bool = False


def is_token_file(source: str) -> bool:
    """True if the source holds token ids, so that no tokenizer is needed."""
    return source.endswith(TOKEN_SUFFIXES)


def read_stream(
    source: str,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    *,
    split: Split,
    text_column: str = "text",
    needed: int | None = None,
    progress: Progress | None = None,
) -> Stream:
    """Read the tokens of a token file, or of any text that `read_parts` accepts.

    A text of up to `LONG_TEXT` characters is tokenised at once, with special tokens. A longer one
    is tokenised in pieces of about a million characters until there are `needed` tokens, so that
    memory does not grow with the text.

    Args:
        source: a name or a path.
        tokenizer: called only when there is text.
        split: split of a named data set.
        text_column: column of jsonl and parquet files, and of data sets named by `hub:`.
        needed: tokens after which a long text is read no further; None reads all of it.
        progress: called with ("tokenising", done, total) for texts that take time.

    Raises:
        CalibrationError: the source is missing, empty or of the wrong form.
    """
    if is_token_file(source):
        ids = _read_token_file(Path(source))
        return Stream(ids, source, digest(ids))
    texts = read_parts(source, split=split, text_column=text_column)
    beginning = _beginning(texts)
    loaded = tokenizer()
    sha256 = hashlib.sha256(beginning[:LONG_TEXT].encode()).hexdigest()
    if len(beginning) > LONG_TEXT:
        text = itertools.chain([beginning], texts)
        ids, special, characters = _encode_pieces(loaded, text, needed, progress)
        return Stream(ids, source, sha256, special, characters, in_pieces=True)
    advance = progress if len(beginning) > _PIECE else None
    if advance:
        advance("tokenising", 0, len(beginning))
    ids = encode(loaded, beginning)
    if advance:
        advance("tokenising", len(beginning), len(beginning))
    return Stream(ids, source, sha256, loaded.num_special_tokens_to_add(), len(beginning))


def _encode_pieces(
    tokenizer: PreTrainedTokenizerBase,
    text: Iterable[str],
    needed: int | None,
    progress: Progress | None,
) -> tuple[Tensor, int, int]:
    """Tokenise a long text in pieces; returns ids, and numbers of special tokens and characters."""
    start, end = special_ends(tokenizer)
    special = tokenizer.num_special_tokens_to_add()
    pieces, ending = [start], [end]
    characters, tokens = 0, len(start)
    for piece in _pieces(text):
        first = characters == 0
        pieces.append(
            encode(tokenizer, piece, special=False)
            if first
            else encode_later_piece(tokenizer, piece)
        )
        characters, tokens = characters + len(piece), tokens + len(pieces[-1])
        if progress:
            progress("tokenising", min(tokens, needed or tokens), needed or tokens)
        if needed is not None and tokens >= needed:
            special, ending = len(start), []  # the text goes on
            break
    return torch.cat(pieces + ending), special, characters


def _beginning(texts: Iterator[str]) -> str:
    """Read the text, or its beginning of more than `LONG_TEXT` characters."""
    read: list[str] = []
    length = 0
    for chunk in texts:
        read.append(chunk)
        length += len(chunk)
        if length > LONG_TEXT:
            break
    return "".join(read)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Cut a text anew, at the last blank line, line end or space before `_PIECE` characters."""
    pending = ""
    for chunk in texts:
        pending += chunk
        first = 0
        while len(pending) - first > _PIECE:
            ends = (pending.rfind(mark, first, first + _PIECE) + len(mark) for mark in _CUTS)
            end = next((end for end in ends if end > first + _PIECE // 2), first + _PIECE)
            yield pending[first:end]
            first = end
        pending = pending[first:]
    if pending:
        yield pending


def sample_windows(
    stream: Stream, *, samples: int, seq_len: int, seed: int, vocabulary: int
) -> Windows:
    """Draw `samples` distinct windows of `seq_len` tokens at random, without overlap.

    Raises:
        CalibrationError: too few tokens, or ids outside the vocabulary.
    """
    rows = _cut(stream, seq_len, vocabulary)
    if len(rows) < samples:
        available = stream.ids.numel()
        fewer = f"at most samples={len(rows)}" if len(rows) else "shorter windows"
        if not len(rows) and available > 1:
            fewer = f"windows of at most seq_len={available}"
        raise CalibrationError(
            f"too little calibration text: '{stream.source}' has {available} tokens, {samples} "
            f"windows of {seq_len} need {samples * seq_len}; give more text, or {fewer}"
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return _windows(stream, rows[order[:samples].sort().values])


def all_windows(stream: Stream, *, seq_len: int, vocabulary: int) -> Windows:
    """Cut a text into full windows in order, without the tail: the evaluation of METHODS §7.

    Raises:
        CalibrationError: less than one window, or ids outside the vocabulary.
    """
    rows = _cut(stream, seq_len, vocabulary)
    if len(rows) == 0:
        raise CalibrationError(
            f"'{stream.source}' has {stream.ids.numel()} tokens, less than one window of "
            f"{seq_len}; give more text, or shorter windows (seq_len=N)"
        )
    return _windows(stream, rows)


def hold_out(windows: Windows, fraction: float, seed: int) -> tuple[Tensor, Tensor | None]:
    """Split windows at random into those to fit on and `held_out` others, or None for no others.

    Windows that were sampled from the model are fitted on: the text judges.

    Raises:
        CalibrationError: no window is left on one of the two sides.
    """
    n = len(windows.ids) - windows.sampled
    count = held_out(n, fraction)
    if count == 0:
        return windows.ids, None
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    fit, judge = order[count:].sort().values, order[:count].sort().values
    return torch.cat([windows.ids[fit], windows.ids[n:]]), windows.ids[judge]


def held_out(n: int, fraction: float) -> int:
    """Number of held-out windows among n: `round(fraction · n)`, at least 1 unless fraction is 0.

    Raises:
        CalibrationError: no window is left on one of the two sides.
    """
    if not fraction:
        return 0
    count = max(1, round(fraction * n))
    if count >= n:
        raise CalibrationError(
            f"holdout={fraction:g} of {n} windows leaves {count} held out and {n - count} to fit "
            "on: both need at least one; take more windows (samples=N)"
        )
    return count


def _windows(stream: Stream, rows: Int[Tensor, "n length"]) -> Windows:
    fields = vars(stream) | {"ids": rows, "available": stream.ids.numel()}
    return Windows(**fields)


def _cut(stream: Stream, seq_len: int, vocabulary: int) -> Int[Tensor, "n length"]:
    ids = stream.ids
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise CalibrationError(
            f"'{stream.source}' has token ids {int(ids.min())}..{int(ids.max())}, the model's "
            f"vocabulary has {vocabulary}: it was made with another tokenizer"
        )
    if ids.ndim == 2:
        if ids.shape[1] != seq_len:
            raise CalibrationError(
                f"'{stream.source}' holds rows of {ids.shape[1]} tokens; "
                f"pass seq_len={ids.shape[1]}, or save one long row"
            )
        return ids
    count = len(ids) // seq_len
    return ids[: count * seq_len].reshape(count, seq_len)


def _read_token_file(path: Path) -> Tensor:
    if not is_file(path):
        raise CalibrationError(f"no token file at '{path}'")
    try:
        if path.suffix == ".npy":
            return token_ids(np.load(path, allow_pickle=False))
        return token_ids(load_file(path)["input_ids"])
    except Exception as error:  # numpy and safetensors raise anything for a damaged file
        missing = isinstance(error, KeyError)
        reason = "it has no 'input_ids'" if missing else one_line(error)
        raise CalibrationError(
            f"'{path}' holds no token ids (an integer .npy array, or a safetensors file with "
            f"'input_ids'): {reason}"
        ) from error


def digest(ids: Tensor) -> str:
    """SHA-256 of token ids as int64."""
    return hashlib.sha256(ids.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()
