"""A document as one HTML file that asks nobody for anything."""

from pathlib import Path

from coec.errors import OptionError
from coec.experiments.reporting.document import Document
from coec.experiments.reporting.plots import check_matplotlib, svg
from coec.experiments.reporting.tables import Cell

ASSETS = Path(__file__).parent / "assets"


def check_page() -> None:
    """Raises OptionError, which names what to install, where a library of the page is missing."""
    check_matplotlib()
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise OptionError("the report's page needs jinja2: pip install 'coec[report]'") from None


def html(document: Document) -> str:
    """The report as a page: style, script and figures inside, no request to anywhere.

    Everything from the results is escaped; the content policy of the page forbids requests.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    drawings = {
        (section.anchor, i, j): svg(panel, f"{section.anchor}-{i}-{j}")
        for section in document.sections
        for i, figure in enumerate(section.figures)
        for j, panel in enumerate(figure.panels)
    }
    return environment.get_template("report.html.j2").render(
        document=document,
        drawings=drawings,
        sort_key=_sort_key,
        style=(ASSETS / "report.css").read_text(encoding="utf-8"),
        script=(ASSETS / "report.js").read_text(encoding="utf-8"),
    )


def _sort_key(cell: Cell) -> str:
    return cell.text if cell.value is None else repr(cell.value)
