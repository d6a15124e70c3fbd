"""Tables as values: what a cell says, sorts by and stresses. Rendering is elsewhere."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from coec.experiments.rows import NO_REASON, Row

ABSENT = "–"
SHOWN = {
    "perplexity": ("Perplexity", 2, "lower"),
    "zero_shot": ("Zero-shot accuracy, %", 1, "higher"),
    "kl": ("KL divergence from the dense model, nats per token", 3, "lower"),
    "agreement": ("Same most probable token as the dense model, %", 1, "higher"),
    "seconds": ("Seconds to prune, the dense pass included", 0, "lower"),
    "memory": ("Peak memory, GiB", 2, "lower"),
}
"""Title, decimals and which is better, by metric."""

BETTER = {name: shown[1:] for name, shown in SHOWN.items()} | {"holdout_after": (4, "lower")}
"""Decimals and which is better, of every quantity of which one is."""


@dataclass(frozen=True)
class Cell:
    """One entry of a table.

    Attributes:
        text: what is printed.
        value: the number behind the text, to sort by; None where there is none.
        bold: whether it is stressed.
        mark: the letter of a footnote, or nothing.
    """

    text: str
    value: float | None = None
    bold: bool = False
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """A table that knows nothing of formats.

    Attributes:
        title: what it shows, and which direction is better.
        heads: one per column.
        rows: cells, as many in every row as there are heads.
        labels: how many leading columns are text; the others are numbers.
        notes: sentences under the table, footnotes among them.
        settings: what the numbers were measured under; one line.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    labels: int = 1
    notes: tuple[str, ...] = ()
    settings: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.heads):
                raise ValueError(f"{self.title}: {len(row)} cells under {len(self.heads)} heads")

    def without_empty_columns(self) -> "Table":
        """Only the columns in which some row has something to say."""
        kept = [i for i in range(len(self.heads)) if any(r[i].text != ABSENT for r in self.rows)]
        return replace(
            self,
            heads=tuple(self.heads[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
            labels=sum(i < self.labels for i in kept),
        )

    def as_dict(self) -> dict[str, Any]:
        """Heads, texts and values, ready for JSON."""
        return {
            "title": self.title,
            "heads": list(self.heads),
            "rows": [[cell.text for cell in row] for row in self.rows],
            "values": [[cell.value for cell in row] for row in self.rows],
            "bold": [[cell.bold for cell in row] for row in self.rows],
            "notes": list(self.notes),
            "settings": self.settings,
        }


@dataclass
class Footnotes:
    """Collects the notes of one table; the same text gets the same letter."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str) -> str:
        """The letter of a note: a to z, then aa, ab, and on."""
        if text not in self.texts:
            self.texts.append(text)
        return _letters(self.texts.index(text))

    @property
    def lines(self) -> tuple[str, ...]:
        """The notes in order, each after its letter."""
        return tuple(f"{_letters(i)}: {text}" for i, text in enumerate(self.texts))


def _letters(index: int) -> str:
    rest, last = divmod(index, len(ascii_lowercase))
    return (_letters(rest - 1) if rest else "") + ascii_lowercase[last]


def decimals(value: float, digits: int) -> str:
    """A number with fixed decimals and a true minus sign; scientific from a million on."""
    shown = f"{value:.2e}" if abs(value) >= 1e6 else f"{value:,.{digits}f}"
    return shown.replace("-", "−")


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits."""
    return f"{value:.{digits}g}".replace("-", "−")


def amount(value: float | None, digits: int = 2, *, signed: bool = False) -> Cell:
    """A number as a cell; a dash for None."""
    if value is None:
        return Cell(ABSENT)
    sign = "+" if signed and round(value, digits) > 0 else ""
    return Cell(sign + decimals(value, digits), value)


def percent(fraction: float) -> str:
    """A sparsity as the documents write it."""
    return f"{100 * fraction:.4g} %"


def value_text(value: Any) -> str:
    """A setting as text; of a path only the name, which is enough to recognise it."""
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:g}"
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


def setting_cell(value: Any) -> Cell:
    """A setting as a cell that sorts by value where it is a number."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(value_text(value), float(value) if plain else None)


def count(value: int | None) -> Cell:
    """A whole number as a cell."""
    return Cell(ABSENT) if value is None else Cell(f"{value:,}", value)


def method_name(row: Row) -> str:
    """Selection, compensation and sparsity in words."""
    if row.dense:
        return "dense"
    return f"{row.setting('selection')} + {row.setting('compensation')} at {percent(row.sparsity)}"


def measurement(rows: Sequence[Row], metric: str, notes: Footnotes) -> Cell:
    """One metric of the rows of one place in a table: their mean, if several seeds were run.

    A failed cell says so, and a footnote says why.
    """
    for row in rows:
        if row.status == "failed":
            reason = row.error or NO_REASON
            return Cell("failed", mark=notes.mark(f"{row.model}, {method_name(row)}: {reason}"))
    value = mean_of(row.measured(metric) for row in rows)
    if value is not None and len(rows) > 1:
        names = [name for name in varying(rows) if name != "seed"]
        mean = f"mean of {len(rows)} " + (
            f"cells that differ in {', '.join(names)}" if names else "seeds"
        )
        return Cell(decimals(value, SHOWN[metric][1]), value, mark=notes.mark(mean))
    return amount(value, SHOWN[metric][1])


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean; None if there is nothing or any value is missing."""
    found = list(values)
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None


def stressed(cells: Sequence[Cell], name: str) -> list[Cell]:
    """The best of two cells or more in bold, as printed; of a tie, all."""
    known = [cell.value for cell in cells if cell.value is not None]
    if len(known) < 2 or name not in BETTER:
        return list(cells)
    digits, better = BETTER[name]
    best = round(min(known) if better == "lower" else max(known), digits)
    return [replace(c, bold=c.value is not None and round(c.value, digits) == best) for c in cells]


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by key, keys in the order of first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def title_of(metric: str, rows: Iterable[Row]) -> str:
    """The metric's name; of zero-shot accuracy also over how many tasks the mean is."""
    name = SHOWN[metric][0]
    if metric == "zero_shot":
        counts = {len(row.zero_shot.tasks) for row in rows if row.zero_shot}
        name = f"Zero-shot accuracy, mean of {'/'.join(map(str, sorted(counts)))} tasks, %"
    return f"{name} ({SHOWN[metric][2]} is better)"


def varying(rows: Sequence[Row]) -> tuple[str, ...]:
    """Settings, and options of the compensations, that take two values or more in these rows.

    An option that a row's compensation does not have is not a value.
    """
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in {**row.settings.values, **row.settings.options}.items():
            values.setdefault(name, set()).add(repr(value))
    return tuple(name for name, found in values.items() if len(found) > 1)
