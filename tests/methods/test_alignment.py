"""The anchored alignment of attention outputs: what it is on, what it costs, what it may not do."""

from itertools import pairwise

import pytest
import torch

import coec
import problems
from coec.config.recipe import CoecOptions
from coec.errors import OptionError
from coec.methods.frame import Anchor, Frame, RotationTarget
from coec.methods.objective import OutputProblem
from coec.types import KeptSet
from problems import attention, case, descended
from tolerances import CLOSED_FORM

pytestmark = pytest.mark.unchecked  # whole solves


def test_the_penalty_falls_as_its_weight_grows():
    W, gram, kept, value = attention()
    penalties = [
        coec.compensate(W, gram, kept, value_weight=value, lambda_a=weight, r_p=3).diagnostics
        for weight in (0.01, 1.0, 100.0)
    ]
    after = [diagnostics["alignment_after"] for diagnostics in penalties]
    assert after[0] > after[1] > after[2]
    assert after[2] < 0.1 * penalties[2]["alignment_before"]


@pytest.mark.parametrize("seed", range(6))
def test_the_penalty_is_on_the_leading_directions_of_what_is_returned(seed):
    """Singular values move as the frame turns: the rows held during it need not lead at its end."""
    W, gram, kept, value = attention(seed)
    result = descended(W, gram, kept, value, lambda_a=1.0, r_p=3, tol=1e-9)
    units = KeptSet(kept, 12)
    target = RotationTarget.of(OutputProblem.tempered(W, gram.xx, units, 0.9))
    anchor = Anchor.of(W, value, units, CoecOptions(lambda_a=1.0, r_p=3))

    def objective(weight):
        frame = Frame.of(weight, target)
        penalty = anchor.alignment(frame, target).penalty(frame.R)
        return penalty, frame.error(target) + penalty

    penalty, after = objective(result.weight)
    assert result.diagnostics["alignment_after"] == pytest.approx(penalty, rel=1e-6)
    assert after <= objective(W[:, kept])[1] * (1 + 1e-9)


def test_without_weight_there_is_no_alignment():
    W, gram, kept, value = attention()
    plain = coec.compensate(W, gram, kept)
    off = coec.compensate(W, gram, kept, value_weight=value, lambda_a=0.0)
    assert torch.equal(plain.weight, off.weight)
    assert "alignment_after" not in off.diagnostics


def penalty(top, W, kept, value):
    """`𝒜` of leading rows of a frame, every projector written out."""
    r = len(top)
    U_v = torch.linalg.svd(value)[0][:, :r]
    V = torch.linalg.qr(torch.linalg.svd(W)[2].T[kept, :r])[0]
    inner = U_v.T @ (top.T @ top - V @ V.T) @ U_v
    return float(inner.square().sum()) / r**2


def test_the_penalty_is_the_one_of_the_paper():
    """Projectors written out, in the channels' own basis."""
    W, gram, kept, value = attention()
    units, r = KeptSet(kept, 12), 3
    target = RotationTarget.of(OutputProblem.of(W, gram.xx, units))
    frame = Frame.of(W[:, kept], target)
    anchor = Anchor.of(W, value, units, CoecOptions(lambda_a=1.0, r_p=r))
    got = anchor.alignment(frame, target).penalty(frame.R)
    R = frame.R @ target.basis.T
    top = R[frame.s.argsort(descending=True)[:r]]
    assert got == pytest.approx(penalty(top, W, kept, value), rel=CLOSED_FORM)


def test_value_rows_must_match_the_kept_columns():
    W, _, kept, value = attention()
    with pytest.raises(OptionError, match="one row per kept column"):
        Anchor.of(W, value[:-1], KeptSet(kept, 12), CoecOptions(lambda_a=1.0, r_p=3))


@pytest.mark.parametrize("seed", range(4))
def test_the_aligned_objective_falls_in_every_round(seed):
    W, gram, kept, value = attention(seed)
    result = descended(W, gram, kept, value, r_p=3, tol=1e-9)
    objectives = result.diagnostics["objectives_per_round"]
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(objectives))
    assert objectives[-1] <= objectives[0]


@pytest.mark.slow
def test_rounding_of_equal_value_rows_does_not_move_the_weight():
    """Eight equal KV rows, six query heads each: beyond the rank any direction would do."""
    m, d, k = 60, 64, 48
    W, gram, kept = case(m, d, k)
    row = problems.weight(1, 20, 3)
    value = row.repeat(k, 1)
    noise = 1e-15 * problems.weight(k, 20, 4)
    one = coec.compensate(W, gram, kept, value_weight=value, r_p=16).weight
    other = coec.compensate(W, gram, kept, value_weight=value + noise, r_p=16).weight
    # What is left comes from where a hundred steps happen to stop.
    assert float((one - other).norm() / one.norm()) < 2e-2
