"""Text for calibration and evaluation: files, WikiText-2, C4, text data sets of the hub, and text
or tokens that a caller passes.

Data sets are read by `datasets`. Large ones are streamed, and read no further than
`HUB_CHARACTERS`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os.path import isfile  # False, unlike Path.is_file, for names that no file can have
from pathlib import Path
from typing import Any, Literal

from coec.errors import CalibrationError, check_installed, first_line

_WIKITEXT2 = ("Salesforce/wikitext", "wikitext-2-raw-v1")
_C4 = "allenai/c4"
_C4_SHARDS = {
    "train": "en/c4-train.00000-of-01024.json.gz",
    "validation": "en/c4-validation.00000-of-00008.json.gz",
}
"""The first shard of each split, as pruning papers read C4; there is no test split."""
HUB_CHARACTERS = 10_000_000
"""Characters of C4 or a `hub:` data set after which no further document is read.

These are about 2.5 M tokens of English, nine times the 128 windows of 2048 tokens of the default.
"""
_SEPARATOR = "\n\n"
"""Text between the documents of a data set, as in the evaluation protocol (METHODS §7)."""

_CHUNK, _ROWS = 2**20, 1000
"""Characters of a text file, and rows of a parquet file, that are in memory at once."""
_SHARE = re.compile(r"(.+)=([0-9]{1,9}(?:\.[0-9]{1,9})?)")
"""A source of a mixture, and its share."""
Split = Literal["train", "validation", "test"]
Rendered = Callable[[list[Any]], str]
"""Return the text of a chat, given its messages."""
CHATS = ("messages", "conversations")
"""Columns that hold chats, read where a row has no text."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Text that a caller holds, read like a data set of the hub.

    Attributes:
        rows: strings, or rows with a `column` of text, as `datasets` has them; streamed ones too.
    """

    rows: Any
    column: str

    def __post_init__(self) -> None:
        if not isinstance(self.rows, Iterable) or isinstance(self.rows, Iterator | bytes):
            raise CalibrationError(
                "text is a name, a path, token ids, a list of strings or a data set, got a "
                f"{type(self.rows).__name__}"
            )
        if isinstance(self.rows, Mapping):
            raise CalibrationError(
                f"text has several splits ({', '.join(map(str, self.rows))!s:.80}): give one"
            )

    def __str__(self) -> str:
        return "documents"


def is_named(source: str) -> bool:
    """True if the source is the name of a data set; otherwise it is the path of a file."""
    return source in ("wikitext2", "c4") or (
        source.startswith("hub:") and len(mixture(source)) == 1
    )


def mixture(source: Any) -> list[tuple[Any, float]]:
    """Return the sources of a mixture, `a.txt=2,b.jsonl`, with their shares; 1 where none is given.

    Whatever is no text with a comma, or is the path of a file, is one source.
    """
    if not isinstance(source, str) or "," not in source or isfile(source):
        return [(source, 1.0)]
    sources = []
    for text in map(str.strip, source.split(",")):
        match = None if isfile(text) else _SHARE.fullmatch(text)
        sources.append((match[1], float(match[2])) if match else (text, 1.0))
    return sources


def read_parts(
    source: str | Documents,
    *,
    split: Split,
    text_column: str = "text",
    characters: int | None = None,
    chat: Rendered | None = None,
) -> Iterator[str]:
    """Yield the text of a source in consecutive pieces; blank lines separate documents.

    A file is read only as far as pieces are consumed.

    Args:
        source: `wikitext2`, `c4`, `hub:OWNER/NAME`, `hub:OWNER/NAME:CONFIG`, the path of a text,
            jsonl or parquet file, or documents.
        split: split of a data set. C4 has no test split; its validation split takes its place.
        text_column: column of jsonl and parquet files, and of data sets named by `hub:`.
        characters: of C4, a `hub:` data set or documents, those after which no further document is
            read; None for `HUB_CHARACTERS`.
        chat: makes the text of a chat, a list in the column; None where there is no way.
    """
    limit = HUB_CHARACTERS if characters is None else characters
    # Source → pieces of text; whether there is any shows only when they have been read.
    texts: Iterable[str]
    if isinstance(source, Documents):
        texts = [_beginning(source.rows, source.column, limit, chat)]
    elif is_named(source):
        texts = [_read_named(source, split, text_column, limit, chat)]
    else:
        texts = _read_file(Path(source), text_column, chat)
    empty = True
    for text in texts:
        empty = empty and not text.strip()
        yield text
    if empty:
        raise CalibrationError(f"'{source}' holds no text")


_NO_TEXT = {
    "is a table, not text: save its column of text as .jsonl, .parquet or .txt": (
        ".csv", ".tsv", ".xlsx", ".arrow",
    ),
    "is compressed: unpack it first": (".gz", ".zst", ".bz2", ".xz", ".zip"),
}  # fmt: skip
"""Reasons why files are refused, and their suffixes."""


def _columns(column: str) -> tuple[str, ...]:
    """Return the columns in which the text of a row may be, the first that holds something."""
    return (column, *CHATS) if column == "text" else (column,)


def _text_in(row: Any, column: str, chat: Rendered | None) -> str | None:
    """Return the text in a column of a row, or of its chat; None where there is neither."""
    if not isinstance(row, Mapping):
        return None
    # First column that holds something → a chat as text → text, or nothing that can be read
    text = next((row[name] for name in _columns(column) if row.get(name) is not None), None)
    if isinstance(text, list) and chat is not None:
        return chat(text)
    return text if isinstance(text, str) else None


def _read_file(path: Path, column: str, chat: Rendered | None) -> Iterator[str]:
    if not isfile(path):
        raise CalibrationError(
            f"no text at '{path}': give 'wikitext2', 'c4', 'hub:OWNER/NAME', 'self', or a file "
            "(.txt, .jsonl, .parquet, or token ids as .npy or .safetensors)"
        )
    for reason, suffixes in _NO_TEXT.items():
        if path.suffix.lower() in suffixes:
            raise CalibrationError(f"'{path}' {reason}")
    try:
        if path.suffix in (".jsonl", ".json"):
            yield from _joined(_jsonl_column(path, column, chat))
        elif path.suffix == ".parquet":
            yield from _joined(_parquet_column(path, column, chat))
        else:
            with path.open(encoding="utf-8") as file:
                while text := file.read(_CHUNK):
                    yield text
    except UnicodeDecodeError as error:
        raise CalibrationError(f"'{path}' is not UTF-8 text: {error}") from error
    except OSError as error:
        raise CalibrationError(f"'{path}' cannot be read: {error.strerror or error}") from error


def _joined(documents: Iterable[str]) -> Iterator[str]:
    """Put the separator before each document but the first."""
    for number, document in enumerate(documents):
        yield _SEPARATOR + document if number else document


def _jsonl_column(path: Path, column: str, chat: Rendered | None) -> Iterator[str]:
    # newline="\n": a JSON string may hold U+2028 unescaped
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CalibrationError(f"'{path}', line {number}, is not JSON: {error}") from error
            if (text := _text_in(row, column, chat)) is None:
                columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise CalibrationError(
                    f"'{path}', line {number}, has no text in column '{column}' (it has: "
                    f"{columns:.200}); name it with text_column=NAME"
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise CalibrationError(
                    f"'{path}', line {number}, is no text: character {error.start + 1} is half of "
                    f"a surrogate pair ({text[error.start]!a}); write the text as UTF-8"
                ) from error
            yield text


def _parquet_column(path: Path, column: str, chat: Rendered | None) -> Iterator[str]:
    check_installed("reading parquet", "pyarrow", "pyarrow.parquet", kind=CalibrationError)
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [name for name in _columns(column) if name in names]
        if not columns:
            raise CalibrationError(
                f"'{path}' has no column '{column}' (it has: {', '.join(names)}); "
                "name it with text_column=NAME"
            )
        # Batches of rows: a file may be larger than memory.
        batches = file.iter_batches(_ROWS, columns=columns)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            if (text := _text_in(row, column, chat)) is None:
                raise CalibrationError(
                    f"'{path}', row {number}, has no text in column '{column}' (it has: "
                    f"{row.get(column)!r:.40}); leave such rows out, or name another column with "
                    "text_column=NAME"
                )
            yield text
    except CalibrationError:
        raise
    except Exception as error:  # pyarrow may raise anything for a damaged file
        raise CalibrationError(f"'{path}' is not a parquet file: {first_line(error)}") from error


def _read_named(source: str, split: Split, column: str, limit: int, chat: Rendered | None) -> str:
    """Read a data set of the hub; any error of its client becomes one line."""
    name, _, config = source.removeprefix("hub:").partition(":")
    of_hub = source.startswith("hub:")
    if of_hub and (name.count("/") != 1 or not all(name.split("/")) or ":" in config):
        raise CalibrationError(
            f"'{source}' names no data set: write hub:OWNER/NAME or hub:OWNER/NAME:CONFIG"
        )
    title = {"wikitext2": "WikiText-2", "c4": "C4"}.get(source, f"'{source}'")
    offline = (
        f"{title} could not be loaded ({{}}). Offline, give a local file instead: "
        "calibration=PATH or calibration=self to prune, text=PATH to evaluate or train"
    )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            offline.format("the 'datasets' package is missing: pip install datasets")
        ) from error
    try:
        if source == "wikitext2":
            return _SEPARATOR.join(load_dataset(*_WIKITEXT2, split=split)["text"])
        if source == "c4":
            c4_split = "train" if split == "train" else "validation"
            files = {c4_split: _C4_SHARDS[c4_split]}
            rows = load_dataset(_C4, data_files=files, split=c4_split, streaming=True)
            return _beginning(rows, "text", limit, None)
        # No split is asked for, so that an error can name all; streaming reads none of them yet.
        splits = load_dataset(name, config or None, streaming=True)
        if split not in splits:
            raise CalibrationError(
                f"'{source}' has no split '{split}' (it has: {', '.join(splits)}); calibration "
                "reads train and evaluation test: save the split you mean to a file"
            )
        return _beginning(splits[split], column, limit, chat)
    except CalibrationError:
        raise
    except Exception as error:  # the hub's client may raise anything
        raise CalibrationError(offline.format(first_line(error))) from error


def _beginning(rows: Iterable[Any], column: str, limit: int, chat: Rendered | None) -> str:
    """Join the first documents, up to the document that reaches `limit` characters."""
    texts, characters = [], 0
    for number, row in enumerate(rows, 1):
        text = row if isinstance(row, str) else _text_in(row, column, chat)
        if text is None:
            raise CalibrationError(
                f"row {number} of the data set has no text in column '{column}' "
                f"(it has: {', '.join(row)}); name it with text_column=NAME"
                if isinstance(row, Mapping)
                else f"document {number} of the text is a {type(row).__name__}, no string"
            )
        texts.append(text)
        characters += len(text) + len(_SEPARATOR)
        if characters >= limit:
            break
    return _SEPARATOR.join(texts)
