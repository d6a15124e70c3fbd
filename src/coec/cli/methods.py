"""`coec methods`."""

import inspect
import json
from collections.abc import Callable
from typing import Any

from coec.cli.common import Json, results
from coec.settings import Preset


def methods_command(as_json: Json = False) -> None:
    """List presets, selections, compensations with their options, and architectures."""
    from coec.compensation import COMPENSATIONS
    from coec.models.architectures import ARCHITECTURES
    from coec.selection import SELECTIONS
    from coec.settings import PRESETS

    listing: dict[str, dict[str, Any]] = {
        "presets": {name: _of_preset(preset) for name, preset in PRESETS.items()},
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


def _of_preset(preset: Preset) -> str:
    """What it is for, and what it sets."""
    shown = {k: str(v).lower() if isinstance(v, bool) else v for k, v in preset.settings.items()}
    settings = ", ".join(f"{name} = {value}" for name, value in shown.items())
    return f"{preset.about.rstrip('.')}{settings and f' [{settings}]'}"


def _described(f: Callable[..., Any]) -> str:
    """A docstring's first line, and its source."""
    doc = inspect.getdoc(f) or ""
    source = doc.partition("Source: ")[2].partition("\n")[0].rstrip(".")
    return f"{doc.splitlines()[0].rstrip('.')} [{source}]"
