"""Errors name arguments as Python does, and the command line spells them as flags."""

import ast
import re
from pathlib import Path

import pytest

import coec
import coec.cli.prune  # declares flags
import coec.cli.recover  # likewise
from coec.cli.flags import spelled

SOURCES = Path(coec.__file__).parent
ELSEWHERE = {"--model-impl"}
"""Flags of other programs."""


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("is not empty; pass force=True", "is not empty; pass --force"),
        ("seq_len=65 is beyond the model's 64", "--seq-len 65 is beyond the model's 64"),
        ("at most samples=3, or seq_len=7.", "at most --samples 3, or --seq-len 7."),
        ('write with dtype="float32"', "write with --dtype float32"),
        ("text=/a/b.txt (text_column=NAME)", "--text /a/b.txt (--text-column NAME)"),
        ("no model at 'dir/force=True'", "no model at 'dir/force=True'"),
        ("heads need width=0 and head_dim=4", "heads need width=0 and head_dim=4"),
        ("alpha must be in [0, 1], got 2", "--alpha must be in [0, 1], got 2"),
    ],
)  # fmt: skip
def test_an_argument_becomes_a_flag(said, shown):
    assert spelled(said) == shown


def literals(path: Path) -> list[str]:
    """Texts of a module but its docstrings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in docstrings
    ]


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES.rglob("*.py") if not {"cli"} & set(path.parts)],
    ids=lambda path: str(path.relative_to(SOURCES)),
)
def test_nobody_in_python_is_told_to_pass_a_flag(path):
    for text in literals(path):
        found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - ELSEWHERE
        assert not found or "coec " in text, f"write it as an argument, name=value: {text!r}"
