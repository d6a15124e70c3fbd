"""Few tokens: results are drawn back to the slice by a known share, and only then."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import coec
import problems
from coec.methods import COMPENSATIONS
from coec.methods.closed_form import ridge_for, solve_by_energy
from coec.types import KeptSet, SiteProblem

DRAWN = [name for name, method in COMPENSATIONS.items() if not method.shrinks]
K = 7


def solved(method, tokens):
    """A compensation of statistics that claim so many tokens, and what the method alone gives."""
    W, gram, kept = problems.case(k=K)
    gram, method = replace(gram, tokens=tokens), coec.Method.of(method)
    problem = SiteProblem(W, gram, KeptSet(kept, W.shape[1]))
    return (
        coec.compensate(W, gram, kept, method=method),
        method(problem, method.chosen({})),
        problem,
    )


@pytest.mark.parametrize("method", DRAWN)
@pytest.mark.parametrize("tokens", [1, 14, 55])
def test_the_share_is_that_of_the_tokens_of_eight_per_column(method, tokens):
    found, alone, problem = solved(method, tokens)
    share, slice_ = tokens / (8 * K), problem.weight[:, problem.kept.indices]
    expected = slice_ + share * (alone.weight - slice_)
    torch.testing.assert_close(found.weight, expected, rtol=0, atol=1e-9)
    if alone.bias is not None:
        torch.testing.assert_close(found.bias, share * alone.bias)
    assert found.diagnostics["followed"] == share
    assert "few tokens" in found.diagnostics["events"][-1]


@pytest.mark.parametrize("method", COMPENSATIONS)
@pytest.mark.parametrize("tokens", [8 * K, 1000])
def test_with_enough_tokens_nothing_changes(method, tokens):
    found, alone, _ = solved(method, tokens)
    assert torch.equal(found.weight, alone.weight)
    assert "followed" not in found.diagnostics


@pytest.mark.parametrize("method", ["coec", "rcpu", "least-squares"])
def test_the_more_tokens_the_further_from_the_slice(method):
    distances = []
    for tokens in (1, 5, 20, 50, 56, 60):
        found, _, problem = solved(method, tokens)
        distances.append(float((found.weight - problem.weight[:, problem.kept.indices]).norm()))
    assert all(near < far for near, far in pairwise(distances[:5]))
    assert distances[4] == pytest.approx(distances[5])


def test_what_shrinks_by_itself_is_not_drawn_back():
    def half(problem):
        return coec.SiteResult(0.5 * problem.weight[:, problem.kept.indices])

    for method in (coec.Method(half, shrinks=True), "ridge-to-slice", "none"):
        found, alone, _ = solved(method, 5)
        assert torch.equal(found.weight, alone.weight)


def test_an_own_ridge_falls_with_the_tokens_and_forgets_the_units_of_channels():
    A, B = problems.gram("power law", 6).xx, problems.weight(3, 6)
    ridges = [ridge_for(6, tokens) for tokens in (0, 100, 180, 1800)]
    assert ridges == pytest.approx([0.3, 0.3, 0.3, 0.03])
    unit = torch.logspace(-3, 3, 6, dtype=A.dtype)
    plain = solve_by_energy(B, A, 0.108)
    other = solve_by_energy(B * unit, A * unit * unit[:, None], 0.108)
    torch.testing.assert_close(other * unit, plain)
    torch.testing.assert_close(plain @ (A + 0.108 * A.diagonal().diag()), B)
