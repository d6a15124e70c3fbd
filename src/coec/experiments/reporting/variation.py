"""One setting varies: ablations by label, curves over a setting, seeds, and whatever varies."""

import statistics
from collections.abc import Sequence
from typing import Any

from coec.experiments.reporting.comparison import in_order
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.tables import (
    ABSENT,
    SHOWN,
    Cell,
    Footnotes,
    Table,
    amount,
    grouped,
    mean_of,
    measurement,
    models_of,
    percent,
    setting_cell,
    title_of,
    value_text,
    varying,
    varying_within,
)
from coec.experiments.rows import Metric, Row

BUILD_UP = (
    "RCPU",
    "+ GCV rescale",
    "+ two-sided rotation",
    "+ reduced Stiefel",
    "+ tempering",
    "+ alignment",
)
"""The cumulative rows of the ablation, each one component more than the row above."""


def ablation_tables(rows: Sequence[Row], grid: str, metric: Metric) -> list[Table]:
    """Per sparsity: the build-up, and then the single changes, by model with a mean."""
    if not any(row.measured(metric) is not None for row in rows):
        return []
    tables = []
    for sparsity, found in grouped(
        sorted(rows, key=lambda r: r.sparsity), lambda r: r.sparsity
    ).items():
        labels = dict.fromkeys(row.labels[grid] for row in found if grid in row.labels)
        cumulative = [label for label in BUILD_UP if label in labels]
        single = [label for label in labels if label not in BUILD_UP]
        for name, chosen in (("Build-up", cumulative), ("Single changes", single)):
            if chosen:
                title = f"{name} at {percent(sparsity)} sparsity: {title_of(metric, found)}"
                tables.append(_labelled(found, grid, chosen, metric, title))
    return tables


def _labelled(
    rows: Sequence[Row], grid: str, labels: Sequence[str], metric: Metric, title: str
) -> Table:
    rows = [row for row in rows if row.labels.get(grid) in labels]
    models, notes = models_of(rows), Footnotes()
    found = grouped(rows, lambda r: (r.labels[grid], r.model))
    cells = {
        (label, model): measurement(found.get((label, model), []), metric, notes)
        for label in labels
        for model in models
    }
    whole = [m for m in models if all(cells[label, m].value is not None for label in labels)]
    body = []
    for label in labels:
        mean = mean_of(cells[label, model].value for model in whole)
        entries = [cells[label, model] for model in models]
        body.append((Cell(label), *entries, amount(mean, SHOWN[metric][1])))
    over = f"Mean over the models that have every row: {', '.join(whole) or 'none'}."
    return Table(
        title,
        ("Configuration", *models, "Mean"),
        tuple(body),
        notes=(over, *notes.lines),
        settings=protocol(rows),
    )


def curve_tables(rows: Sequence[Row], name: str, metric: Metric) -> list[Table]:
    """Per model: method and sparsity by the values of one setting; the best of a row in bold."""
    rows = [row for row in rows if row.setting(name) is not None]
    if not any(row.measured(metric) is not None for row in rows):
        return []
    return [
        _curve(found, name, metric, f"{model}: {title_of(metric, found)} by {name}")
        for model, found in grouped(rows, lambda r: r.model).items()
    ]


def _curve(rows: Sequence[Row], name: str, metric: Metric, title: str) -> Table:
    values = sorted({row.setting(name) for row in rows}, key=_sorting)
    notes, body = Footnotes(), []
    ordered = sorted(rows, key=lambda r: (r.sparsity, in_order(r)))
    others = [other for other in varying_within(rows, _method) if other != name]

    def key(r: Row) -> tuple[Any, ...]:
        return (*_method(r), *(value_text(r.setting(other)) for other in others))

    for (sparsity, *texts), found in grouped(ordered, key).items():
        by_value = grouped(found, lambda r: r.setting(name))
        cells = [measurement(by_value.get(value, []), metric, notes) for value in values]
        labels = (Cell(percent(sparsity), sparsity), *map(Cell, texts))
        body.append((*labels, *_best_bold(cells, metric)))
    heads = (
        "Sparsity", "Selection", "Compensation", *others, *(value_text(value) for value in values)
    )  # fmt: skip
    return Table(
        title, heads, tuple(body), labels=3 + len(others), notes=notes.lines,
        settings=protocol(rows, varies=(name, *others)),
    )  # fmt: skip


def cap_table(rows: Sequence[Row]) -> Table | None:
    """How many modules went on until the cap on the rounds; elsewhere a higher cap does nothing."""
    caps = sorted({row.setting("rounds") for row in rows if row.setting("rounds") is not None})
    counted = [row for row in rows if any(site.rounds is not None for site in row.sites)]
    if not caps or not counted:
        return None
    others = [name for name in varying_within(counted, _method) if name != "rounds"]

    def method(r: Row) -> tuple[str, ...]:
        return r.model, *(value_text(r.setting(other)) for other in others)

    body = []
    for texts, found in grouped(counted, method).items():
        by_cap = grouped(found, lambda r: r.setting("rounds"))
        body.append((*map(Cell, texts), *(_capped(by_cap.get(cap, [])) for cap in caps)))
    heads = ("Model", *others, *(f"Cap {cap}" for cap in caps))
    used = protocol(rows, varies=("rounds", *others))
    title = "Modules that ran into the cap on the rounds"
    return Table(title, heads, tuple(body), labels=1 + len(others), settings=used)


def _capped(rows: Sequence[Row]) -> Cell:
    taken = [
        (s.rounds, row.setting("rounds")) for row in rows for s in row.sites if s.rounds is not None
    ]
    reached = sum(rounds >= cap for rounds, cap in taken)
    return Cell(f"{reached} of {len(taken)}", reached / len(taken)) if taken else Cell(ABSENT)


def _method(row: Row) -> tuple[float, str, str]:
    return row.sparsity, str(row.setting("selection")), str(row.setting("compensation"))


def _sorting(value: Any) -> tuple[bool, Any]:
    """Numbers by size, and before anything else by text."""
    text = not isinstance(value, int | float)
    return text, str(value) if text else value


def _best_bold(cells: Sequence[Cell], metric: Metric) -> list[Cell]:
    known = [cell.value for cell in cells if cell.value is not None]
    if len(known) < 2:
        return list(cells)
    digits = SHOWN[metric][1]
    best = round(min(known) if SHOWN[metric][2] == "lower" else max(known), digits)
    return [
        Cell(c.text, c.value, c.value is not None and round(c.value, digits) == best, c.mark)
        for c in cells
    ]


def seed_tables(rows: Sequence[Row]) -> list[Table]:
    """Perplexity per seed with its spread (max − min), and the spreads per compensation."""
    seeds = sorted({row.setting("seed") for row in rows}, key=_sorting)
    notes, body = Footnotes(), []
    spreads: dict[str, list[float]] = {}
    ordered = sorted(rows, key=lambda r: (r.sparsity, in_order(r)))
    for (model, *method), found in grouped(ordered, lambda r: (r.model, *_method(r))).items():
        by_seed = grouped(found, lambda r: r.setting("seed"))
        cells = [measurement(by_seed.get(seed, []), "perplexity", notes) for seed in seeds]
        known = [cell.value for cell in cells if cell.value is not None]
        spread = max(known) - min(known) if len(known) > 1 else None
        if spread is not None:
            spreads.setdefault(method[2], []).append(spread)
        labels = (Cell(model), Cell(percent(method[0]), method[0]), *map(Cell, method[1:]))
        middle = statistics.median(known) if known else None
        body.append((*labels, *cells, amount(middle), amount(spread)))
    if not spreads:
        return []
    shown = tuple(f"Seed {seed}" for seed in seeds)
    heads = ("Model", "Sparsity", "Selection", "Compensation", *shown, "Median", "Spread")
    note = "Spread: the largest minus the smallest over the seeds."
    used = protocol(rows, varies=("seed",))
    cells_table = Table(
        "Perplexity by seed", heads, tuple(body), labels=4, notes=(note, *notes.lines),
        settings=used,
    )  # fmt: skip
    return [_spread_table(spreads, len(seeds), used), cells_table]


def _spread_table(spreads: dict[str, list[float]], seeds: int, settings: str) -> Table:
    body = tuple(
        (Cell(name), Cell(str(len(s)), len(s)), amount(statistics.median(s)), amount(max(s)))
        for name, s in spreads.items()
    )
    heads = ("Compensation", "Cells", "Median spread", "Largest spread")
    title = f"Spread of perplexity over {seeds} seeds"
    return Table(title, heads, body, settings=settings)


def generic_table(rows: Sequence[Row], grid: str) -> Table:
    """One line per cell: the settings that vary within the grid, and what was measured."""
    names = varying(rows)
    notes, body = Footnotes(), []
    zero_shot = any(row.measured("zero_shot") is not None for row in rows)
    metrics: list[Metric] = ["perplexity", "zero_shot"] if zero_shot else ["perplexity"]
    labelled = any(grid in row.labels for row in rows)
    for row in rows:
        labels = [Cell(row.labels.get(grid, ABSENT))] if labelled else []
        settings = [setting_cell(row.setting(name)) for name in names]
        numbers = [measurement([row], metric, notes) for metric in metrics]
        body.append((Cell(row.model), *labels, *settings, *numbers, _parameters(row)))
    heads = (
        "Model", *(["Label"] if labelled else []), *names,
        *(SHOWN[metric][0] for metric in metrics), "Parameters",
    )  # fmt: skip
    return Table(
        "Everything that varies",
        heads,
        tuple(body),
        labels=1 + labelled + len(names),
        notes=notes.lines,
        settings=protocol(rows, varies=names),
    )


def _parameters(row: Row) -> Cell:
    after = row.parameters.after
    return Cell(ABSENT) if after is None else Cell(f"{after:,}", after)
