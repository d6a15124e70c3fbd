"""Annotations are checked at run time in small tests, and not where that costs too much."""

import importlib
import sys
from typing import Literal

import jaxtyping
import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import typechecker
from coec.compensation.objective import kept_columns
from coec.types import Convergence


def test_a_wrong_shape_is_found_here():
    with pytest.raises(TypeCheckError):
        kept_columns(torch.zeros(3), None)


def test_a_wrong_field_of_a_dataclass_is_found_here():
    with pytest.raises(TypeCheckError):
        Convergence(True, 1, reason=3)


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


def test_a_call_like_one_that_passed_is_not_checked_again_and_any_other_is(monkeypatch):
    checks = []
    once = typechecker._Checks._checked
    monkeypatch.setattr(
        typechecker._Checks, "_checked", lambda *given: checks.append(given) or once(*given)
    )
    function = typechecker.checked(square)
    for _ in range(3):
        function(torch.eye(4))
    assert len(checks) == 1
    function(torch.eye(5))
    assert len(checks) == 2
    for wrong in (torch.zeros(4, 5), torch.zeros(4), torch.eye(4, dtype=torch.long), 4):
        with pytest.raises(TypeCheckError):
            function(wrong)


def test_a_result_of_another_shape_is_found_after_one_that_passed():
    results = [torch.eye(2), torch.zeros(2, 3)]

    def next_of(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
        return results.pop(0)

    function = typechecker.checked(next_of)
    function(torch.eye(2))
    with pytest.raises(TypeCheckError):
        function(torch.eye(2))


def test_a_local_function_is_decorated_once_and_is_itself(monkeypatch):
    decorated, decorate = [], jaxtyping.jaxtyped
    monkeypatch.setattr(
        jaxtyping, "jaxtyped", lambda f, **how: decorated.append(f) or decorate(f, **how)
    )

    def made(factor):
        def times(matrix: Float[Tensor, "d d"], *, more: float = 1.0) -> Float[Tensor, "d d"]:
            return matrix * factor * more

        return typechecker.checked(times)

    for factor in (2.0, 3.0):
        assert torch.equal(made(factor)(torch.eye(2), more=2.0), 2 * factor * torch.eye(2))
        with pytest.raises(TypeCheckError):
            made(factor)(torch.zeros(2, 3))
    assert len(decorated) == 1


def test_values_that_a_literal_names_are_told_apart():
    def named(name: Literal["left", "right"]) -> Literal["left", "right"]:
        return name

    function = typechecker.checked(named)
    assert function("left") == "left"
    with pytest.raises(TypeCheckError):
        function("middle")


def test_what_the_package_imports_is_read_in_its_compiled_form():
    """Compiling transformers and torch's compiler anew takes every process seconds."""
    importlib.import_module("coec.models.dense")
    heavy = [
        module for name, module in list(sys.modules.items()) if name.startswith("transformers.")
    ]
    cached = [str(module.__spec__.cached) for module in heavy]
    assert cached
    assert not [path for path in cached if "opt-" in path]
