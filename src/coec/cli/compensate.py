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
    StatisticsFolder,
    TrustRemoteCode,
    argument,
    quieten,
    settings_of,
    switch,
    with_flags,
)
from coec.cli.planned import MachineOption, MeasureOption, PlanView, check_dry, show_plan
from coec.cli.progress import Quiet, showing_progress
from coec.cli.prune import show_report

_RECIPE = tuple(row for row in settings.RECIPE if row.name not in settings.CHOOSING)
"""Settings but those that say which units stay: here PRUNED does."""


@with_flags(_RECIPE, settings.OPTIONS)
def compensate_command(
    model: Annotated[str, argument("Model folder before it was pruned, or a hub name.", "DENSE")],
    pruned: Annotated[str, argument("What another program made of it.", "PRUNED")],
    out: Annotated[Path | None, argument("Folder to make; --dry-run needs none.", "OUT")] = None,
    *,
    config: Config = None,
    statistics: StatisticsFolder = None,
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
    if not dry_run:
        check_dry(machine, measure=measure)
    quieten()
    from coec.pipeline import compensate as compensating
    from coec.pipeline import prune as pruning
    from coec.planning.recipe import Recipe

    chosen = settings_of(config, flags, trust_remote_code=trust_remote_code)
    if out is not None and not dry_run:
        with showing_progress(quiet) as advance:
            report = compensating.compensate_pruned(
                model, pruned, out, statistics=statistics, force=force, restart=restart,
                progress=advance, **chosen,
            )  # fmt: skip
        show_report(report, as_json)
        return
    compensating.check_settings(chosen, pruned)
    Recipe(**chosen)  # before the weights are read
    with showing_progress(quiet) as advance:
        kept = compensating.infer_kept(model, pruned, advance)
    plan = pruning.plan(model, statistics=statistics, **chosen, kept=kept)
    view = PlanView(machine, measure, as_json, statistics is not None, quiet)
    show_plan(plan, model, out, view)
