"""What happened inside the modules: angles, convergence."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from coec.experiments.records import number
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.tables import (
    ABSENT,
    Cell,
    Table,
    amount,
    method_name,
    significant,
)
from coec.experiments.rows import Geometry, Row

SITES = {"attention": "attention output", "mlp": "MLP"}
"""The kinds of modules that a repair writes, with what a reader calls them."""

RISE = 1e-9
EPS = {"float64": 2.0**-52, "float32": 2.0**-23}
"""A step that raises a curve by at most this fraction of it, or by 16 eps of what it was solved in
(a relative error is a difference of numbers of size 1), is rounding; so it is for the solver."""


def mean_over_sites(rows: Iterable[Row], site: str, name: str) -> float | None:
    """The mean of one quantity over the modules of a kind; None where nobody measured it."""
    values = [number(getattr(s, name)) for row in rows for s in row.sites if s.site == site]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def has_geometry(row: Row) -> bool:
    """Whether principal angles of some module were measured."""
    return any(site.geometry for site in row.sites)


def geometry_table(rows: Sequence[Row]) -> Table | None:
    """Mean principal angles between the frames of the original, pruned and repaired weights."""
    body = []
    for row in rows:
        for site in ("attention", "mlp"):
            measured = [s.geometry for s in row.sites if s.site == site and s.geometry]
            if measured:
                labels = (Cell(row.model), Cell(method_name(row)), Cell(site))
                body.append((*labels, *_geometry_cells(measured)))
    if not body:
        return None
    heads = (
        "Model", "Method", "Site", "Modules", "O–P, degrees", "O–C, degrees", "P–C, degrees",
        "O–C above O–P", "Discrepancy, mean", "Discrepancy, max",
    )  # fmt: skip
    note = (
        "O: the original read frame restricted to the kept units; P: the pruned weight's; C: the "
        "repaired weight's. Discrepancy: how differently read and write frames moved."
    )
    title = "Principal angles between read frames"
    return Table(title, heads, tuple(body), labels=3, notes=(note,), settings=protocol(rows))


def _geometry_cells(measured: Sequence[Geometry]) -> tuple[Cell, ...]:
    def known(name: str) -> list[float]:
        return [v for v in (getattr(g, name) for g in measured) if v is not None]

    means = [
        amount(statistics.fmean(known(name)) if known(name) else None, 1)
        for name in ("angle_op", "angle_oc", "angle_pc")
    ]
    pairs = [(g.angle_op, g.angle_oc) for g in measured]
    compared = [(op, oc) for op, oc in pairs if op is not None and oc is not None]
    above = sum(oc > op for op, oc in compared)
    moved = known("discrepancy")
    mean, largest = (statistics.fmean(moved), max(moved)) if moved else (None, None)
    return (
        Cell(str(len(measured)), len(measured)),
        *means,
        Cell(f"{above} of {len(compared)}", above / len(compared)) if compared else Cell(ABSENT),
        *(Cell(ABSENT) if v is None else Cell(significant(v, 2), v) for v in (mean, largest)),
    )


def curves(rows: Iterable[Row], name: str) -> list[list[float]]:
    """The per-round values of every module that has at least two, all finite."""
    found = []
    for row in rows:
        for site in row.sites:
            values = [number(value) for value in getattr(site, name) or ()]
            known = [value for value in values if value is not None]
            if len(known) > 1 and len(known) == len(values):
                found.append(known)
    return found


def non_increasing(values: Sequence[float], eps: float = EPS["float64"]) -> bool:
    """Whether no step raises the curve by more than rounding."""
    return all(after <= before * (1 + RISE) + 16 * eps for before, after in pairwise(values))


def falling(rows: Iterable[Row], name: str) -> tuple[int, int]:
    """How many modules' curves never rise, and how many there are.

    Objectives count from the second value on: the first is the slice's, on rows of its own.
    """
    first = 1 if name == "objectives_per_round" else 0
    fell = [
        non_increasing(values[first:], EPS.get(row.setting("solve_dtype"), EPS["float64"]))
        for row in rows
        for values in curves([row], name)
    ]
    return sum(fell), len(fell)
