"""Text for calibration and evaluation: files, WikiText-2, C4, and text data sets of the hub.

No data set script is kept here: data sets come through `datasets`. Large ones are streamed, and
read no further than `HUB_CHARACTERS`.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from coec.errors import CalibrationError, first_line

WIKITEXT2 = ("Salesforce/wikitext", "wikitext-2-raw-v1")
C4 = "allenai/c4"
C4_SHARDS = {
    "train": "en/c4-train.00000-of-01024.json.gz",
    "validation": "en/c4-validation.00000-of-00008.json.gz",
}
"""The first shard of each split, as pruning papers read C4; there is no test split."""

HUB_CHARACTERS = 10_000_000
"""Where reading of C4 or a `hub:` data set ends: the document that reaches this is the last.

About 2.5 M tokens of English, nine times the 128 windows of 2048 tokens of the default recipe.
"""
SEPARATOR = "\n\n"
"""Joins the documents of a data set, as the evaluation protocol does (METHODS §7)."""

PART, ROWS = 2**20, 1000
"""How many characters of a text file, and rows of a parquet file, are in memory at once."""

Split = Literal["train", "validation", "test"]


def is_named(source: str) -> bool:
    """Whether the source is a data set known by its name; all else is the path of a file."""
    return source in ("wikitext2", "c4") or source.startswith("hub:")


def read_text(source: str, *, split: Split, text_column: str = "text") -> str:
    """The text of a source, documents joined by blank lines: `read_parts` in one piece."""
    return "".join(read_parts(source, split=split, text_column=text_column))


def read_parts(source: str, *, split: Split, text_column: str = "text") -> Iterator[str]:
    """The text of a source in pieces that make it when joined, documents with blank lines between.

    A file is read no further than pieces are taken.

    Args:
        source: `wikitext2`, `c4`, `hub:OWNER/NAME`, `hub:OWNER/NAME:CONFIG`, or the path of a
            text, jsonl or parquet file.
        split: of a data set. C4 has no test split: its validation split stands in for it.
        text_column: of jsonl and parquet files, and of data sets named by `hub:`.

    Raises:
        CalibrationError: the source is missing, unreachable, empty or of the wrong form.
    """
    if not is_named(source):
        parts = _file_parts(Path(source), text_column)
    elif source == "wikitext2":
        parts = iter([_wikitext2(split)])
    elif source == "c4":
        parts = iter([_c4("train" if split == "train" else "validation")])
    else:
        parts = iter([_hub(source, split, text_column)])
    empty = True
    for part in parts:
        empty = empty and not part.strip()
        yield part
    if empty:
        raise CalibrationError(f"'{source}' holds no text")


TABLE = "is a table, not text: save its column of text as .jsonl, .parquet or .txt"
PACKED = "is compressed: unpack it first"
NO_TEXT = dict.fromkeys((".csv", ".tsv", ".xlsx", ".arrow"), TABLE) | dict.fromkeys(
    (".gz", ".zst", ".bz2", ".xz", ".zip"), PACKED
)
"""What files of these names are."""


def _file_parts(path: Path, column: str) -> Iterator[str]:
    if not is_file(path):
        raise CalibrationError(
            f"no text at '{path}': give 'wikitext2', 'c4', 'hub:OWNER/NAME', 'self', or a file "
            "(.txt, .jsonl, .parquet, or token ids as .npy or .safetensors)"
        )
    if what := NO_TEXT.get(path.suffix.lower()):
        raise CalibrationError(f"'{path}' {what}")
    try:
        if path.suffix in (".jsonl", ".json"):
            yield from _joined(_jsonl_column(path, column))
        elif path.suffix == ".parquet":
            yield from _joined(_parquet_column(path, column))
        else:
            with path.open(encoding="utf-8") as file:
                while part := file.read(PART):
                    yield part
    except UnicodeDecodeError as error:
        raise CalibrationError(f"'{path}' is not UTF-8 text: {error}") from error
    except OSError as error:
        raise CalibrationError(f"'{path}' cannot be read: {error.strerror or error}") from error


def is_file(path: Path) -> bool:
    """Whether a file is there; a name that no file can have, or a circle of links, is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether a folder is there, as `is_file`."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _joined(documents: Iterable[str]) -> Iterator[str]:
    """Documents, each but the first with the separator before it."""
    for number, document in enumerate(documents):
        yield SEPARATOR + document if number else document


def _jsonl_column(path: Path, column: str) -> Iterator[str]:
    # newline="\n": a JSON string may hold U+2028 and its like unescaped
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CalibrationError(f"'{path}', line {number}, is not JSON: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise CalibrationError(
                    f"'{path}', line {number}, has no text in column '{column}' (it has: "
                    f"{found:.200}); name it with text_column=NAME"
                )
            yield _encodable(row[column], f"'{path}', line {number},")


def _encodable(text: str, where: str) -> str:
    """The text, unless half of a surrogate pair stands alone in it, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(
            f"{where} is no text: character {error.start + 1} is half of a surrogate pair "
            f"({text[error.start]!a}); write the text as UTF-8"
        ) from error
    return text


def _parquet_column(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise CalibrationError("reading parquet needs pyarrow: pip install 'coec[data]'") from error
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if column not in names:
            raise CalibrationError(
                f"'{path}' has no column '{column}' (it has: {', '.join(names)}); "
                "name it with text_column=NAME"
            )
        number = 0
        for batch in file.iter_batches(ROWS, columns=[column]):
            for text in batch.column(0).to_pylist():
                number += 1
                if not isinstance(text, str):
                    raise CalibrationError(
                        f"'{path}', row {number}, has no text in column '{column}' (it has: "
                        f"{text!r:.40}); leave such rows out, or name another column with "
                        "text_column=NAME"
                    )
                yield text
    except CalibrationError:
        raise
    except Exception as error:  # of a damaged file pyarrow raises errors of many kinds
        raise CalibrationError(f"'{path}' is not a parquet file: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What a library says of its failure, in one line that is never empty."""
    return " ".join(str(error).split()) or type(error).__name__


def _wikitext2(split: Split) -> str:
    rows = _load("WikiText-2", lambda load: load(*WIKITEXT2, split=split))
    return SEPARATOR.join(rows["text"])


def _c4(split: Literal["train", "validation"]) -> str:
    files = {split: C4_SHARDS[split]}
    return _load(
        "C4",
        lambda load: _beginning(load(C4, data_files=files, split=split, streaming=True), "text"),
    )


def _hub(source: str, split: Split, column: str) -> str:
    """The beginning of one split of a data set named on the hub."""
    name, _, config = source.removeprefix("hub:").partition(":")
    if name.count("/") != 1 or not all(name.split("/")) or ":" in config:
        raise CalibrationError(
            f"'{source}' names no data set: write hub:OWNER/NAME or hub:OWNER/NAME:CONFIG"
        )

    def read(load: Callable[..., Any]) -> str:
        splits = load(name, config or None, streaming=True)
        if split not in splits:
            raise CalibrationError(
                f"'{source}' has no split '{split}' (it has: {', '.join(splits)}); calibration "
                "reads train and evaluation test: save the split you mean to a file"
            )
        return _beginning(splits[split], column)

    return _load(f"'{source}'", read)


def _beginning(rows: Iterable[dict[str, Any]], column: str) -> str:
    """The first documents, joined, up to the one that reaches `HUB_CHARACTERS`."""
    texts, characters = [], 0
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get(column), str):
            raise CalibrationError(
                f"row {number} of the data set has no text in column '{column}' "
                f"(it has: {', '.join(row)}); name it with text_column=NAME"
            )
        texts.append(row[column])
        characters += len(row[column]) + len(SEPARATOR)
        if characters >= HUB_CHARACTERS:
            break
    return SEPARATOR.join(texts)


def _load(name: str, read: Callable[[Callable[..., Any]], Any]) -> Any:
    """What `read` makes of `datasets.load_dataset`; its many errors become one line.

    Streaming reads the network while rows are taken, so that `read` takes them, not the caller.
    """
    offline = (
        f"{name} could not be loaded ({{}}). Offline, give a local file instead: "
        "calibration=PATH to prune, text=PATH to evaluate; or calibration=self"
    )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            offline.format("the 'datasets' package is missing: pip install 'coec[data]'")
        ) from error
    try:
        return read(load_dataset)
    except CalibrationError:
        raise
    except Exception as error:  # the hub's client raises many kinds; one line is enough
        reason = first_line(error)
        raise CalibrationError(offline.format(reason)) from error
