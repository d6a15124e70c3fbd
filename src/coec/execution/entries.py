"""What a journal's lines say: which run it is of, and its finished pieces."""

import hashlib
import json
from pathlib import Path
from typing import Any

from coec.execution.output import NEW, WORK

Identity = dict[str, Any]
"""What determines a result, JSON-ready, models and texts by digests of their content."""
SEAL = "line_sha256"
"""The key of a line's own digest, in every line."""
SHOWN = 3
"""How many of the settings that differ a refusal names."""


def sealed(entry: dict[str, Any]) -> bytes:
    """A line of the journal, which carries the digest of what it says."""
    return (json.dumps(entry | {SEAL: seal(entry)}, allow_nan=False) + "\n").encode()


def unsealed(line: bytes) -> dict[str, Any]:
    """What a line says; raises ValueError, KeyError or TypeError unless it is as it was written."""
    entry = json.loads(line)
    if not isinstance(entry, dict) or entry.pop(SEAL) != seal(entry):
        raise ValueError("it was changed")
    return entry


def seal(entry: dict[str, Any]) -> str:
    """SHA-256 of what an entry says."""
    return hashlib.sha256(json.dumps(entry, allow_nan=False).encode()).hexdigest()


def checked(entry: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError unless an entry has what `put` writes, its file inside the folder."""
    kinds = {"name": str, "file": str, "bytes": int, "sha256": str, "facts": dict}
    for name, kind in kinds.items():
        if not isinstance(entry[name], kind):
            raise ValueError(f"{name} is no {kind.__name__}")
    parts = Path(entry["file"]).parts
    if not parts or parts[0] not in (NEW, WORK) or ".." in parts:
        raise ValueError("the file lies elsewhere")
    return entry


def what_differs(begun: Identity, asked: Identity) -> str:
    """What differs between the run that was begun and this one, in words; empty where nothing."""
    old, new = _flat(begun), _flat(asked)
    places = [place for place in {**new, **old} if old.get(place) != new.get(place)]
    said = [
        f"{place[-1]} was {_short(old.get(place))}, now {_short(new.get(place))}"
        for place in places[:SHOWN]
    ]
    if len(places) > SHOWN:
        said.append(f"and {len(places) - SHOWN} more")
    return ", ".join(said)


def _flat(identity: Identity, *above: str) -> dict[tuple[str, ...], Any]:
    """Nested settings by their place: two of one name are two."""
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in identity.items():
        flat |= _flat(value, *above, name) if isinstance(value, dict) else {(*above, name): value}
    return flat


def _short(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 40 else f"{shown[:12]}…"
