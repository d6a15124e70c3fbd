"""The last half-block fitted to predictions: minimum, judged points, degenerate starts."""

import math

import pytest
import torch

from coec.errors import NumericalError
from coec.reconstruction.logits import fit_logits


def parabola(centre, scale=1.0):
    """`scale · ‖θ − centre‖²` of two tensors, and its gradient."""

    def divergence(theta):
        gaps = {name: theta[name] - centre[name] for name in theta}
        value = scale * sum(float(gap.square().sum()) for gap in gaps.values())
        return value, {name: 2 * scale * gap for name, gap in gaps.items()}

    return divergence


CENTRE = {"a": torch.tensor([1.0, -2.0]), "b": torch.full((2, 2), 3.0)}
START = {"a": torch.zeros(2), "b": torch.zeros(2, 2)}


def test_the_minimum_of_a_parabola_is_found():
    fitted = fit_logits(parabola(CENTRE), None, START, iterations=10)
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

    fitted = fit_logits(parabola(CENTRE), judge, START, iterations=10)
    scores = [judge(theta) for theta in tried[: fitted.evaluations]]
    assert fitted.after == min(scores)
    assert fitted.before == scores[0]
    best = tried[scores.index(min(scores))]
    assert all(torch.equal(fitted.theta[name], best[name]) for name in best)


def test_a_start_that_no_point_improves_on_stays():
    fitted = fit_logits(parabola(CENTRE), lambda theta: parabola(START)(theta)[0], START,
                        iterations=5)  # fmt: skip
    assert fitted.theta is START
    assert fitted.before == fitted.after == 0.0


def test_a_point_that_is_not_finite_is_never_taken():
    def judge(theta):
        return math.nan if theta["a"].any() else 1.0

    fitted = fit_logits(parabola(CENTRE), judge, START, iterations=5)
    assert fitted.theta is START
    with pytest.raises(NumericalError, match="predictions at the start are not finite"):
        fit_logits(parabola(CENTRE), lambda theta: math.inf, START, iterations=5)
