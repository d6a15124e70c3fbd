"""Results of a sweep, as the report reads them."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from coec.errors import ResultsError
from coec.experiments.declarations import Declared, read_declarations
from coec.experiments.rows import RESULTS, Row, read_lines


@dataclass(frozen=True)
class Results:
    """Cells of a sweep, with notes on the file they came from, and what its grids declare."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    declared: Declared = field(default_factory=Declared)

    def grid(self, name: str) -> tuple[Row, ...]:
        """Return the rows of one grid, without those of the dense models."""
        return tuple(row for row in self.rows if name in row.grids and not row.dense)

    @property
    def dense(self) -> dict[str, Row]:
        """Rows of the dense models, by model."""
        return {row.model: row for row in self.rows if row.dense}


def read_results(folder: Path) -> Results:
    """Read the rows of `folder/results.jsonl`, in the order in which their cells first appear.

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
    file = read_lines(path)
    rows: dict[str, Row] = {}
    for row in file.rows:
        earlier = rows.get(row.cell, row)
        grids = tuple(dict.fromkeys(earlier.grids + row.grids))
        rows[row.cell] = replace(row, grids=grids, labels={**earlier.labels, **row.labels})
    if not rows:
        raise ResultsError(f"{path} holds no finished cell: run the sweep first")
    notes = (f"The last line of {RESULTS} was cut short and is left out.",) if file.torn else ()
    return Results(tuple(rows.values()), notes, read_declarations(folder))
