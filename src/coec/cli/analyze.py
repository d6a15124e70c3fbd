"""`coec analyze`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from coec.cli import common
from coec.cli.common import CommandFlag, argument, given, switch
from coec.cli.progress import showing_progress
from coec.errors import OptionError
from coec.evaluation.settings import Workload
from coec.settings.parts import DTYPE_NAMES

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from coec.evaluation.efficiency import Efficiency, Speed, Spread
    from coec.events import Progress
    from coec.models.files import JsonDict

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
    switch(
        "config_only",
        "Cost of MODEL (also a config.json) and of what pruning would leave of it; no weights are "
        "read.",
    ),
    switch("no_speed", "Leave out what takes running both models."),
    switch("no_geometry", "Leave out the decompositions."),
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
    odd = efficiency.oddities(rates, Workload(**given(flags, _WORKLOAD))) if rates else []
    odd += geometry.oddities(rows or [])
    record = {
        "efficiency": cost.as_dict(),
        "speed": None if rates is None else rates.as_dict(),
        "geometry": None if rows is None else {"summary": summary, "modules": rows},
        "notes": odd,
    }
    common.show(record, _lines(cost, rates, summary), flags["json"])
    for note in odd if not flags["json"] else ():
        common.notes.print(f"note: {common.spelled(note)}")


def _measure(
    model: str, pruned: str | None, flags: common.Values, advance: "Progress"
) -> tuple["Efficiency", "Speed | None", "list[JsonDict] | None"]:
    import torch

    from coec.devices import choose_device
    from coec.evaluation import efficiency, geometry
    from coec.evaluation.pair import ModelPair

    # Settings first: a wrong one is told before models are opened.
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


def _lines(
    cost: "Efficiency", rates: "Speed | None", summary: "dict[str, JsonDict] | None"
) -> Iterator["RenderableType"]:
    models = cost.dense, cost.pruned
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
    # Cost → peak memory, where it was measured → rates, each as dense, pruned and their ratio
    rows = [("dtype", cost.dense.dtype, cost.pruned.dtype, "")]
    for label, (before, after) in lines.items():
        rows.append((label, _number(before), _number(after), f"{after / before:.3f}"))
    for label, rate in {"prefill": rates.prefill, "decode": rates.decode}.items() if rates else ():
        ratio = f"{rate.ratio:.2f} ({rate.paired.least:.2f}–{rate.paired.greatest:.2f})"
        rows.append((f"{label}, tokens/s", _spread(rate.dense), _spread(rate.pruned), ratio))
    yield common.table(("", "dense", "pruned", "ratio"), rows)
    if rates is None:
        yield "memory is that of the weights; peak memory and speed have to be measured"
    else:
        load = rates.load
        yield (
            f"tokens/s: median (range) of {load.repeats} runs each, in turns, batch of "
            f"{load.batch_size}, {load.prompt_tokens} + {load.new_tokens} tokens,\n"
            f"{rates.dtype} on {rates.device}; ratio of medians (range of the paired ratios)"
        )
    if summary:
        yield _geometry(summary)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _spread(spread: "Spread") -> str:
    numbers = spread.median, spread.least, spread.greatest
    median, low, high = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in numbers)
    return f"{median} ({low}–{high})"


def _geometry(summary: "dict[str, JsonDict]") -> "Table":
    """Return averages over modules, and the worst module, per site."""
    from coec.evaluation.geometry import MEASURES

    # Two columns per site: the average over its modules, and the worst of them.
    heads = [
        head
        for site, measures in summary.items()
        for head in (f"{site}\n{measures['modules']} × r = {measures['r']}", "worst\n(block)")
    ]
    rows = []
    for name, measure in MEASURES.items():
        cells = []
        for measures in summary.values():
            average = worst = ""
            if values := measures.get(name):
                average = measure.form.format(values[measure.average])
                block = values["worst_module"].split(".")[2]
                worst = f"{measure.form.format(values['worst'])} ({block})"
            cells += [average, worst]
        rows.append((f"{measure.label}, {measure.average}", *cells))
    return common.table(("geometry", *heads), rows)
