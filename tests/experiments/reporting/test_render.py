"""Markdown and LaTeX: structure and escapes."""

import re

import sweep_rows as sr
from coec.experiments.reporting.document import Document, Section, document
from coec.experiments.reporting.plots import Figure
from coec.experiments.reporting.render import latex, markdown
from coec.experiments.reporting.results import read_results
from coec.experiments.reporting.tables import Cell, Table

NASTY = "100% of a_b & c#1 {x} $5 ~ ^ \\ <y> |z| − ± × α λ"
TABLE = Table(
    f"Title {NASTY}",
    ("Name", "a|b"),
    ((Cell(NASTY), Cell("1.00", 1.0, bold=True)), (Cell("n"), Cell("failed", mark="a"))),
    notes=("a: reason with_underscore",),
    settings="Perplexity: a_b.txt.",
)
DOCUMENT = Document(
    "Report", (("Cells", "1 & 2"),), ("A note.",),
    (Section("S & T", "s", (TABLE,), (Figure("F", (), ("3 of 4 fall.",)),), ("Text.",)),),
)  # fmt: skip


def test_markdown_tables_are_tables():
    text = markdown(DOCUMENT)
    assert "| Name | a\\|b |\n| --- | ---: |\n" in text
    assert "| **1.00** |" in text
    assert "| n | failed (a) |" in text
    assert "100% of a\\_b & c#1" in text
    assert "\\<y\\> \\|z\\|" in text
    assert "### F\n\n3 of 4 fall. The figure is in [report.html](report.html)." in text
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
    bare = re.sub(r"(?m)^%.*$", "", re.sub(r"\\[\\{}%&#_$]", "", text))
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
    assert r"failed\textsuperscript{a}" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1


def test_every_row_of_a_whole_report_has_its_columns(tmp_path):
    made = document(read_results(sr.write(tmp_path, sr.sweep())), compare="paper")
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
