"""`coec prune`."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coec.cli.common import (
    Dtype,
    Json,
    Method,
    Selection,
    SolveDtype,
    notes,
    progress_bars,
    results,
    setting,
)
from coec.compensation import COMPENSATIONS, options_of
from coec.planning import Plan, choose_device, choose_forward_dtype, stored_dtype
from coec.pruning import plan as make_plan
from coec.pruning import prune as run_prune
from coec.recipe import Recipe, read_settings
from coec.report import Report


def _option_help(method: Callable[..., Any]) -> dict[str, str]:
    """Texts of the `Args:` section of a docstring, by argument."""
    helps: dict[str, str] = {}
    name, inside = "", False
    for line in (inspect.getdoc(method) or "").splitlines():
        if not line.startswith(" "):
            inside = line == "Args:" or (inside and not line)
        elif inside and line.startswith("     "):
            helps[name] += " " + line.strip()
        elif inside:
            name, _, text = line.strip().partition(": ")
            helps[name] = text
    return helps


def _method_parameters() -> list[inspect.Parameter]:
    """A flag for every option of every compensation, described by its docstring."""
    found: dict[str, inspect.Parameter] = {}
    owners: dict[str, list[str]] = {}
    for name, method in COMPENSATIONS.items():
        helps = _option_help(method)
        for option, parameter in options_of(method).items():
            owners.setdefault(option, []).append(name)
            optional: Any = parameter.annotation | None
            annotation: Any = Annotated[
                optional,
                typer.Option(
                    help=f"{helps[option]} Default: {parameter.default}.",
                    rich_help_panel=f"Options of --compensation {', '.join(owners[option])}",
                    show_default=False,
                ),
            ]
            found[option] = inspect.Parameter(
                option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
    return list(found.values())


def _with_method_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces `**options` in a command's signature by the flags of all compensations."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = _method_parameters()
    command.__signature__ = signature.replace(parameters=own + flags)  # type: ignore[attr-defined]
    command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
    return command


@_with_method_options
def prune_command(
    model: Annotated[str, typer.Argument(help="Model folder (or its config.json), or a hub name.")],
    out: Annotated[Path | None, typer.Argument(help="Folder to make.", show_default=False)] = None,
    *,
    sparsity: Annotated[
        float | None, setting("Fraction of units removed, between 0 and 1. Default: 0.3.")
    ] = None,
    selection: Annotated[
        Selection | None, setting("Which score picks the units. Default: rcpu.")
    ] = None,
    compensation: Annotated[
        Method | None, setting("How the kept weights are repaired. Default: coec.")
    ] = None,
    calibration: Annotated[
        str | None,
        setting(
            "wikitext2; c4; hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (their train splits); self "
            "(text sampled from the model); or a .txt, .jsonl, .parquet, .npy or .safetensors "
            "file. Default: wikitext2."
        ),
    ] = None,
    samples: Annotated[int | None, setting("Calibration windows. Default: 128.")] = None,
    seq_len: Annotated[
        int | None,
        setting("Tokens per window. Default: 2048, or the model's maximum if less."),
    ] = None,
    seed: Annotated[int | None, setting("Draws the windows. Default: 0.")] = None,
    holdout: Annotated[
        float | None,
        setting(
            "Fraction of the windows not fitted on, whose error the report has too. Default: 0."
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        setting("Column of a jsonl or parquet file, or of a hub: data set. Default: text."),
    ] = None,
    device: Annotated[str | None, setting("auto, cpu, cuda, cuda:1, … Default: auto.")] = None,
    dtype: Annotated[Dtype | None, setting("Of the written weights. Default: the model's.")] = None,
    forward_dtype: Annotated[
        Dtype | None,
        setting("Of the dense forward pass. Default: the model's on a GPU, float32 on the CPU."),
    ] = None,
    solve_dtype: Annotated[
        SolveDtype | None, setting("Of the compensation. Default: float64.")
    ] = None,
    config: Annotated[
        Path | None, setting("TOML file with any of these settings; flags win.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan from the configuration alone.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the model that OUT holds.")
    ] = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Prune MODEL and write the smaller dense model to OUT."""
    flags = {
        "sparsity": sparsity, "selection": selection, "compensation": compensation,
        "calibration": calibration, "samples": samples, "seq_len": seq_len, "seed": seed,
        "holdout": holdout, "text_column": text_column, "device": device, "dtype": dtype,
        "forward_dtype": forward_dtype, "solve_dtype": solve_dtype, **options,
    }  # fmt: skip
    settings = read_settings(config) if config else {}
    settings |= {name: value for name, value in flags.items() if value is not None}
    recipe = Recipe.of(**settings)
    if dry_run:
        _show_plan(make_plan(model, recipe), model, as_json)
        return
    if out is None:
        raise typer.BadParameter("OUT is missing (only --dry-run works without)")
    with progress_bars() as advance:
        report = run_prune(model, out, recipe, force=force, progress=advance)
    if as_json:
        print(json.dumps({"out": report.out, **report.as_dict()}))
    else:
        _show_report(report)


def _show_plan(plan: Plan, model: str, as_json: bool) -> None:
    device = choose_device(plan.recipe.device)
    stored = stored_dtype(plan.output.config)
    forward = choose_forward_dtype(plan.recipe.forward_dtype, stored, device)
    memory = plan.memory(stored, forward)
    record = {
        "model": model,
        **plan.record(),
        "memory_bytes": {**memory, "total": sum(memory.values())},
        "device": str(device),
    }
    if as_json:
        print(json.dumps(record))
        return
    table = Table("", "dense", "pruned", box=None, header_style="bold")
    for what, width in record["widths"].items():
        table.add_row(
            f"{what.replace('_', ' ')} × {plan.dense.layers} blocks",
            f"{width['before']:,}",
            f"{width['after']:,}",
        )
    before, after = plan.parameters_before, plan.parameters_after
    table.add_row("parameters", f"{before:,}", f"{after:,} ({after / before:.1%})")
    results.print(table)
    for note in plan.notes:
        results.print(note, markup=False)
    results.print(f"\nstored as {plan.output.model_type}", markup=False)
    if plan.output.relabelled:
        results.print(f"  ({plan.output.relabelled})", markup=False)
    for loader, how in plan.output.loads_in.items():
        results.print(f"  {loader:<14} {how}", markup=False)
    results.print(f"\nmemory on {device}: about {sum(memory.values()) / 1e9:.2f} GB")
    for purpose, size in memory.items():
        results.print(f"  {purpose:<22} {size / 1e9:8.2f} GB", markup=False)


def _show_report(report: Report) -> None:
    parameters, widths = report.plan["parameters"], report.plan["widths"]
    before, after = parameters["before"], parameters["after"]
    lines = [
        f"wrote {report.out}",
        f"parameters       {before:,} → {after:,} ({after / before:.1%})",
        f"MLP channels     {widths['mlp']['before']:,} → {widths['mlp']['after']:,} per block",
        f"KV groups        {widths['kv_groups']['before']} → {widths['kv_groups']['after']} "
        "per block",
    ]
    lines += report.plan["notes"]
    for site in ("attention", "mlp"):
        error = report.mean_errors(site)
        lines.append(
            f"{site + ' error':<16} {error[0]:.4f} → {error[1]:.4f} "
            "(relative output error on the calibration data, mean over blocks)"
        )
        if report.recipe["holdout"]:
            held = report.mean_errors(site, held_out=True)
            lines.append(f"{'  held out':<16} {held[0]:.4f} → {held[1]:.4f}")
    if report.plan["relabelled"]:
        lines.append(
            f"stored as        {report.plan['output_model_type']} ({report.plan['relabelled']})"
        )
    lines.append(f"seconds          {sum(report.seconds.values()):.1f}")
    for line in lines:
        results.print(line, markup=False)
    for event, modules in report.events.items():
        where = modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"
        notes.print(f"note: {where}: {event}", markup=False)
    results.print(f"measure it: coec eval {report.out} --baseline {report.model}", markup=False)
