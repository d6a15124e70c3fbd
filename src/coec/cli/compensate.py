"""`coec compensate`."""

from pathlib import Path
from typing import Annotated, Any

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
    quieten,
    switch,
    with_settings,
)
from coec.cli.planned import MachineOption, MeasureOption, PlanView, check_dry, show_plan
from coec.cli.progress import Quiet, showing_progress
from coec.cli.prune import show_report

RECIPE = tuple(one for one in settings.RECIPE if one.name not in settings.CHOOSING)
"""All but those that say which units stay: here PRUNED does."""


@with_settings(RECIPE, settings.OPTIONS)
def compensate_command(
    model: Annotated[str, argument("Model folder before it was pruned, or a hub name.", "DENSE")],
    pruned: Annotated[str, argument("What another program made of it.", "PRUNED")],
    out: Annotated[Path | None, argument("Folder to make; --dry-run needs none.", "OUT")] = None,
    *,
    config: Config = None,
    statistics: Statistics = None,
    dry_run: Annotated[
        bool, switch("--dry-run", "Print the plan; the weights of both are read for it.")
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
    """Repair what another program pruned: DENSE, with the units that PRUNED keeps, into OUT.

    Which units these are is told from the rows of PRUNED; nothing else of it is used. All else is
    as in coec prune.
    """
    if out is None and not dry_run:
        raise typer.BadParameter("OUT is missing (only --dry-run works without)")
    if not dry_run and out is not None:
        check_dry(machine, measure=measure)
    quieten()
    from coec.pipeline import compensate as compensating
    from coec.pipeline import prune as pruning
    from coec.planning.recipe import Recipe, read_settings

    chosen = (read_settings(config) if config else {}) | given(flags)
    chosen["trust_remote_code"] = trust_remote_code
    with showing_progress(quiet) as advance:
        if out is None or dry_run:
            compensating.check_settings(chosen, pruned)
            Recipe.of(**chosen)  # before the weights are read
            kept = compensating.infer_kept(model, pruned, advance)
            plan = pruning.plan(model, statistics=statistics, **chosen, kept=kept)
        else:
            report = compensating.compensate_pruned(
                model, pruned, out, statistics=statistics, force=force, restart=restart,
                progress=advance, **chosen,
            )  # fmt: skip
    if out is None or dry_run:
        view = PlanView(machine, measure, as_json, statistics is not None, quiet)
        show_plan(plan, model, out, view)
    else:
        show_report(report, as_json)
