"""`coec collect`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from coec.cli import common
from coec.cli.progress import showing_progress
from coec.settings import Calibration, Runtime

if TYPE_CHECKING:
    from coec.streaming.statistics import Statistics


@common.with_flags(
    *Calibration.table(), *Runtime.table(), common.CONFIG_FILE, common.RESTART,
    common.TRUST_REMOTE_CODE, common.QUIET, common.JSON,
)  # fmt: skip
def collect_command(
    model: Annotated[str, common.argument("Model folder, or a hub name.", "MODEL")],
    out: Annotated[Path, common.argument("Folder to make.", "STATS")],
    **flags: Any,
) -> None:
    """Keep the statistics of MODEL's dense pass in STATS, for many prunings.

    Give them to coec prune as --statistics STATS.
    """
    common.quieten()
    from coec.pipeline import collect as collecting

    settings = common.settings_of(flags)
    with showing_progress(flags["quiet"]) as advance:
        statistics = collecting.collect(
            model, out, restart=flags["restart"], progress=advance, **settings
        )
    record = {"folder": str(statistics.folder), **statistics.record()}
    common.show(record, _lines(statistics, model), flags["json"])


def _lines(statistics: "Statistics", model: str) -> Iterator[str]:
    from coec.calibration.windows import text_notes

    calibration = statistics.calibration
    size = sum(path.stat().st_size for path in statistics.folder.iterdir())
    yield f"wrote {statistics.folder} ({size / 1e9:.2f} GB)"
    windows = calibration["windows"]
    yield (
        f"{windows} window{'s' * (windows != 1)} of {calibration['seq_len']} tokens from "
        f"{calibration['source']}"
    )
    yield from text_notes(calibration)
    yield f"use it: coec prune {model} OUT --statistics {statistics.folder}"
