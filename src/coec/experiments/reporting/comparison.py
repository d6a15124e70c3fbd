"""Selection × compensation × sparsity: the native repair of every selection against COEC."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.results import Results
from coec.experiments.reporting.tables import (
    ABSENT,
    SHOWN,
    Cell,
    Footnotes,
    Table,
    amount,
    better,
    decimals,
    geometric_mean,
    grouped,
    measurement,
    models_of,
    percent,
    title_of,
    value_text,
)
from coec.experiments.rows import Metric, Row

NATIVE = {"wanda-sp": "none", "flap": "bias", "rcpu": "rcpu"}
"""The repair that was published with a selection."""

SELECTIONS = tuple(NATIVE)
COMPENSATIONS = ("none", "bias", "least-squares", "ridge-to-slice", "rcpu", "coec")
"""The order of rows; what is not listed comes last."""

OURS = "coec"
Places = Mapping[tuple[str, str], Mapping[str, list[Row]]]
"""Rows by (selection, compensation), then by model."""


@dataclass(frozen=True)
class Pair:
    """A selection's native repair and COEC on the same selection, over models.

    Attributes:
        values: (native, COEC) by model, where both were measured.
        won, tied: on how many of them COEC prints a better, or the same, value.
    """

    selection: str
    native: str
    metric: Metric
    values: Mapping[str, tuple[float, float]]
    won: int
    tied: int

    @property
    def gap(self) -> float:
        """The mean of COEC − native."""
        return statistics.fmean(ours - native for native, ours in self.values.values())

    @property
    def sentence(self) -> str:
        """Wins and gap in words."""
        tied = f", equal on {self.tied}" if self.tied else ""
        gap = amount(self.gap, SHOWN[self.metric][1], signed=True).text
        count = len(self.values)
        models = "model" if count == 1 else "models"
        return (
            f"{self.selection}: COEC {SHOWN[self.metric][2]} on {self.won} of {count} {models}"
            f"{tied}; mean gap {gap} (COEC − {self.native})."
        )


def rank(name: str, order: Sequence[str]) -> tuple[int, str]:
    """Sorts known names by their place, unknown ones behind them by name."""
    return (order.index(name) if name in order else len(order), name)


def in_order(row: Row) -> tuple[tuple[int, str], tuple[int, str]]:
    """The sort key of a row's selection and compensation."""
    selection, compensation = str(row.setting("selection")), str(row.setting("compensation"))
    return rank(selection, SELECTIONS), rank(compensation, COMPENSATIONS)


def places(rows: Sequence[Row]) -> Places:
    """Rows by selection and compensation, in the order of the paper's tables, then by model."""
    ordered = sorted(rows, key=in_order)
    by_method = grouped(
        ordered, lambda r: (value_text(r.setting("selection")), str(r.setting("compensation")))
    )
    return {method: grouped(found, lambda r: r.model) for method, found in by_method.items()}


def fits(rows: Sequence[Row]) -> bool:
    """Whether at most the seed differs between rows that would share an entry."""
    by_place = grouped(rows, lambda r: (r.sparsity, *in_order(r), r.model))
    return all(
        all(
            {**row.settings.values, "options": row.settings.options, "seed": None}
            == {**found[0].settings.values, "options": found[0].settings.options, "seed": None}
            for row in found
        )
        for found in by_place.values()
    )


def comparison_tables(results: Results, rows: Sequence[Row], metric: Metric) -> list[Table]:
    """One table per sparsity: selection and compensation by model, the dense models on top."""
    measured = [row for row in rows if row.measured(metric) is not None or row.status == "failed"]
    if not any(row.measured(metric) is not None for row in measured):
        return []
    by_sparsity = grouped(sorted(measured, key=lambda r: r.sparsity), lambda r: r.sparsity)
    return [
        _comparison(results.dense, found, metric, percent(sparsity))
        for sparsity, found in by_sparsity.items()
    ]


def _comparison(
    dense: Mapping[str, Row], rows: Sequence[Row], metric: Metric, sparsity: str
) -> Table:
    models, by_place, notes = models_of(rows), places(rows), Footnotes()
    cells = {
        (method, model): measurement(found.get(model, []), metric, notes)
        for method, found in by_place.items()
        for model in models
    }
    pairs = pairs_of(cells, models, metric)
    stressed = _stressed(cells, pairs, metric)
    top = [measurement([dense[m]] if m in dense else [], metric, notes) for m in models]
    body = [(Cell("dense"), Cell(ABSENT), *top)] + [
        (Cell(method[0]), Cell(method[1]), *(stressed[method, model] for model in models))
        for method in by_place
    ]
    used = [*rows, *(dense[model] for model in models if model in dense)]
    return Table(
        f"{title_of(metric, rows)} at {sparsity} sparsity",
        ("Selection", "Compensation", *models),
        tuple(body),
        labels=2,
        notes=(*(pair.sentence for pair in pairs), *notes.lines),
        settings=protocol(used),
    )


def pairs_of(
    cells: Mapping[tuple[tuple[str, str], str], Cell], models: Sequence[str], metric: Metric
) -> list[Pair]:
    """The pair of every selection that has both its native repair and COEC on some model."""
    methods = list(dict.fromkeys(method for method, _ in cells))
    pairs = []
    for selection in dict.fromkeys(selection for selection, _ in methods):
        native = _native(selection, [c for s, c in methods if s == selection])
        if native is None or (selection, OURS) not in methods:
            continue
        values, outcomes = {}, []
        for model in models:
            one, two = cells[(selection, native), model], cells[(selection, OURS), model]
            if one.value is not None and two.value is not None:
                values[model] = (one.value, two.value)
                outcomes.append(better(metric, two, one))
        if values:
            won, tied = outcomes.count(1), outcomes.count(0)
            pairs.append(Pair(selection, native, metric, values, won, tied))
    return pairs


def _native(selection: str, present: Sequence[str]) -> str | None:
    """The published repair of a selection; of another selection, its only other repair."""
    if selection in NATIVE:
        return NATIVE[selection] if NATIVE[selection] in present else None
    others = [name for name in present if name != OURS]
    return others[0] if len(others) == 1 else None


def _stressed(
    cells: Mapping[tuple[tuple[str, str], str], Cell], pairs: Sequence[Pair], metric: Metric
) -> dict[tuple[tuple[str, str], str], Cell]:
    """The better of every pair in bold; of a tie, both."""
    stressed = dict(cells)
    for pair in pairs:
        for model in pair.values:
            keys = ((pair.selection, pair.native), model), ((pair.selection, OURS), model)
            order = better(metric, cells[keys[0]], cells[keys[1]])
            for key, best in zip(keys, (order >= 0, order <= 0)):
                cell = cells[key]
                stressed[key] = Cell(cell.text, cell.value, best, cell.mark)
    return stressed


def pair_table(rows: Sequence[Row]) -> Table | None:
    """Every pair at every sparsity: where COEC is better, and by how much."""
    body = []
    for sparsity, found in grouped(
        sorted(rows, key=lambda r: r.sparsity), lambda r: r.sparsity
    ).items():
        pairs = {metric: _measured_pairs(found, metric) for metric in SHOWN}
        for method in dict.fromkeys(key for by_name in pairs.values() for key in by_name):
            entries = [_pair_cells(pairs[metric].get(method)) for metric in SHOWN]
            ratio = _ratio(pairs["perplexity"].get(method))
            labels = (Cell(percent(sparsity), sparsity), Cell(method[0]), Cell(method[1]))
            body.append((*labels, *entries[0], ratio, *entries[1]))
    if not body:
        return None
    heads = (
        "Sparsity", "Selection", "Against", "Perplexity lower on", "Mean gap", "Mean ratio",
        "Zero-shot higher on", "Mean gap, points",
    )  # fmt: skip
    note = (
        "Gaps are COEC − native, means over models; the ratio is the geometric mean of "
        "COEC / native. Counts compare numbers as printed; ties count for neither."
    )
    title = "COEC against the native repair of every selection"
    return Table(title, heads, tuple(body), labels=3, notes=(note,), settings=protocol(rows))


def _measured_pairs(rows: Sequence[Row], metric: Metric) -> dict[tuple[str, str], Pair]:
    notes, models = Footnotes(), models_of(rows)
    cells = {
        (method, model): measurement(found.get(model, []), metric, notes)
        for method, found in places(rows).items()
        for model in models
    }
    return {(p.selection, p.native): p for p in pairs_of(cells, models, metric)}


def _pair_cells(pair: Pair | None) -> tuple[Cell, Cell]:
    if pair is None:
        return Cell(ABSENT), Cell(ABSENT)
    tied = f" ({pair.tied} equal)" if pair.tied else ""
    share = pair.won / len(pair.values)
    return (
        Cell(f"{pair.won} of {len(pair.values)}{tied}", share),
        amount(pair.gap, SHOWN[pair.metric][1], signed=True),
    )


def _ratio(pair: Pair | None) -> Cell:
    if pair is None:
        return Cell(ABSENT)
    ratio = geometric_mean([ours / native for native, ours in pair.values.values()])
    return Cell(f"×{decimals(ratio, 3)}", ratio)
