"""Write what is made of the package's own tables: the settings, and the loaders of checkpoints.

python tools/tables.py settings > docs/SETTINGS.md
python tools/tables.py loaders  (a table in docs/FORMATS.md)

Tests compare the documents with what these commands print.
"""

import argparse
from typing import Any

from coec.config import Described, described, shown
from coec.config.recipe import PRESETS, CoecOptions, Recipe, RidgeOptions
from coec.models.architectures import packaged
from coec.models.formats import LOADERS

_PREFACE = """# Settings

Each is a flag of `coec prune` (`--seq-len`), a key of a file for `--config` (`seq-len` or
`seq_len`), and an argument of `coec.prune` (`seq_len`). This file is written by
`python tools/tables.py settings`.
"""
_WORDS = {float: "number", int: "whole number", str: "text", bool: "on, off"}
_ROWS = "| setting | values | default | |\n|---|---|---|---|\n"


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
    kinds = [_WORDS.get(kind, "anything") for kind in field.kinds]
    values = ", ".join(dict.fromkeys([*kinds, *(f"`{name}`" for name in field.names)]))
    return f"| `{field.name}` | {values} | {field.default} | {field.help} |"


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


WRITERS: dict[str, Any] = {"settings": settings, "loaders": loaders}


def main() -> None:
    """Print the table that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("table", choices=list(WRITERS))
    print(WRITERS[parser.parse_args().table](), end="")


if __name__ == "__main__":
    main()
