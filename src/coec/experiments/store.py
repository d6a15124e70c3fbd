"""results.jsonl: a row per cell, appended as soon as it is known; a cell's last row counts."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from coec.errors import OutputError

RESULTS = "results.jsonl"


class Store:
    """The rows of one sweep folder.

    Attributes:
        rows: by cell, in the order in which cells were first finished.
        torn: whether an unfinished last line was found, and dropped.
    """

    def __init__(self, folder: Path) -> None:
        """Reads what is there.

        Raises:
            OutputError: a line other than an unfinished last one is no row.
        """
        self.path = folder / RESULTS
        self.rows, self._whole, self.torn = _read(self.path)

    @contextmanager
    def writing(self) -> Iterator["Store"]:
        """Holds the folder for this process, and cuts an unfinished last line off.

        Raises:
            OutputError: another process writes there, or nobody can.
        """
        lock = FileLock(self.path.with_name(".lock"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise OutputError(
                f"another sweep is writing to '{self.path.parent}': wait for it, or use another "
                "folder"
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self.rows, self._whole, self.torn = _read(self.path)
            if self.torn:
                with self.path.open("r+b") as file:
                    file.truncate(self._whole)
            yield self
        finally:
            lock.release()

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row, and returns when it is on the disk; raises OutputError if it cannot be."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            with self.path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        self.rows[row["cell"]] = row

    def _unwritable(self, error: OSError) -> OutputError:
        why = error.strerror or error
        return OutputError(
            f"'{self.path.parent}' cannot be written ({why}): make room or give another folder"
        )


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], int, bool]:
    """The rows, how many bytes are whole lines, and whether more follows them."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content.rfind(b"\n") + 1
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            rows[row["cell"]] = row
        except (ValueError, KeyError, TypeError) as error:
            raise OutputError(
                f"'{path}', line {number}, is no row of a sweep: move the file away, or mend it"
            ) from error
    return rows, whole, whole < len(content)
