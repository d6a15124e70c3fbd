"""`coec collect`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec.cli import common
from coec.cli.progress import showing_progress
from coec.settings import Calibration, Runtime

if TYPE_CHECKING:
    from coec.streaming.statistics import Statistics


_SETTINGS = (*Calibration.table(), *Runtime.table())
_SWITCHES = (
    common.CONFIG_FILE,
    common.Switch("merge", "Add up the statistics A and B of one model on different text."),
    common.RESTART, common.TRUST_REMOTE_CODE, common.QUIET, common.JSON,
)  # fmt: skip


@common.with_flags(*_SETTINGS, *_SWITCHES)
def collect_command(
    model: Annotated[
        str, common.argument("Model folder, or a hub name; with --merge: A.", "MODEL")
    ],
    out: Annotated[Path, common.argument("Folder to make; with --merge: B.", "STATS")],
    merged: Annotated[
        Path | None, common.argument("With --merge: the folder to make.", "MERGED")
    ] = None,
    **flags: Any,
) -> None:
    """Keep the statistics of MODEL's dense pass in STATS, for many prunings (--statistics STATS).

    coec collect --merge A B MERGED adds up what was collected on two texts, or on two machines.
    """
    if flags["merge"] != (merged is not None):
        raise typer.BadParameter(
            "give --merge A B MERGED: two folders of statistics, and the folder to make"
        )
    unheard = common.given(flags, (*_SETTINGS, "config"))
    if merged is not None and unheard:
        raise typer.BadParameter(
            f"{common.flag_of(next(iter(unheard)))} has no effect with --merge"
        )
    common.quieten()
    from coec.pipeline import collect as collecting

    restart = flags["restart"]
    with showing_progress(flags["quiet"]) as advance:
        if merged is not None:
            statistics = collecting.merge(model, out, merged, restart=restart, progress=advance)
        else:
            statistics = collecting.collect(
                model, out, restart=restart, progress=advance, **common.settings_of(flags)
            )
    if flags["json"]:
        print(json.dumps({"folder": str(statistics.folder), **statistics.record()}))
    else:
        _show(statistics, model if merged is None else "MODEL")


def _show(statistics: "Statistics", model: str) -> None:
    from coec.calibration.windows import bos_notes

    calibration = statistics.calibration
    size = sum(path.stat().st_size for path in statistics.folder.iterdir())
    for line in (
        f"wrote {statistics.folder} ({size / 1e9:.2f} GB)",
        f"{calibration['windows']} windows of {calibration['seq_len']} tokens from "
        f"{calibration['source']}",
        *bos_notes(calibration),
        f"use it: coec prune {model} OUT --statistics {statistics.folder}",
    ):
        common.results.print(line)
