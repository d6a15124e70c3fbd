"""Hold the words of a package: how docstrings begin, and one word for one thing.

python tools/words.py PACKAGE [DOCUMENT ...]

A docstring begins with a verb or a noun phrase that says what comes out, not with "Of", "What" or
"Whether". Names, comments, docstrings and other strings of the package, and the documents, use the
words of the glossary. Prints every place that breaks a rule; fails where there is one.
"""

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FRAGMENT = re.compile(
    r"(All|And|Another|As|At|Behind|Both|By|Bytes|Every|Everything|For|From|How|In|Its|Not|Nothing|Of|"
    r"On|One|So|Some|That|The same|Their|Those|Two|What|Where|Whether|Which|Who|With)\b"
)
GLOSSARY = {
    r"repair": "compensation, or compensate",
    r"held[-_\s]*out|hold_out": "validation windows, or validation error",
    r"(?<![a-z])(un)?judg(e|es|ed|ing)(?![a-z])": "validation windows, or validate",
    r"half[-_\s]block|\bhal(f|ves)\s+of\s+(a|the)\s+(block|layer|site)\b": "sublayer",
    r"neuron": "channel",
    r"prun(e|ing)[-_\s]ratio": "sparsity",
}
"""Words that are not used, and those of the glossary that are."""
INTERFACE = re.compile(
    r"^held[-_ ]out$|^judging$|^error_held_out$|^Error held out$"  # in files, heads of tables
    r"|`held[-_]out`|kv[-_]groups( = |[ =])held-out|held_out=",  # in text
)
"""Words of files, settings and arguments that keep their names."""
ARGUMENTS = {("report.py", "held_out")}
"""Arguments of public functions that keep their names, by file."""


def main() -> None:
    """Print what breaks the rules; exit 1 where anything does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("package", type=Path)
    parser.add_argument("documents", type=Path, nargs="*")
    chosen = parser.parse_args()
    found: list[str] = []
    for path in sorted(chosen.package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [
            f"{path}:{line}: begin with a verb or a noun: {first}"
            for line, first in first_lines(tree)
            if FRAGMENT.match(first)
        ]
        for line, text in [*strings_and_names(tree, path.name), *comments(path)]:
            found += wrong_words(path, line, text)
    for path in chosen.documents:
        found += wrong_words(path, 1, path.read_text(encoding="utf-8"))
    print("\n".join(found) if found else "words are those of the glossary")
    sys.exit(bool(found))


def first_lines(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line number and first line of the docstring of every class and function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = (ast.get_docstring(node) or "").strip()
            if text:
                yield node.lineno, text.splitlines()[0]


def strings_and_names(tree: ast.Module, file: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of every string, and name of all that is defined or assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.arg) and (file, node.arg) not in ARGUMENTS:
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and text of every comment."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def wrong_words(path: Path, line: int, text: str) -> Iterator[str]:
    """Yield a message for every word in a text, which begins at a line, that the glossary bans."""
    # What keeps its name is blanked, so that lines and the words around it stay where they are.
    text = INTERFACE.sub(lambda kept: " " * len(kept[0]), text)
    for pattern, word in GLOSSARY.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            at = line + text.count("\n", 0, match.start())
            yield f"{path}:{at}: {match[0].strip()!r}: say {word}"


if __name__ == "__main__":
    main()
