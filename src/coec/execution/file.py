"""A single file that appears whole or not at all, and that replaces nothing it should not.

It is written as `OUT.partial`, beside OUT, under a lock, and renamed at the end. What a killed run
left there is written anew: a single file is made in one go.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coec.errors import OutputError
from coec.execution.output import (
    lock,
    partial_of,
    put_beside,
    rename,
    resolved,
    sync,
    unwritable,
)


def check_file(out: Path, kind: bytes, force: bool) -> None:
    """Raises OutputError when `out` cannot become a new file.

    Args:
        kind: the bytes that files of its format begin with.
        force: whether such a file may be replaced.
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
    if not target.is_file() or not _is_of_kind(target, kind):
        raise OutputError(
            f"'{out}' is no {kind.decode()} file: only such a file is replaced; remove it "
            "yourself, or choose another name"
        )


@contextmanager
def appearing(out: Path, kind: bytes, force: bool) -> Iterator[Path]:
    """The path to write to, which becomes `out` at the end of the `with` block.

    Where the block ends by an error nothing is left, and `out` is what it was before.

    Args:
        kind, force: as in `check_file`.

    Raises:
        OutputError: another run is writing it, something appeared there, or the disk refuses.
    """
    target = resolved(out)
    partial = partial_of(target)
    try:
        descriptor = _claim(partial, out, kind)
        try:
            try:
                yield partial
                sync(partial)
                _put_in_place(partial, target, kind, force)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink()
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unwritable(out, error) from error


def _claim(partial: Path, out: Path, kind: bytes) -> int:
    """Makes the file ours; the lock ends with the process, however that ends."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(partial, flags, 0o666)
        try:
            lock(descriptor, partial)
            if os.path.samestat(os.fstat(descriptor), os.stat(partial)):
                if not _is_of_kind(partial, kind):
                    raise OutputError(
                        f"'{partial}' is where '{out}' would be prepared, and is no "
                        f"{kind.decode()} file: move it away, or choose another output"
                    )
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"another run is writing '{out}': wait for it, or choose another output"
            ) from None
        except FileNotFoundError:
            pass  # whoever held it has just renamed or removed it
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_of_kind(path: Path, kind: bytes) -> bool:
    """Whether a file begins with these bytes; one that is empty was only just begun."""
    with path.open("rb") as file:
        return file.read(len(kind)) in (b"", kind)


def _put_in_place(partial: Path, out: Path, kind: bytes, force: bool) -> None:
    try:
        check_file(out, kind, force)
    except OutputError as error:
        raise put_beside(partial, out, out.suffix) from error
    rename(partial, out)
