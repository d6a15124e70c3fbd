"""Write what is made of the package's own tables: the settings, and the loaders of checkpoints.

python tools/tables.py settings > docs/SETTINGS.md
python tools/tables.py loaders  (a table in docs/FORMATS.md)

Tests compare the documents with what these commands print.
"""

import argparse
import textwrap
from collections.abc import Callable
from typing import Any, get_origin

from coec.config import Described, described, shown
from coec.config.recipe import PRESETS, CoecOptions, Recipe, RidgeOptions
from coec.models.architectures import ARCHITECTURES
from coec.models.formats import LOADERS

_PREFACE = """# Settings

Each is a flag of `coec prune` (`--seq-len`), a key of a file for `--config` (`seq-len` or
`seq_len`), and an argument of `coec.prune` (`seq_len`). This file is written by
`python tools/tables.py settings`.
"""
_WORDS = {float: "number", int: "whole number", str: "text", bool: "on, off"}
_ROWS = "| setting | values | default | |\n|---|---|---|---|\n"
CONDITIONS = {
    "non_uniform": "widths by block",
    "non_uniform_heads": "heads by block",
    "odd_channels": "odd channels",
    "odd_experts": "odd experts",
    "fewer_heads": "fewer heads",
    "output_bias": "a bias of `o_proj`",
    "down_bias": "a bias of `down_proj`",
    "new_biases": "new biases",
    "sliding": "a short window",
    "llama3_positions": "llama3 positions",
    "kinds_moved": "dropped blocks",
}
"""Short names of the conditions of loaders.toml; the page explains them."""


def settings() -> str:
    """Return a table for every heading of help, and one for the options of each compensation."""
    fields = [f for f in described(Recipe) if f.name not in ("options", "trust_remote_code")]
    groups: dict[str, list[Described]] = {
        heading: [] for heading in dict.fromkeys(field.heading for field in fields)
    }
    for field in fields:
        groups[field.heading].append(field)
    groups["Options of `coec`"] = list(described(CoecOptions))
    groups["Options of `least-squares`, `ridge-to-slice`"] = list(described(RidgeOptions))
    presets = "| preset | | defaults |\n|---|---|---|\n" + "\n".join(
        f"| `{name}` | {about} | {', '.join(f'{n} = {shown(v)}' for n, v in brought.items())} |"
        for name, (about, brought) in PRESETS.items()
    )
    tables = [
        f"## {title}\n\n{_ROWS}" + "\n".join(map(_row, members)) + "\n"
        for title, members in groups.items()
    ]
    return "\n".join([_PREFACE, f"## Presets\n\n{presets}\n", *tables])


def _row(field: Described) -> str:
    kinds = [
        "function" if get_origin(kind) is Callable else _WORDS.get(kind, "anything")
        for kind in field.kinds
    ]
    values = ", ".join(dict.fromkeys([*kinds, *(f"`{name}`" for name in field.names)]))
    return f"| `{field.name}` | {values} | {field.default} | {field.help} |"


def loaders() -> str:
    """Return a row for every loader of checkpoints, and its exceptions as a list."""
    rows = ["| loader | checked | types that were tried |", "|---|---|---|"]
    shared: dict[str, list[str]] = {}
    for loader in LOADERS.values():
        rows.append(f"| {loader.name} | {loader.checked} | {_types(loader.types)} |")
        for case in loader.exceptions:
            types = [] if case.types is None else [_listed(case.types)]
            exception = f"{' with '.join([*types, *_condition(case.when)])}: {case.verdict}"
            shared.setdefault(exception, []).append(loader.name)
    groups: dict[str, list[str]] = {}
    for exception, names in shared.items():
        groups.setdefault(", ".join(names), []).append(exception)
    return "\n".join([*rows, "", *(_bullets(name, group) for name, group in groups.items())]) + "\n"


def _types(types: tuple[str, ...] | None) -> str:
    """Name the types, or the others with a table where these are fewer."""
    others = [name for name in ARCHITECTURES if name not in (types or ())]
    if types is None or len(others) >= len(types):
        return _listed(types)
    inferred = [name for name in types if name not in ARCHITECTURES]
    tabled = f"all with a table but {', '.join(others)}"
    return f"{tabled}; {', '.join(inferred)}" if inferred else tabled


def _listed(types: tuple[str, ...] | None) -> str:
    return "every type" if types is None else ", ".join(types)


def _condition(name: str | None) -> list[str]:
    return [CONDITIONS[name]] if name else []


def _bullets(name: str, exceptions: list[str]) -> str:
    """List exceptions under the names of the loaders, in lines of a document."""
    lines = [f"- **{name}**"] if len(exceptions) > 1 else []
    for exception in exceptions:
        head = "    - " if lines else f"- **{name}**: "
        indent = "      " if lines else "  "
        lines += textwrap.wrap(
            exception, 115, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
        )
    return "\n".join(lines)


WRITERS: dict[str, Any] = {"settings": settings, "loaders": loaders}


def main() -> None:
    """Print the table that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("table", choices=list(WRITERS))
    print(WRITERS[parser.parse_args().table](), end="")


if __name__ == "__main__":
    main()
