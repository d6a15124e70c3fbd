"""Files that appear whole: a reader sees the old file or the new one."""

import contextlib
import fcntl
import glob
import os
import tempfile
from pathlib import Path

from coec.errors import OutputError


def write_whole(path: Path, content: bytes) -> None:
    """Write a sibling of the file and rename it.

    Raises:
        OutputError: the folder cannot be written.
    """
    try:
        _remove_strays(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                with contextlib.suppress(OSError):  # of a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"cannot write {path} ({reason}): make the folder writable") from None


def _remove_strays(path: Path) -> None:
    """Remove siblings whose writer was killed: nobody holds their lock."""
    for stray in path.parent.glob(f".{glob.escape(path.name)}-*"):
        with contextlib.suppress(OSError), stray.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stray.unlink()
