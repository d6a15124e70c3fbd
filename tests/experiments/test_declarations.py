"""What a grid declares of its report: read before any work, kept beside the rows, drawn."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import sweep_rows as sr
from coec.errors import OptionError, ResultsError
from coec.experiments import reporting
from coec.experiments.declarations import (
    DECLARATIONS,
    READY_GRIDS,
    Declaration,
    Declared,
    items,
    read_declarations,
    write_declarations,
)
from coec.experiments.grid import expand
from coec.experiments.reporting.document import document, markdown
from coec.experiments.reporting.frame import read_results
from coec.experiments.reporting.published import PUBLISHED

GRID = """
sparsity = [0.2, 0.3]
compensation = ["rcpu", "coec"]

[[report]]
section = "Mine"
table = "{model}: {metric}"
each = ["model"]
rows = ["compensation"]
columns = ["sparsity"]
values = ["perplexity"]
best = "column"
notes = ["A sentence."]
text = "Above."
"""


def written(folder, text, name="mine"):
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def declared(folder, text):
    """What the cells of a grid file carry."""
    return expand(written(folder, text), models=["m"])[0].declared


def of_mine(values):
    return [
        sr.row("m", sparsity, "rcpu", pruning, grids=["mine"], perplexity=sr.perplexity(value))
        for (sparsity, pruning), value in values.items()
    ]


ROWS = {(0.2, "rcpu"): 9.0, (0.2, "coec"): 8.0, (0.3, "rcpu"): 12.0, (0.3, "coec"): 13.0}


def test_a_grid_of_a_users_own_is_drawn_as_it_says(tmp_path):
    folder = sr.write(tmp_path / "out", of_mine(ROWS))
    write_declarations(folder, declared(tmp_path, GRID))
    made = document(read_results(folder))
    (section,) = [one for one in made.sections if one.title == "Mine"]
    (table,) = section.tables
    assert table.title == "m: Perplexity (lower is better)"
    assert sr.heads(table) == ["Compensation", "20 %", "30 %"]
    assert sr.texts(table) == [["rcpu", "9.00", "*12.00"], ["coec", "*8.00", "13.00"]]
    assert (table.notes, section.text[0]) == (("A sentence.",), "Above.")
    assert "Grid mine" not in [one.title for one in made.sections]


def test_a_mean_says_what_it_is_over(tmp_path):
    """The columns that have every row, whatever they stand for."""
    values = dict(list(ROWS.items())[:3])
    folder = sr.write(tmp_path / "out", of_mine({**values, (0.4, "rcpu"): 20.0}))
    write_declarations(folder, declared(tmp_path, GRID + 'extra = { Mean = "mean" }\n'))
    (section,) = [s for s in document(read_results(folder)).sections if s.title == "Mine"]
    assert section.tables[0].notes[1] == "Mean over the columns that have every row: 20 %."


def test_a_figure_of_a_users_own_is_drawn_as_it_says(tmp_path):
    figure = (
        '[[report]]\nsection = "Mine"\nfigure = "By sparsity"\nx = "sparsity"\neach = ["model"]'
    )
    folder = sr.write(tmp_path / "out", of_mine(ROWS))
    write_declarations(folder, declared(tmp_path, f"seed = 1\n{figure}"))
    (section,) = [s for s in document(read_results(folder)).sections if s.title == "Mine"]
    (figure,) = section.figures.values()
    (panel,) = figure.panels.values()
    lines = {label: list(line) for (_, label), line in panel.items()}
    assert lines == {"rcpu": [9.0, 12.0], "coec": [8.0, 13.0]}
    assert figure.x_label == "Compression ratio"
    made = markdown(document(read_results(folder)))
    assert "\n### By sparsity\n\n![By sparsity](figures/mine-mine-by-sparsity.svg)\n" in made


def test_what_where_chooses_among_still_tells_lines_apart(tmp_path):
    rows = [
        sr.row("m", 0.2, grids=["mine"], options={"solver": solver}, perplexity=sr.perplexity(9.0))
        for solver in ("joint", "gradient", "conjugate")
    ]
    folder = sr.write(tmp_path / "out", rows)
    text = GRID + 'where = { solver = ["joint", "gradient"] }\n'
    write_declarations(folder, declared(tmp_path, text))
    (section,) = [s for s in document(read_results(folder)).sections if s.title == "Mine"]
    assert sr.texts(section.tables[0]) == [
        ["coec", "joint", "*9.00"], ["coec", "gradient", "*9.00"],
    ]  # fmt: skip


def test_rows_of_a_grid_that_declares_nothing_are_listed(tmp_path):
    rows = [*of_mine(ROWS), sr.row(grids=["other"], perplexity=sr.perplexity(7.0))]
    folder = sr.write(tmp_path / "out", rows)
    write_declarations(folder, declared(tmp_path, GRID))
    sections = {one.title: one for one in document(read_results(folder)).sections}
    assert len(sections["Mine"].tables[0].frame) == 2
    assert sr.texts(sections["Grid other"].tables[0]) == [["wt2-llama", "7.00"]]


def test_rows_of_which_nothing_can_be_drawn_as_declared_are_listed(tmp_path):
    rows = of_mine(ROWS)
    folder = sr.write(tmp_path / "out", [row | {"perplexity": None} for row in rows])
    write_declarations(folder, declared(tmp_path, GRID))
    sections = {one.title: one for one in document(read_results(folder)).sections}
    assert len(sections["Grid mine"].tables[0].frame) == 4
    assert "Mine" not in sections


SEEDS = tomllib.loads(READY_GRIDS["seeds"].read_text(encoding="utf-8"))["report"]


def test_what_grids_declare_lies_beside_the_rows_and_grows(tmp_path):
    small, wide = (declared(tmp_path, GRID), expand("seeds", models=["m"])[0].declared)
    assert read_declarations(tmp_path).grids == {}
    write_declarations(tmp_path, small)
    write_declarations(tmp_path, wide)
    found = read_declarations(tmp_path)
    assert found.grids == {"mine": small.grids["mine"], "seeds": SEEDS}
    assert sorted(path.name for path in tmp_path.iterdir()) == [DECLARATIONS, "mine.toml"]


def test_included_grids_bring_their_declarations(tmp_path):
    found = declared(tmp_path, 'grids = ["main", "seeds"]\n' + GRID)
    assert list(found.grids) == ["main", "seeds", "mine"]


@pytest.mark.parametrize("text", ["{", "[]", '{"grids": {"a": [{}]}}', '{"grids": {"a": 3}}'])
def test_a_file_of_declarations_that_is_none_is_an_error_of_one_line(text, tmp_path):
    folder = sr.write(tmp_path, of_mine(ROWS))
    (folder / DECLARATIONS).write_text(text)
    with pytest.raises(
        ResultsError, match="does not say what the grids declare .*: remove it"
    ) as e:
        read_results(folder)
    assert "\n" not in str(e.value)


TABLE = 'section = "S"\ntable = "T"\nrows = ["model"]\ncolumns = ["seed"]\n'
WRONG = [
    ("report = 3", "report must be a list of tables: write [[report]]"),
    ("[report]\nsection = 'S'", "report must be a list of tables: write [[report]]"),
    ("report = [3]", "Declaration must be a valid dictionary or instance of Declaration, got 3"),
    ("[[report]]\ntable = 'T'", "section is missing, got ['table']"),
    (f"[[report]]\n{TABLE}colums = []", "unknown key 'colums'; did you mean 'columns'?"),
    (f"[[report]]\n{TABLE}each = 'model'", "each must be a valid list, got 'model'"),
    (f"[[report]]\n{TABLE}each = ['modle']", "each[0] must be a setting, model, label, site"),
    (f"[[report]]\n{TABLE}each = ['modle']", "did you mean 'model'?"),
    (f"[[report]]\n{TABLE}each = ['seed']", "must name an axis once"),
    (f"[[report]]\n{TABLE}best = 'all'", "must have best = 'row', 'column' or one of ['model']"),
    (f"[[report]]\n{TABLE}figure = 'F'", "must have one title: table or figure"),
    (f"[[report]]\n{TABLE}values = ['speed']", "values[0] must be one of perplexity, zero_shot"),
    (f"[[report]]\n{TABLE}values = []", "must have values"),
    (f"[[report]]\n{TABLE}where = {{ alfa = [1] }}", "did you mean 'alpha'?"),
    (f"[[report]]\n{TABLE}where = {{ alpha = 1 }}", "where.alpha must be a valid list, got 1"),
    (f"[[report]]\n{TABLE}extra = {{ M = 'men' }}", "extra.M must be 'mean', 'median'"),
    ("[[report]]\nsection = 'S'\nrows = ['model']\ncolumns = ['seed']\ntable = '{x}'",
     "must have {metric} in the braces of '{x}'"),
    ("[[report]]\nsection = 'S'\nrows = ['model']\ncolumns = ['seed']\ntable = '{'",
     "in the braces of '{'"),
    ("[[report]]\nsection = 'S'\ntable = 'T'", "must have rows and columns"),
    ("[[report]]\nsection = 'S'\nfigure = 'F'", "must have x, the setting along it"),
    ("[[report]]\nsection = 'S'\nfigure = 'F'\nx = 'alpa'", "did you mean 'alpha'?"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_an_error_in_a_declaration_is_one_line_before_any_work(text, message, tmp_path):
    with pytest.raises(OptionError) as caught:
        expand(written(tmp_path, text), models=["m"])
    said = str(caught.value)
    assert "mine" in said
    assert message in said
    assert "\n" not in said
    assert text.startswith(("report", "[report]")) or "[[report]] 1" in said


def test_every_ready_declaration_is_one():
    assert all(Declared().items(name) for name in READY_GRIDS)


def test_the_documented_declarations_are_some_and_every_key_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "EXPERIMENTS.md").read_text(encoding="utf-8")
    section = text.partition("### What a grid declares\n")[2].partition("\n### ")[0]
    example = section.partition("```toml\n")[2].partition("```")[0]
    table, figure = items(tomllib.loads(example)["report"], "the document")
    assert (bool(table.table), figure.x) == (True, "alpha")
    unsaid = set(Declaration.model_fields) - set(re.findall(r"[a-z_]+", section))
    assert unsaid == set()


def test_no_code_of_the_report_knows_a_grid_or_a_paper():
    """Names of grids that mean nothing else, as whole strings; `paper` in any string."""
    names = set(READY_GRIDS) - {"alpha", "delta", "rounds", "seeds"}
    for path in Path(reporting.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, f"{path.name}: {node.value}"
                assert not any(p in node.value.lower() for p in PUBLISHED), (
                    f"{path.name}: {node.value}"
                )


def test_declarations_survive_json(tmp_path):
    for name in READY_GRIDS:
        write_declarations(tmp_path, expand(name, models=["m"])[0].declared)
    declared = read_declarations(tmp_path)
    assert {*declared.grids} == {*READY_GRIDS}
    for name in READY_GRIDS:
        assert declared.items(name) == Declared().items(name)
