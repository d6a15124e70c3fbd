import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coec
import oracles
import problems
from coec.errors import NumericalError
from coec.types import Gram
from tolerances import CLOSED_FORM

D, M = 8, 5


def statistics(X):
    return Gram(X @ X.T, X.sum(dim=1), X.shape[1])


def case(kind="power law", seed=0, k=5):
    X = problems.inputs(kind, D, seed=seed)
    return problems.weight(M, D, seed), statistics(X), problems.kept(D, k, seed), X


def test_none_is_the_slice():
    W, gram, kept, X = case()
    result = coec.compensate(W, gram, kept, method="none")
    assert torch.equal(result.weight, W[:, kept])
    expected = oracles.relative_error(W, X, kept, W[:, kept])
    assert result.diagnostics["error_after"] == pytest.approx(expected, rel=CLOSED_FORM)


def test_bias_is_the_mean_of_what_is_lost():
    W, _, kept, X = case()
    X += 2  # a mean to lose
    result = coec.compensate(W, statistics(X), kept, method="bias")
    lost = (W @ X - W[:, kept] @ X[kept]).mean(dim=1)
    torch.testing.assert_close(result.bias, lost, rtol=CLOSED_FORM, atol=CLOSED_FORM)
    expected = oracles.relative_error(W, X, kept, W[:, kept], lost)
    assert result.diagnostics["error_after"] == pytest.approx(expected, rel=CLOSED_FORM)
    assert expected < result.diagnostics["error_before"]


def test_least_squares_without_a_ridge_is_torchs():
    W, gram, kept, X = case("white")
    result = coec.compensate(W, gram, kept, method="least-squares", ridge=0.0)
    expected = torch.linalg.lstsq(X[kept].T, (W @ X).T).solution.T
    torch.testing.assert_close(result.weight, expected, rtol=CLOSED_FORM, atol=CLOSED_FORM)


@pytest.mark.parametrize(("ridge", "copies"), [(0.05, 1), ("auto", 1), ("auto", 20)])
def test_ridge_is_least_squares_on_more_rows(ridge, copies):
    """The penalty as extra data: the textbook augmentation."""
    W, _, kept, X = case()
    X = X.repeat(1, copies)
    gram = statistics(X)
    energy = gram.xx.diagonal()[kept]
    if ridge == "auto":  # nine tokens more for every column, of the mean energy of the others
        root = (min(9 * len(kept) / X.shape[1], 0.3) * energy).sqrt().diag()
    else:
        root = (ridge * energy.mean().expand(5)).sqrt().diag()
    inputs = torch.cat([X[kept], root], dim=1).T
    for method, pull in {"least-squares": 0 * W[:, kept], "ridge-to-slice": W[:, kept]}.items():
        outputs = torch.cat([W @ X, pull @ root], dim=1).T
        expected = torch.linalg.lstsq(inputs, outputs).solution.T
        result = coec.compensate(W, gram, kept, method=method, ridge=ridge)
        torch.testing.assert_close(result.weight, expected, rtol=CLOSED_FORM, atol=CLOSED_FORM)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.floats(0, 1e6) | st.just("auto"), st.integers(0, 50), st.sampled_from(problems.KINDS))
def test_ridge_to_slice_is_never_worse_than_the_slice(ridge, seed, kind):
    if kind == "indefinite":  # no inputs have such statistics
        return
    W, gram, kept, _ = case(kind, seed)
    diagnostics = coec.compensate(W, gram, kept, method="ridge-to-slice", ridge=ridge).diagnostics
    assert diagnostics["error_after"] <= diagnostics["error_before"] + 1e-9


@pytest.mark.parametrize("kind", ["power law", "white"])
@pytest.mark.parametrize(("m", "k"), [(5, 5), (5, 7), (7, 4)])
def test_rcpu_is_the_procrustes_solution_on_the_outputs(kind, m, k):
    X, W, kept = problems.inputs(kind, D), problems.weight(m, D), problems.kept(D, k)
    result = coec.compensate(W, statistics(X), kept, method="rcpu")
    if m <= k:  # otherwise the rotation is not unique outside the outputs
        expected = oracles.rcpu(W, X, kept)
        torch.testing.assert_close(result.weight, expected, rtol=0, atol=CLOSED_FORM)
    expected = oracles.relative_error(W, X, kept, oracles.rcpu(W, X, kept))
    assert result.diagnostics["error_after"] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ("weight", "the weight holds NaN or Inf"),
        ("gram", "calibration statistics hold NaN or Inf"),
        ("value_weight", "the value weight holds NaN or Inf"),
    ],
)
def test_inputs_that_are_not_finite_are_named(spoilt, said):
    W, gram, kept, _ = case()
    given = {"weight": W, "gram": gram, "kept": kept, "value_weight": problems.weight(len(kept), 3)}
    (gram.xx if spoilt == "gram" else given[spoilt])[0, 0] = float("inf")
    with pytest.raises(NumericalError, match=said):
        coec.compensate(**given)


def test_an_answer_that_is_not_finite_never_leaves():
    def broken(problem):
        return coec.SiteResult(problem.weight[:, problem.kept.indices] * float("nan"))

    W, gram, kept, _ = case()
    with pytest.raises(NumericalError, match="the compensated weight holds NaN or Inf"):
        coec.compensate(W, gram, kept, method=broken)
