"""`coec report`."""

import json
from pathlib import Path
from typing import Annotated

from coec.cli.common import Json, argument, results, setting
from coec.cli.signals import interruptible


def report_command(
    out: Annotated[Path, argument("Folder that a sweep wrote to.", "OUT")],
    *,
    compare: Annotated[
        str | None, setting("paper: set the numbers that the paper prints beside ours.", "NAME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the tables and figures of a sweep: report.md, report.tex and report.html in OUT.

    Figures are in OUT/figures too, as PDF and SVG.
    """
    from coec.experiments.reporting.report import write_report

    interruptible()
    written = write_report(out, compare=compare)
    paths = {path.suffix[1:]: str(path) for path in written.files}
    if as_json:
        figures = [str(path) for path in written.figures]
        print(json.dumps({"files": paths, "figures": figures, **written.document.as_dict()}))
        return
    for name, value in written.document.facts.items():
        results.print(f"{name:<20} {value}")
    for note in written.document.notes:
        results.print(note)
    for path in (*paths.values(), *dict.fromkeys(path.parent for path in written.figures)):
        results.print(f"{'written':<20} {path}")
