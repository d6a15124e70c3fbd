"""Rows of a sweep as data frames: a line per cell, per module, or per round of a module."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import Categorical, DataFrame, Series, concat, isna

from coec.errors import ResultsError
from coec.experiments.declarations import (
    QUANTITIES,
    Declaration,
    Declared,
    Filter,
    read_declarations,
)
from coec.experiments.files import RESULTS, read_lines
from coec.experiments.rows import SETTING_NAMES, Module, Row

ABSENT, DENSE = "–", "dense"
_ORDER = {
    "selection": ("wanda-sp", "flap", "rcpu", "leverage", "obs"),
    "compensation": ("none", "bias", "least-squares", "ridge-to-slice", "rcpu", "coec", "auto"),
}
"""Order of lines; other names come last."""
_TEXTS = {"attention": "attention output", "mlp": "MLP"}
METRICS = [name for name, quantity in QUANTITIES.items() if quantity.of == "cells"]
PUBLISHED_METRICS = [n for n, quantity in QUANTITIES.items() if quantity.of == "published"]
_OF_MODULE = [name for name, quantity in QUANTITIES.items() if quantity.of == "modules"]


@dataclass(frozen=True)
class Results:
    """Rows of a sweep, with notes on the file they came from, and what its grids declare.

    Attributes:
        cells: a line per row, with settings, metrics and `parameters` by name.
        modules, rounds: a line per module, and per round of it; `cell` is their row's.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    declared: Declared
    cells: DataFrame
    modules: DataFrame
    rounds: DataFrame

    @property
    def dense(self) -> DataFrame:
        """Lines of the dense models."""
        return self.cells[self.cells["dense"]]

    def of_grid(self, name: str) -> DataFrame:
        """Return the pruned cells of a grid, with its labels."""
        cells = self.cells[~self.cells["dense"] & self.cells["grids"].map(lambda g: name in g)]
        return cells.assign(label=cells["labels"].map(lambda labels: labels.get(name)))


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
        grids = list(dict.fromkeys(earlier.grids + row.grids))
        labels = {**earlier.labels, **row.labels}
        rows[row.cell] = row.model_copy(update={"grids": grids, "labels": labels})
    if not rows:
        raise ResultsError(f"{path} holds no finished cell: run the sweep first")
    notes = (f"The last line of {RESULTS} was cut short and is left out.",) if file.torn else ()
    cells = DataFrame(map(_cell, rows.values()), dtype=object)
    cells = cells.reindex(columns=list(dict.fromkeys([*cells, *SETTING_NAMES])))
    numbers = [*METRICS, *PUBLISHED_METRICS, "parameters", "parameters_kept"]
    modules = [(row.cell, module) for row in rows.values() for module in row.sites]
    caps = {row.cell: row.setting("rounds") for row in rows.values()}
    return Results(
        tuple(rows.values()),
        notes,
        read_declarations(folder),
        cells.assign(dense=cells["dense"].astype(bool), **cells[numbers].astype(float)),
        DataFrame(
            [[cell, m.site, m.block, *_module(m, caps[cell])] for cell, m in modules],
            columns=["cell", "site", "block", *_OF_MODULE],
        ).astype(dict.fromkeys(_OF_MODULE, float)),
        DataFrame(
            [point for row in rows.values() for point in _rounds(row)],
            columns=["cell", "site", "block", "round", "error"],
        ),
    )


def _cell(row: Row) -> dict[str, Any]:
    before, after = row.parameters.before, row.parameters.after
    return {
        **{
            name: ABSENT if value is None else value
            for name, value in row.values.items() if name in SETTING_NAMES
        },
        **{name: row.measured(name) for name in METRICS},
        "cell": row.cell, "model": row.model, "dense": row.dense, "label": None,
        "grids": row.grids, "labels": row.labels, "failed": row.status == "failed",
        **dict.fromkeys(PUBLISHED_METRICS),
        "parameters": after or before,
        "parameters_kept": 100 * after / before if after and before else None,
    }  # fmt: skip


def _module(module: Module, cap: int | None) -> list[float | None]:
    capped = None if None in (cap, module.rounds) else 100.0 * (module.rounds >= cap)  # type: ignore[operator]
    return [
        capped if name == "capped"
        else getattr(module.geometry if name.startswith("angle_") else module, name)
        for name in _OF_MODULE
    ]  # fmt: skip


def chosen(item: Declaration, cells: DataFrame, results: Results) -> DataFrame:
    """Return the cells that a declaration is about, a line per module or round if it shows those.

    Lines have a `value`, the name of a quantity, and its `number`.
    """
    axes = {*item.each, *item.rows, *item.columns, *item.where, item.x}
    kinds = {QUANTITIES[name].of for name in item.values}
    if "rounds" in kinds or "round" in axes:
        cells = cells.merge(results.rounds, on="cell")
    elif "modules" in kinds or {"site", "block"} & axes:
        cells = cells.merge(results.modules, on="cell")
    cells = cells[matching(cells, item.where)] if item.where else cells
    if published := [name for name in item.values if QUANTITIES[name].of == "published"]:
        cells = cells.dropna(subset=published, how="all")
    names = [name for name in item.values if name in cells]
    others = cells.drop(columns=names)
    # As `melt` does, which takes every column by itself, and there are many.
    lines = [others.assign(value=name, number=cells[name]) for name in names]
    return concat(lines or [others.iloc[:0].assign(value="", number=0.0)], ignore_index=True)


def _rounds(row: Row) -> Iterator[tuple[str, str, int, int, float]]:
    """Yield errors relative to the slice's; a module that has stopped keeps its last one."""
    longest = max((len(module.errors_per_round) for module in row.sites), default=0)
    for module in row.sites:
        errors = module.errors_per_round
        if errors and errors[0] > 0:
            for number in range(longest):
                error = errors[min(number, len(errors) - 1)] / errors[0]
                yield row.cell, module.site, module.block, number, error


def matching(cells: DataFrame, only: Filter) -> "Series[bool]":
    """Tell which cells pass a filter; none passes an empty one."""
    passes = Series(bool(only), cells.index)
    for name, values in only.items():
        passes &= cells[name].isin(values) if name in cells else False
    return passes


def differing(cells: DataFrame, axes: Sequence[str], but: Sequence[str] = ("seed",)) -> list[str]:
    """Name the settings that tell cells of one place along some axes apart, but for the seed.

    An option that a cell's compensation does not have is no value.
    """
    names = [name for name in SETTING_NAMES if name in cells and name not in {*axes, *but}]
    names = [name for name in names if cells[name].nunique() > 1]  # the others tell none apart
    places = cells.groupby(["model", *(a for a in axes if a in cells)], dropna=False, sort=False)
    varying = (places[names].nunique() > 1).any() if names else Series(dtype=bool)
    return [name for name in names if varying[name]]


def setting_text(value: object) -> str:
    """Print a setting; of a path only the name, which is enough to recognise it."""
    if value is None or isna(value):
        return ABSENT
    if isinstance(value, float):
        return f"{value:g}"
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


def axis_text(name: str, value: Any) -> str:
    """Print a place along an axis."""
    if name == "value":
        return QUANTITIES[value].title
    if name == "sparsity" and not isinstance(value, str):
        return f"{100 * value:.4g} %"
    if name == "site":
        return _TEXTS.get(value, value)
    return str(value) if name in ("model", "label") else setting_text(value)


def along(cells: DataFrame, name: str, item: Declaration) -> "Series[Any]":
    """Return the places of cells along an axis, as text, in order.

    The order is that of `where`, if it names them, else by size or first appearance.
    """
    first = item.values if name == "value" else item.where.get(name, [])

    def place(value: Any) -> tuple[Any, ...]:
        if value == DENSE:
            return (-1,)
        if value in first:
            return (0, first.index(value))
        if name in _ORDER:
            known = _ORDER[name]
            return (1, known.index(value) if value in known else len(known), str(value))
        if name in ("model", "label"):
            return (1,)
        return (
            1,
            isinstance(value, str),
            value if isinstance(value, int | float) else 0,
            str(value),
        )

    values = [ABSENT if isna(value) else value for value in cells[name]]
    ordered = sorted(dict.fromkeys(values), key=place)
    texts = list(dict.fromkeys(axis_text(name, value) for value in ordered))
    places = Categorical([axis_text(name, value) for value in values], texts, ordered=True)
    return Series(places, cells.index, name=name)


def each(cells: DataFrame, item: Declaration) -> Iterator[tuple[dict[str, str], DataFrame]]:
    """Yield the cells of every place along the axes that have a table or a panel each."""
    if not item.each and len(cells):
        yield {}, cells
    if not item.each or cells.empty:
        return
    keys = [along(cells, name, item) for name in item.each]
    for places, group in cells.groupby(keys, observed=True):
        yield dict(zip(item.each, places)), group
