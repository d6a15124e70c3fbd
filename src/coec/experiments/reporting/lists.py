"""Lists of cells, a line each, that every report has; and the summary of a sweep."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pandas import DataFrame

from coec.events import duration
from coec.experiments.declarations import QUANTITIES
from coec.experiments.reporting.frame import (
    ABSENT,
    DENSE,
    Results,
    axis_text,
    differing,
    setting_text,
)
from coec.experiments.reporting.tables import Table
from coec.experiments.rows import NO_REASON, SETTING_NAMES, Row

_ENVIRONMENT = ("coec", "python", "torch", "transformers", "device", "machine")
_DIGEST = 12
"""Characters of a digest that are shown."""
_GIB = 2**30


def facts(results: Results) -> dict[str, str]:
    """Return the summary of a sweep, by name."""
    rows = results.rows
    failed = sum(row.status == "failed" for row in rows)
    grids = dict.fromkeys(grid for row in rows for grid in row.grids)
    versions = {name: listed(row.environment.get(name) for row in rows) for name in _ENVIRONMENT}
    return {
        "Cells": f"{len(rows) - failed} done, {failed} failed",
        "Grids": ", ".join(grids) or ABSENT,
        "Models": ", ".join(dict.fromkeys(row.model for row in rows)),
        "Compute time": duration(_compute(rows)),
        "Environment": ", ".join(f"{n} {v}" for n, v in versions.items() if v),
    }


def _compute(rows: Sequence[Row]) -> float:
    """Add up the seconds of all cells; those of a dense pass that several cells share, once."""
    passes: dict[tuple[Any, ...], float] = {}
    total = 0.0
    for row in rows:
        key = row.model, row.calibration.windows_sha256, row.setting("holdout")
        passes[key] = max(row.seconds.get("collecting", 0.0), passes.get(key, 0.0))
        total += sum(value for name, value in row.seconds.items() if name != "collecting")
    return total + sum(passes.values())


def protocol(rows: Sequence[Row]) -> str:
    """Describe evaluation text and calibration of some rows; differences as a list or range."""
    measured = [row.perplexity for row in rows if row.perplexity]
    pruned = [row for row in rows if not row.dense]
    sentences = []
    if measured:
        texts = listed(
            f"{setting_text(p.text)} (sha256 {(p.text_sha256 or ABSENT)[:_DIGEST]})"
            for p in measured
        )
        windows, length = (listed(getattr(p, n) for p in measured) for n in ("windows", "seq_len"))
        sentences.append(f"Perplexity: {texts}, {windows} windows of {length} tokens.")
    if pruned:
        text, samples, length, seed, holdout = (
            listed(row.setting(name) for row in pruned)
            for name in ("calibration", "samples", "seq_len", "seed", "holdout")
        )
        held_out = f", {holdout} of the windows held out" if holdout else ""
        sentences.append(
            f"Calibration: {text}, {samples} windows of {length} tokens, seed {seed}{held_out}."
        )
    return " ".join(sentences)


def listed(values: Iterable[object]) -> str:
    """Join distinct values by commas; many numbers as a range."""
    distinct = list(dict.fromkeys(value for value in values if value is not None))
    if len(distinct) > 4 and all(isinstance(value, int | float) for value in distinct):
        return f"{setting_text(min(distinct))} to {setting_text(max(distinct))}"  # type: ignore[type-var]
    return ", ".join(f"{v:,}" if isinstance(v, int) else setting_text(v) for v in distinct)


def _list(
    title: str,
    lines: Iterable[dict[str, Any]],
    digits: Mapping[str, int],
    notes: Sequence[str] = (),
) -> list[Table]:
    """Make a table without the columns in which no line has an entry."""
    frame = DataFrame(lines, dtype=object).replace(ABSENT, None).dropna(axis="columns", how="all")
    return [Table(title, frame, digits, notes=tuple(notes))] if len(frame) else []


def _short(value: object) -> object:
    """Return a setting, of a path only the name."""
    return setting_text(value) if isinstance(value, str) else value


def _method(row: Row) -> str:
    if row.dense:
        return DENSE
    sparsity = axis_text("sparsity", row.settings.sparsity)
    return f"{row.setting('selection')} + {row.setting('compensation')} at {sparsity}"


def _named(row: Row) -> dict[str, Any]:
    return {"Cell": row.cell, "Model": row.model, "Method": _method(row)}


def _in_order(results: Results) -> list[Row]:
    return sorted(results.rows, key=lambda row: (row.model, row.settings.sparsity))


def best(results: Results) -> list[Table]:
    """List the cell of lowest perplexity per model and sparsity, beside the dense model."""
    order = ["model", "sparsity", "perplexity"]
    pruned = results.cells[~results.cells["dense"]].dropna(subset=["perplexity"])
    cells = pruned.sort_values(order).drop_duplicates(order[:2])
    dense = results.dense.set_index("model")["perplexity"]
    lines = DataFrame({
        "Model": cells["model"],
        "Sparsity": [axis_text("sparsity", sparsity) for sparsity in cells["sparsity"]],
        **{name.capitalize(): cells[name] for name in ("preset", "selection", "compensation")},
        "Perplexity": cells["perplexity"],
        "Dense": (base := cells["model"].map(dense.to_dict()).astype(float)),
        "Pruned / dense": cells["perplexity"] / base,
        "Parameters kept, %": cells["parameters_kept"],
    })  # fmt: skip
    digits = {"Perplexity": 2, "Dense": 2, "Pruned / dense": 3, "Parameters kept, %": 1}
    note = "Over all grids, so settings other than those shown differ too; see Record."
    return _list("Lowest perplexity at every sparsity", lines, digits, [note])


def varied(grid: str, results: Results) -> list[Table]:
    """List the cells of a grid with the settings that vary, and what was measured."""
    cells = results.of_grid(grid)
    names = differing(cells, [], but=())
    metrics = ["perplexity", "zero_shot", "kl", "agreement"]
    columns = {QUANTITIES[name].title: name for name in metrics}
    lines = cells[["model", "label", *names, *metrics, "parameters"]].astype(object)
    lines[names] = lines[names].map(_short)
    lines.loc[cells["failed"], "perplexity"] = "failed"
    lines = lines.rename(columns={
        "model": "Model", "label": "Configuration", "parameters": "Parameters",
        **{name: title for title, name in columns.items()},
    })  # fmt: skip
    digits = {title: QUANTITIES[name].digits for title, name in columns.items()}
    return _list("Everything that varies", lines, digits | {"Parameters": 0})


def tasks(results: Results) -> list[Table]:
    """List, per model, the accuracy with its standard error on every task."""
    tables = []
    scored = [row for row in _in_order(results) if row.zero_shot.tasks]
    for model in dict.fromkeys(row.model for row in scored):
        rows = [row for row in scored if row.model == model]
        lines = [
            {
                "Method": _method(row), "Cell": row.cell,
                "Mean": _accuracy(row.zero_shot.mean, row.zero_shot.mean_stderr),
                **{name: _accuracy(t.value, t.stderr) for name, t in row.zero_shot.tasks.items()},
            }
            for row in rows
        ]  # fmt: skip
        guessed = Counter(task for row in rows for task in row.zero_shot.at_chance)
        names = ", ".join(f"{task} in {n} of {len(rows)} cells" for task, n in guessed.items())
        notes = [f"No better than guessing: {names}."] if names else []
        tables += _list(
            f"{model}: zero-shot accuracy by task, % ± standard error", lines, {}, notes
        )
    return tables


def _accuracy(share: float | None, error: float | None) -> str | None:
    if share is None:
        return None
    return f"{100 * share:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def cost(results: Results) -> list[Table]:
    """List parameters, operations, weights and memory per model, sparsity and size."""
    sized = [row for row in _in_order(results) if row.parameters.after is not None]
    if all(row.dense for row in sized):
        return []
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sized:
        size = row.settings.sparsity, row.parameters.after, row.cost.weight_bytes
        groups.setdefault((row.model, *size), []).append(row)
    lines = []
    for rows in groups.values():
        row, after = rows[0], rows[0].parameters.after or 0
        peaks = [r.cost.peak_memory_bytes for r in rows if r.cost.peak_memory_bytes is not None]
        lines.append({
            "Model": row.model,
            "Sparsity": DENSE if row.dense else axis_text("sparsity", row.settings.sparsity),
            "Compensations": listed(row.setting("compensation") for row in rows),
            "Parameters": after,
            "Of the dense, %": 100 * after / (row.parameters.before or after or 1),
            "GFLOPs per token": 2 * after / 1e9,
            "Weights, GiB": row.cost.weight_bytes and row.cost.weight_bytes / _GIB,
            "Memory, GiB": max(peaks) / _GIB if peaks else None,
        })  # fmt: skip
    digits = {
        "Parameters": 0, "Of the dense, %": 1, "GFLOPs per token": 3, "Weights, GiB": 2,
        "Memory, GiB": 2,
    }  # fmt: skip
    notes = ["GFLOPs per token: 2 × parameters."]
    if any("Memory, GiB" in line and line["Memory, GiB"] is not None for line in lines):
        devices = listed(row.environment.get("device") for row in sized) or "device unknown"
        notes.append(
            f"Memory: the most held while the perplexity was measured ({devices}); allocated on a "
            "GPU, resident in the whole process on a CPU, with Python and its libraries."
        )
    return _list("Cost of a model", lines, digits, notes)


def record(results: Results) -> list[Table]:
    """List failures, every cell, settings that differ, and safeguards."""
    rows = _in_order(results)
    failed = [
        {**_named(row), "Reason": row.error or NO_REASON} for row in rows if row.status == "failed"
    ]
    return [
        *_list("Failed cells", failed, {}),
        *_every_cell(rows),
        *_settings(results.cells, rows),
        *_events(rows),
    ]


def _every_cell(rows: Sequence[Row]) -> list[Table]:
    phases = ("collecting", "pruning", "evaluating")
    lines = [
        {
            **_named(row), "Status": row.status, "Seed": row.setting("seed"),
            "Parameters": row.parameters.after, "Perplexity": row.measured("perplexity"),
            "Calibration windows": row.calibration.windows,
            "Windows sha256": (row.calibration.windows_sha256 or ABSENT)[:_DIGEST],
            **{f"{phase.capitalize()}, s": row.seconds.get(phase) for phase in phases},
            "Peak memory, GiB": row.measured("memory"), "coec": row.environment.get("coec"),
        }
        for row in rows
    ]  # fmt: skip
    digits = {"Parameters": 0, "Perplexity": 2, "Peak memory, GiB": 2}
    return _list("Every cell", lines, digits | {f"{p.capitalize()}, s": 1 for p in phases})


def _settings(cells: DataFrame, rows: Sequence[Row]) -> list[Table]:
    names = [name for name in SETTING_NAMES if cells[name].notna().any()]
    varying = [name for name in names if cells[name].nunique() > 1]
    constant = "; ".join(
        f"{name} = {setting_text(cells[name].dropna().iloc[0])}"
        for name in names if name not in varying
    )  # fmt: skip
    lines = [
        {"Cell": row.cell, "Model": row.model, **{n: _short(row.setting(n)) for n in varying}}
        for row in rows
    ]
    notes = [f"The same wherever it applies: {constant}."] if constant else []
    return _list("Settings that differ", lines, {}, notes)


def _events(rows: Sequence[Row]) -> list[Table]:
    """List every safeguard that fired, how often, and in how many cells."""
    by_cell = [[event for site in row.sites for event in site.events] for row in rows]
    modules = Counter(event for events in by_cell for event in events)
    cells = Counter(event for events in by_cell for event in set(events))
    lines = [{"Event": e, "Modules": n, "Cells": cells[e]} for e, n in modules.most_common()]
    return _list("Safeguards that fired", lines, {})
