"""`coec report`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from coec.cli.common import Json, results, setting
from coec.experiments.reporting.report import write_report


def report_command(
    out: Annotated[Path, typer.Argument(help="Folder that a sweep wrote to.")],
    *,
    compare: Annotated[
        Literal["paper"] | None, setting("Set the numbers that the paper prints beside ours.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the tables and figures of a sweep: report.md, report.tex and report.html in OUT."""
    written = write_report(out, compare=compare == "paper")
    paths = {path.suffix[1:]: str(path) for path in written.files}
    if as_json:
        print(json.dumps({"files": paths, **written.document.as_dict()}))
        return
    for name, value in written.document.facts:
        results.print(f"{name:<20} {value}", markup=False)
    for note in written.document.notes:
        results.print(note, markup=False)
    for path in paths.values():
        results.print(f"{'written':<20} {path}", markup=False)
