"""`coec prune`."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec import settings
from coec.cli.common import (
    Config,
    Force,
    Json,
    Restart,
    StatisticsFolder,
    TrustRemoteCode,
    argument,
    notes,
    quieten,
    results,
    settings_of,
    switch,
    with_flags,
)
from coec.cli.planned import MachineOption, MeasureOption, PlanView, check_dry, show_plan
from coec.cli.progress import Quiet, showing_progress

if TYPE_CHECKING:
    from coec.pipeline.report import Report


_WIDTHS = (
    ("mlp", "MLP channels", "per block"),
    ("experts", "expert channels", "per expert"),
    ("kv_groups", "KV groups", "per block"),
)
"""Names of widths in a report, and the words for them."""


@with_flags(settings.RECIPE, settings.OPTIONS)
def prune_command(
    model: Annotated[str, argument("Model folder (or its config.json), or a hub name.", "MODEL")],
    out: Annotated[
        str | None, argument("Folder to make, or its URL (s3://…); --dry-run needs none.", "OUT")
    ] = None,
    *,
    config: Config = None,
    statistics: StatisticsFolder = None,
    dry_run: Annotated[
        bool, switch("--dry-run", "Print the plan from the configuration alone.")
    ] = False,
    machine: MachineOption = None,
    measure: MeasureOption = False,
    force: Force = False,
    restart: Restart = False,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Prune MODEL and write the smaller dense model to OUT.

    Interrupted or killed, the same command goes on with the first unfinished block.
    """
    if out is None and not dry_run:
        raise typer.BadParameter("OUT is missing (only --dry-run works without)")
    quieten()
    from coec.execution.places import is_url
    from coec.pipeline import prune as pruning

    chosen = settings_of(config, flags, trust_remote_code=trust_remote_code)
    if out is None or dry_run:
        plan = pruning.plan(model, statistics=statistics, **chosen)
        folder = None if out is None or is_url(out) else Path(out)
        view = PlanView(machine, measure, as_json, statistics is not None, quiet)
        show_plan(plan, model, folder, view)
        return
    check_dry(machine, measure=measure)
    with showing_progress(quiet) as advance:
        report = pruning.prune(
            model, out, statistics=statistics, force=force, restart=restart, progress=advance,
            **chosen,
        )  # fmt: skip
    show_report(report, as_json)


def show_report(report: "Report", as_json: bool) -> None:
    """Print what a pruning did, in lines or as one JSON object."""
    from coec.models.architectures import ARCHITECTURES

    if as_json:
        print(json.dumps({"out": report.out, **report.as_dict()}))
        return
    for line in _lines(report):
        results.print(line, markup=False)
    for event, modules in report.events.items():
        place = modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"
        notes.print(f"note: {place}: {event}", markup=False)
    fits = not ARCHITECTURES[report.plan["model_type"]].adds  # True where blocks can be fitted
    if report.recipe.get("preset") == "paper" and not report.reconstruction and fits:
        results.print(
            "beyond the paper: --preset best fits every block to the dense model's hidden states",
            markup=False,
        )
    results.print(f"measure it: coec eval {report.out} --baseline {report.model}", markup=False)


def _lines(report: "Report") -> Iterator[str]:
    """Yield sizes, notes, errors and times of a pruning."""
    from coec.pipeline.card import counted

    plan, widths = report.plan, report.plan["widths"]
    before, after = plan["parameters"]["before"], plan["parameters"]["after"]
    yield f"wrote {report.out}"
    yield f"parameters       {before:,} → {after:,} ({after / before:.1%})"
    for name, label, unit in _WIDTHS:
        if width := widths.get(name):
            yield f"{label:<16} {counted(width['before'])} → {counted(width['after'])} {unit}"
    yield from plan["notes"]
    for site in report.kinds:
        before, after = report.mean_errors(site)
        yield (
            f"{site + ' error':<16} {before:.4f} → {after:.4f} "
            "(relative output error on the calibration data, mean over blocks)"
        )
        if any(row.get("holdout_after") is not None for row in report.sites if row["site"] == site):
            before, after = report.mean_errors(site, held_out=True)
            yield f"{'  held out':<16} {before:.4f} → {after:.4f}"
    yield from _reconstruction(report)
    if plan["relabelled"]:
        yield f"stored as        {plan['output_model_type']} ({plan['relabelled']})"
    if plan.get("code"):
        yield (
            f"built by         {plan['code']}, beside the weights: loads with "
            "trust_remote_code=True"
        )
    yield f"seconds          {sum(report.seconds.values()):.1f}"


def _reconstruction(report: "Report") -> Iterator[str]:
    """Yield errors before and after the fit, and how well candidates predict held-out windows."""
    for site in report.kinds:
        fits = [row["reconstruction"] for row in report.sites
                if row["site"] == site and "reconstruction" in row]  # fmt: skip
        if fits:
            before = sum(fit["error_before"] for fit in fits) / len(fits)
            after = sum(fit["error_after"] for fit in fits) / len(fits)
            yield (
                f"{site + ' fitted':<16} {before:.4f} → {after:.4f} "
                "(error of the hidden states, relative to what the part adds)"
            )
    facts = report.reconstruction
    for name, tried in facts.get("candidates", {}).items():
        chosen = ", chosen" if name == facts["kv_groups"] else ""
        divergence = tried["kl"] if tried["kl"] is not None else math.inf
        line = _prediction(f"groups {name}", tried)
        yield f"{line}, KL {divergence:.3f}, fitted briefly{chosen}"
    if facts:
        yield _prediction("predicts", facts)


def _prediction(label: str, facts: Mapping[str, Any]) -> str:
    """Line on how well a model predicts the windows that judge it, beside the dense one."""
    pruned, dense = (facts[model] or math.inf for model in ("perplexity", "dense"))
    windows = facts["windows"].replace(" ", "-")
    return f"{label:<16} perplexity {pruned:.2f} (dense {dense:.2f}) on {windows} windows"
