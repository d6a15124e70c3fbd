"""`coec analyze`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

from coec.cli.common import (
    DEVICE_FLAG,
    CommandFlag,
    Json,
    Values,
    argument,
    given,
    notes,
    quieten,
    results,
    spelled,
    switch,
    with_flags,
)
from coec.cli.progress import Quiet, showing_progress
from coec.errors import OptionError
from coec.settings.parts import DTYPE_NAMES

if TYPE_CHECKING:
    from rich.table import Table

    from coec.evaluation.efficiency import Efficiency
    from coec.evaluation.speed import Speed, Spread
    from coec.events import Progress

_GENERAL = (
    CommandFlag("sparsity", float, "For --config-only: fraction of units removed. Default: 0.3."),
    DEVICE_FLAG,
    CommandFlag(
        "dtype", DTYPE_NAMES,
        "Dtype of weights and forward pass: float64, float32, bfloat16 or float16. Default: the "
        "models', float32 to run on the CPU.",
    ),
)  # fmt: skip
_PANEL = "Measured speed"
_WORKLOAD = (
    CommandFlag(
        "prompt_tokens", int, "Prompt of a run, capped by the model. Default: 512.", _PANEL
    ),
    CommandFlag("new_tokens", int, "Tokens decoded after it. Default: 64.", _PANEL),
    CommandFlag("batch_size", int, "Sequences at once. Default: 1.", _PANEL),
    CommandFlag("repeats", int, "Timed runs of each model, in turns. Default: 5.", _PANEL),
    CommandFlag("warmup", int, "Untimed runs of each before. Default: 1.", _PANEL),
)
_RANKS = (
    CommandFlag("rank_attention", int, "Size of the frames of o_proj. Default: 16.", "Geometry"),
    CommandFlag("rank_mlp", int, "Size of the frames of down_proj. Default: 64.", "Geometry"),
)


@with_flags((*_GENERAL, *_WORKLOAD, *_RANKS))
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
    no_speed: Annotated[
        bool, switch("--no-speed", "Leave out what takes running both models.")
    ] = False,
    no_geometry: Annotated[bool, switch("--no-geometry", "Leave out the decompositions.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Compare PRUNED with MODEL: cost, measured speed, and what happened to the weights' frames."""
    if config_only and pruned is not None:
        raise OptionError("--config-only takes one model; leave out PRUNED or --config-only")
    if flags["sparsity"] is not None and not config_only:
        raise OptionError("--sparsity goes with --config-only: PRUNED has the one it was made with")
    quieten()
    if config_only:
        from coec.evaluation.efficiency import efficiency

        cost = efficiency(model, sparsity=flags["sparsity"], dtype=flags["dtype"])
        _show(cost, None, None, [], as_json)
        return
    with showing_progress(quiet) as advance:
        measured = _measure(model, pruned, flags, not no_speed, not no_geometry, advance)
    _show(*measured, as_json)


def _measure(
    model: str,
    pruned: str | None,
    flags: Values,
    with_speed: bool,
    with_geometry: bool,
    advance: "Progress",
) -> tuple["Efficiency", "Speed | None", list[dict[str, Any]] | None, list[str]]:
    import torch

    from coec.devices import choose_device
    from coec.evaluation import geometry, speed
    from coec.evaluation.efficiency import efficiency
    from coec.evaluation.pair import ModelPair

    device, dtype = flags["device"] or "auto", flags["dtype"]
    workload = speed.Workload(**given(flags, _WORKLOAD))
    sizes = given(flags, _RANKS).items()
    ranks = geometry.RANKS | {name.removeprefix("rank_"): size for name, size in sizes}
    geometry.check_ranks(ranks)
    choose_device(device)
    pair = ModelPair.open(None, model) if pruned is None else ModelPair.open(model, pruned)
    cost = efficiency(pair.dense, pair.pruned, dtype=dtype)
    rates = rows = None
    try:
        if with_speed:
            rates = speed.speed(
                None, pair, load=workload, device=device, dtype=dtype, progress=advance
            )
        if with_geometry:
            rows = geometry.geometry(None, pair, ranks=ranks, device=device, progress=advance)
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
    odd: list[str],
    as_json: bool,
) -> None:
    from coec.evaluation import geometry

    summary = None if rows is None else geometry.summarize(rows)
    if as_json:
        record = {
            "efficiency": cost.as_dict(),
            "speed": None if rates is None else rates.as_dict(),
            "geometry": None if rows is None else {"summary": summary, "modules": rows},
            "notes": odd,
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
            f"{rates.dtype} on {rates.device}; ratio of medians (range of the paired ratios)"
        )
    if summary:
        results.print(_geometry_table(summary))
    for note in odd:
        notes.print(f"note: {spelled(note)}")


def _efficiency_table(cost: "Efficiency", rates: "Speed | None") -> "Table":
    from rich.table import Table

    table = Table("", "dense", "pruned", "ratio", box=None, header_style="bold")
    models = cost.dense, cost.pruned
    table.add_row("dtype", cost.dense.dtype, cost.pruned.dtype, "")
    lines: dict[str, list[float]] = {
        "parameters": [model.parameters for model in models],
        "weights, GB": [model.weight_bytes / 1e9 for model in models],
        "weights, GiB": [model.weight_bytes / 2**30 for model in models],
        "GFLOPs per token": [model.gflops_per_token for model in models],
        "KV cache/token, kB": [model.kv_cache_bytes_per_token / 1e3 for model in models],
    }
    if rates and rates.peak_memory_dense and rates.peak_memory_pruned:
        peaks = rates.peak_memory_dense, rates.peak_memory_pruned
        lines["peak memory, GB"] = [peak / 1e9 for peak in peaks]
    for label, (before, after) in lines.items():
        table.add_row(label, _number(before), _number(after), f"{after / before:.3f}")
    for label, rate in {"prefill": rates.prefill, "decode": rates.decode}.items() if rates else ():
        ratio = f"{rate.ratio:.2f} ({rate.paired.least:.2f}–{rate.paired.greatest:.2f})"
        table.add_row(f"{label}, tokens/s", _spread(rate.dense), _spread(rate.pruned), ratio)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _spread(spread: "Spread") -> str:
    numbers = spread.median, spread.least, spread.greatest
    median, low, high = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in numbers)
    return f"{median} ({low}–{high})"


GEOMETRY_ROWS = {
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
"""Label and format of every measure; the label ends in the name of the average over modules."""


def _geometry_table(summary: dict[str, dict[str, Any]]) -> "Table":
    """Tabulate averages over modules, and the worst module, per site."""
    from rich.table import Table

    heads = [
        head
        for site, measures in summary.items()
        for head in (f"{site}\n{measures['modules']} × r = {measures['r']}", "worst\n(block)")
    ]
    table = Table("geometry", *heads, box=None, header_style="bold")
    for name, (label, form) in GEOMETRY_ROWS.items():
        cells = []
        for measures in summary.values():
            if measure := measures.get(name):
                average = form.format(measure[label.rpartition(" ")[2]])
                block = measure["worst_module"].split(".")[2]
                cells += [average, f"{form.format(measure['worst'])} ({block})"]
            else:
                cells += ["", ""]
        table.add_row(label, *cells)
    return table
