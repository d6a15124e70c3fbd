"""`coec prune` and `coec compensate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from coec import settings
from coec.cli.common import (
    Config,
    Json,
    TrustRemoteCode,
    argument,
    quieten,
    setting,
    settings_of,
    switch,
    with_flags,
)
from coec.cli.progress import Quiet, showing_progress
from coec.cli.pruning_tables import show_plan, show_report
from coec.settings.parts import CHOOSING

StatisticsFolder = Annotated[
    Path | None,
    setting("What `coec collect` wrote, instead of a dense pass; brings its settings.", "PATH"),
]
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
Force = Annotated[bool, switch("--force", "Replace the model that OUT holds.")]
Restart = Annotated[
    bool, switch("--restart", "Throw away what an unfinished run into the same folder left.")
]


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
    _check_use(out, dry_run, machine=machine, measure=measure)
    quieten()
    from coec.pipeline import prune as pruning

    chosen = settings_of(config, flags, trust_remote_code=trust_remote_code)
    if out is None or dry_run:
        plan = pruning.plan(model, statistics=statistics, **chosen)
        show_plan(
            plan, model, out, machine=machine, measure=measure, as_json=as_json,
            collected=statistics is not None, quiet=quiet,
        )  # fmt: skip
        return
    with showing_progress(quiet) as advance:
        report = pruning.prune(
            model, out, statistics=statistics, force=force, restart=restart, progress=advance,
            **chosen,
        )  # fmt: skip
    show_report(report, as_json)


@with_flags(tuple(row for row in settings.RECIPE if row.name not in CHOOSING), settings.OPTIONS)
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
    _check_use(out, dry_run, machine=machine, measure=measure)
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
    show_plan(
        plan, model, out, machine=machine, measure=measure, as_json=as_json,
        collected=statistics is not None, quiet=quiet,
    )  # fmt: skip


def _check_use(out: object, dry_run: bool, *, machine: str | None, measure: bool) -> None:
    """Raise BadParameter for a missing OUT, or options that only a plan takes."""
    if dry_run:
        return
    if out is None:
        raise typer.BadParameter("OUT is missing (only --dry-run works without)")
    for name, value in {"machine": machine, "measure": measure}.items():
        if value:
            raise typer.BadParameter(f"--{name} goes with --dry-run")
