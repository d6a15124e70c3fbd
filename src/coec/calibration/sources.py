"""Text for calibration and evaluation: files, WikiText-2, C4, and text data sets of the hub.

No data set script is kept here: data sets come through `datasets`. Large ones are streamed, and
read no further than `HUB_CHARACTERS`.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from coec.errors import CalibrationError

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

Split = Literal["train", "validation", "test"]


def read_text(source: str, *, split: Split, text_column: str = "text") -> str:
    """The text of a source, documents joined by blank lines.

    Args:
        source: `wikitext2`, `c4`, `hub:OWNER/NAME`, `hub:OWNER/NAME:CONFIG`, or the path of a
            text, jsonl or parquet file.
        split: of a data set. C4 has no test split: its validation split stands in for it.
        text_column: of jsonl and parquet files, and of data sets named by `hub:`.

    Raises:
        CalibrationError: the source is missing, unreachable, empty or of the wrong form.
    """
    if source == "wikitext2":
        text = _wikitext2(split)
    elif source == "c4":
        text = _c4("train" if split == "train" else "validation")
    elif source.startswith("hub:"):
        text = _hub(source, split, text_column)
    else:
        text = _read_file(Path(source), text_column)
    if not text.strip():
        raise CalibrationError(f"'{source}' holds no text")
    return text


def _read_file(path: Path, column: str) -> str:
    if not path.is_file():
        raise CalibrationError(
            f"no text at '{path}': give 'wikitext2', 'c4', 'hub:OWNER/NAME', 'self', or a file "
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
                f"(it has: {', '.join(row)}); name it with --text-column"
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
        "--calibration PATH (coec prune) or --text PATH (coec eval), or --calibration self"
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
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CalibrationError(offline.format(reason)) from error
