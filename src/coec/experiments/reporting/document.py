"""The report as a value, and as Markdown, LaTeX and one HTML page (templates in `assets`)."""

import html as escapes
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pandas import option_context

from coec.experiments.declarations import Declaration
from coec.experiments.reporting import lists
from coec.experiments.reporting.figures import Figure, figure
from coec.experiments.reporting.frame import Results
from coec.experiments.reporting.published import with_published
from coec.experiments.reporting.tables import Table, pivot

_ASSETS = Path(__file__).parent / "assets"
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "−": "$-$", "–": "--", "—": "---", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$",
    "α": r"$\alpha$", "δ": r"$\delta$", "λ": r"$\lambda$", "…": r"\dots{}", "≥": r"$\ge$",
    "≤": r"$\le$", "→": r"$\to$", "\u00a0": "~",
}  # fmt: skip


@dataclass(frozen=True)
class ReportSection:
    """Heading with sentences, tables, and figures by the name of their file."""

    title: str
    tables: Sequence[Table] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    text: Sequence[str] = ()


@dataclass(frozen=True)
class Document:
    """Content of a report, in order; the same for every format."""

    facts: Mapping[str, str]
    notes: tuple[str, ...]
    sections: Sequence[ReportSection]

    def as_dict(self) -> dict[str, object]:
        """Return facts and tables, ready for JSON."""
        return {
            "facts": dict(self.facts),
            "notes": list(self.notes),
            "sections": {s.title: [table.as_dict() for table in s.tables] for s in self.sections},
        }


def document(results: Results, *, compare: str | None = None) -> Document:
    """Make the report on a sweep; with `compare`, published numbers of that name stand beside ours.

    Raises:
        OptionError: no numbers have that name.
    """
    if compare is not None:
        results = with_published(results, compare)
    sections = [ReportSection("Best results", lists.best(results))]
    names: set[str] = set()
    for grid in dict.fromkeys(grid for row in results.rows for grid in row.grids):
        sections += _grid(grid, results, names)
    sections += [
        ReportSection("Zero-shot accuracy by task", lists.tasks(results)),
        ReportSection("Cost", lists.cost(results)),
        ReportSection("Record", lists.record(results)),
    ]
    kept = [section for section in sections if section.tables or section.figures]
    return Document(lists.facts(results), results.notes, kept)


def _grid(grid: str, results: Results, names: set[str]) -> list[ReportSection]:
    """Draw what a grid declares; a list of its cells, where that is nothing.

    Args:
        names: of files of figures; those of new ones are added.
    """
    cells = results.of_grid(grid)
    if cells.empty:
        return []
    conditions = lists.protocol([row for row in results.rows if grid in row.grids])
    sections = []
    for title, group in groupby(results.declared.items(grid), key=lambda item: item.section):
        tables: list[Table] = []
        figures: dict[str, Figure] = {}
        text: dict[str, None] = {}
        for item in group:
            new_tables = pivot(item, cells, results) if item.table else []
            new_figures = figure(item, cells, results) if item.figure else []
            tables += new_tables
            figures |= {_file_name(grid, item, names): drawn for drawn in new_figures}
            text |= {item.text: None} if item.text and (new_tables or new_figures) else {}
        if tables or figures:
            sections.append(ReportSection(title, tables, figures, [*text, conditions]))
    return sections or [
        ReportSection(f"Grid {grid}", lists.varied(grid, results), text=[conditions])
    ]


def _file_name(grid: str, item: Declaration, names: set[str]) -> str:
    words = re.findall(r"[a-z0-9]+", f"{grid} {item.section} {item.figure}".lower())
    name = "-".join(words)[:80]
    if name in names:
        name += f"-{len(names)}"
    names.add(name)
    return name


def markdown(document: Document) -> str:
    """Return the report as GitHub-flavoured Markdown."""

    def table(table: Table) -> str:
        aligned = ["left" if text else "right" for text in table.is_text]
        texts = table.texts(_md, "**{}**".format)
        return texts.to_markdown(index=False, disable_numparse=True, colalign=aligned)

    return _rendered("report.md.j2", document, _md, table)


def latex(document: Document) -> str:
    """Return the report as a LaTeX document."""

    def table(table: Table) -> str:
        columns = "".join("l" if text else "r" for text in table.is_text)
        texts = table.texts(_tex, r"\textbf{{{}}}".format)
        return texts.to_latex(index=False, escape=False, column_format=columns)

    return _rendered("report.tex.j2", document, _tex, table)


def html(document: Document, drawings: Mapping[str, bytes]) -> str:
    """Return the report as a page that makes no request: style and drawings are inside.

    Text from the results is escaped; the content policy of the page forbids scripts and requests.
    """

    def table(table: Table) -> Markup:
        texts = table.texts(escapes.escape, "<b>{}</b>".format)
        with option_context("display.max_colwidth", None):
            return Markup(texts.to_html(index=False, escape=False, border=0))

    pictures = {name: b64encode(data).decode() for name, data in drawings.items()}
    return _rendered("report.html.j2", document, str, table, pictures=pictures)


def _rendered(
    name: str,
    document: Document,
    escape: Callable[[str], str],
    table: Callable[[Table], str],
    **more: object,
) -> str:
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, autoescape="html" in name, block_start_string="<%",
        block_end_string="%>", variable_start_string="<<", variable_end_string=">>",
        comment_start_string="<#", comment_end_string="#>",
    )  # fmt: skip
    environment.filters |= {"text": escape, "table": table}
    return environment.get_template(name).render(document=document, **more)


def _md(text: str) -> str:
    """Escape the characters that mean something to Markdown."""
    text = re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"^([-+#]|\d+\.)(?=\s)", r"\\\1", text)


def _tex(text: str) -> str:
    """Escape the characters that mean something to LaTeX, or that it cannot print."""
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
