"""Hold the words of a package: how docstrings begin, and which names stand for nothing.

python tools/words.py src/coec

A docstring begins with a verb or a noun phrase that says what comes out, not with "Of", "What" or
"Whether". A variable or parameter has the name of its content, not "found", "one" or "own". Prints
every place that breaks the first rule and the files with most names of the second kind; fails where
either share is above its limit.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FRAGMENT = re.compile(
    r"(All|And|Another|As|At|Behind|Both|By|Bytes|Every|Everything|For|From|How|In|Its|Not|Nothing|Of|"
    r"On|One|So|Some|That|The same|Their|Those|Two|What|Where|Whether|Which|Who|With)\b"
)
FILLERS = {
    "asked", "both", "done", "ended", "everything", "found", "given", "handed", "held",
    "here", "how", "kind", "kinds", "known", "least", "left", "made", "mine", "more", "most",
    "named", "now", "one", "other", "others", "own", "part", "parts", "rest", "said", "same",
    "seen", "shown", "taken", "theirs", "then", "there", "told", "wanted", "what", "where",
    "whole",
}  # fmt: skip
MOST_FRAGMENTS = 0.005
"""Share of the docstrings that may begin as a fragment."""
MOST_FILLERS = 0.01
"""Share of the bound names that may be fillers."""


def main() -> None:
    """Print what breaks the rules; exit 1 where there is too much of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("package", type=Path)
    package = parser.parse_args().package
    docstrings = fragments = names = 0
    fillers: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, first in first_lines(tree):
            docstrings += 1
            if FRAGMENT.match(first):
                fragments += 1
                print(f"{path}:{line}: begin with a verb or a noun: {first}")
        for name in bound_names(tree):
            names += 1
            fillers[str(path)] += name in FILLERS
    shares = fragments / max(docstrings, 1), sum(fillers.values()) / max(names, 1)
    print(f"docstrings that begin as a fragment {shares[0]:.1%}, filler names {shares[1]:.1%}")
    if shares[1] > MOST_FILLERS:
        for file, count in fillers.most_common(10):
            print(f"{file}: {count} filler names")
    sys.exit(shares[0] > MOST_FRAGMENTS or shares[1] > MOST_FILLERS)


def first_lines(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line number and first line of the docstring of every class and function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = (ast.get_docstring(node) or "").strip()
            if text:
                yield node.lineno, text.splitlines()[0]


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield the name of every parameter and of every variable that is assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


if __name__ == "__main__":
    main()
