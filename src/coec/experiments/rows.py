"""results.jsonl: what a row holds, and the one reader of it, for the sweep and for its report."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from coec.errors import ResultsError
from coec.settings import OPTIONS, RECIPE

RESULTS = "results.jsonl"
NO_REASON = "no reason recorded"
"""Of a cell that failed without one."""

LARGEST = 1e300
"""Beyond it sums and means of numbers overflow."""

CONTROL = re.compile("[\x00-\x1f\ud800-\udfff\ufffe\uffff]")
"""What UTF-8, the drawings of a page or a line cannot hold."""


@dataclass(frozen=True)
class Kind:
    """A single value: what it must be in words, and whether one is."""

    words: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and abs(value) <= LARGEST


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not CONTROL.search(value)


NUMBER = Kind("a finite number", _is_number)
SHARE = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
PERPLEXITY = Kind("a number of at least 1", lambda value: _is_number(value) and value > 0.999)
"""A cross-entropy of 0 may be rounded to a little less."""

COUNT = Kind("a whole number of at least 0", _is_count)
TEXT = Kind("text without control characters", _is_text)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
PLAIN = Kind(
    "a number, text, true or false",
    lambda value: isinstance(value, bool) or _is_number(value) or _is_text(value),
)
STATUS = Kind("'done' or 'failed'", lambda value: value in ("done", "failed"))


@dataclass(frozen=True)
class Fields:
    """An object, field by field.

    Attributes:
        known: what these fields are: a kind, an object, or `[one]` for a list of such.
        others: what every other field is; None ignores them.
        required: fields that must be there, and not be null.
        nulls: whether null is a value; if not, a field that is null counts as absent.
    """

    known: Mapping[str, Any] = field(default_factory=dict)
    others: "Kind | Fields | None" = None
    required: tuple[str, ...] = ()
    nulls: bool = False


def _all(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_KINDS: dict[Any, Kind] = {float: NUMBER, int: COUNT, str: TEXT}
_OPTIONS, _RECIPE = (
    {setting.name: _KINDS.get(setting.kind, TEXT) for setting in table}
    for table in (OPTIONS, RECIPE)
)
SETTINGS = Fields(
    _RECIPE | {"sparsity": SHARE, "options": Fields(_OPTIONS, others=PLAIN, nulls=True)},
    others=PLAIN, required=("sparsity", "compensation"), nulls=True,
)  # fmt: skip
SITE = Fields(
    _all(TEXT, "module site reason")
    | _all(COUNT, "block rounds")
    | _all(NUMBER, "error_before error_after holdout_before holdout_after gcv_lambda seconds")
    | _all([NUMBER], "errors_per_round objectives_per_round")
    | {
        "events": [TEXT],
        "geometry": Fields(_all(NUMBER, "angle_op angle_oc angle_pc discrepancy")),
    },
    required=("site", "block"),
)
TASK = Fields(_all(NUMBER, "value stderr chance") | {"items": COUNT, "metric": TEXT})
MEASURED = {
    "perplexity": Fields(
        {"perplexity": PERPLEXITY} | _all(TEXT, "text text_sha256") | _all(COUNT, "windows seq_len")
    ),
    "zero_shot": Fields(
        _all(NUMBER, "mean mean_stderr") | {"tasks": Fields(others=TASK), "at_chance": [TEXT]}
    ),
    "parameters": Fields(_all(COUNT, "before after")),
    "cost": Fields(_all(COUNT, "weight_bytes peak_memory_bytes")),
    "sites": [SITE],
    "overlap": Fields(_all(COUNT, "n windows shared") | {"share": SHARE, "flagged": FLAG}),
    "calibration": Fields(
        _all(TEXT, "source text_sha256 windows_sha256") | _all(COUNT, "windows seq_len")
    ),
    "seconds": Fields(others=NUMBER),
    "peak_memory_bytes": COUNT,
    "environment": Fields(others=TEXT),
}
ROW = Fields(
    _all(TEXT, "cell model path error")
    | {"status": STATUS, "settings": SETTINGS, "grids": [TEXT], "labels": Fields(others=TEXT)}
    | {"identity": Fields(others=TEXT)}
    | MEASURED,
    required=("cell", "status", "model", "settings", "grids", "labels"),
)
"""A row. Nobody reads what else it holds."""


@dataclass(frozen=True)
class Lines:
    """The content of a results.jsonl.

    Attributes:
        records: every row as it is in the file.
        rows: the same rows with the fields of `ROW` alone, those that are null left out.
        whole: how many bytes are whole lines.
        torn: whether part of a line follows them.
        unended: whether the last of them lacks its newline.
    """

    records: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    whole: int
    torn: bool
    unended: bool


def read_lines(path: Path) -> Lines:
    """The rows of a results.jsonl; none where there is no such file.

    A last line without its newline is torn unless it is JSON: no part of an object is.

    Raises:
        ResultsError: the file cannot be read, or a line is no row; names the line and the field.
    """
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise ResultsError(
            f"'{path}' cannot be read ({error.strerror or error}): make it readable"
        ) from None
    lines = content.split(b"\n")
    torn = lines[-1] != b"" and not _is_json(lines[-1])
    kept = lines[:-1] if torn else lines
    read = [_row(line, f"{path}, line {n}") for n, line in enumerate(kept, 1) if line.strip()]
    return Lines(
        records=[record for record, _ in read],
        rows=[row for _, row in read],
        whole=len(content) - (len(lines[-1]) if torn else 0),
        torn=torn,
        unended=not torn and lines[-1] != b"",
    )


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _row(line: bytes, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        record = json.loads(line.decode())
        return record, checked(record)
    except (ValueError, RecursionError) as error:
        why = f" is not JSON ({error})"
    except ResultsError as error:
        why = f": {error}"
    raise ResultsError(f"{where}{why}: mend the line, or remove it and run the sweep again")


def checked(record: Any) -> dict[str, Any]:
    """The fields of a row that `ROW` names, those that are null left out.

    Raises:
        ResultsError: one of them is not what it must be.
    """
    row: dict[str, Any] = _read(record, ROW, "")
    return row


def _read(value: Any, wanted: Any, place: str) -> Any:
    if isinstance(wanted, Fields):
        return _object(value, wanted, place)
    if isinstance(wanted, list):
        if not isinstance(value, list):
            raise _mismatch(place, "a list", value)
        return [_read(one, wanted[0], f"{place}[{index}]") for index, one in enumerate(value)]
    if not wanted.holds(value):
        raise _mismatch(place, wanted.words, value)
    return value


def _object(value: Any, wanted: Fields, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _mismatch(place, "a JSON object", value)
    inside = f"{place}." if place else ""
    for name in wanted.required:
        if value.get(name) is None:
            raise _mismatch(place, f"an object with '{name}'", list(value))
    read = {}
    for name, one in value.items():
        kind = wanted.known.get(name, wanted.others)
        if kind is None or (one is None and not wanted.nulls):
            continue
        if not TEXT.holds(name):
            raise _mismatch(f"a name in {place or 'a row'}", TEXT.words, name)
        read[name] = None if one is None else _read(one, kind, inside + name)
    return read


def _mismatch(place: str, wanted: str, found: Any) -> ResultsError:
    return ResultsError(f"{place or 'a row'} must be {wanted}, got {shortened(found)}")
