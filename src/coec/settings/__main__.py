"""Print docs/SETTINGS.md: all settings as Markdown tables. With the argument `typed`: typed.py."""

import sys
from collections.abc import Mapping

from coec.settings import OPTIONS, PARTS, RECIPE, TABLE, Setting
from coec.settings.fields import shown
from coec.settings.recovery import Recovery

_PREFACE = """# Settings

Each is a flag of `coec prune` (`--seq-len`), a key of a recipe or grid (`seq-len` or `seq_len`),
and an argument of `coec.prune` (`seq_len`). Defaults are those of the default preset, and of
`paper` where they differ; `coec methods` lists what every preset sets. `coec collect` holds nothing
out by default. This file is written by `python -m coec.settings`.
"""
_WORDS = {float: "number", int: "whole number", str: "text", bool: "on, off"}


def document() -> str:
    """A table for every part of a recipe, and one for every set of compensations with options."""
    groups: dict[str, tuple[str, tuple[Setting, ...]]] = {}
    for settings in PARTS:
        members = {item.name for item in settings.table()}
        described = tuple(item for item in RECIPE if item.name in members)
        groups[settings.__name__] = (settings.__doc__ or "").splitlines()[0], described
    for methods in dict.fromkeys(option.methods for option in OPTIONS):
        names = ", ".join(f"`{name}`" for name in methods)
        fields = tuple(option for option in OPTIONS if option.methods == methods)
        groups[f"Options of {names}"] = "", fields
    sections = [_PREFACE]
    for title, (intro, group) in groups.items():
        rows = "\n".join(map(_row, group))
        head = f"## {title}\n" + (f"\n{intro}\n" if intro else "")
        sections.append(f"{head}\n| setting | values | default | |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(sections)


def typed() -> str:
    """Return the source of typed.py: for all settings their types, as keyword arguments."""
    head = (
        '"""Settings as keyword arguments, for editors and type checkers.\n\n'
        'Written by `python -m coec.settings typed`.\n"""\n\n'
        "from typing import Any, Literal, TypedDict\n"
    )
    pruning = {item.name: _annotation(item) for item in TABLE}
    pruning |= {"options": "dict[str, Any]", "trust_remote_code": "bool"}
    recovery = {item.name: _annotation(item) for item in Recovery.table()}
    return (
        head
        + _typed("PruningSettings", "pruning", pruning)
        + _typed("RecoverySettings", "training", recovery)
    )


def _typed(name: str, work: str, annotations: Mapping[str, str]) -> str:
    """Return the source of one class of keyword arguments."""
    fields = "".join(f"    {field}: {annotation}\n" for field, annotation in annotations.items())
    return (
        f"\n\nclass {name}(TypedDict, total=False):\n"
        f'    """Settings of a {work}, of its text and of the machine."""\n\n{fields}'
    )


def _annotation(item: Setting) -> str:
    if item.kind is None or item.functions or item.objects:
        return "Any"
    if item.name == "multiple_of":
        return "int | str"
    if isinstance(item.kind, tuple):
        names = ", ".join(f'"{name}"' for name in item.kind)
        plain = f"Literal[{names}]"
    else:
        plain = item.kind.__name__
    if item.words:
        plain += " | Literal[{}]".format(", ".join(f'"{word}"' for word in item.words))
    return f"{plain} | None" if item.default is None else plain


def _row(item: Setting) -> str:
    if isinstance(item.kind, tuple):
        values = ", ".join(f"`{value}`" for value in item.kind)
    else:
        values = _WORDS[item.kind] if item.kind else "anything"
    values = ", ".join((values, *(f"`{word}`" for word in item.words)))
    default = item.otherwise or (shown if item.kind is bool else "`{}`".format)(item.default)
    return f"| `{item.name}` | {values} | {default} | {item.help} |"


if __name__ == "__main__":
    print(typed() if sys.argv[1:] == ["typed"] else document(), end="")
