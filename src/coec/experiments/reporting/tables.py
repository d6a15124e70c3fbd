"""Tables of lines by columns, as a grid declares them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

from numpy import hstack, zeros
from pandas import Categorical, DataFrame, Series, concat, isna

from coec.experiments.declarations import QUANTITIES, Declaration
from coec.experiments.reporting.frame import (
    ABSENT,
    DENSE,
    Results,
    along,
    chosen,
    differing,
    each,
    matching,
    setting_text,
)
from coec.experiments.rows import SETTING_NAMES


@dataclass(frozen=True)
class Table:
    """Table that knows nothing of formats.

    Attributes:
        title: also says which direction is better.
        frame: numbers and texts, with text for heads.
        digits: decimals of columns by head; other numbers print as settings do.
        bold: of the same shape, which entries are stressed.
        notes: sentences under the table.
    """

    title: str
    frame: DataFrame
    digits: Mapping[str, int]
    bold: DataFrame | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_text(self) -> list[bool]:
        """Tell, by column, whether it has no number."""
        columns = (column for _, column in self.frame.items())
        return [not any(isinstance(v, int | float) for v in column) for column in columns]

    def texts(
        self, escape: Callable[[str], str] = str, stress: Callable[[str], str] = str
    ) -> DataFrame:
        """Return entries and heads as text of one format."""
        texts = self.frame.astype(object)
        for i, (head, column) in enumerate(self.frame.items()):  # heads may repeat
            digits = self.digits.get(str(head))
            texts.isetitem(i, [escape(number_text(value, digits)) for value in column])
        if self.bold is not None:
            texts = texts.where(~self.bold.to_numpy(), texts.map(stress))
        return texts.rename(columns=escape)

    def as_dict(self) -> dict[str, object]:
        """Return heads, texts and numbers, ready for JSON."""
        numbers = [
            [float(v) if isinstance(v, int | float) and not isna(v) else None for v in line]
            for line in self.frame.to_numpy().tolist()
        ]
        texts = self.texts()
        return {
            "title": self.title, "heads": [*texts.columns], "rows": texts.to_numpy().tolist(),
            "values": numbers, "notes": [*self.notes],
        }  # fmt: skip


def number_text(value: Any, digits: int | None) -> str:
    """Print a number with fixed decimals and a true minus sign; scientific from a million on."""
    if isinstance(value, str):
        return value
    if digits is None or value is None or isna(value):
        return setting_text(value)
    text = f"{value:.2e}" if digits and abs(value) >= 1e6 else f"{value:,.{digits}f}"
    return text.replace("-", "−")


def pivot(item: Declaration, cells: DataFrame, results: Results) -> list[Table]:
    """Draw a table for every place along `each`, and for every quantity that is no column."""
    data = chosen(item, cells, results)
    if "label" in item.rows:
        data = data[data["label"].notna()]
    split = [item.values] if "value" in item.columns else [[name] for name in item.values]
    tables = []
    for values in split:
        for places, group in each(data[data["value"].isin(values)], item):
            if group["number"].notna().any():
                title = item.table.format_map({**places, "metric": _metric(values[0])})
                tables.append(_pivot(item, title, group, results))
    return tables


def _metric(name: str) -> str:
    quantity = QUANTITIES[name]
    return f"{quantity.title} ({quantity.better} is better)" if quantity.better else quantity.title


def _pivot(item: Declaration, title: str, data: DataFrame, results: Results) -> Table:
    rows, data = _with_lines(item, data, results)
    beside = matching(data, item.reference)
    heads = _heads(item, data, beside)
    quantities = dict(zip(heads, data["value"]))
    places = data.groupby([*(along(data, name, item) for name in rows), heads], observed=True)
    table = places.agg(
        number=("number", "mean"), failed=("failed", "any"), cells=("cell", "nunique")
    )
    numbers, failed = table["number"].unstack(), table["failed"].unstack(fill_value=False)
    numbers.columns = failed.columns = [str(head) for head in numbers.columns]
    shown = (numbers.notna() | failed).any()
    numbers, failed = numbers.loc[:, shown], failed.loc[:, shown]
    compared = numbers.drop(columns=heads[beside].unique(), errors="ignore")
    bold, contests = _best(compared, item.best, quantities)
    extra, notes = _extra(item, compared, bold, contests)
    if (most := table["cells"].max()) > 1:
        notes.append(f"Entries are means of up to {most} cells.")
    labels = numbers.index.to_frame(index=False).astype(object)
    labels.columns = [name.replace("label", "configuration").capitalize() for name in rows]
    body = numbers.astype(object).mask(failed & numbers.isna(), "failed").join(extra)
    frame = concat([labels, body.reset_index(drop=True)], axis="columns")
    digits = {head: QUANTITIES[name].digits for head, name in quantities.items()}
    digits |= dict.fromkeys(item.extra, QUANTITIES[data["value"].iloc[0]].digits)
    stressed = bold.reindex(columns=body.columns, fill_value=False).to_numpy(dtype=bool)
    bold = DataFrame(hstack([zeros(labels.shape, dtype=bool), stressed]))
    return Table(title, frame, digits, bold, (*item.notes, *notes))


def _with_lines(
    item: Declaration, data: DataFrame, results: Results
) -> tuple[list[str], DataFrame]:
    """Return the axes of the lines, and the cells with those of the dense models if they have one.

    Settings that tell cells of one entry apart are axes too.
    """
    pruned = data[~matching(data, item.reference)]
    axes = [*item.rows, *item.columns, *item.each]
    rows = [*item.rows, *differing(pruned, axes)]
    if item.dense:
        dense = chosen(item.model_copy(update={"where": {}}), results.dense, results)
        dense = dense[dense["model"].isin(data["model"]) & dense["value"].isin(data["value"])]
        line = dict.fromkeys(rows, ABSENT) | {rows[0]: DENSE}
        data = concat([data, dense.assign(**line)], ignore_index=True)
    return rows, data


def _heads(item: Declaration, data: DataFrame, beside: "Series[bool]") -> "Series[Any]":
    """Return the heads of the columns in which cells stand, those of the reference last."""
    reference = " ".join(setting_text(v) for values in item.reference.values() for v in values)
    several = len(item.columns) > 1
    keys = [along(data, name, item) for name in item.columns]
    names = [f"{n} = " if several and n in SETTING_NAMES else "" for n in item.columns]
    order: dict[str, tuple[Any, ...]] = {}
    heads = []
    for apart, codes, texts in zip(beside, zip(*(key.cat.codes for key in keys)), zip(*keys)):
        head = ", ".join(f"{name}{text}" for name, text in zip(names, texts))
        heads.append(reference if apart else head)
        order.setdefault(heads[-1], (apart, *codes))
    ordered = sorted(order, key=lambda head: order[head])
    return Series(Categorical(heads, ordered, ordered=True), data.index, name="head")


def _best(
    numbers: DataFrame, by: str, quantities: Mapping[str, str]
) -> tuple[DataFrame, DataFrame]:
    """Tell which entries are the best as printed, and which have others to be compared with.

    Args:
        by: `row`, `column`, or the axis of the lines that are compared; of a tie, all are best.
    """

    def signed(column: "Series[float]") -> "Series[float]":
        quantity = QUANTITIES[quantities[str(column.name)]]
        sign = {"lower": 1.0, "higher": -1.0, "": nan}[quantity.better]
        return sign * column.round(quantity.digits)

    values = numbers.apply(signed)
    if by == "row":
        values = values.T
    axis = values.index.get_level_values(by) if by in values.index.names else [0] * len(values)
    groups = values.groupby(axis, observed=True)
    contests = values.notna() & (groups.transform("count") > 1) & bool(by)
    best = contests & values.eq(groups.transform("min"))
    return (best.T, contests.T) if by == "row" else (best, contests)


def _extra(
    item: Declaration, numbers: DataFrame, best: DataFrame, contests: DataFrame
) -> tuple[DataFrame, list[str]]:
    """Return the columns at the end, and a sentence on the columns that a mean is over."""
    lines = numbers[numbers.index.get_level_values(0) != DENSE]
    whole = lines.dropna(axis="columns")
    wins = best.sum(axis=1).astype(str) + " of " + contests.sum(axis=1).astype(str)
    kinds = {
        "mean": whole.mean(axis=1),
        "median": lines.median(axis=1),
        "spread": (lines.max(axis=1) - lines.min(axis=1)).where(lines.count(axis=1) > 1),
        "wins": wins.where(contests.any(axis=1)),
    }
    extra = DataFrame({head: kinds[kind] for head, kind in item.extra.items()}, numbers.index)
    over = ", ".join(whole) or "none"
    partial = "mean" in item.extra.values() and whole.shape != lines.shape
    return extra, [f"Mean over the columns that have every row: {over}."] if partial else []
