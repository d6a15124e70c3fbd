"""A ridge chosen from the data: by held-out error, or else by generalized cross-validation."""

import pytest
import torch

import coec
import oracles
import problems
from coec.compensation.objective import OutputProblem
from coec.compensation.ridge import GRID, best_ridge
from coec.types import Gram, KeptSet
from tolerances import CLOSED_FORM

D, M, K = 12, 5, 8
METHODS = ("least-squares", "ridge-to-slice")


def case(tokens, seed=0):
    """Inputs of two texts, a weight, kept columns, and outputs that no weight gives wholly."""
    mixing = problems.inputs("power law", D, D, seed=9)
    X, held = (mixing @ problems.inputs("white", D, n, n) for n in (tokens, 200))
    W = problems.weight(M, D, seed)
    return X, held, W, KeptSet(problems.kept(D, K, seed), D)


def gram(X):
    return Gram(X @ X.T, X.sum(dim=1), X.shape[1])


def start(method, W, kept):
    return W[:, kept.indices] * (method == "ridge-to-slice")


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [6, 15, 60])
def test_held_out_windows_choose_the_ridge_of_lowest_error_on_them(method, tokens, standardize):
    """As tried one after the other; fewer tokens than columns too."""
    X, held, W, kept = case(tokens)
    target = W + 0.3 * problems.weight(M, D, 7)
    S, A, errors = start(method, W, kept), gram(X[kept.indices]).xx, {}
    for ridge in GRID:
        energy = A.diagonal() if standardize else A.diagonal().mean().expand(K)
        shifted = A + ridge * energy.diag()
        change = (W @ X - S @ X[kept.indices]) @ X[kept.indices].T @ torch.linalg.inv(shifted)
        errors[ridge] = oracles.relative_error(target, held, kept.indices, S + change)
    fitted = OutputProblem.of(W, gram(X).xx, kept)
    judge = OutputProblem.of(target, gram(held).xx, kept)
    chosen = best_ridge(fitted, S, tokens, held_out=judge, standardize=standardize)
    assert errors[chosen] == pytest.approx(min(errors.values()), rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_else_the_ridge_has_the_lowest_score_of_cross_validation(method, noise):
    """With the hat matrix written out; the outputs' part that no input explains counts too."""
    X, _, W, kept = case(40)
    Y = W @ X + noise * problems.inputs("white", M, 40, seed=3)
    T = torch.linalg.lstsq(X.T, Y.T).solution.T
    unexplained = float((Y - T @ X).square().sum())
    fitted = OutputProblem.of(T, gram(X).xx, kept)
    chosen = best_ridge(fitted, start(method, W, kept), 40, unexplained=unexplained)
    XK, scores = X[kept.indices], {}
    left = Y - start(method, W, kept) @ XK
    for ridge in GRID:
        A = XK @ XK.T
        H = XK.T @ torch.linalg.solve(A + ridge * A.diagonal().mean() * torch.eye(K).to(A), XK)
        scores[ridge] = float((left - left @ H).square().sum() / (1 - H.trace() / 40) ** 2)
    assert chosen == min(scores, key=scores.get)


def test_noise_in_the_outputs_asks_for_a_larger_ridge():
    X, _, W, kept = case(30)
    fitted = OutputProblem.of(W, gram(X).xx, kept)
    quiet, loud = (
        best_ridge(fitted, start("ridge-to-slice", W, kept), 30, unexplained=share * fitted.yy)
        for share in (0.0, 10.0)
    )
    assert quiet < loud


def test_outputs_of_no_error_take_the_largest_ridge():
    """Of equal scores the larger ridge, so also where tokens are fewer than degrees of freedom."""
    X, _, W, _ = case(30)
    everything = KeptSet(torch.arange(D), D)
    assert best_ridge(OutputProblem.of(W, gram(X).xx, everything), W, 30) == GRID[-1]
    fitted = OutputProblem.of(W, gram(X).xx, everything)
    assert best_ridge(fitted, 0 * W, 0) == GRID[-1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", problems.KINDS)
def test_auto_is_the_ridge_that_the_diagnostics_name(method, kind):
    weight, sums, kept = problems.weight(M, D), problems.gram(kind, D), problems.kept(D, K)
    auto = coec.compensate(weight, sums, kept, method=method, ridge="auto")
    ridge = auto.diagnostics["ridge"]
    assert ridge in GRID
    again = coec.compensate(weight, sums, kept, method=method, ridge=ridge)
    torch.testing.assert_close(auto.weight, again.weight, rtol=0, atol=CLOSED_FORM)
    assert again.diagnostics["ridge"] == ridge
