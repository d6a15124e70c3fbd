"""From a sweep's folder to its report in three formats, with its figures."""

import re
from dataclasses import dataclass
from pathlib import Path

from coec.errors import OutputError
from coec.experiments.files import write_whole
from coec.experiments.reporting.document import Document, document
from coec.experiments.reporting.drawing import check_library, pictures
from coec.experiments.reporting.render import html, latex, markdown
from coec.experiments.reporting.results import read_results

FIGURES = "figures"


@dataclass(frozen=True)
class WrittenReport:
    """The report, and the paths of its files: Markdown, LaTeX, the page, and figures."""

    document: Document
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
    folder = Path(folder)
    results = read_results(folder)
    for library in ("pandas", "tabulate", "matplotlib", "jinja2"):
        check_library(library)
    content = document(results, compare=compare)
    names = _figure_names(content)
    texts = {
        folder / "report.md": markdown(content, names),
        folder / "report.tex": latex(content, names),
        folder / "report.html": html(content),
    }
    drawings = {
        folder / f"{names[section.anchor, figure.title]}.{suffix}": data
        for section in content.sections
        for figure in section.figures
        for suffix, data in pictures(figure).items()
    }
    if drawings:
        _make_folder(folder / FIGURES)
    for path, data in drawings.items():
        write_whole(path, data)
    for path, text in texts.items():
        write_whole(path, text.encode())
    return WrittenReport(content, tuple(texts), tuple(drawings))


def _figure_names(content: Document) -> dict[tuple[str, str], str]:
    """Return the path of every figure in the folder, without suffix."""
    names: dict[tuple[str, str], str] = {}
    for section in content.sections:
        for figure in section.figures:
            words = re.findall(r"[a-z0-9]+", f"{section.anchor} {figure.title}".lower())
            name = f"{FIGURES}/{'-'.join(words)[:80]}"
            repeated = name in names.values()
            names[section.anchor, figure.title] = f"{name}-{len(names)}" if repeated else name
    return names


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"cannot make {path} ({reason}): make the folder writable") from None
