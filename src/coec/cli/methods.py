"""`coec methods`."""

import inspect
import json
from collections.abc import Callable
from typing import Any

from coec.cli.common import Json, results


def methods_command(as_json: Json = False) -> None:
    """List selections, compensations with their options, and architectures; the source of each."""
    from coec.compensation import COMPENSATIONS
    from coec.models.architectures import ARCHITECTURES
    from coec.selection import SELECTIONS

    listing: dict[str, dict[str, Any]] = {
        "selections": {name: _described(f) for name, f in SELECTIONS.items()},
        "compensations": {name: _described(m.function) for name, m in COMPENSATIONS.items()},
        "architectures": {
            a.model_type: f"{a.families} [{a.source}]" for a in ARCHITECTURES.values()
        },
        "options": {
            name: {one.name: one.text for one in m.settings} for name, m in COMPENSATIONS.items()
        },
    }
    if as_json:
        print(json.dumps(listing))
        return
    options = listing.pop("options")
    for kind, entries in listing.items():
        results.print(f"[bold]{kind}[/bold]")
        for name, line in entries.items():
            results.print(f"  {name:<16} {line}", markup=False)
            if kind == "compensations" and options[name]:
                results.print(f"    options: {', '.join(options[name])}", markup=False)


def _described(f: Callable[..., Any]) -> str:
    """A docstring's first line, and its source."""
    doc = inspect.getdoc(f) or ""
    source = doc.partition("Source: ")[2].partition("\n")[0].rstrip(".")
    return f"{doc.splitlines()[0].rstrip('.')} [{source}]"
