"""Lines, columns and panels of a declared table or figure, and the rows that stand there."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coec.experiments.declarations import METRICS, Declaration, Filter
from coec.experiments.publications import Publication
from coec.experiments.reporting.results import Results
from coec.experiments.reporting.values import (
    Datum,
    grouped,
    percent,
    setting_entry,
    setting_text,
    varying,
)
from coec.experiments.rows import SETTING_NAMES, Module, Row

_ORDER = {
    "selection": ("wanda-sp", "flap", "rcpu", "leverage", "obs"),
    "compensation": ("none", "bias", "least-squares", "ridge-to-slice", "rcpu", "coec", "auto"),
}
"""Order of lines; other names come last."""
SITES = {"attention": "attention output", "mlp": "MLP"}
_TITLES = {
    "label": "Configuration", "model": "Model", "sparsity": "Sparsity", "selection": "Selection",
    "compensation": "Compensation", "method": "Method", "repair": "Repair",
}  # fmt: skip
"""Heads of columns of labels; other settings are called what they are called."""


@dataclass(frozen=True)
class Context:
    """Source of a declared table or figure.

    Attributes:
        results: the whole sweep.
        rows: the rows to draw, without those of the dense models.
        grid: the grid of these rows; empty for the whole sweep.
        publication, published: numbers to set beside, where they were asked for, and their name.
    """

    results: Results
    rows: tuple[Row, ...]
    grid: str = ""
    publication: Publication | None = None
    published: str = ""


def sort_key(name: str, value: Any) -> tuple[Any, Any]:
    """Sort key of a setting: known names in their order, numbers by size before anything else."""
    order = _ORDER.get(name)
    if order:
        return (order.index(value) if value in order else len(order), str(value))
    text = not isinstance(value, int | float)
    return text, str(value) if text else value


def in_order(row: Row) -> tuple[Any, ...]:
    """Sort key of a row's selection and compensation."""
    return tuple(sort_key(name, row.setting(name)) for name in _ORDER)


def matches(row: Row, only: Filter) -> bool:
    """Tell whether a row passes a filter."""
    return all(row.setting(name) in values for name, values in only.items())


def quantity(row: Row, name: str, site: str | None = None) -> list[float]:
    """Return every value of a quantity in a row: one of a metric, one per module of others."""
    if name in METRICS:
        values = [row.measured(name)]
    else:
        values = [of_module(module, name) for module in row.sites if site in (None, module.site)]
    return [value for value in values if value is not None]


def of_module(module: Module, name: str) -> float | None:
    """Return a quantity of one module."""
    if name == "capped":
        return module.rounds
    value: float | None = getattr(module.geometry if name.startswith("angle_") else module, name)
    return value


def mean_over_sites(rows: Iterable[Row], site: str | None, name: str) -> float | None:
    """Return the mean of a quantity over the modules of a site; None where it was not measured."""
    values = [value for row in rows for value in quantity(row, name, site)]
    return statistics.fmean(values) if values else None


def rows_of(item: Declaration, context: Context) -> list[Row]:
    """Return the rows that a declaration is about, in its order."""
    order = [label for labels in item.groups.values() for label in labels]

    def place(row: Row) -> list[Any]:
        label = row.labels.get(context.grid)
        special = {
            "model": row.model, "label": order.index(label) if label in order else len(order),
        }  # fmt: skip
        return [special.get(name, sort_key(name, row.setting(name))) for name in item.sort]

    rows = [row for row in context.rows if matches(row, item.only)]
    rows = [row for row in rows if matches(row, item.prefer)] or rows
    if item.having:
        rows = [row for row in rows if quantity(row, item.having)]
    if item.varies and len({row.setting(item.varies) for row in rows}) < 2:
        return []
    return sorted(rows, key=place)


@dataclass(frozen=True)
class Axes:
    """Places along axes of the rows of one table or panel."""

    item: Declaration
    grid: str
    rows: Sequence[Row]

    @cached_property
    def differing(self) -> tuple[str, ...]:
        """Settings that tell rows of one place apart, without the seed and those with an axis."""
        item = self.item
        axes = {*item.each, *item.rows, *item.columns, item.x}
        hidden = {*item.reference, *(n for line in item.series for n in line.only), "seed"}

        def place(row: Row) -> tuple[Any, ...]:
            label = row.labels.get(self.grid) if "label" in axes else None
            settings = (row.setting(name) for name in sorted(axes))
            return row.model, row.sparsity, *in_order(row), label, *settings

        names = (name for rows in grouped(self.rows, place).values() for name in varying(rows))
        return tuple(name for name in dict.fromkeys(names) if name not in axes | hidden)

    def differences(self, row: Row) -> str:
        """Print the differing settings that a row has, after a comma each."""
        settings = ((name, row.setting(name)) for name in self.differing)
        return "".join(f", {name} = {setting_text(v)}" for name, v in settings if v is not None)

    def key(self, row: Row, name: str) -> Any:
        """Return the place of a row along an axis; equal keys stand together."""
        label = row.labels.get(self.grid)
        if name in ("method", "repair"):
            several = len({row.setting("selection") for row in self.rows}) > 1
            selection = f"{row.setting('selection')} + " if several or name == "method" else ""
            return f"{selection}{row.setting('compensation')}{self.differences(row)}"
        if name == "others":
            return tuple(setting_text(row.setting(setting)) for setting in self.differing)
        if name == "part":
            default = next((g for g, labels in self.item.groups.items() if not labels), None)
            groups = (g for g, labels in self.item.groups.items() if label in labels)
            return None if label is None else next(groups, default)
        return {"model": row.model, "label": label}.get(name, row.setting(name))

    def grouped(self, *names: str) -> dict[tuple[Any, ...], list[Row]]:
        """Return the rows by their places along axes."""
        return grouped(self.rows, lambda row: tuple(self.key(row, name) for name in names))

    def heads(self, name: str) -> tuple[str, ...]:
        """Return the heads of the columns of labels that an axis has."""
        return self.differing if name == "others" else (_TITLES.get(name, name),)

    def split(self, names: Sequence[str]) -> Iterator[tuple[dict[str, Any], Sequence[Row]]]:
        """Yield the rows at every place along the axes, the first axis outermost."""
        if not names:
            yield {}, self.rows
            return
        name, *inner = names
        if name == "site":
            places: dict[Any, Sequence[Row]] = dict.fromkeys(SITES, self.rows)
        else:
            places = dict(grouped(self.rows, lambda row: self.key(row, name)))
        if name == "part":
            places = {group: places[group] for group in self.item.groups if group in places}
        for key, rows in places.items():
            if key is not None:
                for keys, subset in Axes(self.item, self.grid, rows).split(inner):
                    yield {name: key, **keys}, subset


def labels(name: str, key: Any) -> tuple[Datum, ...]:
    """Return the labels of a place along an axis."""
    if name == "others":
        return tuple(map(Datum, key))
    if name == "sparsity":
        return (Datum(percent(key), key),)
    return (setting_entry(key) if name in SETTING_NAMES else Datum(str(key)),)


def words(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return places along axes as a title prints them."""
    texts = {name: labels(name, key)[0].text for name, key in keys.items() if name != "value"}
    return texts | ({"site": SITES[keys["site"]]} if "site" in keys else {})
