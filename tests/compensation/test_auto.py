"""The compensation that tries the others on held-out windows."""

import json

import pytest
import torch

import coec
import problems
from coec.compensation import auto as module
from coec.compensation import relative_errors
from coec.compensation.auto import CANDIDATES
from coec.errors import NumericalError, OptionError
from coec.types import Gram, KeptSet, SiteProblem, SiteResult
from tolerances import EXACT

D, M, K = 10, 7, 7
pytestmark = pytest.mark.unchecked  # whole solves


def grams(tokens=(400, 400), noise=0.0):
    """Two samples of one distribution, with a noise of its own in each."""
    X = problems.inputs("power law", D, tokens=sum(tokens))
    X = X + noise * torch.randn(X.shape, generator=torch.Generator().manual_seed(1)).double()
    parts = X.split(tokens, dim=1)
    return [Gram(x @ x.T, x.sum(dim=1), x.shape[1]) for x in parts]


def case(seed=0, **how):
    return problems.weight(M, D, seed), *grams(**how), problems.kept(D, K, seed)


def own_options(name):
    """A candidate as `compensate` takes it."""
    method, _, option = name.partition(" ")
    key, _, value = option.partition("=")
    options = {key: value if key == "solver" else float(value)} if option else {}
    return {"method": method, **options}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [(400, 400), (12, 6)])
def test_the_lowest_held_out_error_is_chosen_and_fitted_on_all(seed, tokens):
    W, fit, held, kept = case(seed, tokens=tokens)
    errors = {}
    for name in CANDIDATES:
        result = coec.compensate(W, fit, kept, **own_options(name))
        errors[name] = relative_errors(W, held, KeptSet(kept, D), result)[1]
    best = min(errors, key=errors.get)
    found = coec.compensate(W, fit, kept, method="auto", held_out=held)
    assert found.diagnostics["chosen"] == best
    assert found.diagnostics["candidates"] == pytest.approx(errors, rel=1e-9)
    assert found.diagnostics["holdout_after"] == pytest.approx(errors[best], rel=1e-9)
    assert found.diagnostics["holdout_before"] == pytest.approx(errors["none"], rel=1e-9)
    again = coec.compensate(W, fit + held, kept, **own_options(best))
    torch.testing.assert_close(found.weight, again.weight, rtol=0, atol=EXACT)
    json.dumps(found.diagnostics, allow_nan=False)


def test_different_held_out_windows_lead_to_different_choices():
    """On the fitted windows themselves the freest fit wins; on windows that look like nothing that
    was fitted on, it does not."""
    W, fit, _, kept = case()
    X = problems.inputs("white", D, tokens=5, seed=9)
    odd = Gram(X @ X.T, X.sum(dim=1), 5)
    same = coec.compensate(W, fit, kept, method="auto", held_out=fit)
    other = coec.compensate(W, fit, kept, method="auto", held_out=odd)
    assert same.diagnostics["chosen"] == "ridge-to-slice ridge=0.001"
    assert other.diagnostics["chosen"] != same.diagnostics["chosen"]


def test_the_candidates_are_those_of_the_document():
    assert list(CANDIDATES) == [
        "none", "rcpu", "coec solver=gradient", "coec solver=conjugate", "coec solver=joint",
        "ridge-to-slice ridge=0.001", "ridge-to-slice ridge=0.01", "ridge-to-slice ridge=0.1",
        "ridge-to-slice ridge=1", "ridge-to-slice ridge=10",
    ]  # fmt: skip


def test_the_value_projection_reaches_coec():
    W, fit, held, kept = case()
    value = problems.weight(K, 4)
    plain = coec.compensate(W, fit, kept, method="auto", held_out=held)
    aligned = coec.compensate(W, fit, kept, method="auto", held_out=held, value_weight=value)
    one, two = plain.diagnostics["candidates"], aligned.diagnostics["candidates"]
    assert {name for name in one if one[name] != two[name]} == {n for n in one if "coec" in n}


def test_the_target_is_what_is_aimed_at():
    W, fit, held, kept = case()
    target = W + problems.weight(M, D, 5)
    found = coec.compensate(W, fit, kept, method="auto", held_out=held, target=target)
    sliced = SiteResult(W[:, kept])
    expected = relative_errors(W, held, KeptSet(kept, D), sliced, target=target)[1]
    assert found.diagnostics["candidates"]["none"] == pytest.approx(expected, rel=1e-9)


def failing(problem):
    raise NumericalError("no answer")


def test_a_candidate_that_fails_is_left_out_and_said(monkeypatch):
    W, fit, held, kept = case()
    monkeypatch.setitem(module.CANDIDATES, "rcpu", failing)
    found = coec.compensate(W, fit, kept, method="auto", held_out=held)
    assert "rcpu" not in found.diagnostics["candidates"]
    assert "rcpu left out: no answer" in found.diagnostics["events"]


def test_where_the_second_fit_fails_the_next_best_is_taken(monkeypatch):
    W, fit, held, kept = case()
    first = coec.compensate(W, fit, kept, method="auto", held_out=held).diagnostics
    best, original = first["chosen"], CANDIDATES[first["chosen"]]

    def second_fails(problem):
        return failing(problem) if problem.held_out is None else original(problem)

    monkeypatch.setitem(module.CANDIDATES, best, second_fails)
    found = coec.compensate(W, fit, kept, method="auto", held_out=held).diagnostics
    assert found["chosen"] == sorted(first["candidates"], key=first["candidates"].get)[1]
    assert f"{best} left out, on all windows: no answer" in found["events"]


def test_where_every_candidate_fails_there_is_no_answer(monkeypatch):
    W, fit, held, kept = case()
    for name in CANDIDATES:
        monkeypatch.setitem(module.CANDIDATES, name, failing)
    with pytest.raises(NumericalError, match="every candidate of 'auto' failed"):
        coec.compensate(W, fit, kept, method="auto", held_out=held)


def test_what_happened_in_a_candidate_that_was_not_chosen_is_not_said(monkeypatch):
    W, fit, held, kept = case()

    def noisy(problem):
        module.record("noise")
        return SiteResult(0 * problem.weight[:, problem.kept.indices])

    monkeypatch.setitem(module.CANDIDATES, "rcpu", noisy)
    found = coec.compensate(W, fit, kept, method="auto", held_out=held).diagnostics
    assert found["chosen"] != "rcpu"
    assert found["events"] == []


def test_of_equal_errors_the_earlier_candidate_wins():
    W, fit, held, kept = case()
    nothing = Gram(0 * held.xx, 0 * held.x, held.tokens)
    found = coec.compensate(W, fit, kept, method="auto", held_out=nothing)
    assert found.diagnostics["chosen"] == "none"
    assert torch.equal(found.weight, W[:, kept])


def test_without_held_out_statistics_the_function_itself_refuses():
    W, fit, _, kept = case()
    with pytest.raises(OptionError, match="needs held-out statistics"):
        module.auto(SiteProblem(W, fit, KeptSet(kept, D)))
