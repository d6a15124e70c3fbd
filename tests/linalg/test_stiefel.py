import pytest
import torch

import oracles
import problems
from coec.errors import NumericalError
from coec.linalg import right
from coec.linalg.conjugate import rounded_products
from coec.linalg.gradient import newton_schulz_inverse, newton_schulz_polar, retract_cayley
from coec.linalg.right import lower_gram, retract_cholesky, tangent_
from tolerances import EXACT

SHAPES = [(1, 1), (1, 6), (4, 4), (3, 8)]


@pytest.mark.parametrize(("b", "k"), SHAPES)
def test_a_tangent_keeps_rows_orthonormal_to_first_order(b, k):
    R, Z = problems.orthonormal(k, b).T, problems.weight(b, k)
    xi = tangent_(R, Z.clone())
    torch.testing.assert_close(xi @ R.T, -(xi @ R.T).T, rtol=0, atol=EXACT)
    torch.testing.assert_close(tangent_(R, xi.clone()), xi, rtol=0, atol=EXACT)
    # orthogonal projection: what is left has no tangent part
    assert abs(float(((Z - xi) * tangent_(R, problems.weight(b, k, seed=5))).sum())) < 1e-12


@pytest.mark.parametrize(
    ("retract", "b", "k"),
    [(retract_cholesky, b, k) for b, k in SHAPES]
    + [(retract_cayley, b, k) for b, k in SHAPES if b == k],
)
def test_a_retraction_lands_on_the_manifold_in_the_direction_of_the_step(retract, b, k):
    R = problems.orthonormal(k, b).T
    xi = tangent_(R, problems.weight(b, k))
    far = retract(R, 0.5 * xi / max(1.0, float(xi.norm())))
    torch.testing.assert_close(far @ far.T, torch.eye(b, dtype=R.dtype), rtol=0, atol=EXACT)
    h = 1e-6
    slope = (retract(R, h * xi) - R) / h
    torch.testing.assert_close(slope, xi, rtol=0, atol=1e-4)


def test_the_inverse_by_products():
    A = torch.eye(6, dtype=torch.float64) + 0.1 * problems.weight(6, 6)
    torch.testing.assert_close(newton_schulz_inverse(A), A.inverse(), rtol=0, atol=1e-11)
    with pytest.raises(NumericalError, match="Newton-Schulz inverse did not converge"):
        newton_schulz_inverse(5 * A)


@pytest.mark.parametrize("strip", [1, 3, 7])
def test_the_lower_triangle_is_all_that_a_retraction_needs(monkeypatch, strip):
    R, xi = problems.orthonormal(9, 7).T, problems.weight(7, 9)
    xi = tangent_(R, xi)
    expected = retract_cholesky(R, xi, 0.3)
    monkeypatch.setattr(right, "STRIP", strip)
    torch.testing.assert_close(lower_gram(xi).tril(), (xi @ xi.T).tril(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(retract_cholesky(R, xi, 0.3), expected, rtol=EXACT, atol=EXACT)


def test_products_are_rounded_on_tensor_cores_alone_and_for_as_long_as_asked():
    before = torch.get_float32_matmul_precision()
    with rounded_products(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with rounded_products(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == before


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
