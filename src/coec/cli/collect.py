"""`coec collect`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec.cli.common import (
    Config,
    Json,
    Restart,
    TrustRemoteCode,
    argument,
    flag_of,
    given,
    quieten,
    results,
    settings_of,
    switch,
    with_flags,
)
from coec.cli.progress import Quiet, showing_progress
from coec.settings import Calibration, Runtime

if TYPE_CHECKING:
    from coec.streaming.statistics import Statistics


@with_flags((*Calibration.table(), *Runtime.table()))
def collect_command(
    model: Annotated[str, argument("Model folder, or a hub name; with --merge: A.", "MODEL")],
    out: Annotated[Path, argument("Folder to make; with --merge: B.", "STATS")],
    merged: Annotated[Path | None, argument("With --merge: the folder to make.", "MERGED")] = None,
    *,
    config: Config = None,
    merge: Annotated[
        bool, switch("--merge", "Add up the statistics A and B of one model on different text.")
    ] = False,
    restart: Restart = False,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Keep the statistics of MODEL's dense pass in STATS, for many prunings (--statistics STATS).

    coec collect --merge A B MERGED adds up what was collected on two texts, or on two machines.
    """
    if merge != (merged is not None):
        raise typer.BadParameter(
            "give --merge A B MERGED: two folders of statistics, and the folder to make"
        )
    if merge and (names := [*given(flags), *(["config"] if config else [])]):
        raise typer.BadParameter(f"{flag_of(names[0])} has no effect with --merge")
    quieten()
    from coec.pipeline import collect as collecting
    from coec.planning.recipe import Recipe

    with showing_progress(quiet) as advance:
        if merged is not None:
            statistics = collecting.merge(model, out, merged, restart=restart, progress=advance)
        else:
            chosen = settings_of(config, flags, trust_remote_code=trust_remote_code)
            recipe = Recipe(**chosen)
            statistics = collecting.collect(model, out, recipe, restart=restart, progress=advance)
    if as_json:
        print(json.dumps({"folder": str(statistics.folder), **statistics.record()}))
    else:
        _show(statistics, "MODEL" if merge else model)


def _show(statistics: "Statistics", model: str) -> None:
    calibration = statistics.calibration
    size = sum(path.stat().st_size for path in statistics.folder.iterdir())
    for line in (
        f"wrote {statistics.folder} ({size / 1e9:.2f} GB)",
        f"{calibration['windows']} windows of {calibration['seq_len']} tokens from "
        f"{calibration['source']}",
        f"use it: coec prune {model} OUT --statistics {statistics.folder}",
    ):
        results.print(line)
