"""A document as Markdown, LaTeX and one HTML page: templates in `assets`, tables by pandas."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from coec.experiments.reporting.document import Document
from coec.experiments.reporting.drawing import page_svg
from coec.experiments.reporting.values import Datum, Table

if TYPE_CHECKING:
    from jinja2 import Environment, Template

_ASSETS = Path(__file__).parent / "assets"
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "−": "$-$", "–": "--", "—": "---", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$",
    "α": r"$\alpha$", "δ": r"$\delta$", "λ": r"$\lambda$", "…": r"\dots{}", "≥": r"$\ge$",
    "≤": r"$\le$", "→": r"$\to$", "\u00a0": "~",
}  # fmt: skip


def markdown(document: Document, files: Mapping[tuple[str, str], str]) -> str:
    """Return the report as GitHub-flavoured Markdown.

    Args:
        files: path of a figure without suffix, by its section's anchor and its title.
    """
    return _text("report.md.j2").render(document=document, files=files)


def latex(document: Document, files: Mapping[tuple[str, str], str]) -> str:
    """Return the report as a LaTeX document; arguments as in `markdown`."""
    return _text("report.tex.j2").render(document=document, files=files)


def html(document: Document) -> str:
    """Return the report as a page: style, script and figures inside, no request to anywhere.

    Text from the results is escaped; the content policy of the page forbids requests.
    """
    drawings = {
        (section.anchor, i, j): page_svg(panel, f"{section.anchor}-{i}-{j}")
        for section in document.sections
        for i, figure in enumerate(section.figures)
        for j, panel in enumerate(figure.panels)
    }
    return _environment(autoescape=True).get_template("report.html.j2").render(
        document=document, drawings=drawings,
        style=(_ASSETS / "report.css").read_text(encoding="utf-8"),
        script=(_ASSETS / "report.js").read_text(encoding="utf-8"),
    )  # fmt: skip


def _environment(**options: object) -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_ASSETS), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    environment.filters |= {
        "md": _md, "tex": _tex, "md_table": _markdown_table, "tex_table": _latex_table,
    }  # fmt: skip
    return environment


def _text(name: str) -> "Template":
    environment = _environment(
        block_start_string="<%", block_end_string="%>", variable_start_string="<<",
        variable_end_string=">>", comment_start_string="<#", comment_end_string="#>",
    )  # fmt: skip
    return environment.get_template(name)


def _markdown_table(table: Table) -> str:
    def show(entry: Datum) -> str:
        text = f"**{_md(entry.text)}**" if entry.bold else _md(entry.text)
        return f"{text} ({entry.mark})" if entry.mark else text

    aligned = ["left" if i < table.labels else "right" for i in range(len(table.heads))]
    frame = table.frame(show, _md)
    return frame.to_markdown(index=False, disable_numparse=True, colalign=aligned)


def _latex_table(table: Table) -> str:
    def show(entry: Datum) -> str:
        text = rf"\textbf{{{_tex(entry.text)}}}" if entry.bold else _tex(entry.text)
        return rf"{text}\textsuperscript{{{entry.mark}}}" if entry.mark else text

    columns = "l" * table.labels + "r" * (len(table.heads) - table.labels)
    return table.frame(show, _tex).to_latex(index=False, escape=False, column_format=columns)


def _md(text: str) -> str:
    """Escape the characters that mean something to Markdown."""
    text = re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"^([-+#]|\d+\.)(?=\s)", r"\\\1", text)


def _tex(text: str) -> str:
    """Escape the characters that mean something to LaTeX, or that it cannot print."""
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
