"""Compensations whose outputs are to be something else than the dense weight's products."""

import pytest
import torch

import coec
import oracles
import problems
from coec.errors import NumericalError, OptionError
from coec.methods import COMPENSATIONS
from coec.types import Gram
from tolerances import CLOSED_FORM, EXACT

M, D, K = 6, 9, 6


class Case:
    """Inputs, outputs that are no product of the weight, and the target that stands for them."""

    def __init__(self, m=M, d=D, k=K, kind="white", seed=0):
        self.X = problems.inputs(kind, d, tokens=80, seed=seed)
        self.gram = Gram(self.X @ self.X.T, self.X.sum(dim=1), self.X.shape[1])
        self.weight, self.kept = problems.weight(m, d, seed), problems.kept(d, k, seed)
        noise = problems.weight(m, self.X.shape[1], seed + 50)
        self.Y = self.weight @ self.X + problems.weight(m, d, seed + 70) @ self.X + noise
        self.target = torch.linalg.lstsq(self.X.T, self.Y.T).solution.T

    def compensate(self, method, target=None, **options):
        target = self.target if target is None else target
        return coec.compensate(
            self.weight, self.gram, self.kept, method=method, target=target, **options
        )

    def error(self, W, bias=0.0):
        return oracles.relative_error(self.target, self.X, self.kept, W, bias)


@pytest.mark.parametrize("method", COMPENSATIONS)
@pytest.mark.parametrize("kind", ["power law", "rank deficient"])
def test_the_weight_as_the_target_changes_nothing(method, kind):
    case = Case(kind=kind)
    options = {"value_weight": problems.weight(K, 4)} if method == "coec" else {}
    plain = coec.compensate(case.weight, case.gram, case.kept, method=method, **options)
    aimed = case.compensate(method, case.weight.clone(), **options)
    torch.testing.assert_close(aimed.weight, plain.weight, rtol=0, atol=EXACT)
    if plain.bias is not None:
        torch.testing.assert_close(aimed.bias, plain.bias, rtol=0, atol=EXACT)
    for name in ("error_before", "error_after"):
        assert aimed.diagnostics[name] == pytest.approx(plain.diagnostics[name], abs=EXACT)


def test_least_squares_fits_the_outputs_themselves():
    case = Case()
    expected = torch.linalg.lstsq(case.X[case.kept].T, case.Y.T).solution.T
    found = case.compensate("least-squares", ridge=0.0).weight
    torch.testing.assert_close(found, expected, rtol=CLOSED_FORM, atol=CLOSED_FORM)


def test_ridge_to_slice_is_pulled_to_the_slice_of_the_weight():
    case = Case()
    slice_ = case.weight[:, case.kept]
    assert case.error(slice_) > 0.1
    found = case.compensate("ridge-to-slice", ridge=1e12).weight
    torch.testing.assert_close(found, slice_, rtol=0, atol=1e-9)
    free = case.compensate("ridge-to-slice", ridge=0.0).weight
    best = case.compensate("least-squares", ridge=0.0).weight
    torch.testing.assert_close(free, best, rtol=CLOSED_FORM, atol=CLOSED_FORM)


def test_the_bias_is_the_mean_of_what_the_outputs_lack():
    case = Case()
    case.X += 2  # a mean to lose
    case.gram = Gram(case.X @ case.X.T, case.X.sum(dim=1), case.X.shape[1])
    found = case.compensate("bias")
    slice_ = case.weight[:, case.kept]
    lost = (case.target @ case.X - slice_ @ case.X[case.kept]).mean(dim=1)
    torch.testing.assert_close(found.bias, lost, rtol=CLOSED_FORM, atol=CLOSED_FORM)
    assert found.diagnostics["error_after"] == pytest.approx(
        case.error(slice_, lost), rel=CLOSED_FORM
    )


@pytest.mark.parametrize("method", COMPENSATIONS)
def test_errors_are_relative_to_the_target(method):
    case = Case()
    found = case.compensate(method)
    bias = 0.0 if found.bias is None else found.bias
    errors = [found.diagnostics[f"error_{when}"] for when in ("before", "after")]
    expected = case.error(case.weight[:, case.kept]), case.error(found.weight, bias)
    assert errors == pytest.approx(expected, rel=CLOSED_FORM)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("factor", [-3.0, 0.05])
def test_a_slice_far_from_the_target_may_have_an_error_above_one(seed, factor):
    """The outputs are the weight's turned round, or so small that the slice overshoots."""
    case = Case(kind="power law", seed=seed)
    case.target = factor * case.weight
    errors = {}
    for method in ("none", "ridge-to-slice", "least-squares", "rcpu", "coec"):
        found = case.compensate(method)
        assert found.diagnostics["events"] == []
        assert found.diagnostics["error_before"] > 1
        errors[method] = found.diagnostics["error_after"]
    assert errors["none"] > 1
    assert errors["least-squares"] <= errors["coec"] * (1 + 1e-2)
    assert errors["coec"] <= errors["rcpu"] * (1 + 1e-2) < 1


@pytest.mark.parametrize("method", ["least-squares", "ridge-to-slice"])
def test_with_every_column_kept_there_is_still_something_to_compensate(method):
    case = Case(k=D)
    found = case.compensate(method, ridge=0.0)
    torch.testing.assert_close(found.weight, case.target, rtol=CLOSED_FORM, atol=CLOSED_FORM)
    assert case.compensate("coec").diagnostics["error_after"] < found.diagnostics["error_before"]


@pytest.mark.unchecked
def test_a_target_that_does_not_fit_is_refused():
    case = Case()
    with pytest.raises(OptionError, match=r"target \(6, 8\) does not fit the weight \(6, 9\)"):
        case.compensate("none", case.target[:, :-1])
    case.target[2, 3] = float("nan")
    with pytest.raises(NumericalError, match="the target holds NaN or Inf"):
        case.compensate("none")
