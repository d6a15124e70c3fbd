"""Folders that appear whole or not at all, and that replace nothing they should not.

Work goes on in `OUT.partial/`, beside OUT: whatever ends a run, OUT itself is what it was before,
or complete. A lock there tells a run that works from one that was killed, whose leftovers the next
run of the same OUT removes.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from coec.errors import OutputError
from coec.events import record
from coec.models.carried import foreign_entry

LOCK, NEW, OLD = "coec.lock", "new", "old"
"""What `OUT.partial/` holds: the lock, what is being written, and what it is about to replace."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems without locks answer, those of some networks among them."""


def check_output(out: Path, model: Path, force: bool) -> None:
    """Raises OutputError when `out` cannot become a new model folder."""
    target, source = _resolved(out), _resolved(model)
    if target == source or source in target.parents or target in source.parents:
        raise OutputError(
            f"the output '{out}' and the model '{model}' lie inside each other; "
            "choose a folder beside the model"
        )
    if target.exists() and not target.is_dir():
        raise OutputError(f"'{out}' is a file; the output must be a folder")
    _check_replaceable(target, force)
    parent = _nearest(target)
    if not parent.is_dir():
        raise OutputError(f"'{parent}' is not a folder, so '{out}' cannot be made in it")


def check_space(out: Path, needed: int) -> None:
    """Raises OutputError when the disk has less than `needed` bytes free."""
    free = shutil.disk_usage(_nearest(_resolved(out))).free
    if free < needed:
        raise OutputError(
            f"not enough disk space for '{out}': {needed / 1e9:.2f} GB needed, "
            f"{free / 1e9:.2f} GB free"
        )


@contextmanager
def new_folder(out: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder that becomes `out` in one rename when the block ends well.

    On any error, interrupts included, it is removed, and `out` stays as it was.

    Args:
        out: the folder to make; empty, or not there.
        force: replace the model that `out` holds.

    Raises:
        OutputError: another run works on `out`, it is no model that could be replaced, it appeared
            in the meantime, or the disk refuses.
    """
    out = _resolved(out)
    made: list[Path] = []
    try:
        made = [parent for parent in out.parents if not parent.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(out) as partial:
            _check_replaceable(out, force)
            (partial / NEW).mkdir()
            yield partial / NEW
            _put_in_place(partial, out, force)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"could not write '{out}': {error}") from error
    finally:
        for parent in made:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()


def remove_leftovers(folder: Path) -> None:
    """Removes what killed runs left half-written among the folders in `folder`."""
    for partial in folder.glob("*.partial"):
        with _claimed(partial.with_suffix("")):
            pass


@contextmanager
def _claimed(out: Path) -> Iterator[Path]:
    """`OUT.partial/`, locked and empty of what an earlier run left; it is gone afterwards.

    Raises:
        OutputError: another run holds it, or it is no folder of ours.
    """
    partial = out.with_name(f"{out.name}.partial")
    descriptor = _lock(partial, out)
    try:
        if (partial / OLD).exists() and not out.exists():
            (partial / OLD).rename(out)  # the run was killed between the two renames
        _empty(partial)
        yield partial
    finally:
        # What cannot be removed now is a leftover, which the next run removes.
        with contextlib.suppress(OSError):
            _empty(partial)
            (partial / LOCK).unlink()
            partial.rmdir()
        os.close(descriptor)


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
            _flock(descriptor, partial)
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


def _flock(descriptor: int, partial: Path) -> None:
    """Raises BlockingIOError where another run has it."""
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

    The lock is made first and removed last, so that without one nothing in there is ours.
    """
    if partial.is_symlink():
        return "is a link"
    ours = {LOCK, NEW, OLD} if os.path.lexists(partial / LOCK) else {LOCK}
    for path in partial.iterdir():
        if path.name in ours:
            continue
        # Another run may have begun or ended meanwhile: ours is what has a lock, or is gone.
        locked = path.name in (NEW, OLD) and os.path.lexists(partial / LOCK)
        if not locked and os.path.lexists(path):
            return f"holds '{path.name}'"
    return None


def _empty(partial: Path) -> None:
    for name in (NEW, OLD):
        if (partial / name).exists():
            shutil.rmtree(partial / name)


def _put_in_place(partial: Path, out: Path, force: bool) -> None:
    """Renames the finished folder to `out`; the system refuses where something is there."""
    if force and out.is_dir() and any(out.iterdir()):
        _check_replaceable(out, force)
        out.rename(partial / OLD)
    try:
        os.rename(partial / NEW, out)
    except OSError as error:
        if (partial / OLD).exists() and not out.exists():
            (partial / OLD).rename(out)
            raise
        if not os.path.lexists(out):
            raise
        spare = next(p for n in range(1, 10**6) if not (p := _numbered(out, n)).exists())
        os.rename(partial / NEW, spare)
        raise OutputError(
            f"'{out}' appeared during the run and was left as it is; the result is in '{spare}'"
        ) from error


def _numbered(out: Path, number: int) -> Path:
    return out.with_name(f"{out.name}-{number}")


def _check_replaceable(out: Path, force: bool) -> None:
    """Raises OutputError unless `out` is free, or `force` may replace what it holds."""
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not force:
        raise OutputError(
            f"'{out}' is not empty; choose another folder, or pass force=True to replace the "
            "model that it holds"
        )
    if foreign := foreign_entry(out):
        raise OutputError(
            f"'{out}' {foreign}: only a folder that holds a model and nothing else is replaced; "
            "remove it yourself, or choose another"
        )


def _resolved(path: Path) -> Path:
    """The path without links; raises OutputError for one that no file system holds."""
    try:
        resolved = path.resolve()
        resolved.exists()
        return resolved
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no name of a file
        reason = getattr(error, "strerror", None) or str(error)[:80]
        raise OutputError(f"'{str(path)[:200]}' is no place for an output: {reason}") from error


def _nearest(path: Path) -> Path:
    """The path itself or the first parent that is there."""
    return next(p for p in [path, *path.parents] if p.exists())
