"""`coec collect`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from coec.cli import common
from coec.cli.progress import showing_progress
from coec.settings import Calibration, Runtime

if TYPE_CHECKING:
    from coec.streaming.statistics import Statistics


_SWITCHES = (
    common.CONFIG_FILE, common.RESTART, common.TRUST_REMOTE_CODE, common.QUIET, common.JSON,
)  # fmt: skip


@common.with_flags(*Calibration.table(), *Runtime.table(), *_SWITCHES)
def collect_command(
    model: Annotated[str, common.argument("Model folder, or a hub name.", "MODEL")],
    out: Annotated[Path, common.argument("Folder to make.", "STATS")],
    **flags: Any,
) -> None:
    """Keep the statistics of MODEL's dense pass in STATS, for many prunings.

    Give them to coec prune and coec sweep as --statistics STATS.
    """
    common.quieten()
    from coec.pipeline import collect as collecting

    restart = flags["restart"]
    with showing_progress(flags["quiet"]) as advance:
        statistics = collecting.collect(
            model, out, restart=restart, progress=advance, **common.settings_of(flags)
        )
    if flags["json"]:
        print(json.dumps({"folder": str(statistics.folder), **statistics.record()}))
    else:
        _show(statistics, model)


def _show(statistics: "Statistics", model: str) -> None:
    from coec.calibration.windows import text_notes

    calibration = statistics.calibration
    size = sum(path.stat().st_size for path in statistics.folder.iterdir())
    for line in (
        f"wrote {statistics.folder} ({size / 1e9:.2f} GB)",
        f"{calibration['windows']} windows of {calibration['seq_len']} tokens from "
        f"{calibration['source']}",
        *text_notes(calibration),
        f"use it: coec prune {model} OUT --statistics {statistics.folder}",
    ):
        common.results.print(line)
