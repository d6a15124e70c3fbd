"""Run-time checks of the annotations of `coec`, at no cost while they are switched off.

jaxtyping has an import hook too. It decorates a local function whenever one is made, a millisecond
each and thousands of times in a solve, whether calls are checked or not; and while it runs a module
it hides the compiled form of everything that the module imports, so that every process compiled
transformers anew. Here a function is decorated when it is first called with checks switched on, a
local function once for all the times that it is made.

What a check says depends on types, dtypes and shapes, and on values of whole numbers and words. A
call that is in all of that like one which passed is not checked again.
"""

import ast
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from types import FunctionType
from typing import Any, ClassVar

import jaxtyping
import torch
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
    checks: list[_Checks] = []

    @functools.wraps(target)
    def call(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return target(*arguments, **options)
        if not checks:
            checks.append(_Checks.of(target))
        return checks[0].call(target, arguments, options)

    return call


class _OpaqueError(Exception):
    """A value of which its type does not say what a check would look at."""


MANY = 64
"""Items of a container beyond which describing them takes longer than a check."""
_WHOLE = (int, bool, str, bytes, type(None), torch.dtype, torch.device)


def described(value: Any) -> Hashable:
    """All that a check of annotations can see of a value.

    Raises:
        _OpaqueError: it is an iterable of an unknown kind, or a long one.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.shape
    if kind in _WHOLE:
        return kind, value
    if isinstance(value, type):
        return value
    if kind in (tuple, list, dict) and len(value) <= MANY:
        items = value.items() if kind is dict else value
        return kind, tuple(described(item) for item in items)
    if hasattr(kind, "__iter__"):
        raise _OpaqueError
    return kind


class _Called(threading.local):
    """The functions that are checked at the moment, the innermost last."""

    def __init__(self) -> None:
        self.functions: list[Callable[..., Any]] = []

    def run(self, arguments: tuple, options: dict[str, Any]) -> Any:
        """Calls the innermost, from this module: a warning of `coec` would be an error."""
        __tracebackhide__ = True
        return self.functions.pop()(*arguments, **options)


class _Checks:
    """Checks of the calls of one function, which a local function shares with those made before."""

    known: ClassVar[dict[Hashable, "_Checks"]] = {}
    called = _Called()

    @classmethod
    def of(cls, target: FunctionType) -> "_Checks":
        key = target.__code__, id(target.__globals__), repr(target.__annotations__)
        return cls.known.setdefault(key, cls())

    def __init__(self) -> None:
        self.passed: set[Hashable] = set()
        """What was given in calls that passed, alone and with what was returned."""
        self.decorated: Callable[..., Any] | None = None

    def call(self, target: FunctionType, arguments: tuple, options: dict[str, Any]) -> Any:
        """What the function returns, checked unless a call like it was."""
        __tracebackhide__ = True
        try:
            given = described(arguments), described(options)
        except _OpaqueError:
            return self._checked(target, target, arguments, options)
        if known := given in self.passed:
            result = target(*arguments, **options)
        else:
            result = self._checked(target, target, arguments, options)
            self.passed.add(given)
        try:
            both = given, described(result)
        except _OpaqueError:
            both = None
        if known and both not in self.passed:
            self._checked(target, lambda *_, **__: result, arguments, options)
        if both is not None:
            self.passed.add(both)
        return result

    def _checked(
        self, target: FunctionType, run: Callable[..., Any], arguments: tuple, options: dict
    ) -> Any:
        """What `run` returns, arguments and result checked by the annotations of the target."""
        __tracebackhide__ = True
        if self.decorated is None:
            self.decorated = jaxtyping.jaxtyped(self._stand_in(target), typechecker=check)
        functions = self.called.functions
        depth = len(functions)
        functions.append(run)
        try:
            return self.decorated(*arguments, **options)
        finally:
            del functions[depth:]

    def _stand_in(self, target: FunctionType) -> FunctionType:
        """A function with the target's signature that calls the last of those being checked."""
        called = self.called

        def function(*arguments: Any, **options: Any) -> Any:
            __tracebackhide__ = True
            return called.run(arguments, options)

        made = FunctionType(
            function.__code__, target.__globals__, target.__name__, None, function.__closure__
        )
        for name in ("__qualname__", "__module__", "__annotations__"):
            setattr(made, name, getattr(target, name))
        made.__signature__ = inspect.signature(target)  # type: ignore[attr-defined]
        return made


_PLAIN = (ast.expr, ast.arguments, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return,
          ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)  # fmt: skip


class _Decorated(ast.NodeTransformer):
    """Puts `checked` on every function, before its other decorators, and on every class, after."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list.append(self._checked(node))
        return self.generic_visit(node)

    def visit(self, node: ast.AST) -> ast.AST:
        """Leaves what no function is defined in, which is most of a module, as it is."""
        return node if isinstance(node, _PLAIN) else super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list.insert(0, self._checked(node))
        return self.generic_visit(node)

    def _checked(self, node: ast.FunctionDef | ast.ClassDef) -> ast.expr:
        """The expression `__import__("typechecker").checked`."""
        name = ast.Name("__import__", ast.Load())
        module = ast.Call(name, [ast.Constant(__name__)], [])
        made = ast.Attribute(module, "checked", ast.Load())
        for part in ast.walk(made):
            ast.copy_location(part, node)
        return made


class _Loader(SourceFileLoader):
    def path_stats(self, path: str) -> dict[str, Any]:
        """Python's way of saying that there is no compiled form to read or to leave."""
        raise OSError(f"{path} is compiled with decorators of its own")

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        tree = _Decorated().visit(ast.parse(data, path))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
