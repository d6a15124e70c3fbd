"""`coec report`."""

import json
from pathlib import Path
from typing import Annotated, Any

from coec.cli.common import JSON, CommandFlag, argument, results, with_flags
from coec.cli.signals import interruptible

_COMPARE = CommandFlag(
    "compare", str, "paper: set the numbers that the paper prints beside ours.", metavar="NAME"
)


@with_flags(_COMPARE, JSON)
def report_command(
    out: Annotated[Path, argument("Folder that a sweep wrote to.", "OUT")],
    **flags: Any,
) -> None:
    """Write the tables and figures of a sweep: report.md, report.tex and report.html in OUT.

    Figures are in OUT/figures too, as PDF and SVG.
    """
    from coec.experiments.reporting.report import write_report

    interruptible()
    written = write_report(out, compare=flags["compare"])
    paths = {path.suffix[1:]: str(path) for path in written.files}
    if flags["json"]:
        figures = [str(path) for path in written.figures]
        print(json.dumps({"files": paths, "figures": figures, **written.document.as_dict()}))
        return
    for name, value in written.document.facts.items():
        results.print(f"{name:<20} {value}")
    for note in written.document.notes:
        results.print(note)
    for path in (*paths.values(), *dict.fromkeys(path.parent for path in written.figures)):
        results.print(f"{'written':<20} {path}")
