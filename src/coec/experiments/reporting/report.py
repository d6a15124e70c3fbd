"""From a sweep's folder to its report: CSV, Markdown, LaTeX and a page, with figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coec.errors import check_installed
from coec.experiments.files import write_whole

if TYPE_CHECKING:
    from pandas import DataFrame


_LEGEND = (
    "Bold marks the best of a model in a column, as printed. A spread is the largest minus the "
    "smallest over the seeds. Errors are means over the modules."
)


@dataclass(frozen=True)
class WrittenReport:
    """The frame with a line per cell, a sentence on it, and the paths of the report's files."""

    cells: "DataFrame"
    summary: str
    files: tuple[Path, ...]
    figures: tuple[Path, ...]


def write_report(folder: str | Path) -> WrittenReport:
    """Read `folder/results.jsonl`, and write report.csv, .md, .tex and .html beside it.

    Figures are in the page, and in `folder/figures` as PDF and SVG. Everything is made before the
    first file is written, and each file appears by one rename.

    Raises:
        ResultsError: the results cannot be read.
        OptionError: a library of the report is not installed.
        OutputError: the folder cannot be written.
    """
    libraries = "pandas", "tabulate", "matplotlib", "jinja2"  # pandas needs two of them
    check_installed("the report", "'coec[report]'", *libraries)
    from coec.experiments.reporting import formats
    from coec.experiments.reporting.frame import frame_of, read_rows
    from coec.experiments.reporting.sections import of_all_cells, of_grids

    # Rows → frame → sections → texts and figures, all made before a file is written
    folder = Path(folder)
    rows, torn = read_rows(folder)
    cells = frame_of(rows)
    sections = [*of_grids(cells), *of_all_cells(rows, cells)]
    failed = sum(row.status == "failed" for row in rows)
    summary = f"{len(rows) - failed} cells done, {failed} failed."
    if torn:
        summary += " The last line of results.jsonl was cut short and is left out."
    begin = f"{summary} {_LEGEND}"
    texts = {
        "report.csv": cells.map(_plain).to_csv(index=False),
        "report.md": formats.markdown(begin, sections),
        "report.tex": formats.latex(begin, sections),
        "report.html": formats.html(begin, sections),
    }
    figures = {
        f"figures/{name}.{suffix}": data
        for section in sections
        for name, files in section.figures.items()
        for suffix, data in files.items()
    }
    for name, data in (figures | {name: text.encode() for name, text in texts.items()}).items():
        write_whole(folder / name, data)
    paths, drawn = ([folder / name for name in names] for names in (texts, figures))
    return WrittenReport(cells, summary, tuple(paths), tuple(drawn))


def _plain(value: object) -> object:
    """Return a list, or the values of an object, as one text."""
    if isinstance(value, dict | list):
        return ", ".join(value.values() if isinstance(value, dict) else value)
    return value
