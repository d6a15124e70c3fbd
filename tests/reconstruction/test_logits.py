"""The last half-block fitted to predictions: minimum, judged points, degenerate starts."""

import math

import pytest
import torch

from coec.errors import NumericalError
from coec.reconstruction.least_squares import Factor
from coec.reconstruction.logits import fit_logits


def parabola(centre, scale=1.0):
    """`scale · ‖θ − centre‖²` of two tensors, and its gradient."""

    def divergence(theta):
        gaps = {name: theta[name] - centre[name] for name in theta}
        value = scale * sum(float(gap.square().sum()) for gap in gaps.values())
        return value, {name: 2 * scale * gap for name, gap in gaps.items()}

    return divergence


CENTRE = {"a": torch.tensor([[1.0, -2.0]]), "b": torch.full((2, 2), 3.0)}
START = {"a": torch.zeros(1, 2), "b": torch.zeros(2, 2)}
EVEN = {name: Factor(torch.ones(len(p)), torch.eye(2)) for name, p in START.items()}


def fitted_logits(divergence, judge, *, iterations=10, factors=EVEN):
    return fit_logits(divergence, judge, START, factors, iterations=iterations, damping=0.0)


def test_the_minimum_of_a_parabola_is_found():
    fitted = fitted_logits(parabola(CENTRE), None)
    for name, value in CENTRE.items():
        torch.testing.assert_close(fitted.theta[name], value, rtol=1e-4, atol=1e-4)
    assert fitted.before == pytest.approx(41.0)
    assert fitted.after < 1e-6
    assert all(not tensor.any() for tensor in START.values())  # the start is left as it was


def test_held_out_windows_choose_among_the_points_that_were_tried():
    tried = []

    def judge(theta):
        tried.append({name: p.clone() for name, p in theta.items()})
        return parabola({name: 0.3 * value for name, value in CENTRE.items()})(theta)[0]

    fitted = fitted_logits(parabola(CENTRE), judge)
    scores = [judge(theta) for theta in tried[: fitted.evaluations]]
    assert fitted.after == min(scores)
    assert fitted.before == scores[0]
    best = tried[scores.index(min(scores))]
    assert all(torch.equal(fitted.theta[name], best[name]) for name in best)


def test_a_start_that_no_point_improves_on_stays():
    fitted = fitted_logits(parabola(CENTRE), lambda theta: parabola(START)(theta)[0])
    assert fitted.theta is START
    assert fitted.before == fitted.after == 0.0


def test_a_point_that_is_not_finite_is_never_taken():
    def judge(theta):
        return math.nan if theta["a"].any() else 1.0

    fitted = fitted_logits(parabola(CENTRE), judge)
    assert fitted.theta is START
    with pytest.raises(NumericalError, match="predictions at the start are not finite"):
        fitted_logits(parabola(CENTRE), lambda theta: math.inf)


def valley(scales):
    """`½ Σ_ij rows_i (R columns Rᵀ)_ii` around CENTRE, and the factors that say so."""
    factors = {}
    for name, p in START.items():
        columns = torch.tensor([[1.0, 0.9], [0.9, 1.0]]) * torch.tensor([1.0, scales]).outer(
            torch.tensor([1.0, scales])
        )
        factors[name] = Factor(torch.tensor([1.0, 30.0][: len(p)]), columns)

    def divergence(theta):
        value, gradient = 0.0, {}
        for name, factor in factors.items():
            by_theta = factor.rows[:, None] * ((theta[name] - CENTRE[name]) @ factor.columns)
            gradient[name] = by_theta
            value += 0.5 * float(((theta[name] - CENTRE[name]) * by_theta).sum())
        return value, gradient

    return divergence, factors


def test_in_coordinates_of_its_curvature_a_narrow_valley_takes_few_steps():
    divergence, factors = valley(1e-2)
    plain = fitted_logits(divergence, None, iterations=4)
    fitted = fitted_logits(divergence, None, iterations=4, factors=factors)
    assert fitted.after < 1e-6 * fitted.before
    assert plain.after > 1e-3 * plain.before


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_scale_of_the_factors_does_not_matter(scale):
    divergence, factors = valley(0.5)
    scaled = {n: Factor(f.rows, scale * f.columns) for n, f in factors.items()}
    fitted = fitted_logits(divergence, None, iterations=3, factors=factors)
    other = fitted_logits(divergence, None, iterations=3, factors=scaled)
    for name, value in fitted.theta.items():
        torch.testing.assert_close(other.theta[name], value, rtol=1e-3, atol=1e-4)


def test_a_curvature_that_is_not_finite_is_refused():
    factors = {**EVEN, "b": Factor(torch.ones(2), torch.full((2, 2), math.nan))}
    with pytest.raises(NumericalError, match="curvature at the start is not finite"):
        fitted_logits(parabola(CENTRE), None, factors=factors)


def test_the_divergence_of_nothing_to_gain_takes_no_step():
    fitted = fitted_logits(parabola(START), None)
    assert fitted.theta is START
    assert fitted.evaluations == 1
