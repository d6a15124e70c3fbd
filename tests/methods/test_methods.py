"""What a method declares, and what happens to one that does otherwise."""

from dataclasses import dataclass

import pytest
import torch

import coec
import problems
from coec.config.recipe import Recipe
from coec.errors import OptionError
from coec.methods import COMPENSATIONS
from coec.types import SiteResult
from problems import case


def shifted(problem):
    """A slice, and a bias."""
    W = problem.weight
    return SiteResult(W[:, problem.kept.indices], bias=torch.ones(len(W), dtype=W.dtype))


def scaled(problem, *, factor: float = 0.5, often: int = 1):
    return SiteResult(factor**often * problem.weight[:, problem.kept.indices])


def test_a_bias_that_was_not_declared_is_refused(dense):
    match = r"'shifted' returns a bias .*: pass coec\.Method\(shifted, adds_bias=True\)"
    with pytest.raises(OptionError, match=match):
        coec.compensate(*case(), method=shifted)
    with pytest.raises(OptionError, match=match):
        coec.plan(dense, compensation=shifted)


def test_a_bias_that_was_declared_comes_out():
    method = coec.Method(shifted, adds_bias=True)
    assert torch.equal(coec.compensate(*case(), method=method).bias, torch.ones(6).double())


def test_the_value_projection_reaches_only_methods_that_need_it():
    seen = []

    def spy(problem):
        seen.append(problem.value)
        return SiteResult(bare(problem))

    value = problems.weight(7, 3)
    coec.compensate(*case(), method=spy, value_weight=value)
    coec.compensate(*case(), method=coec.Method(spy, needs={"value"}), value_weight=value)
    coec.compensate(*case(), method=coec.Method(spy, needs="value"))  # one may be a word
    assert seen[0] is None
    assert torch.equal(seen[1], value)
    assert seen[2] is None


def test_only_parts_that_a_problem_has_can_be_needed():
    with pytest.raises(OptionError, match="needs 'valeu', which no problem has; .* need value"):
        coec.Method(scaled, needs={"valeu"})


def test_keyword_arguments_of_a_function_are_its_options():
    W, gram, kept = case()
    found = coec.compensate(W, gram, kept, method=scaled, factor=0.25, often=2)
    assert torch.equal(found.weight, 0.0625 * W[:, kept])
    recipe = Recipe(compensation=scaled, factor=0.25)
    assert recipe.record()["options"] == {"factor": 0.25}
    assert recipe.record()["compensation"] == "scaled"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"factro": 1.0}, "'scaled' has no option 'factro'; did you mean 'factor'"),
        ({"factor": "half"}, "factor must be a valid number, got 'half'"),
        ({"often": 1.5}, "often must be a valid integer, got 1.5"),
    ],
)
def test_options_of_a_function_are_checked_by_their_annotations(options, match, dense):
    with pytest.raises(OptionError, match=match):
        coec.compensate(*case(), method=scaled, **options)
    with pytest.raises(OptionError, match=match):
        coec.plan(dense, compensation=scaled, **options)


def needy(problem, *, factor: float):
    return SiteResult(factor * bare(problem))


def test_an_option_without_a_default_must_be_given(dense):
    for attempt in (
        lambda: coec.compensate(*case(), method=needy),
        lambda: coec.plan(dense, compensation=needy),
    ):
        with pytest.raises(OptionError, match="factor must be given"):
            attempt()
    assert Recipe(compensation=needy, factor=2).record()["options"] == {"factor": 2}


@dataclass
class Halved:
    """Callable, and without a hash."""

    factor: float = 0.5

    def __call__(self, problem):
        return SiteResult(self.factor * bare(problem))


def test_any_callable_is_a_method():
    W, gram, kept = case()
    assert torch.equal(coec.compensate(W, gram, kept, method=Halved()).weight, 0.5 * W[:, kept])


def bare(problem):
    return problem.weight[:, problem.kept.indices]


def wide(problem):
    return SiteResult(problem.weight)


def narrow(problem):
    return SiteResult(bare(problem), bias=torch.ones(len(problem.weight)))


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (bare, "'bare' must return a coec.SiteResult, got Tensor"),
        (wide, r"'wide' must return a weight of shape \(6, 7\) in torch.float64, got \(6, 10\)"),
        (narrow, r"'narrow' must return a bias of shape \(6,\) in torch.float64, got .*float32"),
    ],
)
def test_what_a_method_returns_must_fit(method, match):
    with pytest.raises(OptionError, match=match):
        coec.compensate(*case(), method=coec.Method(method, adds_bias=True))


@pytest.mark.parametrize("name", COMPENSATIONS)
def test_a_method_goes_by_the_name_it_is_listed_under(name):
    method = COMPENSATIONS[name]
    assert method.name == name
    one, two = (Recipe(preset="paper", compensation=choice) for choice in (method, name))
    assert one.record() == two.record()
