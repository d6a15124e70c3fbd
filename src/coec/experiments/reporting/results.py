"""What a sweep wrote, as the report reads it."""

from dataclasses import dataclass, replace
from pathlib import Path

from coec.errors import ResultsError
from coec.experiments.declarations import NOTHING, Declared, read_declarations
from coec.experiments.rows import RESULTS, Row, read_lines


@dataclass(frozen=True)
class Results:
    """All cells of a sweep, and what a reader should know about the file they came from."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    declared: Declared = NOTHING

    def grid(self, name: str) -> tuple[Row, ...]:
        """The rows of one grid, the dense models' left out."""
        return tuple(row for row in self.rows if name in row.grids and not row.dense)

    @property
    def dense(self) -> dict[str, Row]:
        """Every dense model's own row, by model."""
        return {row.model: row for row in self.rows if row.dense}


def read_results(folder: Path) -> Results:
    """The rows of `folder/results.jsonl`, in the order in which their cells first appear.

    A cell that was run again counts once, by its last line; it belongs to the grids of all its
    lines. A last line that a crash cut short is dropped with a note.

    Raises:
        ResultsError: there is no such file, it holds no row, or a line is not a row.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise ResultsError(
            f"no {RESULTS} in {folder}: OUT must be the folder that a sweep wrote to"
        )
    lines = read_lines(path)
    rows: dict[str, Row] = {}
    for row in lines.rows:
        earlier = rows.get(row.cell, row)
        rows[row.cell] = replace(
            row,
            grids=tuple(dict.fromkeys(earlier.grids + row.grids)),
            labels={**earlier.labels, **row.labels},
        )
    if not rows:
        raise ResultsError(f"{path} holds no finished cell: run the sweep first")
    notes = (f"The last line of {RESULTS} was cut short and is left out.",) if lines.torn else ()
    return Results(tuple(rows.values()), notes, read_declarations(folder))
