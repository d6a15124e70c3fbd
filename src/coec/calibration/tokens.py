"""Token windows for calibration and evaluation, from text (`sources`) or token files."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from coec.calibration.sources import Split, read_text
from coec.errors import CalibrationError, ModelError
from coec.models.carried import TOKENIZER_FILES

TOKEN_SUFFIXES = (".npy", ".safetensors")


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of equal length, and where they come from.

    Attributes:
        ids: token ids, int64.
        source: what the user named.
        available: how many tokens the source has.
        text_sha256: of the source text (of the token ids where there is no text).
        special_tokens: how many the tokenizer added to the text.
        characters: of the source text, which of a large data set is its beginning; 0 where
            there is no text.
    """

    ids: Int[Tensor, "n length"]
    source: str
    available: int
    text_sha256: str
    special_tokens: int = 0
    characters: int = 0

    @property
    def sha256(self) -> str:
        """Digest of the windows themselves."""
        return digest(self.ids)

    def record(self) -> dict[str, Any]:
        """What the report keeps."""
        return {
            "source": self.source,
            "windows": self.ids.shape[0],
            "seq_len": self.ids.shape[1],
            "tokens_available": self.available,
            "special_tokens": self.special_tokens,
            "characters": self.characters,
            "text_sha256": self.text_sha256,
            "windows_sha256": self.sha256,
        }


@dataclass(frozen=True, eq=False)
class Stream:
    """A long run of token ids, or rows already cut."""

    ids: Int[Tensor, " n"] | Int[Tensor, "rows length"]
    source: str
    text_sha256: str
    special_tokens: int = 0
    characters: int = 0


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        ModelError: the folder has none, or it cannot be read.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"'{folder}' has no tokenizer ({', '.join(TOKENIZER_FILES)}): copy the tokenizer "
            "files there, or give token ids (.npy, .safetensors) instead of text"
        )
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # tokenizers raise what they like
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"the tokenizer in '{folder}' cannot be loaded: {reason}") from error


def is_token_file(source: str) -> bool:
    """Whether the source holds token ids, so that no tokenizer is needed."""
    return source.endswith(TOKEN_SUFFIXES)


def read_stream(
    source: str,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    *,
    split: Split,
    text_column: str = "text",
) -> Stream:
    """Tokens of a source: a token file, or whatever text `read_text` knows.

    Text is tokenised in one piece, special tokens added once.

    Args:
        source: a name or a path.
        tokenizer: called only when there is text.
        split: of a named data set.
        text_column: of jsonl and parquet files, and of data sets named by `hub:`.

    Raises:
        CalibrationError: the source is missing, empty or of the wrong form.
    """
    if is_token_file(source):
        ids = _read_token_file(Path(source))
        return Stream(ids, source, digest(ids))
    text = read_text(source, split=split, text_column=text_column)
    encode = tokenizer()
    # verbose=False: the warning about texts longer than the model is meant for other uses.
    ids = torch.tensor(encode(text, verbose=False)["input_ids"], dtype=torch.int64)
    special = encode.num_special_tokens_to_add()
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return Stream(ids, source, sha256, special, len(text))


def sample_windows(
    stream: Stream, *, samples: int, seq_len: int, seed: int, vocabulary: int
) -> Windows:
    """`samples` distinct windows of `seq_len` tokens, drawn at random without overlap.

    Raises:
        CalibrationError: too few tokens, or ids outside the vocabulary.
    """
    rows = _cut(stream, seq_len, vocabulary)
    if len(rows) < samples:
        raise CalibrationError(
            f"too little calibration text: '{stream.source}' has {stream.ids.numel()} tokens, "
            f"{samples} windows of {seq_len} need {samples * seq_len}; give more text, "
            f"or --samples {len(rows)} at most"
            + ("" if len(rows) else f" after --seq-len {stream.ids.numel()} or less")
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    chosen = rows[order[:samples].sort().values]
    return _windows(stream, chosen)


def all_windows(stream: Stream, *, seq_len: int, vocabulary: int) -> Windows:
    """Every full window in order, the tail dropped: the evaluation protocol (METHODS §7).

    Raises:
        CalibrationError: less than one window, or ids outside the vocabulary.
    """
    rows = _cut(stream, seq_len, vocabulary)
    if len(rows) == 0:
        raise CalibrationError(
            f"'{stream.source}' has {stream.ids.numel()} tokens, less than one window of "
            f"{seq_len}; give more text or a smaller --seq-len"
        )
    return _windows(stream, rows)


def hold_out(windows: Windows, fraction: float, seed: int) -> tuple[Tensor, Tensor | None]:
    """Windows to fit on, and those held out: `round(fraction · n)` of them, drawn under the seed.

    Raises:
        CalibrationError: the fraction leaves no window on one of the two sides.
    """
    if fraction == 0:
        return windows.ids, None
    n = len(windows.ids)
    held = round(fraction * n)
    if not 0 < held < n:
        raise CalibrationError(
            f"--holdout {fraction:g} of {n} windows leaves {held} held out and {n - held} to fit "
            "on: both need at least one; take more --samples"
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return windows.ids[order[held:].sort().values], windows.ids[order[:held].sort().values]


def _windows(stream: Stream, rows: Int[Tensor, "n length"]) -> Windows:
    return Windows(
        rows,
        stream.source,
        stream.ids.numel(),
        stream.text_sha256,
        stream.special_tokens,
        stream.characters,
    )


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
                f"pass --seq-len {ids.shape[1]}, or save one long row"
            )
        return ids
    count = len(ids) // seq_len
    return ids[: count * seq_len].reshape(count, seq_len)


def _read_token_file(path: Path) -> Tensor:
    if not path.is_file():
        raise CalibrationError(f"no token file at '{path}'")
    try:
        if path.suffix == ".npy":
            ids = torch.from_numpy(
                np.load(path, allow_pickle=False).astype(np.int64, casting="safe")
            )
        else:
            ids = load_file(path)["input_ids"]
            if ids.is_floating_point():
                raise TypeError(f"its 'input_ids' are {ids.dtype}")
            ids = ids.long()
    except (ValueError, TypeError, KeyError, OSError, SafetensorError) as error:
        raise CalibrationError(
            f"'{path}' holds no token ids (an integer .npy array, or a safetensors file with "
            f"'input_ids'): {error}"
        ) from error
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise CalibrationError(f"'{path}' must hold ids of shape (n,) or (rows, length)")
    return ids


def digest(ids: Tensor) -> str:
    """SHA-256 of token ids as int64."""
    return hashlib.sha256(ids.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()
