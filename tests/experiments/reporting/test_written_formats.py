"""Markdown, LaTeX and the page: structure and escapes."""

import re

from pandas import DataFrame

import sweep_rows as sr
from coec.experiments.reporting.formats import html, latex, markdown
from coec.experiments.reporting.frame import Table
from coec.experiments.reporting.sections import Section

NASTY = "100% of a_b & c#1 {x} $5 ~ ^ \\ <y> |z|"
TABLE = Table(
    DataFrame([[NASTY, "1.00"], ["n", "failed"]], columns=["Name", "a|b"]),
    DataFrame([[False, True], [False, False]], columns=["Name", "a|b"]),
)
SECTIONS = [Section("S & T", TABLE, {"f": {"svg": b"<svg/>", "pdf": b"%PDF"}})]


def test_markdown_tables_are_tables():
    text = markdown("1 & 2", SECTIONS)
    table = [re.split(r" *(?<!\\)\| *", row)[1:-1] for row in text.splitlines() if row[:1] == "|"]
    assert table[0] == ["Name", "a\\|b"]
    assert [row[1] for row in table[2:]] == ["**1.00**", "failed"]
    assert "100% of a\\_b & c#1" in text
    assert "\\<y\\> \\|z\\|" in text
    assert "\n## S & T\n\n![f](figures/f.svg)\n\n| Name" in text


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
    body = bare[bare.index("\\begin{document}") :]
    assert not re.search(r"[#_^~$%]", body)


def test_latex_is_balanced_and_escaped():
    text = latex("1 done.", SECTIONS)
    balanced(text)
    assert r"100\% of a\_b \& c\#1 \{x\} \$5 \textasciitilde{} \textasciicircum{}" in text
    assert r"\textbf{1.00} \\" in text
    assert r"{figures/f.pdf}" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1


def test_every_row_of_a_whole_report_has_its_columns(tmp_path):
    sections = sr.sections(tmp_path, sr.sweep()).values()
    named = [Section(s.title, s.table) for s in sections]
    text = latex("Done.", named)
    balanced(text)
    tables = re.findall(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end", text, re.DOTALL)
    assert len(tables) == len(named)
    for columns, body in tables:
        for line in body.splitlines():
            if line.endswith(r"\\"):
                assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1


def test_the_page_escapes_what_results_say():
    text = html("1 done.", SECTIONS)
    assert "100% of a_b &amp; c#1 {x} $5 ~ ^ \\ &lt;y&gt; |z|" in text
    assert "<h2>S &amp; T</h2>" in text
    assert "<b>1.00</b>" in text
    assert "data:image/svg+xml;base64,PHN2Zy8+" in text
