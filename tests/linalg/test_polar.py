import pytest
import torch

import oracles
import problems
from coec.errors import NumericalError
from coec.events import recording
from coec.linalg.polar import newton_schulz_polar, polar
from tolerances import CLOSED_FORM, EXACT


@pytest.mark.parametrize(("m", "b"), [(5, 5), (9, 4), (1, 1), (7, 1)])
def test_the_factor_of_a_full_rank_matrix(m, b):
    """That of the SVD; at the maximiser of ⟨U, A⟩ the product UᵀA is symmetric and positive."""
    A = problems.weight(m, b)
    U = polar(A)
    torch.testing.assert_close(U, oracles.polar_by_svd(A), rtol=0, atol=CLOSED_FORM)
    torch.testing.assert_close(U.T @ U, torch.eye(b, dtype=A.dtype), rtol=0, atol=EXACT)
    torch.testing.assert_close(U.T @ A, A.T @ U, rtol=0, atol=CLOSED_FORM)
    assert float(torch.linalg.eigvalsh(U.T @ A).min()) > 0


def test_an_orthonormal_matrix_times_a_positive_one_gives_it_back():
    U, S = problems.orthonormal(8, 5), problems.gram("white", 5).xx
    torch.testing.assert_close(polar(U @ S), U, rtol=0, atol=CLOSED_FORM)


def test_directions_without_information_stay_where_they_were():
    nearest = problems.orthonormal(8, 5)
    A = nearest[:, :2] @ problems.weight(2, 5)  # rank 2
    with recording() as events:
        U = polar(A, nearest=nearest)
    torch.testing.assert_close(U.T @ U, torch.eye(5, dtype=A.dtype), rtol=0, atol=EXACT)
    assert float((U * A).sum()) == pytest.approx(float(torch.linalg.svdvals(A).sum()), rel=EXACT)
    assert "singular" in events[0]
    # among all maximisers (any completion of the null space) none is closer to `nearest`
    P, _, Qt = torch.linalg.svd(A)
    for seed in range(20):
        turn = problems.orthonormal(6, 3, seed)
        other = P[:, :2] @ Qt[:2] + P[:, 2:] @ turn @ Qt[2:]
        assert float((U - nearest).norm()) <= float((other - nearest).norm()) + EXACT


@pytest.mark.parametrize("m", [2, 3, 4])
def test_a_frame_is_completed_where_nearest_points_at_what_is_taken(m):
    """The free column of `nearest` is the one direction that A already fixes."""
    axes = torch.eye(m, dtype=torch.float64)
    A = torch.zeros(m, 2, dtype=torch.float64)
    A[0, 0] = 1
    with recording():
        U = polar(A, nearest=axes[:, [1, 0]])
    torch.testing.assert_close(U.T @ U, torch.eye(2, dtype=A.dtype), rtol=0, atol=EXACT)
    assert float((U * A).sum()) == pytest.approx(1, rel=EXACT)


def test_frames_stay_orthonormal_on_axis_aligned_matrices():
    """Zeros that are exact: nothing is left to rounding."""
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        m = int(torch.randint(2, 7, (), generator=generator))
        b = int(torch.randint(1, m + 1, (), generator=generator))
        axes = torch.eye(m, dtype=torch.float64)
        nearest = axes[:, torch.randperm(m, generator=generator)[:b]]
        lit = torch.rand(b, generator=generator) < 0.5
        A = axes[:, torch.randperm(m, generator=generator)[:b]] * lit
        with recording():
            U = polar(A, nearest=nearest)
        torch.testing.assert_close(U.T @ U, torch.eye(b, dtype=A.dtype), rtol=0, atol=EXACT)
        assert float((U * A).sum()) == pytest.approx(int(lit.sum()), abs=EXACT)


def test_a_zero_matrix_keeps_everything():
    nearest = problems.orthonormal(6, 3)
    with recording():
        U = polar(torch.zeros(6, 3, dtype=torch.float64), nearest=nearest)
    torch.testing.assert_close(U, nearest, rtol=0, atol=EXACT)


def test_newton_schulz_is_the_factor_of_a_tangent_step():
    R = problems.orthonormal(9, 4).T
    A = R + 0.2 * problems.weight(4, 9)
    torch.testing.assert_close(newton_schulz_polar(A), oracles.polar_by_svd(A), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "A", [torch.zeros(2, 3, dtype=torch.float64), 10 * problems.orthonormal(3, 2).T]
)
def test_newton_schulz_says_when_it_does_not_converge(A):
    with pytest.raises(NumericalError, match="Newton-Schulz polar iteration did not converge"):
        newton_schulz_polar(A)
