"""What a sweep wrote, as the report reads it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from coec.errors import ResultsError
from coec.experiments.rows import RESULTS, read_lines

Status = Literal["done", "failed"]
Metric = Literal["perplexity", "zero_shot"]


@dataclass(frozen=True)
class Row:
    """One cell of a sweep: the settings, and what was measured under them.

    Attributes:
        cell: digest of the settings.
        model: a label that no other model has.
        status: `failed` comes with an error of one line and without measurements.
        settings: sparsity, selection, compensation, its resolved options, calibration; the dense
            model's own row has sparsity 0 and compensation `dense`.
        grids: the grids that the cell belongs to.
        labels: what a grid calls the cell, where it names its rows.
        perplexity, zero_shot, parameters, cost, sites, overlap, calibration, seconds,
        peak_memory_bytes, environment: as the sweep measured them; empty where it did not.
    """

    cell: str
    model: str
    status: Status
    settings: Mapping[str, Any]
    grids: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    perplexity: Mapping[str, Any] = field(default_factory=dict)
    zero_shot: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    cost: Mapping[str, Any] = field(default_factory=dict)
    sites: tuple[Mapping[str, Any], ...] = ()
    overlap: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def dense(self) -> bool:
        """Whether this is the dense model itself."""
        return bool(self.settings.get("compensation") == "dense")

    @property
    def sparsity(self) -> float:
        """Fraction of units removed."""
        return float(self.settings["sparsity"])

    def setting(self, name: str) -> Any:
        """A setting or an option of the compensation by name; None where the row has neither."""
        if name in self.settings:
            return self.settings[name]
        return (self.settings.get("options") or {}).get(name)

    def measured(self, metric: Metric) -> float | None:
        """Perplexity, or mean zero-shot accuracy in %; None where it was not measured."""
        if metric == "perplexity":
            return number(self.perplexity.get("perplexity"))
        mean = number(self.zero_shot.get("mean"))
        return None if mean is None else 100 * mean


@dataclass(frozen=True)
class Results:
    """All cells of a sweep, and what a reader should know about the file they came from."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def grid(self, name: str) -> tuple[Row, ...]:
        """The rows of one grid, the dense models' left out."""
        return tuple(row for row in self.rows if name in row.grids and not row.dense)

    @property
    def dense(self) -> dict[str, Row]:
        """Every dense model's own row, by model."""
        return {row.model: row for row in self.rows if row.dense}


def number(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


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
    for read in lines.rows:
        row = _row(read)
        earlier = rows.get(row.cell)
        rows[row.cell] = row if earlier is None else _replaced(earlier, row)
    if not rows:
        raise ResultsError(f"{path} holds no finished cell: run the sweep first")
    notes = (f"The last line of {RESULTS} was cut short and is left out.",) if lines.torn else ()
    return Results(tuple(rows.values()), notes)


def _row(read: Mapping[str, Any]) -> Row:
    given = {one.name: read[one.name] for one in fields(Row) if one.name in read}
    return Row(**given | {name: tuple(given.get(name, ())) for name in ("grids", "sites")})


def _replaced(earlier: Row, row: Row) -> Row:
    """The later line of one cell, in the grids of both."""
    grids = tuple(dict.fromkeys(earlier.grids + row.grids))
    return Row(**{**vars(row), "grids": grids, "labels": {**earlier.labels, **row.labels}})
