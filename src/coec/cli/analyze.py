"""`coec analyze`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

from coec.cli.common import (
    NAME,
    NUMBER,
    WHOLE,
    Device,
    Dtype,
    Json,
    argument,
    given,
    notes,
    quieten,
    results,
    setting,
    switch,
)
from coec.cli.progress import Quiet, showing_progress
from coec.cli.spelling import spelled
from coec.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from coec.evaluation.efficiency import Efficiency
    from coec.evaluation.speed import Speed, Spread
    from coec.events import Progress

SPEED = "Measured speed"
GEOMETRY = "Geometry"


def analyze_command(
    model: Annotated[
        str,
        argument(
            "Dense model; may be left out where PRUNED was made from a folder that is here.",
            "MODEL",
        ),
    ],
    pruned: Annotated[str | None, argument("Folder that coec prune wrote.", "PRUNED")] = None,
    *,
    config_only: Annotated[
        bool,
        switch(
            "--config-only",
            "Cost of MODEL (also a config.json) and of what pruning would leave of it; no "
            "weights are read.",
        ),
    ] = False,
    sparsity: Annotated[
        float | None, setting("For --config-only: fraction of units removed. Default: 0.3.", NUMBER)
    ] = None,
    no_speed: Annotated[
        bool, switch("--no-speed", "Leave out what takes running both models.")
    ] = False,
    no_geometry: Annotated[bool, switch("--no-geometry", "Leave out the decompositions.")] = False,
    device: Device = None,
    dtype: Annotated[
        Dtype | None,
        setting(
            "Of weights and forward pass: float64, float32, bfloat16 or float16. Default: the "
            "models', float32 to run on the CPU.",
            NAME,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        setting(
            "Prompt of a run, capped by the model. Default: 512.", WHOLE, rich_help_panel=SPEED
        ),
    ] = None,
    new_tokens: Annotated[
        int | None, setting("Tokens decoded after it. Default: 64.", WHOLE, rich_help_panel=SPEED)
    ] = None,
    batch_size: Annotated[
        int | None, setting("Sequences at once. Default: 1.", WHOLE, rich_help_panel=SPEED)
    ] = None,
    repeats: Annotated[
        int | None,
        setting("Timed runs of each model, in turns. Default: 5.", WHOLE, rich_help_panel=SPEED),
    ] = None,
    warmup: Annotated[
        int | None,
        setting("Untimed runs of each before. Default: 1.", WHOLE, rich_help_panel=SPEED),
    ] = None,
    rank_attention: Annotated[
        int | None,
        setting("Size of the frames of o_proj. Default: 16.", WHOLE, rich_help_panel=GEOMETRY),
    ] = None,
    rank_mlp: Annotated[
        int | None,
        setting("Size of the frames of down_proj. Default: 64.", WHOLE, rich_help_panel=GEOMETRY),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare PRUNED with MODEL: cost, measured speed, and what happened to the weights' frames."""
    if config_only and pruned is not None:
        raise OptionError("--config-only takes one model; leave out PRUNED or --config-only")
    if sparsity is not None and not config_only:
        raise OptionError("--sparsity goes with --config-only: PRUNED has the one it was made with")
    quieten()
    from coec.evaluation.efficiency import efficiency

    if config_only:
        _show(efficiency(model, sparsity=sparsity, dtype=dtype), None, None, as_json)
        return
    load = given(
        {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "batch_size": batch_size,
         "repeats": repeats, "warmup": warmup}
    )  # fmt: skip
    ranks = given({"attention": rank_attention, "mlp": rank_mlp})
    parts = {"speed": not no_speed, "geometry": not no_geometry}
    with showing_progress(quiet) as advance:
        cost, rates, rows, odd = _measured(
            model, pruned, load, ranks, parts, device or "auto", dtype, advance
        )
    _show(cost, rates, rows, as_json, odd)


def _measured(
    model: str,
    pruned: str | None,
    load: dict[str, int],
    given_ranks: dict[str, int],
    parts: dict[str, bool],
    device: str,
    dtype: str | None,
    advance: "Progress",
) -> tuple["Efficiency", "Speed | None", list[dict[str, Any]] | None, list[str]]:
    """Cost, and what was asked for of speed and geometry, with notes on what looks odd."""
    import torch

    from coec.devices import choose_device
    from coec.evaluation import geometry, speed
    from coec.evaluation.efficiency import efficiency
    from coec.evaluation.pair import ModelPair

    workload = speed.Workload(**load)
    ranks = geometry.RANKS | given_ranks
    geometry.check_ranks(ranks)
    choose_device(device)
    pair = ModelPair.open(None, model) if pruned is None else ModelPair.open(model, pruned)
    cost = efficiency(pair.dense, pair.pruned, dtype=dtype)
    rates = rows = None
    try:
        if parts["speed"]:
            rates = speed.measure_speed(pair, workload, device, dtype, advance)
        if parts["geometry"]:
            rows = geometry.measure_geometry(pair, ranks, device, advance)
    except torch.OutOfMemoryError as error:
        raise OptionError(
            "out of memory: lower --prompt-tokens or --batch-size, leave out a part with "
            "--no-speed or --no-geometry, or use --device cpu"
        ) from error
    odd = speed.oddities(rates, workload) if rates else []
    return cost, rates, rows, odd + geometry.oddities(rows or [])


def _show(
    cost: "Efficiency",
    rates: "Speed | None",
    rows: list[dict[str, Any]] | None,
    as_json: bool,
    odd: list[str] | None = None,
) -> None:
    from coec.evaluation import geometry

    summary = None if rows is None else geometry.summarize(rows)
    if as_json:
        record = {
            "efficiency": cost.as_dict(),
            "speed": None if rates is None else rates.as_dict(),
            "geometry": None if rows is None else {"summary": summary, "modules": rows},
            "notes": odd or [],
        }
        print(json.dumps(record))
        return
    results.print(_efficiency_table(cost, rates))
    if rates is None:
        results.print("memory is that of the weights; peak memory and speed have to be measured")
    else:
        load = rates.load
        results.print(
            f"tokens/s: median (range) of {load.repeats} runs each, in turns, batch of "
            f"{load.batch_size}, {load.prompt_tokens} + {load.new_tokens} tokens,\n"
            f"{rates.dtype} on {rates.device}; ratio of medians (range of the paired ratios)",
            markup=False,
        )
    if summary:
        results.print(_geometry_table(summary))
    for note in odd or []:
        notes.print(f"note: {spelled(note)}", markup=False)


def _efficiency_table(cost: "Efficiency", rates: "Speed | None") -> "Table":
    from rich.table import Table

    table = Table("", "dense", "pruned", "ratio", box=None, header_style="bold")
    both = cost.dense, cost.pruned
    table.add_row("dtype", cost.dense.dtype, cost.pruned.dtype, "")
    weights = [one.weight_bytes for one in both]
    lines: dict[str, list[float]] = {
        "parameters": [one.parameters for one in both],
        "weights, GB": [size / 1e9 for size in weights],
        "weights, GiB": [size / 2**30 for size in weights],
        "GFLOPs per token": [one.gflops_per_token for one in both],
        "KV cache/token, kB": [one.kv_cache_bytes_per_token / 1e3 for one in both],
    }
    if rates and rates.peak_memory_dense and rates.peak_memory_pruned:
        lines["peak memory, GB"] = [
            rates.peak_memory_dense / 1e9,
            rates.peak_memory_pruned / 1e9,
        ]
    for label, (before, after) in lines.items():
        table.add_row(label, _number(before), _number(after), f"{after / before:.3f}")
    if rates:
        for label, rate in {"prefill": rates.prefill, "decode": rates.decode}.items():
            ratio = f"{rate.ratio:.2f} ({rate.paired.least:.2f}–{rate.paired.greatest:.2f})"
            table.add_row(f"{label}, tokens/s", _spread(rate.dense), _spread(rate.pruned), ratio)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _spread(spread: "Spread") -> str:
    numbers = spread.median, spread.least, spread.greatest
    shown = [f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in numbers]
    return f"{shown[0]} ({shown[1]}–{shown[2]})"


ROWS = {
    "angle_original_pruned": ("angle O–P, mean", "{:.1f}°"),
    "angle_original_compensated": ("angle O–C, mean", "{:.1f}°"),
    "angle_pruned_compensated": ("angle P–C, mean", "{:.1f}°"),
    "discrepancy": ("frame discrepancy, mean", "{:.2%}"),
    "scale_change": ("|log(s_C/s_P)|, median", "{:.3f}"),
    "gap_dense": ("σ_r/σ_(r+1) dense, median", "{:.4f}"),
    "gap_pruned": ("… pruned, median", "{:.4f}"),
    "gap_compensated": ("… compensated, median", "{:.4f}"),
    "penalty_pruned": ("penalty pruned, median", "{:.1e}"),
    "penalty_compensated": ("… compensated, median", "{:.1e}"),
    "penalty_factor": ("… before/after, median", "{:.1f}"),
    "weighted_penalty_pruned": ("s²-weighted pruned, median", "{:.1e}"),
    "weighted_penalty_compensated": ("… compensated, median", "{:.1e}"),
    "weighted_penalty_factor": ("… before/after, median", "{:.1f}"),
}
"""Label, which ends in the average over the modules, and format of every measure."""


def _geometry_table(summary: dict[str, dict[str, Any]]) -> "Table":
    """Averages over modules, and the worst module, per site."""
    from rich.table import Table

    heads = [
        head
        for site, found in summary.items()
        for head in (f"{site}\n{found['modules']} × r = {found['r']}", "worst\n(block)")
    ]
    table = Table("geometry", *heads, box=None, header_style="bold")
    for name, (label, form) in ROWS.items():
        cells = []
        for found in summary.values():
            if name not in found:
                cells += ["", ""]
                continue
            measure = found[name]
            block = measure["worst_module"].split(".")[2]
            cells += [
                form.format(measure[label.rpartition(" ")[2]]),
                f"{form.format(measure['worst'])} ({block})",
            ]
        table.add_row(label, *cells)
    return table
