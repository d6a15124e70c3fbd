"""The journal of a run: what is finished is on the disk, and the same command goes on from there.

A finished piece of work is one file in `OUT.partial/`: written under another name, synced, renamed,
and then recorded with its digest in `journal.jsonl`, whose first line says what the run was asked
for. Whatever ends the run, SIGKILL and a power cut included, at most the piece in hand is lost. A
piece counts when it is recorded and its file is what the record says; everything else is removed
when the run goes on. A line carries its own digest: what it records may be in no other file.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coec.errors import NumericalError, OptionError, OutputError, UnfinishedError
from coec.events import record
from coec.execution.entries import Identity, checked, sealed, unsealed, what_differs
from coec.execution.output import (
    JOURNAL,
    NEW,
    WORK,
    check_replaceable,
    claimed,
    empty,
    partial_of,
    publish,
    resolved,
    sync,
    unwritable,
)
from coec.models.files import sha256

WRITING = ".writing"
"""The suffix of a file until it is complete."""
PLACING = "placing"
"""The name of the entry that says that all is done but to rename the folder to OUT."""
SWEPT = "swept"
"""The fact that a piece was written by other means than `put`."""
AGAIN = (NumericalError, OptionError)
"""Errors that the same command would meet again: what was finished before is of no use then."""


class Journal:
    """The finished pieces of one run; made by `journal`.

    Attributes:
        out: the folder to make.
        partial: where work goes on.
        new: what will be `out`.
        work: other pieces, gone in the end.
        finished: whether an earlier run had put `out` in place already, and was killed then.
        resumed: whether an earlier run has left finished pieces.
    """

    def __init__(self, out: Path, partial: Path, identity: Identity, force: bool) -> None:
        self.out, self.partial, self._force = out, partial, force
        self.new, self.work = partial / NEW, partial / WORK
        self._path = partial / JOURNAL
        self._entries: dict[str, dict[str, Any]] = {}
        self.finished = self._read(identity)
        if not self.finished:
            check_replaceable(out, force)
            self._drop_the_unfinished()
        self.resumed = bool(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def path(self, name: str) -> Path:
        """The file of a finished piece."""
        return self.partial / str(self._entries[name]["file"])

    def facts(self, name: str) -> dict[str, Any]:
        """What was recorded with a finished piece."""
        facts: dict[str, Any] = self._entries[name]["facts"]
        return facts

    def every(self, fact: str) -> list[Any]:
        """What was recorded under a name, of all finished pieces that have it."""
        return [e["facts"][fact] for e in self._entries.values() if fact in e["facts"]]

    def put(self, name: str, path: Path, write: Callable[[Path], None], **facts: Any) -> None:
        """Finishes a piece; returns when it is on the disk.

        Args:
            name: of the piece.
            path: of its file, in `new` or in `work`.
            write: writes the file that it is given.
            facts: kept with it, JSON-ready.

        Raises:
            OutputError: the disk refuses.
        """
        temporary = path.with_name(path.name + WRITING)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            sync(temporary)
            os.rename(temporary, path)
            sync(path.parent)
            self._append(_entry(name, path.relative_to(self.partial).as_posix(), path, facts))
        except OSError as error:
            raise unwritable(self.out, error) from error

    def note(self, name: str, **facts: Any) -> None:
        """Records something that has no file of its own; returns when it is on the disk.

        Raises:
            OutputError: the disk refuses.
        """
        try:
            self._append({"name": name, "file": NEW, "bytes": 0, "sha256": "", "facts": facts})
        except OSError as error:
            raise unwritable(self.out, error) from error

    def recorded(self) -> dict[str, tuple[int, str]]:
        """Size and SHA-256 of every file in `new`, by path; what is no piece becomes one.

        Raises:
            OutputError: the disk refuses.
        """
        put = {e["file"]: e for e in self._entries.values() if SWEPT not in e["facts"]}
        files: dict[str, tuple[int, str]] = {}
        try:
            for path in sorted(path for path in self.new.rglob("*") if path.is_file()):
                name, file = (path.relative_to(top).as_posix() for top in (self.new, self.partial))
                entry = put.get(file)
                if entry is None:
                    sync(path)
                    entry = _entry(name, file, path, {SWEPT: True})
                    self._append(entry)
                files[name] = entry["bytes"], entry["sha256"]
        except OSError as error:
            raise unwritable(self.out, error) from error
        return files

    def remove(self, name: str) -> None:
        """Deletes the file of a piece that is in another one by now."""
        self.path(name).unlink(missing_ok=True)
        del self._entries[name]

    def complete(self) -> None:
        """Makes `new` to `out`, in one rename.

        Raises:
            OutputError: something appeared at `out`, or the disk refuses.
        """
        try:
            for path in [self.new, *self.new.rglob("*")]:
                sync(path)
            self.note(PLACING)
            publish(self.partial, self.out, self._force)
        except OSError as error:
            raise unwritable(self.out, error) from error
        finally:
            if not self.new.exists():
                empty(self.partial)

    def elsewhere(self) -> None:
        """Says that all of `new` is in another place: nothing is needed here any more."""
        self.finished = True

    def _read(self, identity: Identity) -> bool:
        """Takes up what an earlier run left, or begins; whether that run had come to its end.

        Raises:
            UnfinishedError: the journal is damaged, or of a run that was asked for something else.
        """
        content = self._path.read_bytes() if self._path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]  # of a torn last line nothing is kept
        if not whole:
            self._begin(identity)
            return False
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                entry = unsealed(line)
                if number == 1:
                    begun = dict(entry["identity"])
                    continue
                self._entries[entry["name"]] = checked(entry)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UnfinishedError(
                    f"'{self._path}', line {number}, is damaged: pass restart=True to begin anew"
                ) from error
        placed = PLACING in self._entries and not self.new.exists() and self._in_place()
        differing = what_differs(begun, json.loads(json.dumps(identity)))
        if differing and (placed or not self._entries):  # nothing is lost
            self._begin(identity)
            return False
        if differing:
            raise UnfinishedError(
                f"an unfinished run into '{self.out}' was asked for something else ({differing}): "
                "ask for the same to continue it, or pass restart=True to throw it away"
            )
        if len(whole) < len(content):
            with self._path.open("r+b") as file:
                file.truncate(len(whole))
            sync(self._path)
        return placed

    def _begin(self, identity: Identity) -> None:
        empty(self.partial)
        self._entries.clear()
        self._append({"identity": identity}, fresh=True)

    def _drop_the_unfinished(self) -> None:
        """Removes files that no entry vouches for, and forgets entries that no file vouches for."""
        self._entries.pop(PLACING, None)
        for name, entry in list(self._entries.items()):
            path = self.path(name)
            if entry["file"] == NEW:
                continue  # a note
            if not path.is_file():
                del self._entries[name]  # it had been removed because another piece has it
            elif not _is_recorded(path, entry):
                del self._entries[name]
                record(f"'{path}' is not what was written: it is made again")
        for folder in (self.new, self.work):
            folder.mkdir(exist_ok=True)
        kept = {self.path(name) for name in self._entries}
        for path in sorted(p for top in (self.new, self.work) for p in top.rglob("*")):
            if (path.is_file() or path.is_symlink()) and path not in kept:
                path.unlink()

    def _in_place(self) -> bool:
        """Whether `out` is what the entries say that `new` was."""
        pieces = [entry for entry in self._entries.values() if entry["file"].startswith(f"{NEW}/")]
        return all(
            (path := self.out / entry["file"].removeprefix(f"{NEW}/")).is_file()
            and _is_recorded(path, entry)
            for entry in pieces
        )

    def _append(self, entry: dict[str, Any], *, fresh: bool = False) -> None:
        with self._path.open("wb" if fresh else "ab") as file:
            file.write(sealed(entry))
            file.flush()
            os.fsync(file.fileno())
        if fresh:
            sync(self.partial)
            sync(self.partial.parent)
        else:
            self._entries[entry["name"]] = entry


def _entry(name: str, file: str, path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of a piece."""
    size, digest = path.stat().st_size, sha256(path)
    return {"name": name, "file": file, "bytes": size, "sha256": digest, "facts": facts}


def _is_recorded(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file is what an entry says of it; one of another size is not read."""
    return path.stat().st_size == entry["bytes"] and sha256(path) == entry["sha256"]


@contextmanager
def journal(
    out: Path, identity: Identity, *, force: bool = False, restart: bool = False
) -> Iterator[Journal]:
    """The journal of a run that makes the folder `out`, for this process alone.

    When the run ends before its first piece, or by an error that the same command would meet again,
    nothing is left. Otherwise finished pieces stay, and the error has a note that says so.

    Args:
        out: the folder to make; empty, or not there.
        identity: what determines the result.
        force: replace the model that `out` holds.
        restart: throw away what an earlier run left.

    Raises:
        OutputError: another run works on `out`, an earlier one was asked for something else, `out`
            holds no model that could be replaced or appeared in the meantime, or the disk refuses.
    """
    out = resolved(out)
    with claimed(out) as partial:
        one: Journal | None = None
        try:
            if restart:
                empty(partial)
            one = Journal(out, partial, identity, force)
            yield one
        except BaseException as error:
            if isinstance(error, AGAIN) or not _has_pieces(partial):
                with contextlib.suppress(OSError):
                    empty(partial)
            elif one is not None or not isinstance(error, OutputError):
                error.add_note(f"what is finished is kept in '{partial}'")
            raise
        if one.finished or not one.new.exists():
            empty(partial)


def _has_pieces(partial: Path) -> bool:
    """Whether a journal there has more than its first line, be it readable or not."""
    try:
        return (partial / JOURNAL).read_bytes().count(b"\n") > 1
    except FileNotFoundError:
        return False
    except OSError:
        return True  # nobody knows


def unfinished(out: Path) -> bool:
    """Whether an earlier run into `out` has left something to go on with."""
    return (partial_of(resolved(out)) / JOURNAL).is_file()
