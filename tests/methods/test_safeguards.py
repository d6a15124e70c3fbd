"""What must be said, and what must not happen, at the edges: every safeguard leaves an event."""

import pytest
import torch

import coec
import problems
from coec.config.recipe import RidgeOptions
from coec.errors import NumericalError, OptionError
from coec.events import recording
from coec.linalg.spd import noise, root, solve_right
from coec.methods import COMPENSATIONS
from coec.methods.closed_form import least_squares
from coec.types import Gram, GramSum, KeptSet, SiteProblem
from problems import case, descended

# fallbacks


@pytest.mark.parametrize("method", COMPENSATIONS)
def test_an_indefinite_gram_is_said_and_no_error_is_negative(method):
    for seed in range(4):
        W, gram, kept = case(kind="indefinite", seed=seed)
        result = coec.compensate(W, gram, kept, method=method)
        assert any("indefinite Gram" in event for event in result.diagnostics["events"])
        assert result.diagnostics["error_after"] >= 0


@pytest.mark.parametrize("method", ["rcpu", "coec"])
def test_a_scale_that_is_not_positive_is_said(method):
    """The kept columns answer to the dropped ones with the opposite sign."""
    X = problems.inputs("white", 4)
    X[2:] = -3 * X[:2]
    W = torch.eye(2, 4, dtype=torch.float64) + torch.eye(2, 4, dtype=torch.float64).roll(2, 1)
    gram, kept = Gram(X @ X.T, X.sum(dim=1), 60), torch.tensor([0, 1])
    options = {"rotation": "right"} if method == "coec" else {}
    result = coec.compensate(W, gram, kept, method=method, **options)
    said = "the global scale is not positive: not applied" in result.diagnostics["events"]
    # The left rotation of RCPU turns the outputs round first: then the scale is positive.
    assert said == (method == "coec")


# the precision that statistics have


def summed(X):
    """Statistics summed in float32, as in a pass."""
    sums = GramSum(X.shape[1])
    sums.update(X)
    return sums.gram()


def few_tokens(tokens=60, d=96):
    """Fewer tokens than channels: the Gram has rank `tokens`."""
    X = torch.randn(tokens, d, generator=torch.Generator().manual_seed(0))
    return X, summed(X)


def test_eigenvalues_that_are_noise_are_told_from_those_that_are_not():
    X, gram = few_tokens()
    with recording():
        F = root(gram.xx, 0.9, precision=gram.precision)
    assert int((F.square().sum(dim=0) > 0).sum()) == len(X)
    mu, E = torch.linalg.eigh(gram.xx)
    blind = noise(mu, E, gram.xx.diagonal(), 0.0)
    assert int((mu > blind).sum()) > len(X)


def test_without_a_ridge_the_solution_has_minimum_norm():
    X, gram = few_tokens()
    W, kept = problems.weight(8, X.shape[1]), problems.kept(X.shape[1], 80)
    problem = SiteProblem(W, gram, KeptSet(kept, X.shape[1]))
    got = least_squares(problem, RidgeOptions(ridge=0.0)).weight
    exact = W @ X.double().T @ torch.linalg.pinv(X.double()[:, kept].T)
    assert float((got - exact).norm() / exact.norm()) < 1e-3
    blind = solve_right(W @ gram.xx[:, kept], gram.xx[kept][:, kept], 0.0)
    assert float((blind - exact).norm() / exact.norm()) > 0.1


@pytest.mark.parametrize("aligned", [False, True])
def test_the_weight_is_continuous_in_alpha(aligned):
    """α = 1 and a hair below it see the same directions of G."""
    X, gram = few_tokens()
    W, kept = problems.weight(24, X.shape[1]), problems.kept(X.shape[1], 70)
    value = problems.weight(70, 12, 5) if aligned else None
    with recording() as events:
        one, other = (
            descended(W, gram, kept, value, alpha=alpha, rounds=0, lambda_a=0.1)
            for alpha in (1.0, 1 - 1e-9)
        )
    assert not events
    assert float((one.weight - other.weight).norm() / one.weight.norm()) < 1e-4


# extreme sizes


@pytest.mark.slow
@pytest.mark.parametrize("method", COMPENSATIONS)
@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_float32_survives_extreme_sizes(method, size, scale):
    W, _, kept = case()
    gram = problems.gram("power law", 10, scale=scale)
    expected = coec.compensate(W, gram, kept, method=method)
    small = (W * size).float(), gram.to(torch.float32), kept
    if method == "bias" and size * scale > 1e38:
        with pytest.raises(NumericalError, match="the bias overflows"):
            coec.compensate(*small, method=method)
        return
    single = coec.compensate(*small, method=method)
    for name in ("error_before", "error_after"):
        assert single.diagnostics[name] == pytest.approx(expected.diagnostics[name], rel=1e-3)
    got = single.weight.double() / size
    torch.testing.assert_close(got, expected.weight, rtol=0, atol=2e-2)
    if expected.bias is not None and size * scale > 1e-38:
        torch.testing.assert_close(
            single.bias.double() / size, expected.bias, rtol=1e-3, atol=1e-4 * scale
        )


# options


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lambda_a": 0.0, "r_p": 8}, "r_p has no effect with lambda_a = 0"),
        ({"rotation": "left", "solver": "gradient"}, "solver has no effect with rotation = left"),
        ({"alpha": 0.0, "kappa": 3.0}, "kappa has no effect with alpha = 0"),
    ],
)
def test_an_option_without_effect_is_refused(options, why):
    with pytest.raises(OptionError, match=why):
        coec.compensate(*case(), **options)
