"""Native repairs of selections against another repair on the same units, over models."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coec.experiments.declarations import Declaration
from coec.experiments.reporting.axes import Axes, Context, labels, rows_of
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.values import (
    FORMATS,
    NO_DATUM,
    Datum,
    Footnotes,
    Table,
    amount,
    grouped,
    measurement,
    stressed,
    times,
)
from coec.experiments.rows import Row


@dataclass(frozen=True)
class Pairing:
    """Native repair of a selection and another one, over the models where both were measured.

    Attributes:
        values: (native, ours), by model.
        won, tied: the number of models on which ours prints a better, or the same, value.
    """

    selection: str
    native: str
    ours: str
    metric: str
    values: Sequence[tuple[float, float]]
    won: int
    tied: int

    @property
    def gap(self) -> Datum:
        """Mean of ours − native."""
        mean = statistics.fmean(ours - native for native, ours in self.values)
        return amount(mean, FORMATS[self.metric].digits, signed=True)

    @property
    def ratio(self) -> Datum:
        """Geometric mean of ours / native, which no model of high perplexity dominates."""
        logs = [math.log(ours / native) for native, ours in self.values]
        return times(math.exp(statistics.fmean(logs)), 1.0)

    @property
    def wins(self) -> Datum:
        """Number of models on which ours is better."""
        tied = f" ({self.tied} equal)" if self.tied else ""
        return Datum(f"{self.won} of {len(self.values)}{tied}", self.won / len(self.values))

    @property
    def sentence(self) -> str:
        """Wins and gap in words."""
        tied = f", equal on {self.tied}" if self.tied else ""
        ours, models = self.ours.upper(), "model" if len(self.values) == 1 else "models"
        return (
            f"{self.selection}: {ours} {FORMATS[self.metric].better} on {self.won} of "
            f"{len(self.values)} {models}{tied}; mean gap {self.gap.text} ({ours} − {self.native})."
        )


def paired(
    item: Declaration, methods: Sequence[Any], body: list[list[Datum]], metric: str
) -> list[Pairing]:
    """Find the pairs among lines of (selection, compensation), and make the better entries bold.

    The native repair of a selection that the declaration does not name is its only other one.
    """
    places = {method: place for place, method in enumerate(methods)}
    pairings = []
    for selection in dict.fromkeys(selection for selection, _ in methods):
        repairs = [c for s, c in methods if s == selection and c != item.ours]
        native = item.native.get(selection, repairs[0] if len(repairs) == 1 else "")
        first, second = places.get((selection, native)), places.get((selection, item.ours))
        if first is None or second is None:
            continue
        couples = [stressed(couple, metric) for couple in zip(body[first], body[second])]
        body[first], body[second] = map(list, zip(*couples))
        couples = [couple for couple in couples if all(e.value is not None for e in couple)]
        if couples:
            values = [(a.value or 0.0, b.value or 0.0) for a, b in couples]
            won = sum(b.bold and not a.bold for a, b in couples)
            tied = sum(b.bold and a.bold for a, b in couples)
            pairings.append(Pairing(selection, native, item.ours, metric, values, won, tied))
    return pairings


def pairs(item: Declaration, context: Context) -> list[Table]:
    """Draw every pair at every sparsity: where ours is better, and by how much."""
    rows, body = rows_of(item, context), []
    for keys, subset in Axes(item, context.grid, rows).split(["sparsity"]):
        perplexity, zero_shot = (
            {(p.selection, p.native): p for p in _pairings(item, subset, metric)}
            for metric in ("perplexity", "zero_shot")
        )
        for key in dict.fromkeys([*perplexity, *zero_shot]):
            p, z = perplexity.get(key), zero_shot.get(key)
            body.append((
                *labels("sparsity", keys["sparsity"]), *map(Datum, key),
                *((p.wins, p.gap, p.ratio) if p else (NO_DATUM,) * 3),
                *((z.wins, z.gap) if z else (NO_DATUM,) * 2),
            ))  # fmt: skip
    heads = (
        "Sparsity", "Selection", "Against", "Perplexity lower on", "Mean gap", "Mean ratio",
        "Zero-shot higher on", "Mean gap, points",
    )  # fmt: skip
    table = Table(item.table, heads, tuple(body), 3, item.notes, protocol(rows))
    return [table] if body else []


def _pairings(item: Declaration, rows: Sequence[Row], metric: str) -> list[Pairing]:
    notes, models = Footnotes(), dict.fromkeys(row.model for row in rows)
    lines = grouped(rows, lambda r: (r.setting("selection"), r.setting("compensation")))
    body = [
        [
            measurement([row for row in line if row.model == model], metric, notes)
            for model in models
        ]
        for line in lines.values()
    ]
    return paired(item, list(lines), body, metric)
