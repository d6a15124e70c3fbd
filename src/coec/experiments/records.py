"""JSON objects as dataclasses: every field's annotation says what it must be.

An annotation is a dataclass, `tuple[X, ...]` of a list, `Mapping[str, X]` of an object with names
that nobody declared, a `Literal`, or one of the kinds below. A field of a dataclass that is null is
one that is not there, and fields that it does not name are ignored; in a mapping null is a value
where the annotation says `X | None`. A field with `others` in its metadata is the mapping that
takes what the dataclass does not name; one with `own` false is not read.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from reprlib import repr as shortened
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from coec.errors import ResultsError

LARGEST = 1e300
"""Beyond it sums and means of numbers overflow."""

CONTROL = re.compile("[\x00-\x1f\ud800-\udfff\ufffe\uffff]")
"""What UTF-8, the drawings of a page or a line cannot hold."""


@dataclass(frozen=True)
class Kind:
    """A single value: what it must be in words, and whether one is."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, eq=False)
class Named:
    """The kinds of some values of a mapping, by their names; the mapping says what others are."""

    kinds: Mapping[str, Kind]
    required: tuple[str, ...] = ()


def number(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _is_number(value: Any) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and abs(value) <= LARGEST


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not CONTROL.search(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool) or _is_number(value) or _is_text(value)


NUMBER = Kind("a finite number", _is_number)
SHARE = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
COUNT = Kind("a whole number of at least 0", _is_count)
TEXT = Kind("text without control characters", _is_text)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
PERPLEXITY = Kind("a number of at least 1", lambda value: _is_number(value) and value > 0.999)
"""A cross-entropy of 0 may be rounded to a little less."""

Number = Annotated[float, NUMBER]
Share = Annotated[float, SHARE]
Count = Annotated[int, COUNT]
Text = Annotated[str, TEXT]
Flag = Annotated[bool, FLAG]
Plain = Annotated[float | str | bool, Kind("a number, text, true or false", _is_plain)]


class Part:
    """A part of an object; false where nobody measured anything of it."""

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) != _default(one) for one in _own(type(self)))


def plain(value: Any) -> Any:
    """What JSON can say, without the fields that say no more than their defaults."""
    if is_dataclass(value):
        said: dict[str, Any] = {}
        for one in _own(type(value)):
            inner = getattr(value, one.name)
            if "others" in one.metadata:
                said |= plain(inner)
            elif _default(one) != inner:
                said[one.name] = plain(inner)
        return said
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value


Reader = Callable[[Any, str], Any]
"""Makes a value of what JSON said at a place, or raises ResultsError."""


@cache
def reader(kind: Any) -> Reader:
    """The reader of an annotation: a dataclass, a mapping, a tuple, or a single value."""
    if is_dataclass(kind):
        return _object(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        (noted,) = kind.__metadata__
        return _mapping(arguments[0], noted) if isinstance(noted, Named) else _single(noted)
    if origin is Literal:
        allowed = " or ".join(map(repr, arguments))
        return _single(Kind(allowed, lambda value: value in arguments))
    if origin is tuple:
        return _list(reader(arguments[0]))
    if origin is UnionType or type(None) in arguments:
        return reader(next(one for one in arguments if one is not type(None)))
    return _mapping(kind, Named({}))


def _single(kind: Kind) -> Reader:
    def read_it(value: Any, place: str) -> Any:
        if not kind.holds(value):
            raise _mismatch(place, kind.words, value)
        return value

    return read_it


def _list(one: Reader) -> Reader:
    def read_it(value: Any, place: str) -> Any:
        if not isinstance(value, list):
            raise _mismatch(place, "a list", value)
        return tuple(one(item, f"{place}[{index}]") for index, item in enumerate(value))

    return read_it


def _object(cls: Any) -> Reader:
    """Of a dataclass: the fields that it names, and all others in the one that takes them."""
    hints = get_type_hints(cls, include_extras=True)
    others = next((f.name for f in _own(cls) if "others" in f.metadata), None)
    readers = {f.name: reader(hints[f.name]) for f in _own(cls) if f.name != others}
    rest = None if others is None else reader(hints[others])
    required = [f.name for f in _own(cls) if _is_required(f) and f.name != others]

    def read_it(value: Any, place: str) -> Any:
        _check_object(value, required, place or f"a {cls.__name__.lower()}")
        inside = f"{place}." if place else ""
        given = {
            name: readers[name](one, inside + name)
            for name, one in value.items()
            if name in readers and one is not None
        }
        if rest is not None and others is not None:
            given[others] = rest({n: v for n, v in value.items() if n not in readers}, place)
        return cls(**given)

    return read_it


def _mapping(kind: Any, named: Named) -> Reader:
    """Of names that nobody declared; null is a value only where the annotation says so."""
    wanted = get_args(kind)[1]
    nulls, other = type(None) in get_args(wanted), reader(wanted)
    readers = {name: _single(one) for name, one in named.kinds.items()}

    def read_it(value: Any, place: str) -> Any:
        _check_object(value, named.required, place)
        inside, found = f"{place}." if place else "", {}
        for name, one in value.items():
            if one is None and not nulls:
                continue
            if not TEXT.holds(name):
                raise _mismatch(f"a name in {place or 'a row'}", TEXT.words, name)
            found[name] = None if one is None else readers.get(name, other)(one, inside + name)
        return found

    return read_it


def _check_object(value: Any, required: Iterable[str], place: str) -> None:
    if not isinstance(value, dict):
        raise _mismatch(place, "a JSON object", value)
    for name in required:
        if value.get(name) is None:
            raise _mismatch(place, f"an object with '{name}'", list(value))


def _own(cls: Any) -> list[Any]:
    return [one for one in fields(cls) if one.metadata.get("own", True)]


def _default(one: Any) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _is_required(one: Any) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _mismatch(place: str, wanted: str, found: Any) -> ResultsError:
    return ResultsError(f"{place} must be {wanted}, got {shortened(found)}")
