"""Write what is made of the package's own tables: documents on them, and types for editors.

python tools/tables.py settings > docs/SETTINGS.md
python tools/tables.py typed > src/coec/settings/typed.py
python tools/tables.py loaders  (a table in docs/FORMATS.md)

Tests compare what is written with what these commands print.
"""

import argparse
from collections.abc import Iterable, Mapping

from coec.settings import OPTIONS, PARTS, RECIPE, TABLE, Setting
from coec.settings.fields import shown

from coec.models.architectures import packaged
from coec.models.formats import LOADERS

_PREFACE = """# Settings

Each is a flag of `coec prune` (`--seq-len`), a key of a recipe (`seq-len` or `seq_len`),
and an argument of `coec.prune` (`seq_len`). Defaults are those of the default preset, and of
`paper` where they differ; `coec methods` lists what every preset sets. `coec collect` sets
no windows aside by default. This file is written by `python tools/tables.py settings`.
"""
_WORDS = {float: "number", int: "whole number", str: "text", bool: "on, off"}
_TYPED = '''"""Settings as keyword arguments, for editors and type checkers.

Written by `python tools/tables.py typed`.
"""

from typing import Any, Literal, TypedDict
'''


def settings() -> str:
    """Return a table for every part of a recipe, and one for every set of methods with options."""
    groups: dict[str, tuple[str, tuple[Setting, ...]]] = {}
    for part in PARTS:
        members = {item.name for item in part.table()}
        described = tuple(item for item in RECIPE if item.name in members)
        groups[part.__name__] = (part.__doc__ or "").splitlines()[0], described
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


def _row(item: Setting) -> str:
    if isinstance(item.kind, tuple):
        values = ", ".join(f"`{value}`" for value in item.kind)
    else:
        values = _WORDS[item.kind] if item.kind else "anything"
    values = ", ".join((values, *(f"`{word}`" for word in item.words)))
    default = item.otherwise or (shown if item.kind is bool else "`{}`".format)(item.default)
    return f"| `{item.name}` | {values} | {default} | {item.help} |"


def typed() -> str:
    """Return the source of typed.py: the types of all settings, as keyword arguments."""
    apart = {"options": "dict[str, Any]", "trust_remote_code": "bool"}
    return _TYPED + _class(
        "PruningSettings", "a pruning, of its text and of the machine", TABLE, apart
    )


def _class(
    name: str, of_what: str, table: Iterable[Setting], apart: Mapping[str, str] | None = None
) -> str:
    """Return the source of one class of keyword arguments, with some that are no settings."""
    annotations = {**{item.name: _annotation(item) for item in table}, **(apart or {})}
    fields = "".join(f"    {field}: {annotation}\n" for field, annotation in annotations.items())
    return (
        f'\n\nclass {name}(TypedDict, total=False):\n    """Settings of {of_what}."""\n\n{fields}'
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


def loaders() -> str:
    """Return a row for every loader of checkpoints, with its versions and exceptions."""
    conditions = packaged("loaders.toml")["conditions"]

    def listed(types: tuple[str, ...] | None) -> str:
        return "every type" if types is None else ", ".join(types)

    lines = [
        "| loader | checked | types that were tried | loads them, except |",
        "|---|---|---|---|",
    ]
    for loader in LOADERS.values():
        exceptions = "; ".join(
            f"{listed(case.types)}{f' where {conditions[case.when]}' if case.when else ''}: "
            f"{case.verdict}"
            for case in loader.exceptions
        )
        types = listed(loader.types)
        lines.append(f"| {loader.name} | {loader.checked} | {types} | {exceptions} |")
    return "\n".join(lines) + "\n"


_WRITERS = {"settings": settings, "typed": typed, "loaders": loaders}


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("table", choices=_WRITERS)
    print(_WRITERS[parser.parse_args().table](), end="")


if __name__ == "__main__":
    main()
