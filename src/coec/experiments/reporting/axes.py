"""What the lines, columns and panels that a grid declares stand for."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coec.experiments.declarations import Declaration, Where
from coec.experiments.publications import Publication
from coec.experiments.reporting.results import Results
from coec.experiments.reporting.tables import SHOWN, Cell, grouped, percent, setting_cell, varying
from coec.experiments.reporting.tables import value_text as text_of
from coec.experiments.rows import SETTING_NAMES, Row, Site

SELECTIONS = ("wanda-sp", "flap", "rcpu", "leverage", "obs")
COMPENSATIONS = ("none", "bias", "least-squares", "ridge-to-slice", "rcpu", "coec", "auto")
"""The order of lines; what is not listed comes last."""

SITES = {"attention": "attention output", "mlp": "MLP"}
"""The kinds of modules that a repair writes, with what a reader calls them."""

HEADS = {"label": "Configuration", "cell": "Cell"}
TITLED = ("model", "sparsity", "selection", "compensation", "method", "repair")
"""What the heads of columns of labels are; settings besides are called what they are called."""


@dataclass(frozen=True)
class Context:
    """What a declared table or figure is drawn from.

    Attributes:
        results: the whole sweep.
        rows: those that it is about, the dense models' left out.
        grid: whose they are; nothing where they are the sweep's.
        compare, published: numbers to set beside, where they were asked for, and their name.
    """

    results: Results
    rows: tuple[Row, ...]
    grid: str = ""
    compare: Publication | None = None
    published: str = ""


def rank(name: Any, order: Sequence[str]) -> tuple[int, str]:
    """Sorts known names by their place, unknown ones behind them by name."""
    return (order.index(name) if name in order else len(order), str(name))


def sequential(row: Row) -> tuple[tuple[int, str], tuple[int, str]]:
    """The sort key of a row's selection and compensation."""
    return (
        rank(str(row.setting("selection")), SELECTIONS),
        rank(str(row.setting("compensation")), COMPENSATIONS),
    )


def sorting(value: Any) -> tuple[bool, Any]:
    """Numbers by size, and before anything else by text."""
    text = not isinstance(value, int | float)
    return text, str(value) if text else value


def matches(row: Row, where: Where) -> bool:
    """Whether every one of the settings has one of its values."""
    return all(row.setting(name) in values for name, values in where.items())


def quantity(row: Row, name: str, site: str | None = None) -> list[float]:
    """Every value of a quantity in a row: one of a metric, one per module of the others."""
    if name in SHOWN:
        value = row.measured(name)
        return [] if value is None else [value]
    found = [of_module(one, name) for one in row.sites if site in (None, one.site)]
    return [value for value in found if value is not None]


def of_module(module: Site, name: str) -> float | None:
    """A quantity of one module."""
    if name == "capped":
        return module.rounds
    value: float | None = getattr(module.geometry if name.startswith("angle_") else module, name)
    return value


def mean_over_sites(rows: Iterable[Row], site: str | None, name: str) -> float | None:
    """The mean of one quantity over the modules of a kind; None where nobody measured it."""
    known = [value for row in rows for value in quantity(row, name, site)]
    return statistics.fmean(known) if known else None


def shown(item: Declaration, context: Context) -> list[Row]:
    """The rows that a declaration is about, in its order."""
    order = [label for labels in item.parts.values() for label in labels]

    def place(row: Row) -> list[Any]:
        known: dict[str, Any] = {
            "model": row.model,
            "selection": sequential(row)[0],
            "compensation": sequential(row)[1],
            "label": rank(row.labels.get(context.grid), order)[0],
        }
        return [known.get(name, sorting(row.setting(name))) for name in item.sort]

    rows = [row for row in context.rows if matches(row, item.where)]
    rows = [row for row in rows if matches(row, item.prefer)] or rows
    if item.having:
        rows = [row for row in rows if quantity(row, item.having)]
    if item.varies and len({row.setting(item.varies) for row in rows}) < 2:
        return []
    return sorted(rows, key=place)


@dataclass(frozen=True)
class Axes:
    """The places of rows that stand in one table or panel together."""

    item: Declaration
    grid: str
    rows: Sequence[Row]

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Settings that tell rows of one place apart, besides the seed and what has an axis."""
        item = self.item
        own = {*item.each, *item.rows, *item.columns, item.x}
        hidden = {*item.reference, *(n for s in item.series for n in s.where), "seed"}

        def place(row: Row) -> tuple[Any, ...]:
            label = row.labels.get(self.grid) if "label" in own else None
            method = row.model, row.sparsity, *sequential(row), label
            return *method, *(row.setting(name) for name in sorted(own))

        names = (n for found in grouped(self.rows, place).values() for n in varying(found))
        return tuple(name for name in dict.fromkeys(names) if name not in own | hidden)

    @property
    def told(self) -> tuple[str, ...]:
        """The other settings, where labels say what they are."""
        return self.others if {"others", "method", "repair"} & {*self.item.rows} else ()

    @cached_property
    def several(self) -> bool:
        """Whether there is more than one selection."""
        return len({row.setting("selection") for row in self.rows}) > 1

    def differs(self, row: Row) -> str:
        """Those of the other settings that a row has, after a comma each."""
        known = ((name, row.setting(name)) for name in self.others)
        return "".join(f", {name} = {text_of(v)}" for name, v in known if v is not None)

    def key(self, row: Row, name: str) -> Any:
        """Where a row stands along an axis; what is equal stands together."""
        if name in ("method", "repair"):
            selection = f"{row.setting('selection')} + "
            known = selection if self.several or name == "method" else ""
            return f"{known}{row.setting('compensation')}{self.differs(row)}"
        if name == "others":
            return tuple(text_of(row.setting(other)) for other in self.others)
        if name == "part":
            label = row.labels.get(self.grid)
            parts = self.item.parts
            rest = next((part for part, labels in parts.items() if not labels), None)
            named = next((part for part, labels in parts.items() if label in labels), rest)
            return None if label is None else named
        plain = {"model": row.model, "cell": row.cell, "label": row.labels.get(self.grid)}
        return plain[name] if name in plain else row.setting(name)

    def grouped(self, *names: str) -> dict[tuple[Any, ...], list[Row]]:
        """The rows by their places along axes."""
        return grouped(self.rows, lambda row: tuple(self.key(row, name) for name in names))

    def heads(self, name: str) -> tuple[str, ...]:
        """Of the columns of labels that an axis has."""
        if name == "others":
            return self.others
        return (HEADS.get(name, name.capitalize() if name in TITLED else name),)


def cells(name: str, key: Any) -> tuple[Cell, ...]:
    """The labels of a place along an axis."""
    if name == "others":
        return tuple(map(Cell, key))
    if name == "sparsity":
        return (Cell(percent(key), key),)
    return (setting_cell(key) if name in SETTING_NAMES else Cell(str(key)),)


def words(keys: Mapping[str, Any]) -> dict[str, str]:
    """Places along axes as a title says them."""
    said = {
        name: "" if name == "others" else cells(name, key)[0].text for name, key in keys.items()
    }
    return said | ({"site": SITES[keys["site"]]} if "site" in keys else {})


def split(
    rows: Sequence[Row], names: Sequence[str], item: Declaration, grid: str
) -> Iterator[tuple[dict[str, Any], Sequence[Row]]]:
    """The rows at every place along the axes, the first axis outermost."""
    if not names:
        yield {}, rows
        return
    first, *rest = names
    axes = Axes(item, grid, rows)
    if first == "site":
        parts: dict[Any, Sequence[Row]] = dict.fromkeys(SITES, rows)
    else:
        parts = dict(grouped(rows, lambda row: axes.key(row, first)))
    order = list(item.parts) if first == "part" else []
    for key in sorted(parts, key=lambda k: rank(k, order)[0]) if order else parts:
        for keys, found in split(parts[key], rest, item, grid) if key is not None else ():
            yield {first: key, **keys}, found
