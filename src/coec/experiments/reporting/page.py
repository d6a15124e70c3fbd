"""A document as one HTML file that asks nobody for anything."""

import re
from collections.abc import Iterable
from pathlib import Path
from string import ascii_uppercase

from coec.errors import OptionError
from coec.experiments.reporting.document import Document, Section
from coec.experiments.reporting.plots import check_matplotlib, svg, swatch
from coec.experiments.reporting.tables import Cell

ASSETS = Path(__file__).parent / "assets"
OWN = re.compile(r"[a-z][\w.-]*: ")
"""How a sentence begins that is about one table: with a footnote's letter or a method's name."""


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
        swatch=swatch,
        lettered=_lettered,
        Said=_Said,
        sort_key=_sort_key,
        style=(ASSETS / "report.css").read_text(encoding="utf-8"),
        script=(ASSETS / "report.js").read_text(encoding="utf-8"),
    )


class _Said:
    """What a section has said; a sentence that stands further up is not said again.

    Footnotes, and sentences about what they name first, belong to one table and are.
    """

    def __init__(self) -> None:
        self.sentences: set[str] = set()

    def news(self, sentences: Iterable[str]) -> list[str]:
        """Those of the sentences that are to be shown."""
        shown = [s for s in sentences if OWN.match(s) or s not in self.sentences]
        self.sentences.update(shown)
        return shown


def _sort_key(cell: Cell) -> str:
    return cell.text if cell.value is None else repr(cell.value)


def _lettered(section: Section) -> dict[str, str]:
    """What the numbers of a section were measured under: every text once, with a letter.

    Tables and figures name the letter; where there is only one text there is none to name.
    """
    texts = [f.settings for f in section.figures] + [t.settings for t in section.tables]
    given = [text for text in dict.fromkeys(texts) if text]
    return {text: ascii_uppercase[i] if len(given) > 1 else "" for i, text in enumerate(given)}
