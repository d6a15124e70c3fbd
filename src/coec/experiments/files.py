"""Files of a sweep: results.jsonl, to which rows are appended, and files that appear whole.

A row is appended as soon as it is known; a cell's last row counts.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from coec.errors import OutputError, ResultsError
from coec.experiments.rows import Row, read

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class RowFile:
    """Content of a results.jsonl.

    Attributes:
        rows: in the file's order.
        size: bytes of its whole lines.
        torn: part of a line follows them.
        unended: the last of them lacks its newline.
    """

    rows: list[Row]
    size: int
    torn: bool
    unended: bool


def read_lines(path: Path) -> RowFile:
    """Read the rows of a results.jsonl; none where there is no such file.

    A last line without its newline is torn unless it is JSON: a part of an object never is.

    Raises:
        ResultsError: the file cannot be read, or a line is no row; names the line and the field.
    """
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise ResultsError(
            f"'{path}' cannot be read ({error.strerror or error}): make it readable"
        ) from None
    # Whole lines, and what follows the last newline: a row without it, or a part of one.
    *lines, last = content.split(b"\n")
    torn = last != b"" and not _is_json(last)
    lines += [] if torn else [last]
    return RowFile(
        rows=[_line(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()],
        size=len(content) - (len(last) if torn else 0),
        torn=torn,
        unended=not torn and last != b"",
    )


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _line(line: bytes, place: str) -> Row:
    try:
        return read(json.loads(line.decode()))
    except (ValueError, RecursionError) as error:
        reason = f" is not JSON ({error})"
    except ResultsError as error:
        reason = f": {error}"
    raise ResultsError(f"{place}{reason}: mend the line, or remove it and run the sweep again")


class Store:
    """Rows of one sweep folder by cell, in the order in which cells were first finished.

    `torn` tells that an unfinished last line was dropped.
    """

    def __init__(self, folder: Path) -> None:
        """Read the folder's rows; ResultsError as `read_lines`."""
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
            # Under the lock once more: another sweep may have written since.
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
