"""JSON objects as dataclasses: the annotation of a field says what it must be.

`float` is a finite number, `int` a whole number of at least 0, `str` text without control
characters, `bool` true or false; `Annotated[X, reader]` brings a reader of its own. A list is
`tuple[X, ...]`, an object with free names `Mapping[str, X]`. A null field counts as absent, and
fields that a dataclass does not declare are ignored. A field's metadata may give its `key` in JSON,
and `read=False` for a field that is not read.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from reprlib import repr as shortened
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from coec.errors import ResultsError

_LARGEST = 1e300
"""Sums and means of larger numbers overflow."""
CONTROL = re.compile("[\x00-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that UTF-8, the drawings of a page or a line cannot hold."""

Reader = Callable[[Any, str], Any]
"""Turns a JSON value at a place into a Python value, or raises ResultsError."""


def checked(words: str, holds: Callable[[Any], bool]) -> Reader:
    """Reader of single values for which `holds` is true; `words` say what that means."""

    def read(value: Any, place: str) -> Any:
        if not holds(value):
            raise _mismatch(place, words, value)
        return value

    return read


def number(value: object) -> float | None:
    """Return a finite number as a float, and None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def is_number(value: object) -> bool:
    """Tell finite numbers that can be summed from anything else."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and abs(value) <= _LARGEST  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not CONTROL.search(value)


NUMBER = checked("a finite number", is_number)
COUNT = checked("a whole number of at least 0", _is_count)
PLAIN_TEXT = checked("text without control characters", _is_text)
FLAG = checked("true or false", lambda value: isinstance(value, bool))
PLAIN = checked(
    "a number, text, true or false",
    lambda value: isinstance(value, bool) or is_number(value) or _is_text(value),
)
BY_TYPE: Mapping[Any, Reader] = {
    float: NUMBER, int: COUNT, str: PLAIN_TEXT, bool: FLAG, Any: lambda value, place: value,
}  # fmt: skip


@cache
def reader(annotation: Any) -> Reader:
    """Return the reader of an annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if is_dataclass(annotation):
        return _object(annotation)
    if hasattr(annotation, "__metadata__"):
        return annotation.__metadata__[0]
    if origin is Literal:
        return checked(" or ".join(map(repr, arguments)), lambda value: value in arguments)
    if origin is tuple:
        return _list(reader(arguments[0]))
    if origin in (Union, UnionType):
        return reader(arguments[0])
    if origin in (dict, Mapping):
        return _mapping(reader(arguments[1]), nulls=type(None) in get_args(arguments[1]))
    return BY_TYPE[annotation]


def _list(item_reader: Reader) -> Reader:
    def read(value: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _mismatch(place, "a list", value)
        return tuple(item_reader(item, f"{place}[{i}]") for i, item in enumerate(value))

    return read


def _mapping(value_reader: Reader, nulls: bool) -> Reader:
    def read(value: Any, place: str) -> dict[str, Any]:
        return values(value, place, {}, value_reader, nulls=nulls)

    return read


def values(
    value: Any, place: str, readers: Mapping[str, Reader], default: Reader, *, nulls: bool
) -> dict[str, Any]:
    """Read an object with free names; `default` reads the values of names that have no reader.

    Args:
        nulls: whether null is a value; otherwise it counts as absent.
    """
    check_object(value, (), place)
    for name in value:
        PLAIN_TEXT(name, f"a name in {place}")
    return {
        name: None if item is None else readers.get(name, default)(item, f"{place}.{name}")
        for name, item in value.items()
        if nulls or item is not None
    }


def _object(cls: Any) -> Reader:
    hints = get_type_hints(cls, include_extras=True)
    members = [field for field in fields(cls) if field.metadata.get("read", True)]
    names = {field.metadata.get("key", field.name): field.name for field in members}
    readers = {key: reader(hints[name]) for key, name in names.items()}
    required = [
        field.metadata.get("key", field.name) for field in members
        if field.default is MISSING and field.default_factory is MISSING
    ]  # fmt: skip

    def read(value: Any, place: str) -> Any:
        check_object(value, required, place or f"a {cls.__name__.lower()}")
        prefix = f"{place}." if place else ""
        return cls(**{
            name: readers[key](value[key], prefix + key)
            for key, name in names.items() if value.get(key) is not None
        })  # fmt: skip

    return read


def check_object(value: Any, required: Iterable[str], place: str) -> None:
    """Raise ResultsError unless the value is an object with the required names."""
    if not isinstance(value, dict):
        raise _mismatch(place, "a JSON object", value)
    for name in required:
        if value.get(name) is None:
            raise _mismatch(place, f"an object with '{name}'", list(value))


def _mismatch(place: str, required: str, value: object) -> ResultsError:
    return ResultsError(f"{place} must be {required}, got {shortened(value)}")
