"""Folders that appear whole or not at all, and that replace nothing they should not.

Work goes on in `OUT.partial/`, beside OUT: whatever ends a run, OUT itself is what it was before,
or complete. A lock there tells a run that works from one that was killed, with whose finished
pieces (`coec.execution.journal`) the next run of the same OUT goes on.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coec.errors import OutputError
from coec.events import record
from coec.models.companion_files import foreign_entry

LOCK, NEW, OLD, WORK, JOURNAL = "coec.lock", "new", "old", "work", "journal.jsonl"
"""What `OUT.partial/` holds: the lock, what will be OUT, what that is about to replace, other
finished pieces, and the account of both."""
KINDS = {
    LOCK: stat.S_ISREG, JOURNAL: stat.S_ISREG, NEW: stat.S_ISDIR, OLD: stat.S_ISDIR,
    WORK: stat.S_ISDIR,
}  # fmt: skip
URL = re.compile(r"[a-z][a-z0-9+.-]+://?")
"""How a URL begins; with one slash where it was taken for a path."""
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems without locks answer, those of some networks among them."""


def check_output(out: Path, model: Path, force: bool) -> None:
    """Raises OutputError when `out` cannot become a new model folder."""
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


def check_space(out: Path, needed: int) -> None:
    """Raises OutputError when the disk has less than `needed` bytes free."""
    free = free_space(out)
    if free < needed:
        raise OutputError(
            f"not enough disk space for '{out}': {needed / 1e9:.2f} GB needed, "
            f"{free / 1e9:.2f} GB free; choose a folder on another disk"
        )


def free_space(out: Path) -> int:
    """Bytes that are free where a folder is to be made."""
    return shutil.disk_usage(nearest(resolved(out))).free


@contextmanager
def claimed(out: Path) -> Iterator[Path]:
    """`OUT.partial/`, locked: nobody else works on `out` meanwhile.

    What an earlier run left there stays, but for the model that it was about to replace, which is
    put back. Where the folder is empty in the end it is removed, with the parents made for it.

    Args:
        out: the folder to make, as `resolved` gives it.

    Raises:
        OutputError: another run holds it, it is no folder of ours, or the disk refuses.
    """
    made: list[Path] = []
    try:
        made = [parent for parent in out.parents if not parent.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_of(out)
        descriptor = _lock(partial, out)
        try:
            if (partial / OLD).exists() and not out.exists():
                rename(partial / OLD, out)  # the run was killed between the two renames
            yield partial
        finally:
            _release(partial, descriptor)
    except OSError as error:
        raise unwritable(out, error) from error
    finally:
        for parent in made:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()


def _release(partial: Path, descriptor: int) -> None:
    # What cannot be removed now is a leftover, which the next run removes.
    with contextlib.suppress(OSError):
        if [path.name for path in partial.iterdir()] == [LOCK]:
            (partial / LOCK).unlink()
            partial.rmdir()
    os.close(descriptor)


def unwritable(out: Path, error: Exception) -> OutputError:
    """What the disk said, and what helps."""
    why = str(error)
    advice = ""
    if getattr(error, "errno", None) in FULL or "No space left" in why:
        advice = "; make room"
    return OutputError(f"could not write '{out}': {why}{advice}")


def partial_of(out: Path) -> Path:
    """Where work on `out` goes on."""
    return out.with_name(f"{out.name}.partial")


def remove_leftovers(folder: Path) -> None:
    """Removes what killed runs left half-done among the folders in `folder`."""
    for partial in folder.glob("*.partial"):
        with claimed(partial.resolve().with_suffix("")):
            empty(partial)


def clear_remains(out: Path) -> None:
    """Removes `OUT.partial/` where no journal is in it: its run was killed while it tidied up."""
    partial = partial_of(out)
    if partial.is_dir() and not (partial / JOURNAL).exists():
        with contextlib.suppress(OutputError), claimed(out):
            pass  # an empty folder goes with its lock


def _lock(partial: Path, out: Path) -> int:
    """Makes the folder ours; the lock ends with the process, however that ends."""
    while True:
        partial.mkdir(exist_ok=True)
        if strange := _strange(partial):
            raise OutputError(
                f"'{partial}' is where '{out}' would be prepared, and {strange}, which "
                "coec did not write: move it away, or choose another output"
            )
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(partial / LOCK, flags, 0o666)
        except FileNotFoundError:
            continue  # whoever held it has just removed it
        try:
            lock(descriptor, partial)
            if os.path.samestat(os.fstat(descriptor), os.stat(partial / LOCK)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"another run is writing '{out}': wait for it, or choose another output"
            ) from None
        except FileNotFoundError:
            pass
        os.close(descriptor)


def lock(descriptor: int, partial: Path) -> None:
    """Locks an open file until it is closed; raises BlockingIOError where another run has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        record(
            f"the file system of '{partial}' has no locks ({error.strerror}): nothing kept another "
            "run from writing the same output"
        )


def _strange(partial: Path) -> str | None:
    """What tells that the folder is not ours: it would be emptied.

    The lock is made first and removed last, so that without one nothing in there is ours. What we
    make are folders and files, through which nothing outside can be reached.
    """
    if partial.is_symlink():
        return "is a link"
    for path in partial.iterdir():
        kind = KINDS.get(path.name)
        # Another run may have begun or ended meanwhile: ours is what has a lock, or is gone.
        locked = path.name == LOCK or os.path.lexists(partial / LOCK)
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if kind is None or not locked:
            return f"holds '{path.name}'"
        if not kind(status.st_mode):
            return f"holds a '{path.name}' that is a link or of another kind"
    return None


def empty(partial: Path) -> None:
    """Removes everything but the lock; the journal last, which says what the rest is."""
    for path in sorted(partial.iterdir(), key=lambda path: path.name == JOURNAL):
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def publish(partial: Path, out: Path, force: bool) -> None:
    """Renames the finished folder to `out`; the system refuses where something is there.

    Raises:
        OutputError: something appeared at `out`; the result is then beside it.
    """
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
        raise put_beside(partial / NEW, out) from error


def put_beside(made: Path, out: Path, suffix: str = "") -> OutputError:
    """Gives a result the first free name beside `out`, which appeared meanwhile, and says so.

    Args:
        made: the result.
        out: the name that it should have had.
        suffix: of that name, which the number stands before.
    """
    stem = out.name.removesuffix(suffix)
    names = (out.with_name(f"{stem}-{number}{suffix}") for number in range(1, 10**6))
    spare = next(path for path in names if not path.exists())
    rename(made, spare)
    return OutputError(
        f"'{out}' appeared during the run and was left as it is; the result is in '{spare}'"
    )


def rename(source: Path, target: Path) -> None:
    """Renames, and returns when that is on the disk."""
    os.rename(source, target)
    for folder in {source.parent, target.parent}:
        sync(folder)


def sync(path: Path) -> None:
    """Returns when a file's or a folder's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_replaceable(out: Path, force: bool) -> None:
    """Raises OutputError unless `out` is free, or `force` may replace what it holds."""
    if out.is_dir() and any(out.iterdir()):
        check_judged(out, force, lambda: foreign_entry(out))


def check_judged(out: str | Path, force: bool, foreign: Callable[[], str | None]) -> None:
    """Raises OutputError unless what is in a place may be replaced.

    Args:
        out: the place, which is not empty.
        force: whether a model there may be replaced.
        foreign: says what is in the place that is not of a model.
    """
    if not force:
        raise OutputError(
            f"'{out}' is not empty; choose another folder, or pass force=True to replace the "
            "model that it holds"
        )
    if strange := foreign():
        raise OutputError(
            f"'{out}' {strange}: only a folder that holds a model and nothing else is replaced; "
            "remove it yourself, or choose another"
        )


def is_url(out: str | Path) -> bool:
    """Whether an output is meant to be at a URL."""
    return URL.match(str(out)) is not None


def resolved(path: Path) -> Path:
    """The path without links; raises OutputError for one that no file system holds."""
    if is_url(path):
        raise OutputError(f"'{path}' is a URL, and only `coec prune` writes models there")
    try:
        place = path.resolve()
        place.exists()
        return place
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no name of a file
        reason = getattr(error, "strerror", None) or str(error)[:80]
        raise OutputError(f"'{str(path)[:200]}' is no place for an output: {reason}") from error


def nearest(path: Path) -> Path:
    """The path itself or the first parent that is there."""
    return next(p for p in [path, *path.parents] if p.exists())
