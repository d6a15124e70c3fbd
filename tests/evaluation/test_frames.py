"""Frames of one weight: known answers, invariances, and slow versions in numpy."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from pandas import json_normalize

import problems
from coec.compensation.frame import Anchor
from coec.errors import NumericalError
from coec.evaluation.frames import compare_frames
from coec.linalg.right import Alignment
from coec.settings import CoecOptions
from coec.types import KeptSet
from tolerances import CLOSED_FORM, EXACT

M, D, K, R = 20, 16, 11, 4
KEPT = KeptSet(problems.kept(D, K), D)
TINY_ANGLE = 1e-6
"""Degrees: what rounding leaves of an angle that is 0."""


def spectrum(values, rows, columns, seed=0):
    """A weight with chosen singular values and random frames."""
    s = torch.as_tensor(values, dtype=torch.float64)
    U, V = (problems.orthonormal(n, len(s), seed + n) for n in (rows, columns))
    return U @ torch.diag(s) @ V.T


def numpy_angles(A, B):
    """Principal angles between two spans as Björck and Golub define them: one pair at a time.

    The pair of unit vectors of largest inner product, then the same on what is orthogonal to it.
    """
    A, B = (np.linalg.qr(M)[0] for M in (A, B))
    angles = []
    for _ in range(min(A.shape[1], B.shape[1])):
        U, _, Vt = np.linalg.svd(A.T @ B)
        a, b = A @ U[:, 0], B @ Vt[0]
        angles.append(2 * math.atan2(np.linalg.norm(a - b), np.linalg.norm(a + b)))
        A, B = A @ U[:, 1:], B @ Vt[1:].T
    return np.degrees(angles)


def three_numbers(angles):
    return (angles.mean, angles.least, angles.greatest)


@pytest.mark.parametrize("seed", range(3))
def test_angles_are_those_of_the_definition(seed):
    W0, C = problems.weight(M, D, seed), problems.weight(M, K, seed + 50)
    found = compare_frames(W0, KEPT, C, R)
    V_full, V_P, V_C = (np.linalg.svd(W.numpy())[2][:R].T for W in (W0, W0[:, KEPT.indices], C))
    O = V_full[KEPT.indices.numpy()]  # noqa: E741  # the paper's name
    for measured, pair in {
        found.original_pruned: (O, V_P),
        found.original_compensated: (O, V_C),
        found.pruned_compensated: (V_P, V_C),
    }.items():
        angles = numpy_angles(*pair)
        expected = angles.mean(), angles.min(), angles.max()
        assert three_numbers(measured) == pytest.approx(expected, rel=CLOSED_FORM)


def test_without_compensation_nothing_turns():
    W0 = problems.weight(M, D)
    found = compare_frames(W0, KEPT, W0[:, KEPT.indices], R, value_weight=problems.weight(K, 9))
    assert found.original_pruned == found.original_compensated
    assert found.original_pruned.mean > 1
    assert found.pruned_compensated.greatest < TINY_ANGLE
    assert found.discrepancy < EXACT
    assert found.scale_change < EXACT
    assert found.gap_pruned == found.gap_compensated
    assert found.penalty.pruned == found.penalty.compensated > 0
    assert found.penalty.weighted_pruned == found.penalty.weighted_compensated > 0


@pytest.mark.parametrize("degrees", [1e-5, 0.3, 30.0, 89.9, 90.0])
def test_a_known_rotation_of_the_inputs_is_the_angle(degrees):
    """Every read direction turns toward one of its own outside the frame, U stays."""
    W0 = spectrum([9, 8, 7, 6], M, D)
    W_K = W0[:, KEPT.indices]
    _, _, Vt = torch.linalg.svd(W_K, full_matrices=True)
    V, outside = Vt[:R].T, Vt[R : 2 * R].T
    angle = math.radians(degrees)
    turned = math.cos(angle) * V + math.sin(angle) * outside
    found = compare_frames(W0, KEPT, W_K @ V @ turned.T, R)
    assert three_numbers(found.pruned_compensated) == pytest.approx((degrees,) * 3, rel=1e-7)
    # Q_u = I, Q_v = cos(angle) I
    assert found.discrepancy == pytest.approx(1 - math.cos(angle), abs=EXACT)
    assert found.scale_change < EXACT


def test_a_rotation_of_both_sides_alike_keeps_the_pairing():
    """`Q_l W_K Q_r` with the same generator in both frames: `Q_u = Q_v`."""
    W0 = problems.weight(M, D)
    U, s, Vt = torch.linalg.svd(W0[:, KEPT.indices], full_matrices=False)
    T = torch.linalg.matrix_exp(0.2 * (A := problems.weight(K, K)) - 0.2 * A.T)
    found = compare_frames(W0, KEPT, (U @ T) @ torch.diag(s / 2) @ (T.T @ Vt), R)
    assert found.discrepancy < CLOSED_FORM
    assert found.pruned_compensated.mean > 1
    assert found.scale_change == pytest.approx(math.log(2), rel=CLOSED_FORM)


def test_signs_and_equal_singular_values_change_nothing(monkeypatch):
    """Singular vectors are known up to signs and rotations within a mode's space."""
    from coec.evaluation import frames

    s = [9, 9, 9, 5, 3, 3, 2, 2, 1, 1, 0.5]
    W0, C = problems.weight(M, D), spectrum(s, M, K)
    value = problems.weight(K, 9)
    first = compare_frames(W0, KEPT, C, R, value_weight=value)
    svd = frames.svd

    def other_svd(A):
        """Another decomposition of the same matrix."""
        U, s, Vt = svd(A)
        signs = torch.tensor([(-1.0) ** i for i in range(len(s))], dtype=A.dtype)
        U, Vt = U * signs, signs[:, None] * Vt
        if A is C:
            Q = problems.orthonormal(3, 3, seed=5)
            U[:, :3], Vt[:3] = U[:, :3] @ Q, Q.T @ Vt[:3]
        return U, s, Vt

    monkeypatch.setattr(frames, "svd", other_svd)
    second = compare_frames(W0, KEPT, C, R, value_weight=value)
    flat, again = (json_normalize(dataclasses.asdict(f)).iloc[0].tolist() for f in (first, second))
    assert flat == pytest.approx(again, rel=CLOSED_FORM)
    assert (other_svd(C)[0][:, 0] - svd(C)[0][:, 0]).norm() > 0.1


def test_the_discrepancy_is_that_of_the_definition():
    W0, C = problems.weight(M, D), problems.weight(M, K, 3)
    U_P, _, Vt_P = np.linalg.svd(W0[:, KEPT.indices].numpy(), full_matrices=False)
    U_C, _, Vt_C = np.linalg.svd(C.numpy(), full_matrices=False)
    Q_u, Q_v = U_P[:, :R].T @ U_C[:, :R], Vt_P[:R] @ Vt_C[:R].T
    expected = np.linalg.norm(Q_u - Q_v) / np.linalg.norm(Q_u)
    assert compare_frames(W0, KEPT, C, R).discrepancy == pytest.approx(expected, rel=CLOSED_FORM)


def test_the_penalty_is_the_one_that_compensation_minimises():
    W0, C, value = problems.weight(M, D), problems.weight(M, K, 3), problems.weight(K, 9)
    anchor = Anchor.of(W0, value, KEPT, CoecOptions(lambda_a=1.0, r_p=R))
    penalty = compare_frames(W0, KEPT, C, R, value_weight=value).penalty
    alignment = Alignment(anchor.writer, anchor.target, torch.arange(R), 1.0)
    for W, measured in ((W0[:, KEPT.indices], penalty.pruned), (C, penalty.compensated)):
        V_r = torch.linalg.svd(W, full_matrices=False)[2][:R]
        assert measured == pytest.approx(alignment.penalty(V_r), rel=CLOSED_FORM)


def test_the_weighted_penalty_is_its_formula_and_the_plain_one_for_equal_values():
    W0, C, value = problems.weight(M, D), problems.weight(M, K, 3), problems.weight(K, 9)
    U_v = torch.linalg.svd(value, full_matrices=False)[0][:, :R]

    def read(W, V=None):
        _, s, Vt = torch.linalg.svd(W, full_matrices=False)
        V = Vt[:R].T if V is None else V
        return V @ torch.diag(s[:R] ** 2 / (s[:R] ** 2).sum()) @ V.T

    L, _, Zt = torch.linalg.svd(torch.linalg.svd(W0)[2][:R].T[KEPT.indices], full_matrices=False)
    difference = U_v.T @ (read(C) - read(W0, L @ Zt)) @ U_v
    measured = compare_frames(W0, KEPT, C, R, value_weight=value).penalty
    assert measured.weighted_compensated == pytest.approx(
        float(difference.square().sum()), rel=CLOSED_FORM
    )
    flat0, flat = spectrum([2.0] * R, M, D), spectrum([5.0] * R, M, K)
    same = compare_frames(flat0, KEPT, flat, R, value_weight=value).penalty
    assert same.weighted_compensated == pytest.approx(same.compensated, rel=CLOSED_FORM)


def test_a_frame_is_no_larger_than_the_rank():
    W0 = spectrum([5, 4, 3], M, D)
    found = compare_frames(W0, KEPT, W0[:, KEPT.indices], 8, value_weight=problems.weight(K, 2))
    assert found.r == 3
    assert found.gap_dense is None
    assert found.pruned_compensated.greatest < TINY_ANGLE
    assert math.isfinite(found.penalty.compensated)
    low = compare_frames(problems.weight(M, D), KEPT, spectrum([5, 4], M, K), 8)
    assert low.r == 2
    assert low.gap_compensated is None
    assert low.gap_dense == pytest.approx(
        float((s := torch.linalg.svdvals(problems.weight(M, D)))[1] / s[2]), rel=CLOSED_FORM
    )


def test_directions_that_only_the_removed_columns_read_leave_the_frame():
    """The leading direction of W₀ lies in a column that goes."""
    W0 = problems.weight(M, D)
    gone = int(KEPT.dropped()[0])
    outer = problems.orthonormal(M, 1)[:, 0]
    W0 = W0 - outer[:, None] * (outer @ W0)
    W0[:, gone] = 1000 * outer
    found = compare_frames(W0, KEPT, W0[:, KEPT.indices], 1 + R)
    assert found.r == 1 + R
    assert math.isfinite(found.original_pruned.mean)
    with pytest.raises(NumericalError, match="leading directions vanish on the kept columns"):
        compare_frames(W0, KEPT, W0[:, KEPT.indices], 1)


def test_what_has_no_frames_is_an_error():
    W0 = problems.weight(M, D)
    with pytest.raises(NumericalError, match="there are no frames to compare"):
        compare_frames(W0, KEPT, torch.zeros(M, K, dtype=torch.float64), R)
    with pytest.raises(NumericalError, match="NaN or Inf"):
        compare_frames(W0, KEPT, torch.full((M, K), math.nan, dtype=torch.float64), R)
