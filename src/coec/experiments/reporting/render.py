"""A document as Markdown and as LaTeX. Figures are drawn in the HTML page only."""

import re

from coec.experiments.reporting.document import Document, Section
from coec.experiments.reporting.plots import Figure
from coec.experiments.reporting.tables import Cell, Table

PAGE = "report.html"

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "−": "$-$", "–": "--", "—": "---", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$",
    "α": r"$\alpha$", "δ": r"$\delta$", "λ": r"$\lambda$", "…": r"\dots{}", "≥": r"$\ge$",
    "≤": r"$\le$", "→": r"$\to$", "'": "'", "\u00a0": "~",
}  # fmt: skip

_PREAMBLE = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage[margin=2cm]{geometry}
\usepackage{booktabs,graphicx}
\newcommand{\fitted}[1]{\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{#1}}
\begin{document}
"""


def markdown(document: Document) -> str:
    """The report as GitHub-flavoured Markdown."""
    lines = [f"# {document.title}", ""]
    lines += [f"- **{name}:** {_md(value)}" for name, value in document.facts]
    lines += ["", *(f"> {_md(note)}\n" for note in document.notes)]
    for section in document.sections:
        lines += [f"## {_md(section.title)}", ""]
        lines += [f"{_md(sentence)}\n" for sentence in section.text]
        lines += [_markdown_table(table) for table in section.tables]
        lines += [_markdown_figure(figure) for figure in section.figures]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(table: Table) -> str:
    rule = ["---" if column < table.labels else "---:" for column in range(len(table.heads))]
    rows = [[_md(head) for head in table.heads], rule]
    rows += [[_markdown_cell(cell) for cell in row] for row in table.rows]
    body = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = "".join(f"\n- {_md(note)}" for note in table.notes)
    settings = f"\n*{_md(table.settings)}*\n" if table.settings else ""
    return f"### {_md(table.title)}\n\n{body}\n{notes}\n{settings}"


def _markdown_cell(cell: Cell) -> str:
    text = f"**{_md(cell.text)}**" if cell.bold else _md(cell.text)
    return f"{text} ({cell.mark})" if cell.mark else text


def _markdown_figure(figure: Figure) -> str:
    caption = " ".join(figure.caption)
    words = f"{_md(caption)} The figure is in [{PAGE}]({PAGE}).".strip()
    return f"### {_md(figure.title)}\n\n{words}\n"


def _md(text: str) -> str:
    """Text whose characters mean nothing to Markdown."""
    text = re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"^([-+#]|\d+\.)(?=\s)", r"\\\1", text)


def latex(document: Document) -> str:
    """The report as a LaTeX document; its tables need booktabs and graphicx."""
    facts = "".join(rf"\item[{_tex(name)}] {_tex(value)}" + "\n" for name, value in document.facts)
    notes = "".join(f"\n{_tex(note)}\n" for note in document.notes)
    sections = "\n".join(_latex_section(section) for section in document.sections)
    return (
        f"{_PREAMBLE}\n\\section*{{{_tex(document.title)}}}\n"
        f"\\begin{{description}}\n{facts}\\end{{description}}\n{notes}\n{sections}"
        "\\end{document}\n"
    )


def _latex_section(section: Section) -> str:
    text = "".join(f"{_tex(sentence)}\n" for sentence in section.text)
    tables = "\n".join(_latex_table(table) for table in section.tables)
    figures = "".join(
        f"\n% {figure.title}: drawn in {PAGE}\n{_tex(' '.join(figure.caption))}\n"
        for figure in section.figures
    )
    return f"\\section{{{_tex(section.title)}}}\n{text}\n{tables}{figures}\\clearpage\n"


def _latex_table(table: Table) -> str:
    columns = "l" * table.labels + "r" * (len(table.heads) - table.labels)
    head = " & ".join(_tex(head) for head in table.heads)
    rows = "\n".join(" & ".join(map(_latex_cell, row)) + r" \\" for row in table.rows)
    notes = "".join(f"\\par\\footnotesize {_tex(note)}\n" for note in table.notes)
    caption = _tex(" ".join(part for part in (f"{table.title}.", table.settings) if part))
    return (
        "\\begin{table}[htbp]\n\\centering\n\\small\n"
        f"\\fitted{{\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head} \\\\\n\\midrule\n"
        f"{rows}\n\\bottomrule\n\\end{{tabular}}}}\n{notes}"
        f"\\caption{{{caption}}}\n\\end{{table}}\n"
    )


def _latex_cell(cell: Cell) -> str:
    text = rf"\textbf{{{_tex(cell.text)}}}" if cell.bold else _tex(cell.text)
    return rf"{text}\textsuperscript{{{cell.mark}}}" if cell.mark else text


def _tex(text: str) -> str:
    """Text whose characters mean nothing to LaTeX."""
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
