"""Files that appear whole: a reader sees the old file or the new one."""

import os
import tempfile
from pathlib import Path

from coec.errors import OutputError


def write_whole(path: Path, content: bytes) -> None:
    """Write a sibling of the file and rename it; make its folder, if there is none.

    Raises:
        OutputError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
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
