"""The native repair of every selection against another on the same units, over models."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coec.experiments.declarations import Declaration
from coec.experiments.reporting.axes import Context, shown, split
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.tables import (
    ABSENT,
    SHOWN,
    Cell,
    Footnotes,
    Table,
    amount,
    decimals,
    grouped,
    measurement,
    percent,
    stressed,
)
from coec.experiments.rows import Row


@dataclass(frozen=True)
class Pair:
    """A selection's native repair and another one, over the models where both were measured.

    Attributes:
        values: (native, other), by model.
        won, tied: on how many of them the other prints a better, or the same, value.
    """

    selection: str
    native: str
    ours: str
    metric: str
    values: Sequence[tuple[float, float]]
    won: int
    tied: int

    @property
    def gap(self) -> float:
        """The mean of the other − native."""
        return statistics.fmean(ours - native for native, ours in self.values)

    @property
    def sentence(self) -> str:
        """Wins and gap in words."""
        tied = f", equal on {self.tied}" if self.tied else ""
        _, digits, better = SHOWN[self.metric]
        gap = amount(self.gap, digits, signed=True).text
        models = "model" if len(self.values) == 1 else "models"
        return (
            f"{self.selection}: {self.ours.upper()} {better} on {self.won} of {len(self.values)} "
            f"{models}{tied}; mean gap {gap} ({self.ours.upper()} − {self.native})."
        )

    @property
    def cells(self) -> tuple[Cell, Cell]:
        """Wins and gap as entries of a table."""
        tied = f" ({self.tied} equal)" if self.tied else ""
        won = Cell(f"{self.won} of {len(self.values)}{tied}", self.won / len(self.values))
        return won, amount(self.gap, SHOWN[self.metric][1], signed=True)


def paired(
    item: Declaration, methods: Sequence[Any], body: list[list[Cell]], metric: str
) -> list[Pair]:
    """The pairs among lines of (selection, compensation); in `body` the better becomes bold.

    The native repair of a selection that the declaration does not name is its only other one.
    """
    places, pairs = {method: place for place, method in enumerate(methods)}, []
    for selection in dict.fromkeys(selection for selection, *_ in methods):
        others = [c for s, c, *_ in methods if s == selection and c != item.ours]
        native = item.native.get(selection, others[0] if len(others) == 1 else "")
        one, two = places.get((selection, native)), places.get((selection, item.ours))
        if one is None or two is None:
            continue
        both = [stressed(cells, metric) for cells in zip(body[one], body[two])]
        body[one], body[two] = [first for first, _ in both], [second for _, second in both]
        known = [pair for pair in both if pair[0].value is not None and pair[1].value is not None]
        if known:
            values = [(first.value or 0.0, second.value or 0.0) for first, second in known]
            won = sum(second.bold and not first.bold for first, second in known)
            tied = sum(second.bold and first.bold for first, second in known)
            pairs.append(Pair(selection, native, item.ours, metric, values, won, tied))
    return pairs


def pairs(item: Declaration, context: Context) -> list[Table]:
    """Every pair at every sparsity: where ours is better, and by how much."""
    rows, body = shown(item, context), []
    for keys, found in split(rows, ["sparsity"], item, context.grid):
        named = [
            {(p.selection, p.native): p for p in _pairs(item, found, m)}
            for m in ("perplexity", "zero_shot")
        ]
        for selection, native in dict.fromkeys(key for by_name in named for key in by_name):
            one, two = (by_name.get((selection, native)) for by_name in named)
            entries = [pair.cells if pair else (Cell(ABSENT),) * 2 for pair in (one, two)]
            sparsity = Cell(percent(keys["sparsity"]), keys["sparsity"])
            body.append(
                (sparsity, Cell(selection), Cell(native), *entries[0], _ratio(one), *entries[1])
            )
    heads = (
        "Sparsity", "Selection", "Against", "Perplexity lower on", "Mean gap", "Mean ratio",
        "Zero-shot higher on", "Mean gap, points",
    )  # fmt: skip
    table = Table(item.table, heads, tuple(body), 3, item.notes, protocol(rows))
    return [table] if body else []


def _pairs(item: Declaration, rows: Sequence[Row], metric: str) -> list[Pair]:
    notes, models = Footnotes(), dict.fromkeys(row.model for row in rows)
    lines = grouped(rows, lambda r: (r.setting("selection"), r.setting("compensation")))
    body = [
        [
            measurement([row for row in found if row.model == model], metric, notes)
            for model in models
        ]
        for found in lines.values()
    ]
    return paired(item, list(lines), body, metric)


def _ratio(pair: Pair | None) -> Cell:
    """The geometric mean of ours over native: a model of high perplexity does not dominate it."""
    if pair is None:
        return Cell(ABSENT)
    ratio = math.exp(statistics.fmean(math.log(ours / native) for native, ours in pair.values))
    return Cell(f"×{decimals(ratio, 3)}", ratio)
