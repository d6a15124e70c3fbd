"""What `--dry-run` prints: the plan, and what a run of it will take."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec.cli.common import results, setting, switch
from coec.cli.progress import showing_progress

if TYPE_CHECKING:
    from coec.planning import Forecast, Plan
    from coec.planning.machines import Machine

OfMachine = Annotated[
    str | None,
    setting(
        "With --dry-run: plan for a GPU by its data sheet (h100, h200, a100, l40s, rtx4090, "
        "rtx3090) instead of for this machine.",
        "NAME",
    ),
]
Measure = Annotated[bool, switch("--measure", "With --dry-run: measure this machine's rates anew.")]


@dataclass(frozen=True)
class Asked:
    """How a plan is to be shown.

    Attributes:
        machine: of which times are estimated; None for this one.
        measure: whether its rates are measured anew.
        as_json: one JSON object instead of tables.
        measured: there are statistics, and no text is run.
        quiet: no progress is shown.
    """

    machine: str | None
    measure: bool
    as_json: bool
    measured: bool
    quiet: bool = False


def check_dry(machine: str | None, *, measure: bool) -> None:
    """Raises BadParameter for what only a plan takes."""
    for name, value in {"machine": machine, "measure": measure}.items():
        if value:
            raise typer.BadParameter(f"--{name} goes with --dry-run")


def show_plan(plan: "Plan", model: str, out: Path | None, asked: Asked) -> None:
    """Prints what a pruning would do, as tables or as one JSON object.

    Raises:
        OptionError: it does not fit in the memory that there is.
    """
    import torch

    from coec.devices import choose_device
    from coec.planning import ComputeConfig, FreeMemory, check_room, close, named, within

    close_to: tuple[str, ...] = ()
    if asked.machine is not None:
        machine = named(asked.machine)
        device = torch.device(machine.device)
        room = FreeMemory(machine.device_bytes, None)
    else:
        device = choose_device(plan.recipe.runtime.device)
        machine, room = _here(device, asked), FreeMemory.of(device)
    elsewhere = None if asked.machine is None else machine
    how = within(
        plan, ComputeConfig.of(plan, device, measured=asked.measured, machine=elsewhere), room
    )
    check_room(plan, how, room)
    close_to = close(plan, how, room)
    forecast = plan.forecast(how, machine)
    record = {
        "model": model,
        **plan.record(),
        **forecast.record(),
        "device": str(device),
        "close": list(close_to),
    }
    if asked.as_json:
        print(json.dumps(record))
        return
    _show_sizes(plan, record)
    _show_forecast(forecast, str(device))
    for line in (*close_to, *_disk(forecast, out)):
        results.print(line, markup=False)


def _here(device: Any, asked: Asked) -> "Machine":
    from coec.planning import measuring

    with showing_progress(asked.quiet) as advance:
        return measuring.here(device, anew=asked.measure, progress=advance)


def _show_sizes(plan: "Plan", record: dict[str, Any]) -> None:
    """Widths, parameters, candidates, notes and the format."""
    from rich.table import Table

    from coec.pipeline.card import counted

    table = Table("", "dense", "pruned", box=None, header_style="bold")
    for what, width in record["widths"].items():
        table.add_row(
            f"{what.replace('_', ' ')} × {plan.dense.layers} blocks",
            counted(width["before"]),
            counted(width["after"]),
        )
    before, after = plan.parameters_before, plan.parameters_after
    table.add_row("parameters", f"{before:,}", f"{after:,} ({after / before:.1%})")
    results.print(table)
    for name, other in plan.alternatives.items():
        results.print(
            f"or, if held-out windows say so (kv_groups = {name}): {other.pruned.kv_heads} KV "
            f"groups, {other.pruned.ffn:,} MLP channels, stored as {other.output.model_type}",
            markup=False,
        )
    for note in plan.notes:
        results.print(note, markup=False)
    code = f", built by {record['code']} beside the weights" if record["code"] else ""
    results.print(f"\nstored as {plan.output.model_type}{code}", markup=False)
    if plan.output.relabelled:
        results.print(f"  ({plan.output.relabelled})", markup=False)
    for loader, how in plan.output.loads_in.items():
        results.print(f"  {loader:<14} {how}", markup=False)
    results.print()


def _show_forecast(forecast: "Forecast", device: str) -> None:
    """A line for every phase: memory at its fullest, operations, time."""
    from rich.table import Table

    alone = device == "cpu"
    columns = [
        "phase",
        *(["memory"] if alone else [device, "host"]),
        "operations",
        "time",
        "most of it",
    ]
    table = Table(*columns, box=None, header_style="bold")
    held = {one.phase: one for one in forecast.held}
    for phase in forecast.phases:
        own = held.get(phase.name)
        sizes = [] if own is None else [own.host] if alone else [own.device, own.host]
        cells = [_gigabytes(sum(part.values())) for part in sizes] or [""] * (1 if alone else 2)
        time = forecast.seconds.get(phase.name)
        operations = f"{phase.operations:.1e}" if phase.operations else ""
        most = max(sizes[0], key=sizes[0].__getitem__) if sizes and sizes[0] else ""
        table.add_row(phase.name, *cells, operations, str(time or ""), most)
    everything = sum(phase.operations for phase in forecast.phases)
    total = str(forecast.total) if forecast.seconds else ""
    peak = [sum(forecast.peak)] if alone else forecast.peak
    table.add_row("all", *map(_gigabytes, peak), f"{everything:.1e}", total, "")
    results.print(table)
    machine = forecast.machine
    if machine is None:
        return
    if machine.measured:
        results.print(f"times: by rates measured on {machine.name}, with nothing else running; "
                      "reading from the disk is left out", markup=False)  # fmt: skip
    else:
        results.print(
            f"times: by the data sheet of {machine.name}, products taken to reach "
            f"{machine.share:.0%} of its peak: not measured here, or anywhere",
            markup=False,
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _disk(forecast: "Forecast", out: Path | None) -> list[str]:
    """What is written, and whether there is room for it."""
    from coec.execution.places import free_space

    needed = forecast.output + forecast.partial
    lines = [
        f"disk: {forecast.output / 1e9:.2f} GB, and {forecast.partial / 1e9:.2f} GB of unfinished "
        "work meanwhile"
    ]
    if out is not None and (free := free_space(out)) < needed:
        lines.append(f"'{out}' has {free / 1e9:.2f} GB free: choose a folder on another disk")
    return lines
