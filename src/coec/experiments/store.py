"""results.jsonl: a row per cell, appended as soon as it is known; a cell's last row counts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from coec.errors import OutputError
from coec.experiments.rows import RESULTS, Row, RowFile, read_lines, write


class Store:
    """The rows of one sweep folder.

    Attributes:
        rows: by cell, in the order in which cells were first finished.
        torn: whether an unfinished last line was found, and dropped.
    """

    def __init__(self, folder: Path) -> None:
        """Reads what is there.

        Raises:
            ResultsError: a line other than an unfinished last one is no row.
        """
        self.path = folder / RESULTS
        self._read()

    def _read(self) -> RowFile:
        lines = read_lines(self.path)
        self.rows: dict[str, Row] = {row.cell: row for row in lines.rows}
        self.torn = lines.torn
        return lines

    @contextmanager
    def writing(self) -> Iterator["Store"]:
        """Holds the folder for this process, and cuts an unfinished last line off.

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
            lines = self._read()
            if lines.torn or lines.unended:
                with self.path.open("r+b") as file:
                    file.truncate(lines.size)
                    file.seek(lines.size)
                    file.write(b"\n" if lines.unended else b"")
            yield self
        finally:
            lock.release()

    def append(self, row: Row) -> None:
        """Adds a row, and returns when it is on the disk; raises OutputError if it cannot be."""
        line = write(row)
        try:
            with self.path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        self.rows[row.cell] = row

    def _unwritable(self, error: OSError) -> OutputError:
        why = error.strerror or error
        return OutputError(
            f"'{self.path.parent}' cannot be written ({why}): make room or give another folder"
        )
