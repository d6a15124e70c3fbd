"""Run-time checks of the annotations of `coec`, at no cost while they are switched off.

jaxtyping has an import hook too. It decorates a local function whenever one is made, a millisecond
each and thousands of times in a solve, whether calls are checked or not; and while it runs a module
it hides the compiled form of everything that the module imports, so that every process compiled
transformers anew. Here a function is decorated when it is first called with checks switched on.
"""

import ast
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

PACKAGE = "coec"
EVERYWHERE = os.environ.get("COEC_TYPECHECK") == "1"
check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is as good as a float


def install() -> None:
    """Checks the modules of the package that are imported from now on."""
    sys.meta_path.insert(0, _Finder())


def switch(on: bool) -> None:
    """Switches checks on or off, from the next call on."""
    jaxtyping.config.update("jaxtyping_disable", not on)


def checked(target: Any) -> Any:
    """The function, or the class with the `__init__` that a dataclass has, with calls checked."""
    if isinstance(target, type):
        if is_dataclass(target) and "__init__" in vars(target):
            target.__init__ = checked(target.__init__)
        return target
    decorated: list[Callable[..., Any]] = []

    @functools.wraps(target)
    def call(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return target(*arguments, **options)
        if not decorated:
            decorated.append(jaxtyping.jaxtyped(target, typechecker=check))
        return decorated[0](*arguments, **options)

    return call


class _Decorated(ast.NodeTransformer):
    """Puts `checked` on every function, before its other decorators, and on every class, after."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list.append(self._checked(node))
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list.insert(0, self._checked(node))
        return self.generic_visit(node)

    def _checked(self, node: ast.FunctionDef | ast.ClassDef) -> ast.expr:
        (statement,) = ast.parse(f"__import__({__name__!r}).checked").body
        assert isinstance(statement, ast.Expr)
        for part in ast.walk(statement.value):
            ast.copy_location(part, node)
        return statement.value


class _Loader(SourceFileLoader):
    def path_stats(self, path: str) -> dict[str, Any]:
        """Python's way of saying that there is no compiled form to read or to leave."""
        raise OSError(f"{path} is compiled with decorators of its own")

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        tree = _Decorated().visit(ast.parse(data, path))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        # Settings are classes of pydantic, which checks them itself.
        if fullname.partition(".")[0] != PACKAGE or fullname.startswith(f"{PACKAGE}.config"):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
