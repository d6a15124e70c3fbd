"""`coec methods`."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.text import Text

from coec.cli.common import JSON, show
from coec.cli.flags import with_flags
from coec.config import described, shown
from coec.config.recipe import PRESETS


@with_flags(JSON)
def methods_command(**flags: Any) -> None:
    """List presets, selections, compensations and architectures."""
    from coec.methods import COMPENSATIONS
    from coec.methods.selection import SELECTIONS
    from coec.models.architectures import ARCHITECTURES

    options = {
        name: {row.name: row.text for row in described(method.settings)}
        for name, method in COMPENSATIONS.items()
    }
    listing: dict[str, dict[str, str]] = {
        "presets": {name: _preset(*preset) for name, preset in PRESETS.items()},
        "selections": {name: _described(score) for name, score in SELECTIONS.items()},
        "compensations": {name: _described(m.function) for name, m in COMPENSATIONS.items()},
        "architectures": {
            a.model_type: f"{a.families} [{a.source}]" for a in ARCHITECTURES.values()
        },
    }
    show({**listing, "options": options}, _lines(listing, options), flags["json"])


def _lines(
    listing: Mapping[str, Mapping[str, str]], options: Mapping[str, Mapping[str, str]]
) -> Iterator[str | Text]:
    for heading, entries in listing.items():
        yield Text(heading, "bold")
        for name, line in entries.items():
            yield f"  {name:<16} {line}"
            if heading == "compensations" and options[name]:
                yield f"    options: {', '.join(options[name])}"


def _preset(about: str, settings: Mapping[str, Any]) -> str:
    brought = ", ".join(f"{name} = {shown(value)}" for name, value in settings.items())
    return f"{about.rstrip('.')}{brought and f' [{brought}]'}"


def _described(function: Callable[..., object]) -> str:
    doc = inspect.getdoc(function) or ""
    # The first line of a docstring says what, its "Source:" from where.
    source = doc.partition("Source: ")[2].partition("\n")[0].rstrip(".")
    return f"{doc.splitlines()[0].rstrip('.')} [{source}]"
