"""The journal of a run: finished work is on the disk, and the same command continues from there.

A finished piece of work is one file in `OUT.partial/`: written under another name, synced, renamed,
and then recorded with its digest in `journal.jsonl`, whose first line identifies the run. Whatever
ends the run, SIGKILL and a power cut included, at most the current piece is lost. A piece counts
when it is recorded and its file agrees with the record; everything else is removed when the run
continues. A line carries its own digest, since no other file may have the facts that it records.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from coec.checkpoint import folder as output
from coec.checkpoint.folder import JOURNAL, NEW, STATES, WORK, sync, writing
from coec.errors import OutputError, UnfinishedError
from coec.events import record
from coec.models.files import JsonDict, Kept, read_tensors, sha256, write_tensors

RunIdentity = JsonDict
"""Everything that determines a result, JSON-ready; models and texts by digests of their content."""
_DIGEST = "line_sha256"
"""Key of a line's own digest, in every line."""
_SHOWN = 3
"""Number of differing settings that a refusal names."""
_UNFINISHED = ".writing"
"""Suffix of a file until it is complete."""
_PLACING = "placing"
"""Name of the note that only the rename of the folder to OUT remains."""


@dataclass(frozen=True)
class JournalEntry:
    """A finished piece of a run, or a note without a file.

    Attributes:
        file: path inside `OUT.partial/`; NEW itself for a note.
        facts: kept with the piece, JSON-ready.
    """

    name: str
    file: str
    bytes: int
    sha256: str
    facts: JsonDict

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


class Journal:
    """The finished pieces of one run; made by `journal`.

    Attributes:
        out: the folder to make.
        partial: the folder in which it is prepared.
        new: becomes `out`.
        work: holds other pieces, which are removed in the end.
        finished: whether an earlier run had put `out` in place, and was killed then.
        resumed: whether an earlier run has left finished pieces.
    """

    def __init__(self, out: Path, partial: Path, identity: RunIdentity, force: bool) -> None:
        self.out, self.partial, self._force = out, partial, force
        self.new, self.work = partial / NEW, partial / WORK
        self._path = partial / JOURNAL
        self._entries: dict[str, JournalEntry] = {}
        self.finished = self._read(identity)
        if not self.finished:
            output.check_replaceable(out, force)
            self._drop_unfinished()
        self.resumed = bool(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def path(self, name: str) -> Path:
        """The file of a finished piece."""
        return self.partial / self._entries[name].file

    def facts(self, name: str) -> JsonDict:
        """The facts recorded with a finished piece."""
        return self._entries[name].facts

    def every(self, fact: str) -> list[Any]:
        """The values of a fact in all finished pieces that have it."""
        return [e.facts[fact] for e in self._entries.values() if fact in e.facts]

    def put(self, name: str, path: Path, write: Callable[[Path], None], **facts: Any) -> None:
        """Finish a piece; return when it is on the disk.

        Args:
            name: identifies the piece.
            path: its file, in `new` or in `work`.
            write: writes the file that it is given.
            facts: kept with the piece, JSON-ready.

        Raises:
            OutputError: the disk refuses.
        """
        # Written under another name → synced → renamed → folder synced → recorded. A crash before
        # the record leaves a file without an entry, which the next run removes.
        temporary = path.with_name(path.name + _UNFINISHED)
        with writing(self.out):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            sync(temporary)
            os.rename(temporary, path)
            sync(path.parent)
            file = path.relative_to(self.partial).as_posix()
            self._append(JournalEntry(name, file, path.stat().st_size, sha256(path), facts))

    def put_tensors(self, name: str, tensors: Mapping[str, Tensor], **facts: Any) -> None:
        """Finish a piece of tensors, in `work`."""
        path = self.work / f"{name.replace(' ', '-')}.safetensors"
        self.put(name, path, functools.partial(write_tensors, dict(tensors)), **facts)

    def tensors(self, name: str) -> Kept | None:
        """Return the tensors and facts of such a piece; None if it is not finished."""
        return (read_tensors(self.path(name)), self.facts(name)) if name in self else None

    def once(self, name: str, make: Callable[[], Kept]) -> Kept:
        """Return the tensors and facts that are kept under a name; make and keep them first."""
        kept = self.tensors(name)
        if kept is None:
            tensors, facts = kept = make()
            self.put_tensors(name, tensors, **facts)
        return kept

    def note(self, name: str, **facts: Any) -> None:
        """Record facts without a file; return when they are on the disk."""
        with writing(self.out):
            self._append(JournalEntry(name, NEW, 0, "", facts))

    def recorded(self) -> dict[str, tuple[int, str]]:
        """Size and SHA-256 of every finished piece in `new`, by path."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.file)
        inside = [entry for entry in entries if entry.file.startswith(f"{NEW}/")]
        return {e.file.removeprefix(f"{NEW}/"): (e.bytes, e.sha256) for e in inside}

    def remove(self, name: str) -> None:
        """Delete the file of a piece whose content is in another piece by now."""
        self.path(name).unlink(missing_ok=True)
        # The line stays: a later run finds no file and drops the entry by itself.
        del self._entries[name]

    def complete(self) -> None:
        """Turn `new` into `out`, in one rename; OutputError where something appeared there.

        The journal goes at the end of `journal`: until then a killed run is known to be complete.
        """
        try:
            with writing(self.out):
                # All content is durable before the note, and the note before the rename: a run that
                # finds the note and no `new` knows that the rename was done.
                for path in [self.new, *self.new.rglob("*")]:
                    sync(path)
                self.note(_PLACING)
                output.publish(self.partial, self.out, self._force)
        except BaseException:
            if not self.new.exists():
                output.empty(self.partial)
            raise

    def _read(self, identity: RunIdentity) -> bool:
        """Take up the pieces of an earlier run, or begin; return whether that run was complete."""
        content = self._path.read_bytes() if self._path.is_file() else b""
        lines = content[: content.rfind(b"\n") + 1]  # a torn last line is dropped
        if not lines:
            self._begin(identity)
            return False
        begun = self._parse(lines)
        # Killed after the rename: the note, no `new`, and OUT as it was recorded.
        placed = _PLACING in self._entries and not self.new.exists() and self._in_place()
        # Through JSON, as the first line went: tuples are lists there.
        differences = describe_differences(begun, json.loads(json.dumps(identity)))
        if differences and (placed or not self._entries):  # nothing is lost
            self._begin(identity)
            return False
        if differences:
            raise UnfinishedError(
                f"an unfinished run into '{self.out}' was asked for something else ({differences}):"
                " ask for the same to continue it, or pass restart=True to throw it away"
            )
        # A line appended after a torn line would become part of it.
        if len(lines) < len(content):
            with self._path.open("r+b") as file:
                file.truncate(len(lines))
            sync(self._path)
        return placed

    def _parse(self, lines: bytes) -> RunIdentity:
        identity: RunIdentity = {}
        for number, line in enumerate(lines.splitlines(), start=1):
            try:
                content = json.loads(line)
                if not isinstance(content, dict) or content.pop(_DIGEST) != seal(content):
                    raise ValueError("it was changed")
                if number == 1:
                    identity = dict(content["identity"])
                    continue
                entry = JournalEntry.from_json(content)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UnfinishedError(
                    f"'{self._path}', line {number}, is damaged: pass restart=True to begin anew"
                ) from error
            self._entries[entry.name] = entry
        return identity

    def _begin(self, identity: RunIdentity) -> None:
        output.empty(self.partial)
        self._entries.clear()
        self._write({"identity": identity}, "wb")
        sync(self.partial)
        sync(self.partial.parent)

    def _drop_unfinished(self) -> None:
        """Remove files without an entry, and forget entries whose file is gone or was changed."""
        # A note that is found here belonged to a rename that was not done.
        self._entries.pop(_PLACING, None)
        for name, entry in list(self._entries.items()):
            path = self.path(name)
            if entry.file == NEW:
                continue  # a note
            if not path.is_file():
                del self._entries[name]  # it had been removed because another piece has it
            elif not _is_unchanged(path, entry.bytes, entry.sha256):
                del self._entries[name]
                record(f"'{path}' is not what was written: it is made again")
        for folder in (self.new, self.work):
            folder.mkdir(exist_ok=True)
        pieces = {self.path(name) for name in self._entries}
        for path in sorted(p for top in (self.new, self.work) for p in top.rglob("*")):
            if (path.is_file() or path.is_symlink()) and path not in pieces:
                path.unlink()

    def _in_place(self) -> bool:
        """True if `out` holds every piece of `new`, unchanged."""
        pieces = self.recorded().items()
        return all(_is_unchanged(self.out / file, *recorded) for file, recorded in pieces)

    def _append(self, entry: JournalEntry) -> None:
        self._write(vars(entry), "ab")
        self._entries[entry.name] = entry

    def _write(self, content: JsonDict, mode: str) -> None:
        with self._path.open(mode) as file:
            file.write(encode_line(content))
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def journal(
    out: Path, identity: RunIdentity, *, force: bool = False, restart: bool = False
) -> Iterator[Journal]:
    """Open the journal of a run that makes the folder `out`, for this process alone.

    If the run ends before its first piece, nothing is left. Otherwise finished pieces stay, and the
    error has a note that says so.

    Args:
        out: the folder to make.
        identity: determines the result.
        force: replace the model that `out` holds.
        restart: throw away the pieces of an earlier run.

    Raises:
        OutputError: another run works on `out`, an earlier one was asked for something else, `out`
            holds no model that could be replaced or appeared in the meantime, or the disk refuses.
    """
    out = output.resolved(out)
    with output.claimed(out) as partial:
        opened: Journal | None = None
        try:
            if restart:
                output.empty(partial)
            opened = Journal(out, partial, identity, force)
            yield opened
        except BaseException as error:
            # BaseException: an interrupt, too, leaves finished pieces, or nothing.
            if not _has_pieces(partial):
                with contextlib.suppress(OSError):
                    output.empty(partial)
            elif opened is not None or not isinstance(error, OutputError):
                error.add_note(f"what is finished is kept in '{partial}'")
            raise
        if opened.finished or not opened.new.exists():
            output.empty(partial)


def _is_unchanged(path: Path, size: int, digest: str) -> bool:
    """True if a file is as it was recorded; one of another size is not read."""
    return path.is_file() and path.stat().st_size == size and sha256(path) == digest


def _has_pieces(partial: Path) -> bool:
    """True if a journal has more than its first line, readable or not, and there is a file."""
    kept = (path for top in (NEW, WORK, STATES) for path in (partial / top).rglob("*"))
    try:
        return (partial / JOURNAL).read_bytes().count(b"\n") > 1 and any(map(Path.is_file, kept))
    except FileNotFoundError:
        return False
    except OSError:
        return True  # it may have pieces


def unfinished(out: Path) -> bool:
    """True if an earlier run into `out` has left pieces to continue from."""
    return (output.partial_of(output.resolved(out)) / JOURNAL).is_file()


def encode_line(content: JsonDict) -> bytes:
    """Write a line of the journal, which carries the digest of its content."""
    return (json.dumps(content | {_DIGEST: seal(content)}, allow_nan=False) + "\n").encode()


def seal(content: JsonDict) -> str:
    """SHA-256 of JSON content."""
    return hashlib.sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()


def describe_differences(before: RunIdentity, after: RunIdentity) -> str:
    """Name the settings in which two runs differ; empty if there are none."""
    if len(before.keys() & after.keys()) <= 1 < len(before):  # but for the machine
        return "by another command"
    old, new = _flat(before), _flat(after)
    places = [place for place in {**new, **old} if old.get(place) != new.get(place)]
    # A pruning and its training may share a setting, which one of them writes as text.
    words = {
        (place[-1], str(old.get(place)), str(new.get(place))): f"{place[-1]} was "
        f"{_short(old.get(place))}, now {_short(new.get(place))}"
        for place in places
    }
    shown = list(words.values())[:_SHOWN]
    if len(words) > _SHOWN:
        shown.append(f"and {len(words) - _SHOWN} more")
    return ", ".join(shown)


def _flat(identity: RunIdentity, *above: str) -> dict[tuple[str, ...], Any]:
    """Key nested settings by their place, so that two of one name stay apart."""
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in identity.items():
        flat |= _flat(value, *above, name) if isinstance(value, dict) else {(*above, name): value}
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:12]}…"
