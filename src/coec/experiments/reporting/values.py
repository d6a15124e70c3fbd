"""Entries of tables: what they print, sort by and stress."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from coec.experiments.rows import NO_REASON, Row

if TYPE_CHECKING:
    from pandas import DataFrame

ABSENT = "–"
GIB = 2**30


@dataclass(frozen=True)
class Format:
    """Title of a quantity, its head in tables and figures, its decimals, and which is better."""

    title: str
    head: str
    digits: int
    better: str = ""


FORMATS = {
    "perplexity": Format("Perplexity", "Perplexity", 2, "lower"),
    "zero_shot": Format("Zero-shot accuracy, %", "Zero-shot accuracy, %", 1, "higher"),
    "kl": Format("KL divergence from the dense model, nats per token", "KL, nats", 3, "lower"),
    "agreement": Format(
        "Same most probable token as the dense model, %", "Same top token, %", 1, "higher"
    ),
    "seconds": Format("Seconds to prune, the dense pass included", "Seconds", 0, "lower"),
    "memory": Format("Peak memory, GiB", "GiB", 2, "lower"),
    "error_before": Format("", "Slice", 4),
    "error_after": Format("", "Fit", 4),
    "holdout_before": Format("", "Slice, held out", 4),
    "holdout_after": Format("", "Held out", 4, "lower"),
    "capped": Format("", "At the cap", 0),
    "angle_op": Format("", "O–P, degrees", 4),
    "angle_oc": Format("", "O–C, degrees", 4),
    "angle_pc": Format("", "P–C, degrees", 4),
}


@dataclass(frozen=True)
class Datum:
    """Content of one place in a table.

    Attributes:
        text: as it is printed.
        value: the number behind the text, to sort by; None where there is none.
        bold: it is stressed.
        mark: the letter of a footnote, or nothing.
    """

    text: str
    value: float | None = None
    bold: bool = False
    mark: str = ""


NO_DATUM = Datum(ABSENT)


@dataclass(frozen=True)
class Table:
    """Table that knows nothing of formats.

    Attributes:
        title: also says which direction is better.
        rows: as many entries in every row as there are heads.
        labels: number of leading columns that are text; the others are numbers.
        notes: sentences under the table, footnotes among them.
        settings: the conditions of the numbers; one line.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Datum, ...], ...]
    labels: int = 1
    notes: tuple[str, ...] = ()
    settings: str = ""

    def without_empty_columns(self) -> "Table":
        """Leave out the columns in which no row has an entry."""
        kept = [i for i in range(len(self.heads)) if any(r[i].text != ABSENT for r in self.rows)]
        return replace(
            self,
            heads=tuple(self.heads[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
            labels=sum(i < self.labels for i in kept),
        )

    def frame(self, show: Callable[[Datum], str], show_head: Callable[[str], str]) -> "DataFrame":
        """Return the table with its entries as text of one format."""
        from pandas import DataFrame

        texts = [[show(entry) for entry in row] for row in self.rows]
        return DataFrame(texts, columns=[show_head(head) for head in self.heads], dtype=object)

    def as_dict(self) -> dict[str, object]:
        """Return heads, texts and values, ready for JSON."""
        columns = {"rows": "text", "values": "value", "bold": "bold"}
        return {
            "title": self.title,
            "heads": list(self.heads),
            **{
                name: [[getattr(entry, field) for entry in row] for row in self.rows]
                for name, field in columns.items()
            },
            "notes": list(self.notes),
            "settings": self.settings,
        }


@dataclass
class Footnotes:
    """Notes of one table; the same text gets the same letter."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str) -> str:
        """Return the letter of a note: a to z, then aa, ab, and on."""
        if text not in self.texts:
            self.texts.append(text)
        return _letters(self.texts.index(text))

    @property
    def lines(self) -> tuple[str, ...]:
        """Notes in order, each after its letter."""
        return tuple(f"{_letters(i)}: {text}" for i, text in enumerate(self.texts))


def _letters(index: int) -> str:
    tens, last = divmod(index, len(ascii_lowercase))
    return (_letters(tens - 1) if tens else "") + ascii_lowercase[last]


def decimals(value: float, digits: int) -> str:
    """Print fixed decimals with a true minus sign; scientific from a million on."""
    text = f"{value:.2e}" if abs(value) >= 1e6 else f"{value:,.{digits}f}"
    return text.replace("-", "−")


def amount(value: float | None, digits: int = 2, *, signed: bool = False) -> Datum:
    """Return a number with fixed decimals; a dash for None."""
    if value is None:
        return NO_DATUM
    sign = "+" if signed and round(value, digits) > 0 else ""
    return Datum(sign + decimals(value, digits), value)


def significant(value: float | None, digits: int = 3) -> Datum:
    """Return a number with significant digits; a dash for None."""
    return NO_DATUM if value is None else Datum(f"{value:.{digits}g}".replace("-", "−"), value)


def count(value: int | None) -> Datum:
    """Return a whole number; a dash for None."""
    return NO_DATUM if value is None else Datum(f"{value:,}", value)


def share(value: float | None, total: float | None) -> Datum:
    """Return a ratio in %; a dash where either number is missing."""
    ratio = value / total if value is not None and total else None
    return NO_DATUM if ratio is None else Datum(f"{100 * ratio:.1f} %", ratio)


def times(value: float | None, base: float | None) -> Datum:
    """Return a ratio as a factor; a dash where either number is missing."""
    ratio = value / base if value is not None and base else None
    return Datum(f"×{decimals(ratio, 3)}", ratio) if ratio else NO_DATUM


def percent(fraction: float) -> str:
    """Print a sparsity as the documents write it."""
    return f"{100 * fraction:.4g} %"


def setting_text(value: object) -> str:
    """Print a setting; of a path only the name, which is enough to recognise it."""
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:g}"
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


def setting_entry(value: object) -> Datum:
    """Return a setting, which sorts by value where it is a number."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return Datum(setting_text(value), float(value) if plain else None)  # type: ignore[arg-type]


def method_name(row: Row) -> str:
    """Name selection, compensation and sparsity of a row."""
    if row.dense:
        return "dense"
    return f"{row.setting('selection')} + {row.setting('compensation')} at {percent(row.sparsity)}"


def measurement(rows: Sequence[Row], metric: str, notes: Footnotes) -> Datum:
    """Return one metric of the rows of one place: their mean, if several seeds were run.

    A failed cell says so, and a footnote says why.
    """
    for row in rows:
        if row.status == "failed":
            reason = row.error or NO_REASON
            return Datum("failed", mark=notes.mark(f"{row.model}, {method_name(row)}: {reason}"))
    entry = amount(mean_of(row.measured(metric) for row in rows), FORMATS[metric].digits)
    if entry.value is None or len(rows) == 1:
        return entry
    names = [name for name in varying(rows) if name != "seed"]
    cells = f"cells that differ in {', '.join(names)}" if names else "seeds"
    return replace(entry, mark=notes.mark(f"mean of {len(rows)} {cells}"))


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean; None if there is nothing or any value is missing."""
    numbers = list(values)
    complete = [value for value in numbers if value is not None]
    return statistics.fmean(complete) if complete and len(complete) == len(numbers) else None


def stressed(entries: Sequence[Datum], quantity: str) -> list[Datum]:
    """Make the best of two entries or more bold, as printed; of a tie, all."""
    digits, better = FORMATS[quantity].digits, FORMATS[quantity].better
    printed = [round(entry.value, digits) for entry in entries if entry.value is not None]
    if len(printed) < 2 or not better:
        return list(entries)
    best = min(printed) if better == "lower" else max(printed)
    return [
        replace(entry, bold=entry.value is not None and round(entry.value, digits) == best)
        for entry in entries
    ]


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Return the rows by key, keys in the order of first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def varying(rows: Sequence[Row]) -> tuple[str, ...]:
    """Name the settings and options that take two values or more in these rows.

    An option that a row's compensation does not have is not a value.
    """
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in {**row.settings.values, **row.settings.options}.items():
            values.setdefault(name, set()).add(repr(value))
    return tuple(name for name, different in values.items() if len(different) > 1)
