"""Markdown and LaTeX: structure and escapes."""

import re

import sweep_rows as sr
from coec.experiments.reporting.document import Document, ReportSection, document
from coec.experiments.reporting.drawing import Figure
from coec.experiments.reporting.render import latex, markdown
from coec.experiments.reporting.results import read_results
from coec.experiments.reporting.values import Datum, Table

NASTY = "100% of a_b & c#1 {x} $5 ~ ^ \\ <y> |z| − ± × α λ"
TABLE = Table(
    f"Title {NASTY}",
    ("Name", "a|b"),
    (
        (Datum(NASTY), Datum("1.00", 1.0, bold=True)),
        (Datum("n"), Datum("failed", mark="a")),
    ),
    notes=("a: reason with_underscore",),
    settings="Perplexity: a_b.txt.",
)
DOCUMENT = Document(
    "Report", (("Cells", "1 & 2"),), ("A note.",),
    (ReportSection("S & T", "s", (TABLE,), (Figure("F", (), ("3 of 4 fall.",)),), ("Text.",)),),
)  # fmt: skip


FILES = {("s", "F"): "figures/f"}


def test_markdown_tables_are_tables():
    text = markdown(DOCUMENT, FILES)
    table = [re.split(r" *(?<!\\)\| *", row)[1:-1] for row in text.splitlines() if row[:1] == "|"]
    assert table[0] == ["Name", "a\\|b"]
    assert re.fullmatch(r":-+,-+:", ",".join(table[1]))
    assert [row[1] for row in table[2:]] == ["**1.00**", "failed (a)"]
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
    text = latex(DOCUMENT, FILES)
    balanced(text)
    assert r"100\% of a\_b \& c\#1 \{x\} \$5 \textasciitilde{} \textasciicircum{}" in text
    assert r"$-$ $\pm$ $\times$ $\alpha$ $\lambda$" in text
    assert r"\textbf{1.00} \\" in text
    assert r"failed\textsuperscript{a}" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1


def test_every_row_of_a_whole_report_has_its_columns(tmp_path):
    made = document(read_results(sr.write(tmp_path, sr.sweep())), compare="paper")
    files = {(s.anchor, f.title): "figures/f" for s in made.sections for f in s.figures}
    text = latex(made, files)
    balanced(text)
    assert text.isascii(), {c for c in text if not c.isascii()}
    for columns, body in re.findall(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end", text, re.DOTALL):
        for line in body.splitlines():
            if line.endswith(r"\\"):
                assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1
    lines = markdown(made, files).splitlines()
    assert sum(line.startswith("### ") for line in lines) == sum(
        len(s.tables) + len(s.figures) for s in made.sections
    )
