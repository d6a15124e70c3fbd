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
Rendered = Callable[[str | list[Any]], Any]
"""Return a document, given its text or the messages of a chat; None if it cannot be read."""
PROMPT, CHATS = "prompt", ("messages", "conversations")
"""Columns of prompts, and of chats, that are read if a row has no text."""


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


def _text_alone(document: str | list[Any]) -> str | None:
    """Return a text; None for a chat."""
    return document if isinstance(document, str) else None


def read_prompts(path: Path, column: str, rendered: Rendered) -> list[Any]:
    """Return what `rendered` makes of every row of a jsonl or parquet file.

    Args:
        path: of the file.
        column: of the prompts; `text` for `prompt`, or else `messages` or `conversations`.
        rendered: raises CalibrationError for a bad row, and the message then names the line.

    Raises:
        CalibrationError: it is no such file, or has no rows.
    """
    if path.suffix.lower() not in (".jsonl", ".json", ".parquet"):
        raise CalibrationError(
            f"'{path}' holds no prompts: give self:FILE, a .jsonl or .parquet file whose rows have "
            "a prompt, or messages that end with the user's turn"
        )
    prompts = list(_read_file(path, PROMPT if column == "text" else column, rendered))
    if not prompts:
        raise CalibrationError(f"'{path}' holds no prompts")
    return prompts


def read_parts(
    source: str | Documents,
    *,
    split: Split,
    text_column: str = "text",
    characters: int | None = None,
    rendered: Rendered = _text_alone,
) -> Iterator[Any]:
    """Yield the text of a source in consecutive pieces; blank lines separate documents of text.

    A file is read only as far as pieces are consumed.

    Args:
        source: `wikitext2`, `c4`, `hub:OWNER/NAME`, `hub:OWNER/NAME:CONFIG`, the path of a text,
            jsonl or parquet file, or documents.
        split: split of a data set. C4 has no test split; its validation split takes its place.
        text_column: column of jsonl and parquet files, and of data sets named by `hub:`.
        characters: of C4, a `hub:` data set or documents, those after which no further document is
            read; None for `HUB_CHARACTERS`.
        rendered: makes a document of a row's text, or of its chat, a list in the column. What is
            no string is a piece of its own.
    """
    limit = HUB_CHARACTERS if characters is None else characters
    # Source → pieces of text; whether there is any shows only when they have been read.
    texts: Iterable[Any]
    if isinstance(source, Documents):
        texts = _joined(_beginning(source.rows, source.column, limit, rendered))
    elif is_named(source):
        texts = _read_named(source, split, text_column, limit, rendered)
    else:
        texts = _read_file(Path(source), text_column, rendered)
    empty = True
    for text in texts:
        empty = empty and isinstance(text, str) and not text.strip()
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
    return (column, *CHATS) if column in ("text", PROMPT) else (column,)


def _document(row: Any, column: str, rendered: Rendered, place: str) -> Any:
    """Return the text in a column of a row, or its chat; None where there is neither.

    An error begins with the place.
    """
    if not isinstance(row, Mapping):
        return None
    # First column that holds something → a document
    present = [name for name in _columns(column) if row.get(name) is not None]
    if not present:
        return None
    name = next((name for name in present if row[name] != ""), present[0])
    found = row[name]
    try:
        if isinstance(found, str):
            check_unicode(found)
        elif not isinstance(found, list):
            raise CalibrationError(
                f"column '{name}' holds {found!r:.40}, no text: leave such rows out, or name "
                "another column with text_column=NAME"
            )
        return rendered(found)
    except CalibrationError as error:
        raise CalibrationError(f"{place}: {error}") from error


def check_unicode(text: str) -> None:
    """Raise CalibrationError for half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(
            f"character {error.start + 1} is half of a surrogate pair ({text[error.start]!a}); "
            "write the text as UTF-8"
        ) from error


def _read_file(path: Path, column: str, rendered: Rendered) -> Iterator[Any]:
    if not isfile(path):
        raise CalibrationError(
            f"no text at '{path}': give 'wikitext2', 'c4', 'hub:OWNER/NAME', 'self', or a file "
            "(.txt, .jsonl, .parquet, or token ids as .npy or .safetensors)"
        )
    suffix = path.suffix.lower()
    for reason, suffixes in _NO_TEXT.items():
        if suffix in suffixes:
            raise CalibrationError(f"'{path}' {reason}")
    try:
        if suffix in (".jsonl", ".json"):
            yield from _joined(_jsonl_column(path, column, rendered))
        elif suffix == ".parquet":
            yield from _joined(_parquet_column(path, column, rendered))
        else:
            with path.open(encoding="utf-8") as file:
                while text := file.read(_CHUNK):
                    yield text
    except UnicodeDecodeError as error:
        raise CalibrationError(f"'{path}' is not UTF-8 text: {error}") from error
    except OSError as error:
        raise CalibrationError(f"'{path}' cannot be read: {error.strerror or error}") from error


def _joined(documents: Iterable[Any]) -> Iterator[Any]:
    """Put the separator before each text but the first."""
    for number, document in enumerate(documents):
        yield _SEPARATOR + document if number and isinstance(document, str) else document


def _jsonl_column(path: Path, column: str, rendered: Rendered) -> Iterator[Any]:
    # newline="\n": a JSON string may hold U+2028 unescaped
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CalibrationError(f"'{path}', line {number}, is not JSON: {error}") from error
            place = f"'{path}', line {number}"
            if (text := _document(row, column, rendered, place)) is None:
                columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise CalibrationError(
                    f"{place}, has no text in column '{column}' (it has: "
                    f"{columns:.200}); name it with text_column=NAME"
                )
            yield text


def _parquet_column(path: Path, column: str, rendered: Rendered) -> Iterator[Any]:
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
            place = f"'{path}', row {number}"
            if (text := _document(row, column, rendered, place)) is None:
                raise CalibrationError(
                    f"{place}, has no text in column '{column}' (it has: "
                    f"{row.get(column)!r:.40}); leave such rows out, or name another column with "
                    "text_column=NAME"
                )
            yield text
    except CalibrationError:
        raise
    except Exception as error:  # pyarrow may raise anything for a damaged file
        raise CalibrationError(f"'{path}' is not a parquet file: {first_line(error)}") from error


def _read_named(
    source: str, split: Split, column: str, limit: int, rendered: Rendered
) -> Iterator[Any]:
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
            yield _SEPARATOR.join(load_dataset(*_WIKITEXT2, split=split)["text"])
            return
        if source == "c4":
            c4_split = "train" if split == "train" else "validation"
            files = {c4_split: _C4_SHARDS[c4_split]}
            rows = load_dataset(_C4, data_files=files, split=c4_split, streaming=True)
            yield from _joined(_beginning(rows, "text", limit, _text_alone))
            return
        # No split is asked for, so that an error can name all; streaming reads none of them yet.
        splits = load_dataset(name, config or None, streaming=True)
        if split not in splits:
            raise CalibrationError(
                f"'{source}' has no split '{split}' (it has: {', '.join(splits)}); calibration "
                "reads train and evaluation test: save the split you mean to a file"
            )
        yield from _joined(_beginning(splits[split], column, limit, rendered))
    except CalibrationError:
        raise
    except Exception as error:  # the hub's client may raise anything
        raise CalibrationError(offline.format(first_line(error))) from error


def _beginning(rows: Iterable[Any], column: str, limit: int, rendered: Rendered) -> Iterator[Any]:
    """Yield the first documents, up to the document that reaches `limit` characters."""
    characters = 0
    for number, row in enumerate(rows, 1):
        place = f"row {number} of the data set"
        text = row if isinstance(row, str) else _document(row, column, rendered, place)
        if text is None:
            raise CalibrationError(
                f"{place} has no text in column '{column}' "
                f"(it has: {', '.join(row)}); name it with text_column=NAME"
                if isinstance(row, Mapping)
                else f"document {number} of the text is a {type(row).__name__}, no string"
            )
        yield text
        characters += len(text if isinstance(text, str) else str(row)) + len(_SEPARATOR)
        if characters >= limit:
            break
