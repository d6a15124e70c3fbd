"""Lines of a journal: the identity of its run, and its finished pieces."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coec.execution.output import NEW, WORK
from coec.models.files import JsonDict, sha256

RunIdentity = JsonDict
"""Everything that determines a result, JSON-ready; models and texts by digests of their content."""
_DIGEST = "line_sha256"
"""Key of a line's own digest, in every line."""
_NAMED = 3
"""Number of differing settings that a refusal names."""


@dataclass(frozen=True)
class JournalEntry:
    """A finished piece of a run, or a note without a file.

    Attributes:
        name: the piece.
        file: its path inside `OUT.partial/`; NEW itself for a note.
        bytes: size of the file.
        sha256: digest of the file.
        facts: kept with the piece, JSON-ready.
    """

    name: str
    file: str
    bytes: int
    sha256: str
    facts: JsonDict

    @classmethod
    def of_file(cls, name: str, path: Path, file: str, facts: JsonDict) -> "JournalEntry":
        """Describe the file at `path`."""
        return cls(name, file, path.stat().st_size, sha256(path), facts)

    @classmethod
    def from_json(cls, content: JsonDict) -> "JournalEntry":
        """Read an entry; raises ValueError or TypeError unless a journal could have written it."""
        entry = cls(**content)
        for name, expected in cls.__annotations__.items():
            if not isinstance(getattr(entry, name), dict if name == "facts" else expected):
                raise ValueError(f"{name} has another type")
        folders = Path(entry.file).parts
        if not folders or folders[0] not in (NEW, WORK) or ".." in folders:
            raise ValueError("the file lies elsewhere")
        return entry

    def describes(self, path: Path) -> bool:
        """True if the file at `path` is unchanged; a file of another size is not read."""
        return path.stat().st_size == self.bytes and sha256(path) == self.sha256


def encode_line(content: JsonDict) -> bytes:
    """Write a line of the journal, which carries the digest of its content."""
    return (json.dumps(content | {_DIGEST: seal(content)}, allow_nan=False) + "\n").encode()


def decode_line(line: bytes) -> JsonDict:
    """Read a line; raises ValueError, KeyError or TypeError if it was changed."""
    content: JsonDict = json.loads(line)
    if not isinstance(content, dict) or content.pop(_DIGEST) != seal(content):
        raise ValueError("it was changed")
    return content


def seal(content: JsonDict) -> str:
    """SHA-256 of JSON content."""
    return hashlib.sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()


def describe_differences(before: RunIdentity, after: RunIdentity) -> str:
    """Name the settings in which two runs differ; empty if there are none."""
    old, new = _flat(before), _flat(after)
    places = [place for place in {**new, **old} if old.get(place) != new.get(place)]
    words = [
        f"{place[-1]} was {_short(old.get(place))}, now {_short(new.get(place))}"
        for place in places[:_NAMED]
    ]
    if len(places) > _NAMED:
        words.append(f"and {len(places) - _NAMED} more")
    return ", ".join(words)


def _flat(identity: RunIdentity, *above: str) -> dict[tuple[str, ...], Any]:
    """Key nested settings by their place, so that two of one name stay apart."""
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in identity.items():
        flat |= _flat(value, *above, name) if isinstance(value, dict) else {(*above, name): value}
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:12]}…"
