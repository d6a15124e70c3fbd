"""From a sweep's folder to its report in three formats."""

from dataclasses import dataclass
from pathlib import Path

from coec.experiments.files import write_whole
from coec.experiments.reporting.document import Document, document
from coec.experiments.reporting.page import check_page, html
from coec.experiments.reporting.render import latex, markdown
from coec.experiments.reporting.results import read_results


@dataclass(frozen=True)
class Written:
    """The report, and where it is."""

    document: Document
    files: tuple[Path, ...]


def write_report(folder: str | Path, *, compare: str | None = None) -> Written:
    """Reads `folder/results.jsonl` and writes report.md, report.tex and report.html beside it.

    All formats are rendered before the first is written, and each appears by one rename.

    Args:
        compare: sets published numbers of that name beside ours.

    Raises:
        ResultsError: the results cannot be read.
        OptionError: a library that the page needs is not installed, or no numbers have that name.
        OutputError: the folder cannot be written.
    """
    folder = Path(folder)
    results = read_results(folder)
    check_page()
    made = document(results, compare=compare)
    texts = {
        folder / "report.md": markdown(made),
        folder / "report.tex": latex(made),
        folder / "report.html": html(made),
    }
    for path, text in texts.items():
        write_whole(path, text)
    return Written(made, tuple(texts))
