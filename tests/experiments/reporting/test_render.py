"""Markdown and LaTeX: structure and escapes."""

import re

from pandas import DataFrame

from coec.experiments.reporting.document import (
    Document,
    ReportSection,
    html,
    latex,
    markdown,
)
from coec.experiments.reporting.figures import Figure
from coec.experiments.reporting.tables import Table

NASTY = "100% of a_b & c#1 {x} $5 ~ ^ \\ <y> |z| − ± × α λ"
TABLE = Table(
    f"Title {NASTY}",
    DataFrame([[NASTY, 1.0], ["n", "failed"]], columns=["Name", "a|b"], dtype=object),
    {"a|b": 2},
    DataFrame([[False, True], [False, False]]),
    ("reason with_underscore",),
)
FIGURE = Figure("F", {}, "x", "y", True, False, ("3 of 4 fall.",))
DOCUMENT = Document(
    {"Cells": "1 & 2"}, ("A note.",), [ReportSection("S & T", [TABLE], {"f": FIGURE}, ["Text."])]
)


def test_markdown_tables_are_tables():
    text = markdown(DOCUMENT)
    table = [re.split(r" *(?<!\\)\| *", row)[1:-1] for row in text.splitlines() if row[:1] == "|"]
    assert table[0] == ["Name", "a\\|b"]
    assert re.fullmatch(r":-+,-+:", ",".join(table[1]))
    assert [row[1] for row in table[2:]] == ["**1.00**", "failed"]
    assert "100% of a\\_b & c#1" in text
    assert "\\<y\\> \\|z\\|" in text
    assert "### F\n\n![F](figures/f.svg)\n\n3 of 4 fall.\n" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 3


def balanced(text):
    """Braces and environments of LaTeX close in order; specials are escaped."""
    open_environments = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            open_environments.append(name)
        else:
            assert open_environments.pop() == name
    assert not open_environments
    bare = re.sub(r"\\[\\{}%&#_$]", "", text)
    depth = 0
    for character in bare:
        depth += (character == "{") - (character == "}")
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    assert "%" not in bare
    body = bare[bare.index("\\begin{document}") :]
    assert not re.search(r"[#_^~]", body.replace("\\textasciitilde", ""))


def test_latex_is_balanced_and_escaped():
    text = latex(DOCUMENT)
    balanced(text)
    assert r"100\% of a\_b \& c\#1 \{x\} \$5 \textasciitilde{} \textasciicircum{}" in text
    assert r"$-$ $\pm$ $\times$ $\alpha$ $\lambda$" in text
    assert r"\textbf{1.00} \\" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1


def test_every_row_of_a_whole_report_has_its_columns(whole_report):
    made = whole_report
    text = latex(made)
    balanced(text)
    assert text.isascii(), {c for c in text if not c.isascii()}
    for columns, body in re.findall(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end", text, re.DOTALL):
        for line in body.splitlines():
            if line.endswith(r"\\"):
                assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1
    lines = markdown(made).splitlines()
    assert sum(line.startswith("### ") for line in lines) == sum(
        len(s.tables) + len(s.figures) for s in made.sections
    )


def test_the_page_escapes_what_results_say():
    text = html(DOCUMENT, {"figures/f.svg": b"<svg/>"})
    assert "100% of a_b &amp; c#1 {x} $5 ~ ^ \\ &lt;y&gt; |z|" in text
    assert "<b>1.00</b>" in text
    assert "data:image/svg+xml;base64,PHN2Zy8+" in text
