"""`coec analyze`."""

import json
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from coec.cli.common import Dtype, Json, notes, progress_bars, results, setting
from coec.errors import OptionError
from coec.evaluation import geometry, speed
from coec.evaluation.efficiency import Efficiency, efficiency
from coec.evaluation.pair import Pair
from coec.evaluation.speed import Spread, Workload
from coec.planning import choose_device

SPEED = "Measured speed"
GEOMETRY = "Geometry"


def analyze_command(
    model: Annotated[
        str,
        typer.Argument(
            help="Dense model; may be left out where PRUNED was made from a folder that is here."
        ),
    ],
    pruned: Annotated[
        str | None,
        typer.Argument(help="Folder that coec prune wrote.", show_default=False),
    ] = None,
    *,
    config_only: Annotated[
        bool,
        typer.Option(
            "--config-only",
            help="Cost of MODEL (also a config.json) and of what pruning would leave of it; no "
            "weights are read.",
        ),
    ] = False,
    sparsity: Annotated[
        float | None, setting("For --config-only: fraction of units removed. Default: 0.3.")
    ] = None,
    no_speed: Annotated[
        bool, typer.Option("--no-speed", help="Leave out what takes running both models.")
    ] = False,
    no_geometry: Annotated[
        bool, typer.Option("--no-geometry", help="Leave out the decompositions.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    dtype: Annotated[
        Dtype | None,
        setting("Of weights and forward pass. Default: the models', float32 to run on the CPU."),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Prompt of a run, capped by the model.", rich_help_panel=SPEED)
    ] = Workload.prompt_tokens,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens decoded after it.", rich_help_panel=SPEED)
    ] = Workload.new_tokens,
    batch_size: Annotated[
        int, typer.Option(help="Sequences at once.", rich_help_panel=SPEED)
    ] = Workload.batch_size,
    repeats: Annotated[
        int, typer.Option(help="Timed runs of each model, in turns.", rich_help_panel=SPEED)
    ] = Workload.repeats,
    warmup: Annotated[
        int, typer.Option(help="Untimed runs of each before.", rich_help_panel=SPEED)
    ] = Workload.warmup,
    rank_attention: Annotated[
        int, typer.Option(help="Size of the frames of o_proj.", rich_help_panel=GEOMETRY)
    ] = geometry.RANKS["attention"],
    rank_mlp: Annotated[
        int, typer.Option(help="Size of the frames of down_proj.", rich_help_panel=GEOMETRY)
    ] = geometry.RANKS["mlp"],
    as_json: Json = False,
) -> None:
    """Compare PRUNED with MODEL: cost, measured speed, and what happened to the weights' frames."""
    if config_only:
        if pruned is not None:
            raise OptionError("--config-only takes one model; leave out PRUNED or --config-only")
        _show(efficiency(model, sparsity=sparsity, dtype=dtype), None, None, as_json)
        return
    if sparsity is not None:
        raise OptionError("--sparsity goes with --config-only: PRUNED has the one it was made with")
    load = Workload(prompt_tokens, new_tokens, batch_size, repeats, warmup)
    ranks = {"attention": rank_attention, "mlp": rank_mlp}
    geometry.check_ranks(ranks)
    choose_device(device)
    pair = Pair.open(None, model) if pruned is None else Pair.open(model, pruned)
    cost = efficiency(pair.dense, pair.pruned, dtype=dtype)
    try:
        with progress_bars() as advance:
            rates = None if no_speed else speed.measure_speed(pair, load, device, dtype, advance)
            rows = None if no_geometry else geometry.measure_geometry(pair, ranks, device, advance)
    except torch.OutOfMemoryError as error:
        raise OptionError(
            "out of memory: lower --prompt-tokens or --batch-size, leave out a part with "
            "--no-speed or --no-geometry, or use --device cpu"
        ) from error
    odd = speed.oddities(rates, load) if rates else []
    _show(cost, rates, rows, as_json, odd + geometry.oddities(rows or []))


def _show(
    cost: Efficiency,
    rates: speed.Speed | None,
    rows: list[dict[str, Any]] | None,
    as_json: bool,
    odd: list[str] | None = None,
) -> None:
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
        notes.print(f"note: {note}", markup=False)


def _efficiency_table(cost: Efficiency, rates: speed.Speed | None) -> Table:
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


def _spread(spread: Spread) -> str:
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


def _geometry_table(summary: dict[str, dict[str, Any]]) -> Table:
    """Averages over modules, and the worst module, per site."""
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
