"""Rows of a sweep as one data frame, a line per cell; averages and tables are made from it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpy import mean
from pandas import DataFrame, Series, concat, factorize, isna, json_normalize, to_numeric

from coec.errors import ResultsError
from coec.experiments.files import RESULTS, read_lines
from coec.experiments.rows import SETTING_NAMES, Row

ABSENT, DENSE = "–", "dense"


class Metric(NamedTuple):
    """Head of a metric in tables, its decimals, and `min` or `max` where one end is better."""

    title: str
    digits: int
    better: str = ""


METRICS = {
    "perplexity": Metric("Perplexity", 2, "min"),
    "zero_shot": Metric("Zero-shot, %", 1, "max"),
    "kl": Metric("KL, nats", 3, "min"),
    "agreement": Metric("Agreement, %", 1, "max"),
    "error": Metric("Error", 4),
    "error_held_out": Metric("Error held out", 4, "min"),
    "seconds": Metric("Seconds", 0),
}
"""Columns of the frame that tables show, where something was measured."""
_CONDITIONS = {"zero_shot", "parameters", "cost", "calibration", "seconds", "environment"}
"""Parts of a row that the frame holds as they are, with dotted names."""


def read_rows(folder: Path) -> tuple[list[Row], bool]:
    """Read the rows of `folder/results.jsonl`, and whether an unfinished last line was left out.

    A cell that was run again counts once, at its first place and by its last line; it belongs to
    the grids of all its lines.

    Raises:
        ResultsError: there is no such file, it holds no row, or a line is not a row.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise ResultsError(
            f"no {RESULTS} in {folder}: OUT must be the folder that a sweep wrote to"
        )
    file = read_lines(path)
    rows: dict[str, Row] = {}
    for row in file.rows:
        earlier = rows.get(row.cell, row)
        grids = list(dict.fromkeys(earlier.grids + row.grids))
        labels = {**earlier.labels, **row.labels}
        rows[row.cell] = row.model_copy(update={"grids": grids, "labels": labels})
    if not rows:
        raise ResultsError(f"{path} holds no finished cell: run the sweep first")
    return list(rows.values()), file.torn


def frame_of(rows: Iterable[Row]) -> DataFrame:
    """Return a line per cell: what it is, its settings, its metrics, and how it was measured."""
    rows = list(rows)
    conditions = [row.model_dump(include=_CONDITIONS, exclude_defaults=True) for row in rows]
    texts = [row.perplexity.model_dump(exclude={"perplexity", "kl", "agreement"}) for row in rows]
    columns = [
        DataFrame([_head(row) for row in rows]),
        DataFrame([{n: row.values.get(n) for n in SETTING_NAMES} for row in rows], dtype=object),
        DataFrame([_metrics(row) for row in rows], dtype=float),
        DataFrame(texts, dtype=object).add_prefix("evaluation."),
        json_normalize(conditions),
    ]
    return concat(columns, axis="columns")


def _head(row: Row) -> dict[str, Any]:
    method = f"{row.values.get('selection')} + {row.settings.compensation}"
    return {
        "cell": row.cell, "model": row.model, "method": DENSE if row.dense else method,
        "grids": row.grids, "labels": row.labels, "status": row.status, "reason": row.error,
    }  # fmt: skip


def _metrics(row: Row) -> dict[str, float | None]:
    """Return metrics by name: shares in %, memory in GiB, and means over the modules."""

    def of_modules(values: Iterable[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return float(mean(numbers)) if numbers else None

    # Modules that lack a number are left out of its mean.
    cap, share = row.values.get("rounds"), row.zero_shot.mean
    phases = [row.seconds.get(name) or 0.0 for name in ("collecting", "pruning")]
    before, after = row.parameters.before, row.parameters.after
    capped = (100.0 * (s.rounds >= cap) for s in row.sites if s.rounds is not None and cap)
    return {
        "perplexity": row.perplexity.perplexity,
        "zero_shot": None if share is None else 100 * share,
        "kl": row.perplexity.kl,
        "agreement": None if (a := row.perplexity.agreement) is None else 100 * a,
        "error": of_modules(site.error_after for site in row.sites),
        "error_held_out": of_modules(site.holdout_after for site in row.sites),
        "gcv_lambda": of_modules(site.gcv_lambda for site in row.sites),
        "modules_at_cap": of_modules(capped),
        "angle_op": of_modules(site.geometry.angle_op for site in row.sites),
        "angle_oc": of_modules(site.geometry.angle_oc for site in row.sites),
        "angle_pc": of_modules(site.geometry.angle_pc for site in row.sites),
        "seconds": None if row.dense else sum(phases) or None,
        "peak_memory": row.peak_memory_bytes and row.peak_memory_bytes / 2**30,
        "parameters_kept": 100 * after / before if after and before else None,
    }  # fmt: skip


def setting_text(value: object) -> str:
    """Print a setting, or that there is none."""
    if value is None or isna(value):
        return ABSENT
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def of_grid(cells: DataFrame, grid: str) -> DataFrame:
    """Return the cells of a grid: labels take the place of methods, and settings are texts.

    Methods begin with their preset where there are several. The dense models have a line at every
    sparsity, to stand beside what was pruned.
    """
    cells = cells[[grid in names for names in cells["grids"]]]
    settings = [name for name in SETTING_NAMES if name != "sparsity"]
    labels = [names.get(grid) for names in cells["labels"]]
    # Labels and presets → methods; every dense model → a line per sparsity
    is_dense = cells["compensation"] == DENSE
    methods = cells["method"]
    if cells["preset"].nunique() > 1:
        methods = methods.where(is_dense, cells["preset"] + ": " + methods)
    methods = [label or method for label, method in zip(labels, methods)]
    cells = cells.assign(method=methods, **cells[settings].map(setting_text))
    places = cells.loc[~is_dense, ["model", "sparsity"]].drop_duplicates()
    dense = cells[is_dense].drop(columns="sparsity").merge(places, on="model")
    return concat([dense, cells[~is_dense]], ignore_index=True)


def axes_of(cells: DataFrame) -> list[str]:
    """Name what tells the cells of a grid apart, but for the seed: model, method, sparsity first.

    A setting that follows from those before it, as options do from a preset, is none of them.
    """
    # A setting is an axis if it tells more places apart than those before it.
    axes = ["model", "method", "sparsity"]
    for name in ("preset", *SETTING_NAMES):
        if name not in (*axes, "seed"):
            finer = cells.groupby([*axes, name]).ngroups
            axes += [name] if finer > cells.groupby(axes).ngroups else []
    return axes


def averages(cells: DataFrame, axes: list[str]) -> DataFrame:
    """Return a line per place along the axes: means of metrics over the seeds, and their spread.

    `METRIC_spread` is the largest minus the smallest of several, and `failed` tells that one of the
    cells failed. Lines of a model, and then of a method, stand together, in the order of their
    first cells.
    """
    # Places along the axes → means and spreads over the seeds → order of the lines
    metrics = [name for name in METRICS if name in cells]
    places = cells.assign(failed=cells["status"] == "failed").groupby(axes, sort=False)
    spreads = places[metrics].max() - places[metrics].min()
    spreads = spreads.where(places[metrics].count() > 1).add_suffix("_spread")
    lines = places[metrics].mean().join(spreads).assign(failed=places["failed"].any())
    lines = lines.reset_index()
    return lines.sort_values(axes, key=_order, ignore_index=True)


def _order(column: "Series[Any]") -> "Series[float]":
    """Order settings that are numbers by size, and all else by its first place."""
    first = Series(factorize(column)[0], column.index, dtype=float)
    if column.name in ("model", "method"):
        return first
    return to_numeric(column, errors="coerce").fillna(first)


@dataclass(frozen=True)
class Table:
    """Table of texts; `bold` is of the same shape."""

    texts: DataFrame
    bold: DataFrame

    @classmethod
    def plain(cls, lines: DataFrame) -> "Table":
        """Return a table without bold entries."""
        texts = lines.map(setting_text)
        return cls(texts, DataFrame(False, texts.index, texts.columns))

    def written(self, escape: Callable[[str], str], bold: Callable[[str], str]) -> DataFrame:
        """Return entries and heads as text of one format."""
        texts = self.texts.map(escape).rename(columns=escape)
        return texts.mask(self.bold.to_numpy(), texts.map(bold))


def table_of(lines: DataFrame, axes: list[str]) -> Table:
    """Return averages with a column for every metric at every sparsity, the other axes as lines.

    The best of a model's entries in a column are bold, as they are printed.
    """
    # Sparsities become columns: METRIC × sparsity → texts, and what of them is bold
    names = [name for name in axes if name != "sparsity"]
    lines = lines.set_index([*names, "sparsity"])
    order = lines.index.droplevel("sparsity").unique()
    metrics = {name: metric for name, metric in METRICS.items() if name in lines}
    texts, bold = (
        DataFrame({metric.title: make(lines, name, metric) for name, metric in metrics.items()})
        .unstack("sparsity", fill_value=fill)
        .reindex(order)
        for make, fill in ((_texts, ABSENT), (_best, False))
    )
    columns = [head for head in texts if (texts[head] != ABSENT).any()]
    heads = order.to_frame(index=False).rename(columns=str.capitalize)
    texts, bold = (frame[columns].reset_index(drop=True) for frame in (texts, bold))
    texts.columns = bold.columns = [
        f"{title}, {100 * sparsity:.4g} %" for title, sparsity in columns
    ]
    no = DataFrame(False, heads.index, heads.columns)
    return Table(concat([heads, texts], axis="columns"), concat([no, bold], axis="columns"))


def _texts(lines: DataFrame, name: str, metric: Metric) -> "Series[str]":
    """Print a metric; a failed cell says so where its perplexity would stand."""

    def text(value: float, spread: float, failed: bool) -> str:
        if isna(value):
            return "failed" if failed and name == "perplexity" else ABSENT
        brackets = "" if isna(spread) else f" (spread {spread:,.{metric.digits}f})"
        return f"{value:,.{metric.digits}f}{brackets}"

    columns = (lines[column] for column in (name, f"{name}_spread", "failed"))
    return Series(list(map(text, *columns)), lines.index)


def _best(lines: DataFrame, name: str, metric: Metric) -> "Series[bool]":
    """Tell the best pruned entries of every model and sparsity; of a tie all, of one alone none."""
    printed = lines[name].round(metric.digits)
    printed = printed.mask(lines.index.get_level_values("method") == DENSE)
    places = printed.groupby(["model", "sparsity"])
    best = printed == places.transform(metric.better or "min")
    return best & (places.transform("count") > 1) & bool(metric.better)
