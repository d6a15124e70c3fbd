"""Printing of a plan, for `--dry-run`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec.cli.common import results, setting, switch
from coec.cli.progress import showing_progress

if TYPE_CHECKING:
    from coec.planning import Forecast, Plan

MachineOption = Annotated[
    str | None,
    setting(
        "With --dry-run: plan for a GPU by its data sheet (h100, h200, a100, l40s, rtx4090, "
        "rtx3090) instead of for this machine.",
        "NAME",
    ),
]
MeasureOption = Annotated[
    bool, switch("--measure", "With --dry-run: measure this machine's rates anew.")
]


@dataclass(frozen=True)
class PlanView:
    """Options of printing a plan.

    Attributes:
        machine: GPU whose data sheet gives the times; None for this machine.
        measure: measure this machine's rates anew.
        as_json: print one JSON object instead of tables.
        measured: statistics are given, and no text is run.
        quiet: show no progress.
    """

    machine: str | None
    measure: bool
    as_json: bool
    measured: bool
    quiet: bool = False


def check_dry(machine: str | None, *, measure: bool) -> None:
    """Raises BadParameter for options that only a plan takes."""
    for name, value in {"machine": machine, "measure": measure}.items():
        if value:
            raise typer.BadParameter(f"--{name} goes with --dry-run")


def show_plan(plan: "Plan", model: str, out: Path | None, view: PlanView) -> None:
    """Print what a pruning would do and take, as tables or as one JSON object.

    Raises:
        OptionError: it does not fit in the free memory.
    """
    import torch

    from coec.devices import FreeMemory, choose_device
    from coec.planning import (
        ComputeConfig,
        Forecast,
        check_room,
        close_fits,
        machine_named,
        this_machine,
        within,
    )

    if view.machine is not None:
        machine = elsewhere = machine_named(view.machine)
        device, room = torch.device(machine.device), FreeMemory(machine.device_bytes, None)
    else:
        device, elsewhere = choose_device(plan.recipe.runtime.device), None
        room = FreeMemory.of(device)
        with showing_progress(view.quiet) as advance:
            machine = this_machine(device, anew=view.measure, progress=advance)
    compute = ComputeConfig.of(plan, device, measured=view.measured, machine=elsewhere)
    compute = within(plan, compute, room)
    check_room(plan, compute, room)
    close = close_fits(plan, compute, room)
    forecast = Forecast.of(plan, compute, machine)
    record = {"model": model, **plan.record(), **forecast.record()}
    record |= {"device": str(device), "close": list(close)}
    if view.as_json:
        print(json.dumps(record))
        return
    _show_sizes(plan, forecast.alternatives, record)
    _show_forecast(forecast, str(device))
    for line in (*close, *_disk(forecast, out)):
        results.print(line, markup=False)


def _show_sizes(plan: "Plan", alternatives: dict[str, "Plan"], record: dict[str, Any]) -> None:
    """Print widths, parameters, candidates, notes and the format."""
    from rich.table import Table

    from coec.pipeline.card import counted

    table = Table("", "dense", "pruned", box=None, header_style="bold")
    for name, width in record["widths"].items():
        label = f"{name.replace('_', ' ')} × {plan.dense.layers} blocks"
        table.add_row(label, counted(width["before"]), counted(width["after"]))
    before, after = plan.parameters_before, plan.parameters_after
    table.add_row("parameters", f"{before:,}", f"{after:,} ({after / before:.1%})")
    results.print(table)
    for rule, candidate in alternatives.items():
        results.print(
            f"or, if held-out windows say so (kv_groups = {rule}): {candidate.pruned.kv_heads} KV "
            f"groups, {candidate.pruned.ffn:,} MLP channels, stored as "
            f"{candidate.output.model_type}",
            markup=False,
        )
    for note in plan.notes:
        results.print(note, markup=False)
    code = f", built by {record['code']} beside the weights" if record["code"] else ""
    results.print(f"\nstored as {plan.output.model_type}{code}", markup=False)
    if plan.output.relabelled:
        results.print(f"  ({plan.output.relabelled})", markup=False)
    for loader, finding in plan.output.loads_in.items():
        results.print(f"  {loader:<14} {finding}", markup=False)
    results.print()


def _show_forecast(forecast: "Forecast", device: str) -> None:
    """Print a line for every phase: memory at its fullest moment, operations, time."""
    from rich.table import Table

    alone = device == "cpu"
    memory = ["memory"] if alone else [device, "host"]
    columns = ["phase", *memory, "operations", "time", "most of it"]
    table = Table(*columns, box=None, header_style="bold")
    for phase in forecast.phases:
        sizes = [phase.host] if alone else [phase.device, phase.host]
        cells = [_gigabytes(sum(size.values())) if phase.host else "" for size in sizes]
        operations = f"{phase.operations:.1e}" if phase.operations else ""
        largest = max(sizes[0], key=sizes[0].__getitem__, default="")
        time = str(forecast.seconds.get(phase.name, ""))
        table.add_row(phase.name, *cells, operations, time, largest)
    everything = sum(phase.operations for phase in forecast.phases)
    peak = [sum(forecast.peak)] if alone else forecast.peak
    table.add_row("all", *map(_gigabytes, peak), f"{everything:.1e}", str(forecast.total), "")
    results.print(table)
    if machine := forecast.machine:
        source = (
            f"rates measured on {machine.name}, with nothing else running; reading from the disk "
            "is left out"
            if machine.measured
            else f"the data sheet of {machine.name}, products taken to reach {machine.share:.0%} "
            "of its peak: not measured here, or anywhere"
        )
        results.print(f"times: by {source}", markup=False)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _disk(forecast: "Forecast", out: Path | None) -> list[str]:
    """Lines on the disk space that a run needs, and on too little of it."""
    from coec.execution.places import free_space

    output, partial = forecast.output, forecast.partial
    lines = [
        f"disk: {output / 1e9:.2f} GB, and {partial / 1e9:.2f} GB of unfinished work meanwhile"
    ]
    if out is not None and (free := free_space(out)) < output + partial:
        lines.append(f"'{out}' has {free / 1e9:.2f} GB free: choose a folder on another disk")
    return lines
