"""results.jsonl: a row per cell, appended as soon as it is known; a cell's last row counts."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from coec.errors import OutputError
from coec.experiments.rows import RESULTS, Row, RowFile, read_lines


class Store:
    """Rows of one sweep folder.

    Attributes:
        rows: by cell, in the order in which cells were first finished.
        torn: an unfinished last line was dropped.
    """

    def __init__(self, folder: Path) -> None:
        """Read the folder's rows.

        Raises:
            ResultsError: a line other than an unfinished last one is no row.
        """
        self.path = folder / RESULTS
        self._read()

    def _read(self) -> RowFile:
        file = read_lines(self.path)
        self.rows: dict[str, Row] = {row.cell: row for row in file.rows}
        self.torn = file.torn
        return file

    @contextmanager
    def writing(self) -> Iterator["Store"]:
        """Hold the folder for this process, and cut an unfinished last line off.

        A whole last line that lacks its newline gets it.

        Raises:
            OutputError: another process writes there, or nobody can.
            ResultsError: as when the store was made.
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
            content = self._read()
            if content.torn or content.unended:
                with self.path.open("r+b") as file:
                    file.truncate(content.size)
                    file.seek(content.size)
                    file.write(b"\n" if content.unended else b"")
            yield self
        finally:
            lock.release()

    def append(self, row: Row) -> None:
        """Add a row, and return when it is on the disk; raises OutputError if it cannot be."""
        try:
            with self.path.open("ab") as file:
                text = json.dumps(row.record, ensure_ascii=False, allow_nan=False)
                file.write(f"{text}\n".encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        self.rows[row.cell] = row

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(
            f"'{self.path.parent}' cannot be written ({error.strerror or error}): make room or "
            "give another folder"
        )
