"""Output folders and files that appear whole or not at all, and replace nothing they should not.

A run writes to `OUT.partial/`, next to OUT. However a run ends, OUT is then unchanged or complete.
A lock in that folder distinguishes a working run from a killed one, whose finished pieces
(`coec.checkpoint.journal`) the next run of the same OUT takes up.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import portalocker

from coec.errors import OutputError
from coec.events import record
from coec.models.folder import foreign_entry

LOCK, NEW, OLD, WORK, JOURNAL = "coec.lock", "new", "old", "work", "journal.jsonl"
STATES = "states"
"""Entries of `OUT.partial/`: the lock, the future OUT, the model that it replaces, other finished
pieces, the journal of both, and what another program keeps there, which is its own to tidy."""
_TYPES = {
    LOCK: (stat.S_ISREG,), JOURNAL: (stat.S_ISREG,), NEW: (stat.S_ISDIR, stat.S_ISREG),
    OLD: (stat.S_ISDIR,), WORK: (stat.S_ISDIR,), STATES: (stat.S_ISDIR,),
}  # fmt: skip
_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
"""Flag that refuses to open a link; Windows has none."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Error numbers of file systems without locks, such as some network file systems."""
_URL = re.compile(r"[a-z][a-z0-9+.-]+://?")
"""Start of a URL; only one slash is left of it where it was read as a path."""


def check_file(out: Path, magic: bytes, force: bool) -> None:
    """Raise OutputError when `out` cannot become a new file; `force` replaces one that begins with
    `magic`, as files of the format do, or that is empty.
    """
    target = resolved(out)
    if not target.parent.is_dir():
        raise OutputError(f"'{target.parent}' is not a folder, so '{out}' cannot be made in it")
    if target.is_dir():
        raise OutputError(f"'{out}' is a folder; the output must be a file in it")
    if not target.exists():
        return
    if not force:
        raise OutputError(f"'{out}' exists; choose another name, or pass force=True to replace it")
    if not target.is_file() or _start(target, len(magic)) not in (b"", magic):
        raise OutputError(
            f"'{out}' is no {magic.decode()} file: only such a file is replaced; remove it "
            "yourself, or choose another name"
        )


def _start(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def check_space(out: Path, needed: int) -> None:
    """Raise OutputError when the disk has less than `needed` bytes free."""
    if (free := free_space(out)) < needed:
        raise OutputError(
            f"not enough disk space for '{out}': {needed / 1e9:.2f} GB needed, "
            f"{free / 1e9:.2f} GB free; choose a folder on another disk"
        )


def free_space(out: Path) -> int:
    """Free bytes on the disk of an output that need not exist yet."""
    return shutil.disk_usage(nearest(resolved(out))).free


def check_replaceable(out: Path, force: bool) -> None:
    """Raise OutputError unless `out` is free, or `force` may replace its content."""
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise OutputError(
                f"'{out}' is not empty; choose another folder, or pass force=True to replace the "
                "model that it holds"
            )
        if reason := foreign_entry(out):
            raise OutputError(
                f"'{out}' {reason}: only a folder that holds a model and nothing else is replaced; "
                "remove it yourself, or choose another"
            )


def path_of(out: object) -> Path:
    """Return the path that a caller gives for an output; raises OutputError for another thing."""
    if not isinstance(out, str | os.PathLike):
        raise OutputError(f"the output is the path of a folder or file, got {out!r:.80}")
    return Path(out)


def resolved(path: Path) -> Path:
    """Resolve links; raises OutputError for a path that no file system holds, or from `~`."""
    if _URL.match(str(path)):
        raise OutputError(
            f"'{path}' is a URL: write to a folder, and copy that there (hf upload, aws s3 sync)"
        )
    if str(path).startswith("~"):
        raise OutputError(
            f"'{path}' would be a folder of that name, as nobody replaced ~: give the whole path, "
            "or leave out the quotes around it"
        )
    try:
        place = path.resolve()
        place.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no name of a file
        reason = getattr(error, "strerror", None) or str(error)[:80]
        raise OutputError(f"'{str(path)[:200]}' is no place for an output: {reason}") from error
    if not place.name:
        raise OutputError(f"'{path}' is no place for an output: it is the whole file system")
    return place


def nearest(path: Path) -> Path:
    """The path itself, or its first parent that exists."""
    return next(p for p in [path, *path.parents] if p.exists())


def partial_of(out: Path) -> Path:
    """The folder in which an output is prepared."""
    return out.with_name(f"{out.name}.partial")


def check_output(out: Path, model: Path, force: bool) -> None:
    """Raise OutputError when `out` cannot become a new model folder."""
    target, source = resolved(out), resolved(model)
    clear_remains(target)
    if target == source or source in target.parents or target in source.parents:
        raise OutputError(
            f"the output '{out}' and the model '{model}' lie inside each other; "
            "choose a folder beside the model"
        )
    if target.exists() and not target.is_dir():
        raise OutputError(f"'{out}' is a file; the output must be a folder")
    check_replaceable(target, force)
    parent = nearest(target)
    if not parent.is_dir():
        raise OutputError(f"'{parent}' is not a folder, so '{out}' cannot be made in it")


@contextmanager
def claimed(out: Path) -> Iterator[Path]:
    """Lock `OUT.partial/`, and give it: no other run works on `out` meanwhile.

    The folder keeps what an earlier run left in it; a model that this run was about to replace is
    put back. A folder that is empty in the end is removed, with the parents made for it.

    Raises:
        OutputError: another run holds the folder, it is not ours, or the disk refuses.
    """
    new_parents: list[Path] = []
    try:
        with writing(out):
            # Folders made on the way are removed again, innermost first, if nothing was put there.
            new_parents = [parent for parent in out.parents if not parent.exists()]
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = partial_of(out)
            descriptor = _acquire(partial, out)
            try:
                if (partial / OLD).exists() and not out.exists():
                    rename(partial / OLD, out)  # the run was killed between the two renames
                yield partial
            finally:
                _release(partial, descriptor)
    finally:
        for parent in new_parents:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()


@contextmanager
def appearing(out: Path, magic: bytes, force: bool) -> Iterator[Path]:
    """Give the path to write a single file to, which becomes `out` at the end of the block.

    A file has no journal: the partial file of a killed run is written anew. `magic` and `force`
    are as in `check_file`.

    Raises:
        OutputError: another run is writing it, something appeared there, or the disk refuses.
    """
    target = resolved(out)
    with claimed(target) as partial:
        # A journal belongs to a run into a folder of this name, whose pieces must not be lost.
        if (partial / JOURNAL).exists():
            raise OutputError(
                f"'{partial}' holds an unfinished run into a folder '{out}': finish it, move it "
                "away, or choose another output"
            )
        try:
            empty(partial)
            yield partial / NEW
            sync(partial / NEW)
            try:
                check_file(target, magic, force)
            except OutputError as error:
                raise _put_beside(partial / NEW, target) from error
            rename(partial / NEW, target)
        finally:
            with contextlib.suppress(OSError):
                empty(partial)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn errors of the disk into an OutputError that tells what helps."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        advice = "; make room" if full else ""
        raise OutputError(f"could not write '{out}': {error}{advice}") from error


def clear_remains(out: Path) -> None:
    """Remove an `OUT.partial/` without a journal: its run was killed while it tidied up."""
    partial = partial_of(out)
    if partial.is_dir() and not (partial / JOURNAL).exists():
        with contextlib.suppress(OutputError), claimed(out):
            pass  # an empty folder goes with its lock


def _acquire(partial: Path, out: Path) -> int:
    """Open and lock the folder's lock file; the lock ends with the process, however that ends."""
    while True:
        # Make the folder, open its lock, lock it, and look whether the lock is still the one in the
        # folder: another run may remove both at any moment.
        with contextlib.suppress(FileExistsError):
            partial.mkdir()
        if reason := _foreign(partial):
            raise OutputError(
                f"'{partial}' is where '{out}' would be prepared, and {reason}, which "
                "coec did not write: move it away, or choose another output"
            )
        try:
            # No link is followed: it could point to a file of somebody else.
            descriptor = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
        except FileNotFoundError:
            continue  # the run that held it has just removed it
        try:
            _lock(descriptor, partial)
            # A lock on a file that was unlinked meanwhile keeps nobody out.
            if os.path.samestat(os.fstat(descriptor), os.stat(partial / LOCK)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"another run is writing '{out}': wait for it, or choose another output"
            ) from None
        except FileNotFoundError:
            pass  # it was removed between opening and locking
        os.close(descriptor)


def _lock(descriptor: int, partial: Path) -> None:
    """Lock an open file until it is closed; raises BlockingIOError if another run has it.

    filelock would take a file system without locks for a reason to lock by the file's existence,
    which outlives a killed process.
    """
    flags = portalocker.LockFlags.EXCLUSIVE | portalocker.LockFlags.NON_BLOCKING
    try:
        portalocker.lock(descriptor, flags)
    except portalocker.AlreadyLocked as error:
        raise BlockingIOError from error
    except portalocker.LockException as error:
        reason = error.__cause__
        if not isinstance(reason, OSError) or reason.errno not in _NO_LOCKS:
            raise reason or error from None
        record(
            f"the file system of '{partial}' has no locks ({reason.strerror}): nothing kept "
            "another run from writing the same output"
        )


def _release(partial: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the next run removes what cannot be removed now
        if [path.name for path in partial.iterdir()] == [LOCK]:
            (partial / LOCK).unlink()
            partial.rmdir()
    os.close(descriptor)


def _foreign(partial: Path) -> str | None:
    """Say why a folder is not ours and must not be emptied; None if it is ours.

    The lock is made first and removed last, so a folder without one holds nothing of ours. We make
    only folders and files, through which nothing outside can be reached.
    """
    if partial.is_symlink():
        return "is a link"
    if partial.is_file():
        return "is a file (one that is left of an earlier release can be removed)"
    for path in partial.iterdir():
        # Another run may have begun or ended meanwhile: its entries have a lock, or are gone.
        locked = path.name == LOCK or os.path.lexists(partial / LOCK)
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if path.name not in _TYPES or not locked:
            return f"holds '{path.name}'"
        if not any(is_type(mode) for is_type in _TYPES[path.name]):
            return f"holds a '{path.name}' that is a link or of another kind"
    return None


def empty(partial: Path) -> None:
    """Remove everything but the lock; the journal last, since it accounts for the rest."""
    # A crash in between leaves a journal whose files are gone, which the next run understands.
    for path in sorted(partial.iterdir(), key=lambda path: path.name == JOURNAL):
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def publish(partial: Path, out: Path, force: bool) -> None:
    """Rename the finished folder to `out`. If something appeared there, put the result next to it
    and name its place in the OutputError.
    """
    # OUT → old, new → OUT. A crash between the two renames leaves no OUT: `claimed` puts it back.
    if force and out.is_dir() and any(out.iterdir()):
        check_replaceable(out, force)
        if (partial / OLD).exists():  # replaced by a run that was killed then
            shutil.rmtree(partial / OLD)
        rename(out, partial / OLD)
    try:
        rename(partial / NEW, out)
    except OSError as error:
        if (partial / OLD).exists() and not out.exists():
            rename(partial / OLD, out)
            raise
        if not os.path.lexists(out):
            raise
        raise _put_beside(partial / NEW, out) from error


def _put_beside(result: Path, out: Path) -> OutputError:
    """Rename a result to the first free name next to `out`; the error states the name."""
    suffix = "" if result.is_dir() else out.suffix
    stem = out.name.removesuffix(suffix)
    names = (out.with_name(f"{stem}-{number}{suffix}") for number in range(1, 10**6))
    spare = next(path for path in names if not path.exists())
    rename(result, spare)
    return OutputError(
        f"'{out}' appeared during the run and was left as it is; the result is in '{spare}'"
    )


def rename(source: Path, target: Path) -> None:
    """Rename durably: return when the change is on the disk."""
    os.rename(source, target)
    # A rename is durable once the folders that hold the names are.
    for folder in {source.parent, target.parent}:
        sync(folder)


def sync(path: Path) -> None:
    """Return when the content of a file or folder is on the disk; of a file alone on Windows."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
