"""`coec prune`."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec import settings
from coec.cli.common import (
    Config,
    Force,
    Json,
    Restart,
    Statistics,
    TrustRemoteCode,
    argument,
    given,
    notes,
    quieten,
    results,
    switch,
    with_settings,
)
from coec.cli.planned import MachineOption, MeasureOption, PlanView, check_dry, show_plan
from coec.cli.progress import Quiet, showing_progress

if TYPE_CHECKING:
    from coec.pipeline.report import Report


WIDTHS = (
    ("mlp", "MLP channels", "per block"),
    ("experts", "expert channels", "per expert"),
    ("kv_groups", "KV groups", "per block"),
)
"""What a report says of widths, and in what words."""


@with_settings(settings.RECIPE, settings.OPTIONS)
def prune_command(
    model: Annotated[str, argument("Model folder (or its config.json), or a hub name.", "MODEL")],
    out: Annotated[
        str | None, argument("Folder to make, or its URL (s3://…); --dry-run needs none.", "OUT")
    ] = None,
    *,
    config: Config = None,
    statistics: Statistics = None,
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
    from coec.execution.output import is_url
    from coec.pipeline import prune as pruning
    from coec.planning.recipe import read_settings

    chosen = (read_settings(config) if config else {}) | given(flags)
    chosen["trust_remote_code"] = trust_remote_code
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
    """Prints what a pruning did, in lines or as one JSON object."""
    from coec.models.architectures import ARCHITECTURES
    from coec.pipeline.card import counted

    if as_json:
        print(json.dumps({"out": report.out, **report.as_dict()}))
        return
    parameters, widths = report.plan["parameters"], report.plan["widths"]
    before, after = parameters["before"], parameters["after"]
    lines = [
        f"wrote {report.out}",
        f"parameters       {before:,} → {after:,} ({after / before:.1%})",
        *(
            f"{what:<16} {counted(widths[name]['before'])} → {counted(widths[name]['after'])} {of}"
            for name, what, of in WIDTHS
            if name in widths
        ),
    ]
    lines += report.plan["notes"]
    for site in report.kinds:
        error = report.mean_errors(site)
        lines.append(
            f"{site + ' error':<16} {error[0]:.4f} → {error[1]:.4f} "
            "(relative output error on the calibration data, mean over blocks)"
        )
        if any(row.get("holdout_after") is not None for row in report.sites if row["site"] == site):
            held = report.mean_errors(site, held_out=True)
            lines.append(f"{'  held out':<16} {held[0]:.4f} → {held[1]:.4f}")
    lines += _rebuilt_lines(report)
    if report.plan["relabelled"]:
        lines.append(
            f"stored as        {report.plan['output_model_type']} ({report.plan['relabelled']})"
        )
    if report.plan.get("code"):
        lines.append(
            f"built by         {report.plan['code']}, beside the weights: loads with "
            "trust_remote_code=True"
        )
    lines.append(f"seconds          {sum(report.seconds.values()):.1f}")
    for line in lines:
        results.print(line, markup=False)
    for event, modules in report.events.items():
        where = modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"
        notes.print(f"note: {where}: {event}", markup=False)
    adds = ARCHITECTURES[report.plan["model_type"]].adds  # where blocks can be fitted at all
    if report.recipe.get("preset") == "paper" and not report.reconstruction and not adds:
        results.print(
            "beyond the paper: --preset best fits every block to the dense model's hidden states",
            markup=False,
        )
    results.print(f"measure it: coec eval {report.out} --baseline {report.model}", markup=False)


def _rebuilt_lines(report: "Report") -> list[str]:
    """What reconstruction left of the errors, and how the candidates predict held-out windows."""
    lines = []
    for site in report.kinds:
        rows = [r["reconstruction"] for r in report.sites
                if r["site"] == site and "reconstruction" in r]  # fmt: skip
        if rows:
            before, after = (
                sum(row[f"error_{when}"] for row in rows) / len(rows)
                for when in ("before", "after")
            )
            lines.append(
                f"{site + ' fitted':<16} {before:.4f} → {after:.4f} "
                "(error of the hidden states, relative to what the part adds)"
            )
    facts = report.reconstruction
    for name, tried in facts.get("candidates", {}).items():
        chosen = ", chosen" if name == facts["kv_groups"] else ""
        kl = f", KL {tried['kl'] if tried['kl'] is not None else math.inf:.3f}"
        lines.append(_predicting(f"groups {name}", tried) + f"{kl}, fitted briefly{chosen}")
    if facts:
        lines.append(_predicting("predicts", facts))
    return lines


def _predicting(what: str, facts: dict[str, Any]) -> str:
    """How well a model predicts the windows that judge it, beside the dense one."""
    mine, dense = (facts[which] or math.inf for which in ("perplexity", "dense"))
    windows = facts["windows"].replace(" ", "-")
    return f"{what:<16} perplexity {mine:.2f} (dense {dense:.2f}) on {windows} windows"
