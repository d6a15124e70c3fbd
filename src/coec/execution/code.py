"""Digests of functions, by which a continued run knows that it still calls the same ones."""

import functools
import hashlib
import inspect
import os
import pickle
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor


def code_digest(function: Callable[..., Any]) -> str:
    """SHA-256 of a function's behaviour: its byte code, defaults, closure and bound object.

    A function that it calls by a global name enters by that name only. Where the behaviour cannot
    be told, as with an object that cannot be pickled, no two digests are equal: it is better not to
    continue a run than to continue it with another function.
    """
    content = hashlib.sha256()
    try:
        for data in _function(function):
            content.update(data)
    except Exception:  # pickling an object may raise anything
        content.update(os.urandom(32))
    return content.hexdigest()


def _function(function: Any) -> Iterator[bytes]:
    if isinstance(function, functools.partial):
        yield from _function(function.func)
        for value in (*function.args, *map(list, sorted(function.keywords.items()))):
            yield from _value(value)
    elif inspect.ismethod(function):
        yield from _function(function.__func__)
        yield from _value(function.__self__)
    elif inspect.isfunction(function):
        yield from _code(function.__code__)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for value in (*cells, *defaults):
            yield from _value(value)
    else:
        call = inspect.getattr_static(type(function), "__call__", None)
        if inspect.isfunction(call):
            yield from _function(call)
        yield pickle.dumps(function)


def _code(code: CodeType) -> Iterator[bytes]:
    """Byte code with its names and constants; neither file nor line numbers."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):  # its order differs between processes
            yield repr(sorted(map(repr, constant))).encode()
        else:
            yield repr(constant).encode()


def _value(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif callable(value) and not inspect.isclass(value):
        yield from _function(value)
    else:
        yield pickle.dumps(value)
