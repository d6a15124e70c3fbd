"""Annotations are checked at run time in small tests, and not where that costs too much."""

import importlib
import sys

import jaxtyping
import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import typechecker
from coec.methods.objective import kept_columns
from coec.types import Convergence


def test_a_wrong_shape_is_found_here():
    with pytest.raises(TypeCheckError):
        kept_columns(torch.zeros(3), None)


def test_a_wrong_field_of_a_dataclass_is_found_here():
    with pytest.raises(TypeCheckError):
        Convergence(1, reason=3)


@pytest.mark.skipif(typechecker.EVERYWHERE, reason="COEC_TYPECHECK=1 checks all tests")
@pytest.mark.unchecked
def test_and_is_not_looked_for_in_a_marked_test():
    with pytest.raises(AttributeError):
        kept_columns(torch.zeros(3), None)


def square(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    return matrix


@pytest.mark.skipif(typechecker.EVERYWHERE, reason="COEC_TYPECHECK=1 checks all tests")
@pytest.mark.unchecked
def test_where_nothing_is_checked_nothing_is_decorated(monkeypatch):
    """Solvers make local functions by the thousand; decorating one takes a millisecond."""
    decorated = []
    monkeypatch.setattr(jaxtyping, "jaxtyped", lambda f, **how: decorated.append(f) or f)
    assert typechecker.checked(square)(torch.zeros(2, 3)).shape == (2, 3)
    assert decorated == []


def test_a_function_is_decorated_when_it_is_first_called():
    function = typechecker.checked(square)
    assert torch.equal(function(torch.eye(2)), torch.eye(2))
    with pytest.raises(TypeCheckError):
        function(torch.zeros(2, 3))


def test_what_the_package_imports_is_read_in_its_compiled_form():
    """Compiling transformers and torch's compiler anew takes every process seconds."""
    importlib.import_module("coec.models.dense")
    heavy = [
        module for name, module in list(sys.modules.items()) if name.startswith("transformers.")
    ]
    cached = [str(module.__spec__.cached) for module in heavy]
    assert cached
    assert not [path for path in cached if "opt-" in path]
