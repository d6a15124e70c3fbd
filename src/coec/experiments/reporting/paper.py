"""The paper's printed numbers, and tables that set ours beside them."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from coec.experiments.reporting.comparison import in_order
from coec.experiments.reporting.cost import GIB, gflops, memory
from coec.experiments.reporting.protocol import protocol
from coec.experiments.reporting.tables import (
    ABSENT,
    SHOWN,
    Cell,
    Footnotes,
    Table,
    amount,
    described,
    grouped,
    measurement,
    method_name,
    percent,
    varying_within,
)
from coec.experiments.rows import Metric, Row

PREFIXES = ("meta-",)
SUFFIXES = ("-hf",)
"""What hub names carry and the paper does not print."""


@cache
def paper() -> dict[str, Any]:
    """The paper's tables and its protocol, as `paper.toml` has them."""
    with (Path(__file__).parent / "paper.toml").open("rb") as file:
        return tomllib.load(file)


@cache
def _numbers() -> dict[tuple[Metric, float, str, str, str], float]:
    """Every number of the main and additional tables, by metric, sparsity, model and method."""
    return {
        (block["metric"], block["sparsity"], normal_name(model), selection, compensation): value
        for block in paper()["comparison"]
        for selection, by_compensation in block["values"].items()
        for compensation, values in by_compensation.items()
        for model, value in zip(block["models"], values, strict=True)
    }


def normal_name(model: str) -> str:
    """A model's name without owner, case, and the prefixes and suffixes of hub names."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def printed(row: Row, metric: Metric) -> float | None:
    """What the paper prints for this model, method and sparsity; None if it does not."""
    method = str(row.setting("selection")), str(row.setting("compensation"))
    return _numbers().get((metric, round(row.sparsity, 4), normal_name(row.model), *method))


def differences(rows: Sequence[Row]) -> str:
    """Both protocols, in one note."""
    source = paper()["protocol"]
    return (
        f"Ours. {protocol(rows)} The paper. Perplexity: {source['perplexity']}. "
        f"Zero-shot: {source['zero_shot']}. Calibration: {source['calibration']}."
    )


def paper_table(rows: Sequence[Row]) -> Table | None:
    """Ours beside the paper's, for every cell of a model that is in the paper.

    Of the main grid where there is one; else cells that differ in more than the seed have a line
    each.
    """
    main = [row for row in rows if "main" in row.grids]
    matched = [
        row
        for row in sorted(main or rows, key=lambda r: (r.model, r.sparsity, in_order(r)))
        if any(printed(row, metric) is not None for metric in SHOWN)
    ]
    if not matched:
        return None
    notes, body = Footnotes(), []

    def place(r: Row) -> tuple[Any, ...]:
        return r.model, r.sparsity, in_order(r)

    names = varying_within(matched, place)
    for (_, differs), found in grouped(matched, lambda r: (place(r), described(r, names))).items():
        labels = (Cell(found[0].model), Cell(method_name(found[0]) + differs))
        body.append(
            (*labels, *_beside(found, "perplexity", notes), *_beside(found, "zero_shot", notes))
        )
    heads = (
        "Model", "Method", "Perplexity", "Perplexity, paper", "Zero-shot, %", "Zero-shot, paper, %",
    )  # fmt: skip
    return Table(
        "Beside the paper",
        heads,
        tuple(body),
        labels=2,
        notes=notes.lines,
        settings=differences(matched),
    )


def _beside(rows: Sequence[Row], metric: Metric, notes: Footnotes) -> tuple[Cell, Cell]:
    theirs = printed(rows[0], metric)
    return measurement(rows, metric, notes), amount(theirs, SHOWN[metric][1])


def with_paper_ablation(table: Table, metric: Metric) -> Table:
    """An ablation table with the paper's column, which is a mean over models of its own."""
    source = paper()["ablation"]
    column = [amount(source[metric].get(row[0].text), SHOWN[metric][1]) for row in table.rows]
    if all(cell.text == ABSENT for cell in column):
        return table
    same = {normal_name(m) for m in source["models"]} == {
        normal_name(head) for head in table.heads[1:-1]
    }
    which = "the same" if same else "other"
    note = (
        f"Paper: mean over {which} models ({', '.join(source['models'])}) at "
        f"{percent(source['sparsity'])} sparsity, {paper()['protocol']['perplexity']}; "
        f"calibration {paper()['protocol']['calibration']}."
    )
    return replace(
        table,
        heads=(*table.heads, f"Paper, {len(source['models'])} {which} models"),
        rows=tuple((*row, cell) for row, cell in zip(table.rows, column)),
        notes=(*table.notes, note),
    )


def ablation_table() -> Table:
    """The paper's ablation by itself, for sweeps that share no model with the paper."""
    source = paper()["ablation"]
    body = tuple(
        (Cell(label), amount(value, 2), amount(source["zero_shot"][label], 1))
        for label, value in source["perplexity"].items()
    )
    note = f"Mean over models that this sweep does not have: {', '.join(source['models'])}."
    return Table(
        f"The paper's ablation at {percent(source['sparsity'])} sparsity",
        ("Configuration", "Perplexity", "Zero-shot, %"),
        body,
        notes=(note,),
        settings=" ".join(f"{k}: {v}." for k, v in paper()["protocol"].items()),
    )


def with_paper_seeds(table: Table) -> Table:
    """The spread over seeds with the paper's, which is of one model."""
    source = paper()["seeds"]
    spreads: list[Mapping[str, float]] = [source.get(row[0].text, {}) for row in table.rows]
    return replace(
        table,
        heads=(*table.heads, "Paper, median", "Paper, largest"),
        rows=tuple(
            (*row, amount(s.get("median")), amount(s.get("max")))
            for row, s in zip(table.rows, spreads)
        ),
        notes=(*table.notes, f"Paper: three seeds on {source['model']}."),
    )


def efficiency_table(rows: Sequence[Row]) -> Table | None:
    """Cost before and after pruning beside the paper's, for the models whose cost it prints."""
    source = paper()["efficiency"]
    costs = {normal_name(model): cost for model, cost in source["models"].items()}
    found = {
        row.model: row
        for row in rows
        if normal_name(row.model) in costs
        and round(row.sparsity, 4) == source["sparsity"]
        and None not in (row.parameters.before, row.parameters.after)
    }
    if not found:
        return None
    dense = {row.model: row for row in rows if row.dense}
    body = [
        line
        for model, row in found.items()
        for line in _costs(row, dense.get(model), costs[normal_name(model)])
    ]
    heads = ("Model", "Cost", "Dense", "Pruned", "Kept", "Paper, dense", "Paper, pruned", "Kept")
    title = f"Cost at {percent(source['sparsity'])} sparsity"
    used = list(found.values())
    return Table(title, heads, tuple(body), labels=2, settings=differences(used))


def _costs(
    row: Row, dense: Row | None, theirs: Mapping[str, Sequence[float]]
) -> Iterator[tuple[Cell, ...]]:
    """Parameters, operations and memory of one model: ours, the paper's, and what was kept."""
    sizes = [getattr(row.parameters, name) for name in ("before", "after")]
    held = [memory([dense] if dense else []), memory([row])]
    for name, key, ours in (
        ("Parameters, billions", "parameters", [size / 1e9 for size in sizes]),
        ("GFLOPs per token", "gflops", [gflops(size) for size in sizes]),
        ("Memory, GiB (the paper: GB)", "memory", [h and h / GIB for h in held]),
    ):
        cells = [cell for pair in (ours, theirs[key]) for cell in _before_and_after(pair)]
        yield Cell(row.model), Cell(name), *cells


def _before_and_after(pair: Sequence[float | None]) -> tuple[Cell, ...]:
    before, after = pair
    kept = after / before if before and after else None
    share = Cell(ABSENT) if kept is None else Cell(f"{100 * kept:.1f} %", kept)
    return amount(before), amount(after), share
