"""Sections of a report as Markdown, LaTeX and one HTML page; pandas writes the tables."""

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from pandas import option_context

from coec.experiments.reporting.sections import Section

_ASSETS = Path(__file__).parent / "assets"
_SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    **{character: rf"\{character}" for character in "&%$#_{}"},
}  # fmt: skip


def markdown(summary: str, sections: Sequence[Section]) -> str:
    """Return the report as GitHub-flavoured Markdown."""
    blocks = ["# Report of a pruning sweep", summary]
    for section in sections:
        table = section.table.written(_md, "**{}**".format)
        blocks += [
            f"## {_md(section.title)}",
            *(f"![{name}](figures/{name}.svg)" for name in section.figures),
            table.to_markdown(index=False, disable_numparse=True),
        ]  # fmt: skip
    return "\n\n".join(block for block in blocks if block) + "\n"


def latex(summary: str, sections: Sequence[Section]) -> str:
    """Return the report as a LaTeX document."""
    blocks = [summary]
    for section in sections:
        table = section.table.written(_tex, r"\textbf{{{}}}".format)
        size = r"width=\linewidth,height=0.8\textheight,keepaspectratio"
        blocks += [
            rf"\section*{{{_tex(section.title)}}}",
            *(rf"\includegraphics[{size}]{{figures/{name}.pdf}}" for name in section.figures),
            rf"\fitted{{{table.to_latex(index=False, escape=False).strip()}}}",
        ]  # fmt: skip
    page = (_ASSETS / "page.tex").read_text(encoding="utf-8")
    return page.replace("@BODY@", "\n\n".join(block for block in blocks if block))


def html(summary: str, sections: Sequence[Section]) -> str:
    """Return the report as a page that makes no request: style and figures are inside.

    Text from the results is escaped; the content policy of the page forbids scripts and requests.
    """
    scrolled = '<div tabindex="0">{}</div>'.format
    blocks = [f"<p>{summary}</p>"]
    for section in sections:
        blocks.append(f"<h2>{escape(section.title)}</h2>")
        for name, files in section.figures.items():
            data = b64encode(files["svg"]).decode()
            blocks.append(scrolled(f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">'))
        table = section.table.written(escape, "<b>{}</b>".format)
        with option_context("display.max_colwidth", None):  # pandas would cut long texts
            blocks.append(scrolled(table.to_html(index=False, escape=False, border=0)))
    page = (_ASSETS / "page.html").read_text(encoding="utf-8")
    return page.replace("@BODY@", "\n".join(blocks))


def _md(text: str) -> str:
    """Escape the characters that mean something to Markdown."""
    text = re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"^([-+#]|\d+\.)(?=\s)", r"\\\1", text)


def _tex(text: str) -> str:
    """Escape the characters that mean something to LaTeX."""
    return "".join(_SPECIAL.get(character, character) for character in " ".join(text.split()))
