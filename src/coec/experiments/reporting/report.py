"""From a sweep's folder to its report: Markdown, LaTeX and a page, with its figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coec.errors import OptionError
from coec.experiments.files import write_whole

if TYPE_CHECKING:
    from coec.experiments.reporting.document import Document

FIGURES = "figures"


@dataclass(frozen=True)
class WrittenReport:
    """The report, and the paths of its files: Markdown, LaTeX, the page, and figures."""

    document: "Document"
    files: tuple[Path, ...]
    figures: tuple[Path, ...]


def write_report(folder: str | Path, *, compare: str | None = None) -> WrittenReport:
    """Read `folder/results.jsonl` and write report.md, report.tex and report.html beside it.

    Figures are in the page, and in `folder/figures` as PDF and SVG. Everything is rendered before
    the first file is written, and each file appears by one rename.

    Args:
        compare: published numbers of that name stand beside ours.

    Raises:
        ResultsError: the results cannot be read.
        OptionError: a library of the report is not installed, or no numbers have that name.
        OutputError: the folder cannot be written.
    """
    for library in ("pandas", "tabulate", "matplotlib", "jinja2"):
        try:
            __import__(library)
        except ImportError:
            message = f"the report needs {library}: pip install 'coec[report]'"
            raise OptionError(message) from None
    from coec.experiments.reporting.document import document, html, latex, markdown
    from coec.experiments.reporting.figures import draw
    from coec.experiments.reporting.frame import read_results

    folder = Path(folder)
    content = document(read_results(folder), compare=compare)
    drawings = {
        f"{FIGURES}/{name}.{suffix}": data
        for section in content.sections
        for name, figure in section.figures.items()
        for suffix, data in draw(figure).items()
    }
    texts = {
        "report.md": markdown(content), "report.tex": latex(content),
        "report.html": html(content, drawings),
    }  # fmt: skip
    for name, data in (drawings | {name: text.encode() for name, text in texts.items()}).items():
        write_whole(folder / name, data)
    files, figures = ([folder / name for name in names] for names in (texts, drawings))
    return WrittenReport(content, tuple(files), tuple(figures))
