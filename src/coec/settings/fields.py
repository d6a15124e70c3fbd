"""How a setting is declared: one field of a dataclass holds its default and its limits.

What the docstring of the dataclass says of the field is the setting's help. Flags, keys of files,
help texts and docs/SETTINGS.md are made of these fields.
"""

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from coec.errors import OptionError

_Value = float | int | str | bool | None
_T = TypeVar("_T")
Kind = type[float] | type[int] | type[str] | type[bool] | tuple[str, ...]
KINDS = (float, int, str, bool)
DECLARED = "setting"
"""The key in a field's metadata under which its declaration stands."""


@dataclass(frozen=True)
class Setting:
    """A flag of `coec prune`, a key of recipes and grids, an argument of `coec.prune`.

    Attributes:
        name: with underscores, as in Python.
        kind: `float`, `int`, `str` or `bool`; or the names that are allowed; None for anything.
        default: where nothing is given.
        help: what it does.
        otherwise: the default in words, where None stands for something.
        least, most: the range of a number, both included; None for no limit.
        check: raises OptionError for other values that are not allowed.
        functions: whether a function is allowed where a name is.
        objects: whether Python takes other objects than text.
        methods: the compensations that have this option; none for a setting of every recipe.
        words: names that are allowed beside numbers.
    """

    name: str
    kind: Kind | None
    default: Any
    help: str = ""
    otherwise: str = ""
    least: float | None = None
    most: float | None = None
    check: Callable[[Any], object] | None = None
    functions: bool = False
    objects: bool = False
    methods: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The help text: what it does, what it may be, and its default."""
        default = self.otherwise or shown(self.default)
        choices = ""
        if isinstance(self.kind, tuple) and not all(value in self.help for value in self.kind):
            choices = f" One of {', '.join(self.kind)}."
        return f"{self.help}{choices} Default: {default}."

    def checked(self, value: Any) -> Any:
        """The value, numbers as Python's own; raises OptionError where it is not allowed."""
        value = plain(value)
        if value is None and self.default is None:
            return None
        if isinstance(value, str) and value in self.words:
            return value
        if isinstance(self.kind, tuple):
            self._check_name(value)
        elif self.kind is int:
            check_whole(self.name, value, self.least)
        elif self.kind is float:
            self._check_number(value)
        elif self.kind is str:
            self._check_text(value)
        elif self.kind is bool and not isinstance(value, bool):
            raise OptionError(f"{self.name} must be true or false, got {value!r:.80}")
        if self.check:
            self.check(value)
        return value

    def _check_name(self, value: Any) -> None:
        assert isinstance(self.kind, tuple)
        if self.functions and callable(value):
            return
        names = ", ".join(self.kind)
        if self.functions:
            self._check_text(value)
            if value not in self.kind:
                raise OptionError(f"unknown {self.name} '{value}'; known: {names}")
        elif not isinstance(value, str) or value not in self.kind:
            raise OptionError(f"{self.name} must be one of {names}, got {value!r:.80}")

    def _check_number(self, value: Any) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            kinds = " or ".join(("a number", *self.words))
            raise OptionError(f"{self.name} must be {kinds}, got {value!r:.80}")
        if self.least is None:
            if isinstance(value, int):
                _check_bits(self.name, value, sys.float_info.max_exp - 1)
            return
        most = sys.float_info.max if self.most is None else self.most
        if not self.least <= value <= most:
            unbounded = f"at least {self.least:g} and finite"
            bound = unbounded if self.most is None else f"in [{self.least:g}, {self.most:g}]"
            raise OptionError(f"{self.name} must be {bound}, got {value!r:.80}")

    def _check_text(self, value: Any) -> None:
        if not self.objects and isinstance(value, int | float | list | bool | None):
            raise OptionError(f"{self.name} must be text, got {value!r:.80}")
        if isinstance(value, str) and (not value or "\0" in value):
            raise OptionError(f"{self.name} must be text without NUL characters, got {value!r:.80}")


def setting(default: _Value, *, key: str = "", **declaration: Any) -> Any:
    """Declare a field as a setting, whose kind is the field's annotation.

    Args:
        default, declaration: as in `Setting`.
        key: what flags and files call the field, where that is not its name.
    """
    return dataclasses.field(default=default, metadata={DECLARED: declaration, "key": key})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fields declared by `setting`; every value is checked when the object is made."""

    def __post_init__(self) -> None:
        for attribute, member in declared(type(self)).items():
            object.__setattr__(self, attribute, member.checked(getattr(self, attribute)))

    @classmethod
    def table(cls) -> tuple[Setting, ...]:
        """Return the settings, in the order of the fields."""
        return tuple(declared(cls).values())

    @classmethod
    def of(cls: type[_T], settings: Mapping[str, Any]) -> _T:
        """An object of those of the settings that are its own; names as flags and files have them.

        Raises:
            OptionError: a value is not allowed.
        """
        names = {f.metadata.get("key") or f.name: f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{names[k]: value for k, value in settings.items() if k in names})

    def record(self) -> dict[str, Any]:
        """Return every setting's value, by name."""
        return {member.name: getattr(self, at) for at, member in declared(type(self)).items()}


_DECLARED: dict[type, dict[str, Setting]] = {}
"""What `declared` has found: annotations are slow to read, and grids make thousands of recipes."""


def declared(cls: type) -> dict[str, Setting]:
    """The settings of a dataclass by the names of its fields."""
    if cls not in _DECLARED:
        hints, descriptions = get_type_hints(cls), _attributes(cls)
        _DECLARED[cls] = {
            field.name: of_annotation(
                field.metadata["key"] or field.name,
                hints[field.name],
                field.default,
                help=descriptions.get(field.name, ""),
                **field.metadata[DECLARED],
            )
            for field in dataclasses.fields(cls)
            if DECLARED in field.metadata
        }
    return _DECLARED[cls]


def _attributes(cls: type) -> dict[str, str]:
    """Return what docstrings say of every attribute, by name, each in one line; bases included."""
    said: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        _, _, section = inspect.cleandoc(owner.__doc__ or "").partition("Attributes:\n")
        # An entry goes on in lines that are indented further than its name.
        entries = re.findall(r"^    (\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
        said |= {name: " ".join(text.split()) for name, text in entries}
    return said


def of_annotation(name: str, annotation: Any, default: Any, **declaration: Any) -> Setting:
    """A setting whose kind an annotation says: the first of its members that is a kind.

    Names that follow a number's are words.
    """
    union = get_origin(annotation) in (Union, types.UnionType)
    members = get_args(annotation) if union else (annotation,)
    candidates = [
        get_args(member) if get_origin(member) is Literal else member for member in members
    ]
    type_kind = next(
        (member for member in candidates if member in KINDS or isinstance(member, tuple)), None
    )
    functions = any(get_origin(member) is get_origin(Callable[..., Any]) for member in members)
    names = (member for member in candidates if type_kind is float and isinstance(member, tuple))
    return Setting(
        name, type_kind, default, functions=functions, words=next(names, ()), **declaration
    )


def plain(value: Any) -> Any:
    """A number of numpy or torch, also in an array without dimensions, as Python's own."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def shown(value: Any) -> str:
    """A value as help and documents write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def without_effect(name: str, why: str) -> OptionError:
    """The error for a setting that others make idle."""
    return OptionError(f"{name} has no effect with {why}: leave it out, or change the other")


_BITS = 64
"""Bits of the largest whole number that a setting may be."""
SEEDS = 2**_BITS
"""Generators of random numbers take seeds below this."""


def nth_seed(seed: int, number: int) -> int:
    """Return the seed of one of many draws, a block's or a window's: other numbers in each."""
    return (seed * 1_000_003 + number) % SEEDS


def check_whole(name: str, value: Any, least: float | None = 1) -> int:
    """The value as Python's own; raises OptionError unless it is whole and at least `least`."""
    value = plain(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least:g}"
        raise OptionError(f"{name} must be a whole number{bound}, got {value!r:.80}")
    _check_bits(name, value, _BITS)
    return value


def _check_bits(name: str, value: int, bits: int) -> None:
    """Raise OptionError for a whole number whose size alone would break what computes with it."""
    if value.bit_length() > bits:
        raise OptionError(
            f"{name} must be below 2**{bits}, got a number of {value.bit_length()} bits"
        )


def check_seed(seed: Any) -> int:
    """The seed as Python's own number; raises OptionError unless a generator takes it."""
    return check_whole("seed", seed, least=0)
