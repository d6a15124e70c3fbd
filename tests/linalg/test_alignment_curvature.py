"""The curvature of the alignment penalty in the preconditioner, against dense matrices."""

import pytest
import torch

import problems

B, K, ROWS = 6, 9, (4, 0, 2)


def aligned(r):
    return problems.alignment(K, r, torch.tensor(ROWS))


def frame(seed=0):
    return problems.orthonormal(K, B, seed + 2).T.contiguous()


def gauss_newton(alignment, R):
    """The Hessian of `λ_a 𝒜` in R without the residual's own curvature, by autograd."""

    def residual(flat):
        D = flat.reshape(B, K)[alignment.rows] @ alignment.writer
        return (D.T @ D - alignment.target).flatten()

    J = torch.autograd.functional.jacobian(residual, R.flatten())
    return 2 * alignment.weight / len(ROWS) ** 2 * J.T @ J


@pytest.mark.parametrize("r", [1, 2, 4])
def test_division_is_the_inverse_of_the_whole_hessian(r):
    alignment, R = aligned(r), frame()
    curvature = torch.rand(B, K, dtype=torch.float64) + 0.1
    X = problems.weight(B, K)
    H = curvature.flatten().diag() + gauss_newton(alignment, R)
    expected = torch.linalg.solve(H, X.flatten()).reshape(B, K)
    got = alignment.divided(R, 1 / curvature)(X.clone())
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("r", [1, 2, 4])
def test_planes_give_way_as_far_as_the_penalty_lets_them(r):
    """The inverse of the planes' curvature and the penalty's, on all skew matrices."""
    alignment, R = aligned(r), frame()
    softness = torch.rand(B, B, dtype=torch.float64) + 0.1
    softness = softness + softness.T
    skew = problems.weight(B, B)
    skew = skew - skew.T
    i, j = torch.triu_indices(B, B, 1)

    def generator(n):
        J = torch.zeros(B, B, dtype=torch.float64)
        J[i[n], j[n]], J[j[n], i[n]] = 1.0, -1.0
        return (J @ R).flatten()

    planes = torch.stack([generator(n) for n in range(len(i))])
    # Half the second derivative, as everywhere among planes.
    H = (1 / softness[i, j]).diag() + planes @ gauss_newton(alignment, R) @ planes.T / 2
    expected = torch.linalg.solve(H, skew[i, j])
    got = alignment.resisted(R, softness, skew * softness)
    torch.testing.assert_close(got[i, j], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got, -got.T)
