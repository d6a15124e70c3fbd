import pytest
import torch

import problems
from coec.errors import NumericalError
from coec.linalg.stiefel import newton_schulz_inverse, retract_cayley, retract_cholesky, tangent
from tolerances import EXACT

SHAPES = [(1, 1), (1, 6), (4, 4), (3, 8)]


@pytest.mark.parametrize(("b", "k"), SHAPES)
def test_a_tangent_keeps_rows_orthonormal_to_first_order(b, k):
    R, Z = problems.orthonormal(k, b).T, problems.weight(b, k)
    xi = tangent(R, Z)
    torch.testing.assert_close(xi @ R.T, -(xi @ R.T).T, rtol=0, atol=EXACT)
    torch.testing.assert_close(tangent(R, xi), xi, rtol=0, atol=EXACT)
    # orthogonal projection: what is left has no tangent part
    assert abs(float(((Z - xi) * tangent(R, problems.weight(b, k, seed=5))).sum())) < 1e-12


@pytest.mark.parametrize(
    ("retract", "b", "k"),
    [(retract_cholesky, b, k) for b, k in SHAPES]
    + [(retract_cayley, b, k) for b, k in SHAPES if b == k],
)
def test_a_retraction_lands_on_the_manifold_in_the_direction_of_the_step(retract, b, k):
    R = problems.orthonormal(k, b).T
    xi = tangent(R, problems.weight(b, k))
    far = retract(R, 0.5 * xi / max(1.0, float(xi.norm())))
    torch.testing.assert_close(far @ far.T, torch.eye(b, dtype=R.dtype), rtol=0, atol=EXACT)
    h = 1e-6
    slope = (retract(R, h * xi) - R) / h
    torch.testing.assert_close(slope, xi, rtol=0, atol=1e-4)


def test_a_step_that_is_not_finite_is_an_error():
    R = problems.orthonormal(5, 2).T
    with pytest.raises(NumericalError, match="not finite"):
        retract_cholesky(R, torch.full_like(R, float("nan")))


def test_the_inverse_by_products():
    A = torch.eye(6, dtype=torch.float64) + 0.1 * problems.weight(6, 6)
    torch.testing.assert_close(newton_schulz_inverse(A), A.inverse(), rtol=0, atol=1e-11)
    with pytest.raises(NumericalError, match="Newton-Schulz inverse did not converge"):
        newton_schulz_inverse(5 * A)
