"""`coec analyze`."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from coec.cli import common
from coec.cli.common import CommandFlag, Switch, argument, given, results, show_table
from coec.cli.progress import showing_progress
from coec.errors import OptionError
from coec.evaluation.settings import Workload
from coec.settings.parts import DTYPE_NAMES

if TYPE_CHECKING:
    from coec.evaluation.efficiency import Efficiency, Speed, Spread
    from coec.events import Progress

_GENERAL = (
    CommandFlag("sparsity", float, "For --config-only: fraction of units removed. Default: 0.3."),
    common.DEVICE,
    CommandFlag(
        "dtype", DTYPE_NAMES,
        "Dtype of weights and forward pass: float64, float32, bfloat16 or float16. Default: the "
        "models', float32 to run on the CPU.",
    ),
)  # fmt: skip
_WORKLOAD = [
    CommandFlag.of(row)._replace(panel="Measured speed")
    for row in Workload.table()
    if row.name not in ("repeats", "warmup")
]
_RANKS = (
    CommandFlag("rank_attention", int, "Size of the frames of o_proj. Default: 16.", "Geometry"),
    CommandFlag("rank_mlp", int, "Size of the frames of down_proj. Default: 64.", "Geometry"),
)
_SWITCHES = (
    Switch(
        "config_only",
        "Cost of MODEL (also a config.json) and of what pruning would leave of it; no weights are "
        "read.",
    ),
    Switch("no_speed", "Leave out what takes running both models."),
    Switch("no_geometry", "Leave out the decompositions."),
)


@common.with_flags(*_GENERAL, *_WORKLOAD, *_RANKS, *_SWITCHES, common.QUIET, common.JSON)
def analyze_command(
    model: Annotated[
        str,
        argument(
            "Dense model; may be left out where PRUNED was made from a folder that is here.",
            "MODEL",
        ),
    ],
    pruned: Annotated[str | None, argument("Folder that coec prune wrote.", "PRUNED")] = None,
    **flags: Any,
) -> None:
    """Compare PRUNED with MODEL: cost, measured speed, and what happened to the weights' frames."""
    config_only, sparsity = flags["config_only"], flags["sparsity"]
    if config_only and pruned is not None:
        raise OptionError("--config-only takes one model; leave out PRUNED or --config-only")
    if sparsity is not None and not config_only:
        raise OptionError("--sparsity goes with --config-only: PRUNED has the one it was made with")
    common.quieten()
    from coec.evaluation import efficiency, geometry

    rates = rows = None
    if config_only:
        cost = efficiency.efficiency(model, sparsity=sparsity, dtype=flags["dtype"])
    else:
        with showing_progress(flags["quiet"]) as advance:
            cost, rates, rows = _measure(model, pruned, flags, advance)
    summary = None if rows is None else geometry.summarize(rows)
    workload = Workload(**given(flags, _WORKLOAD))
    odd = efficiency.oddities(rates, workload) if rates else []
    odd += geometry.oddities(rows or [])
    if flags["json"]:
        record = {
            "efficiency": cost.as_dict(),
            "speed": None if rates is None else rates.as_dict(),
            "geometry": None if rows is None else {"summary": summary, "modules": rows},
            "notes": odd,
        }
        print(json.dumps(record))
        return
    show_table(("", "dense", "pruned", "ratio"), _costs(cost, rates))
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
        _show_geometry(summary)
    for note in odd:
        common.notes.print(f"note: {common.spelled(note)}")


def _measure(
    model: str, pruned: str | None, flags: common.Values, advance: "Progress"
) -> tuple["Efficiency", "Speed | None", list[dict[str, Any]] | None]:
    import torch

    from coec.devices import choose_device
    from coec.evaluation import efficiency, geometry
    from coec.evaluation.pair import ModelPair

    device, dtype = flags["device"] or "auto", flags["dtype"]
    workload = Workload(**given(flags, _WORKLOAD))
    sizes = given(flags, _RANKS).items()
    ranks = geometry.RANKS | {name.removeprefix("rank_"): size for name, size in sizes}
    geometry.check_ranks(ranks)
    choose_device(device)
    pair = ModelPair.open(None, model) if pruned is None else ModelPair.open(model, pruned)
    cost = efficiency.efficiency(pair.dense, pair.pruned, dtype=dtype)
    rates = rows = None
    try:
        if not flags["no_speed"]:
            rates = efficiency.speed(
                None, pair, load=workload, device=device, dtype=dtype, progress=advance
            )
        if not flags["no_geometry"]:
            rows = geometry.geometry(None, pair, ranks=ranks, device=device, progress=advance)
    except torch.OutOfMemoryError as error:
        raise OptionError(
            "out of memory: lower --prompt-tokens or --batch-size, leave out a part with "
            "--no-speed or --no-geometry, or use --device cpu"
        ) from error
    return cost, rates, rows


def _costs(cost: "Efficiency", rates: "Speed | None") -> Iterator[tuple[str, ...]]:
    """Yield the lines of a table: label, dense, pruned and their ratio."""
    yield "dtype", cost.dense.dtype, cost.pruned.dtype, ""
    for label, of in {
        "parameters": lambda model: model.parameters,
        "weights, GB": lambda model: model.weight_bytes / 1e9,
        "weights, GiB": lambda model: model.weight_bytes / 2**30,
        "GFLOPs per token": lambda model: model.gflops_per_token,
        "KV cache/token, kB": lambda model: model.kv_cache_bytes_per_token / 1e3,
    }.items():
        yield _compared(label, of(cost.dense), of(cost.pruned))
    if rates and rates.peak_memory_dense and rates.peak_memory_pruned:
        peaks = rates.peak_memory_dense / 1e9, rates.peak_memory_pruned / 1e9
        yield _compared("peak memory, GB", *peaks)
    for label, rate in {"prefill": rates.prefill, "decode": rates.decode}.items() if rates else ():
        ratio = f"{rate.ratio:.2f} ({rate.paired.least:.2f}–{rate.paired.greatest:.2f})"
        yield f"{label}, tokens/s", _spread(rate.dense), _spread(rate.pruned), ratio


def _compared(label: str, *values: float) -> tuple[str, ...]:
    texts = (f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in values)
    return label, *texts, f"{values[1] / values[0]:.3f}"


def _spread(spread: "Spread") -> str:
    numbers = spread.median, spread.least, spread.greatest
    median, low, high = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in numbers)
    return f"{median} ({low}–{high})"


def _show_geometry(summary: dict[str, dict[str, Any]]) -> None:
    """Print averages over modules, and the worst module, per site."""
    from coec.evaluation.geometry import MEASURES

    heads = [
        head
        for site, measures in summary.items()
        for head in (f"{site}\n{measures['modules']} × r = {measures['r']}", "worst\n(block)")
    ]
    rows = []
    for name, measure in MEASURES.items():
        cells = []
        for measures in summary.values():
            if values := measures.get(name):
                block = values["worst_module"].split(".")[2]
                average, worst = (
                    measure.form.format(values[n]) for n in (measure.average, "worst")
                )
                cells += [average, f"{worst} ({block})"]
            else:
                cells += ["", ""]
        rows.append((f"{measure.label}, {measure.average}", *cells))
    show_table(("geometry", *heads), rows)
