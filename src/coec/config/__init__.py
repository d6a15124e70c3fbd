"""The base of all settings, and what help, documents and flags say of a field.

    class Example(Settings):
        samples: int = setting(128, ge=1, heading="Calibration")
        \"\"\"Calibration windows.\"\"\"

The docstring under a field is its help. The order of the fields is the order of help.
"""

import functools
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coec.errors import OptionError, did_you_mean

DtypeName = Literal["float64", "float32", "bfloat16", "float16"]
OWN = "self"
"""Text that the dense model writes; followed by a colon and a file, its answers to prompts."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
_BITS = 64
"""Bits of the largest whole number; generators of random numbers take no larger seed."""


def setting(default: Any, *, heading: str = "", otherwise: str = "", **limits: Any) -> Any:
    """Declare a field of `Settings`.

    Args:
        default: its value if none is given.
        heading: heading of help for this field and the fields that follow it.
        otherwise: the default in words, if the value does not say it.
        limits: as in `pydantic.Field`, such as `ge` and `lt`. In a union of a number and names the
            number has its own: `NonNegativeFloat | Literal["auto"]`.
    """
    return Field(default, json_schema_extra={"heading": heading, "otherwise": otherwise}, **limits)


_RAISED = "Value error, "
"""What pydantic puts before the message of a validator."""


class Settings(BaseModel):
    """Settings that are checked when the object is made, and never change.

    Numbers may be numpy's or torch's, also arrays without dimensions. `model_fields_set` holds the
    names that the caller gave, without those that a validator of the class fills in.

    Attributes:
        presets: sets of other defaults by name, the usual one first, for help and documents.

    Raises:
        OptionError: an unknown setting, or a value that is not allowed.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, str_min_length=1,
        use_attribute_docstrings=True, arbitrary_types_allowed=True,
    )  # fmt: skip

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, **settings: Any) -> None:
        values = {name: plain(value) for name, value in settings.items()}
        for name, value in values.items():
            if isinstance(value, int) and value.bit_length() > _BITS:
                raise OptionError(f"{name} must have at most {_BITS} bits, got a larger one")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise OptionError(_one_line(error, type(self).model_fields)) from None
        object.__setattr__(self, "__pydantic_fields_set__", set(settings))

    def record(self, *without: str) -> dict[str, Any]:
        """Return all settings but some by name, ready for JSON; a function by its own name."""
        return self.model_dump(
            mode="json", exclude=set(without), warnings=False,
            fallback=called,
        )  # fmt: skip


def called(value: Any) -> str:
    """Return the name of a function, or of an object's class; the same in every process."""
    while isinstance(value, functools.partial):
        value = value.func
    return str(getattr(value, "__name__", type(value).__name__))


class Described(NamedTuple):
    """Texts about a field, for help, documents and flags.

    Attributes:
        names: values that are allowed by name.
        kinds: types of its other values, as they are annotated.
        default: in words.
    """

    name: str
    names: tuple[str, ...]
    kinds: tuple[Any, ...]
    default: str
    help: str
    heading: str

    @property
    def text(self) -> str:
        """Help, with the allowed names that it does not mention, and the default."""
        named = all(name in self.help for name in self.names)
        choices = "" if named else f" One of {', '.join(self.names)}."
        return f"{self.help}{choices} Default: {self.default}."


@functools.cache
def described(cls: type[Settings]) -> tuple[Described, ...]:
    """Return the descriptions of all fields, in order."""
    hints, rows, heading = get_type_hints(cls), [], ""
    for name, field in cls.model_fields.items():
        extra: Any = field.json_schema_extra or {}
        heading = extra.get("heading") or heading
        members = _members(hints[name])
        names = tuple(member for member in members if isinstance(member, str))
        kinds = tuple(member for member in members if not isinstance(member, str))
        default = extra.get("otherwise") or _by_preset(cls, name, field.default)
        text = " ".join((field.description or "").split())
        rows.append(Described(name, names, kinds, default, text, heading))
    return tuple(rows)


def listing(cls: type[Settings]) -> Callable[[_Function], _Function]:
    """Add the settings of a class to the docstring of a function that takes them by keyword."""

    def decorate(function: _Function) -> _Function:
        rows = [
            textwrap.fill(
                f"{field.name}: {field.text}", 100, initial_indent=4 * " ",
                subsequent_indent=8 * " ", break_on_hyphens=False,
            )
            for field in described(cls)
        ]  # fmt: skip
        own = inspect.getdoc(function) or ""
        function.__doc__ = "\n".join([own, "", "Settings:", *rows])
        return function

    return decorate


def plain(value: Any) -> Any:
    """Return a number of numpy or torch, also in an array without dimensions, as Python's own."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def shown(value: Any) -> str:
    """Return a value as help and documents write it."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _by_preset(cls: type[Settings], name: str, default: Any) -> str:
    """Return a default in words: that of the usual preset, and those of presets that differ."""
    groups: dict[str, list[str]] = {}
    for preset, defaults in cls.presets.items():
        groups.setdefault(shown(defaults.get(name, default)), []).append(preset)
    usual, *others = groups.items() or [(shown(default), [])]
    return "; ".join([usual[0], *(f"{value} in {' and '.join(who)}" for value, who in others)])


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union, without None; names stand for a Literal."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for member in get_args(annotation) for kind in _members(member)]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [] if annotation is type(None) else [annotation]


def _one_line(error: ValidationError, names: Iterable[str]) -> str:
    """Return what is wrong with the first setting that is refused."""
    errors = error.errors(include_url=False, include_context=False)
    place = errors[0]["loc"]
    if not place:
        return errors[0]["msg"].removeprefix(_RAISED)
    name = str(place[0])
    if errors[0]["type"] == "extra_forbidden":
        return f"unknown setting '{name}'{did_you_mean(name, names)}"
    if errors[0]["type"] == "missing":
        return f"{name} must be given"
    # A union has an error for each of its members.
    wanted = [
        re.sub(rf"^({_RAISED}|\w+ should )", "", item["msg"])
        for item in errors if item["loc"][:1] == place[:1]
    ]  # fmt: skip
    must = " or ".join(dict.fromkeys(wanted)).replace(" or be ", " or ")
    return f"{name} must {must}, got {errors[0]['input']!r:.80}"


def without_effect(name: str, why: str) -> OptionError:
    """Return the error for a setting that others make idle: `with` one, or `without` one."""
    return OptionError(f"{name} has no effect {why}: leave it out, or change the other")


def is_own(text: Any) -> bool:
    """True if the model writes a text, which is no mixture: `self`, or `self:` with prompts."""
    return isinstance(text, str) and re.fullmatch(rf"{OWN}(:[^,]*)?", text) is not None


def own_parts(text: Any) -> list[str]:
    """Return the parts of a text that the model writes, with their shares."""
    parts = text.split(",") if isinstance(text, str) else []
    return [part for part in map(str.strip, parts) if is_own(part.partition("=")[0])]


def asks(text: Any) -> bool:
    """True if the model answers prompts in a text, or in a part of it."""
    return any(part.startswith(f"{OWN}:") for part in own_parts(text))


def nth_seed(seed: int, number: int) -> int:
    """Return the seed of one of many draws, a block's or a window's: other numbers in each."""
    return (seed * 1_000_003 + number) % 2**_BITS
