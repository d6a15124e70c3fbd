"""Token windows for calibration and evaluation, from text, token files or a data set.

No data set script is kept here: WikiText-2 comes through `datasets`, everything else from files.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from coec.errors import CalibrationError, ModelError
from coec.models.checkpoint import TOKENIZER_FILES

WIKITEXT2 = ("Salesforce/wikitext", "wikitext-2-raw-v1")
SEPARATOR = "\n\n"
"""Joins the documents of a data set, as the evaluation protocol does (METHODS §7)."""

TOKEN_SUFFIXES = (".npy", ".safetensors")
Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of equal length, and where they come from.

    Attributes:
        ids: token ids, int64.
        source: what the user named.
        available: how many tokens the source has.
        text_sha256: of the source text (of the token ids where there is no text).
        special_tokens: how many the tokenizer added to the text.
    """

    ids: Int[Tensor, "n length"]
    source: str
    available: int
    text_sha256: str
    special_tokens: int = 0

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
    """Tokens of a source: `wikitext2`, a text, jsonl or parquet file, or a token file.

    Text is tokenised in one piece, special tokens added once.

    Args:
        source: a name or a path.
        tokenizer: called only when there is text.
        split: of a named data set.
        text_column: of jsonl and parquet files.

    Raises:
        CalibrationError: the source is missing, empty or of the wrong form.
    """
    if is_token_file(source):
        ids = _read_token_file(Path(source))
        return Stream(ids, source, digest(ids))
    text = _wikitext2(split) if source == "wikitext2" else _read_text(Path(source), text_column)
    if not text.strip():
        raise CalibrationError(f"'{source}' holds no text")
    encode = tokenizer()
    # verbose=False: the warning about texts longer than the model is meant for other uses.
    ids = torch.tensor(encode(text, verbose=False)["input_ids"], dtype=torch.int64)
    special = encode.num_special_tokens_to_add()
    return Stream(ids, source, hashlib.sha256(text.encode()).hexdigest(), special)


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
        rows, stream.source, stream.ids.numel(), stream.text_sha256, stream.special_tokens
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


def _read_text(path: Path, column: str) -> str:
    if not path.is_file():
        raise CalibrationError(
            f"no text at '{path}': give 'wikitext2', 'self', or a file "
            "(.txt, .jsonl, .parquet, or token ids as .npy or .safetensors)"
        )
    try:
        if path.suffix in (".jsonl", ".json"):
            return SEPARATOR.join(_jsonl_column(path, column))
        if path.suffix == ".parquet":
            return SEPARATOR.join(_parquet_column(path, column))
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"'{path}' is not UTF-8 text: {error}") from error


def _jsonl_column(path: Path, column: str) -> list[str]:
    texts = []
    # not splitlines: a JSON string may hold U+2028 and its like unescaped
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CalibrationError(f"'{path}', line {number}, is not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise CalibrationError(
                f"'{path}', line {number}, has no text in column '{column}' (it has: {found}); "
                "name it with --text-column"
            )
        texts.append(row[column])
    return texts


def _parquet_column(path: Path, column: str) -> list[str]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise CalibrationError("reading parquet needs pyarrow: pip install 'coec[data]'") from error
    try:
        names = parquet.read_schema(path).names
        if column not in names:
            raise CalibrationError(
                f"'{path}' has no column '{column}' (it has: {', '.join(names)}); "
                "name it with --text-column"
            )
        texts = parquet.read_table(path, columns=[column])[column].to_pylist()
    except arrow.ArrowInvalid as error:
        raise CalibrationError(f"'{path}' is not a parquet file: {error}") from error
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise CalibrationError(
                f"'{path}', row {number}, has no text in column '{column}' (it has: {text!r:.40}); "
                "leave such rows out, or name another column with --text-column"
            )
    return texts


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


def _wikitext2(split: Split) -> str:
    offline = (
        "WikiText-2 could not be loaded ({}). Offline, give a local file instead: "
        "--calibration PATH (coec prune) or --text PATH (coec eval), or --calibration self"
    )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            offline.format("the 'datasets' package is missing: pip install 'coec[data]'")
        ) from error
    try:
        rows = load_dataset(*WIKITEXT2, split=split)
    except Exception as error:  # the hub's client raises many kinds; one line is enough
        raise CalibrationError(offline.format(str(error).strip().splitlines()[0])) from error
    return SEPARATOR.join(rows["text"])


def digest(ids: Tensor) -> str:
    """SHA-256 of token ids as int64."""
    return hashlib.sha256(ids.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()
