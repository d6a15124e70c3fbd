import pytest
import torch

import oracles
import problems
from coec.events import recording
from coec.linalg import decompose
from coec.linalg.decompose import nearly_orthogonal, polar, qdwh, svd_by_polar
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


# by products, as on a CUDA device

SHAPES = [(1, 1), (5, 5), (40, 25), (60, 60)]
ORTHOGONAL = {torch.float64: 1e-12, torch.float32: 1e-5}


def conditioned(m, b, condition, seed=0):
    """P diag(σ) Qᵀ with σ from 1 to 1/condition, and its polar factor P Qᵀ."""
    P, Q = problems.orthonormal(m, b, seed), problems.orthonormal(b, b, seed + 1)
    sigma = torch.logspace(0, -torch.tensor(float(condition)).log10().item(), b)
    return (P * sigma.double()) @ Q.T, P @ Q.T


@pytest.mark.parametrize("dtype", ORTHOGONAL)
@pytest.mark.parametrize("columns", [2, 1_000, 30_000])
def test_rounding_never_hides_that_columns_are_orthonormal(dtype, columns):
    """It was measured as 3.1 eps √b for 1,024 and 2,048 columns in float32."""
    eps = torch.finfo(dtype).eps
    near = nearly_orthogonal(dtype, columns)
    assert 2 * 3.1 * eps * columns**0.5 < near
    assert near**2 < 1e-7  # what the last step leaves


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("condition", [1, 1e3, 1e6])
def test_the_polar_factor_is_the_one_of_the_svd(shape, condition):
    A, U = conditioned(*shape, condition)
    torch.testing.assert_close(qdwh(A, 1 / condition), U, rtol=0, atol=1e-9 * condition**0.5)


@pytest.mark.parametrize(
    ("dtype", "condition"),
    [(torch.float32, 1), (torch.float32, 1e4)] + [(torch.float64, 10.0**i) for i in (0, 4, 8, 12)],
)
@pytest.mark.parametrize("smallest", [0.0, 1e-4, 1.0])
def test_columns_are_orthonormal_whatever_the_estimate(dtype, condition, smallest):
    A, _ = conditioned(60, 40, condition)
    U = qdwh(A.to(dtype), smallest)
    gap = U.T @ U - torch.eye(40, dtype=dtype)
    assert float(gap.norm()) <= ORTHOGONAL[dtype]


@pytest.mark.parametrize("shape", [(5, 5), (40, 25), (25, 40), (1, 7), (7, 1)])
def test_singular_values_through_the_polar_factor(shape):
    A = problems.weight(*shape)
    U, s, Vt = svd_by_polar(A)
    r = min(shape)
    assert U.shape == (shape[0], r)
    assert Vt.shape == (r, shape[1])
    torch.testing.assert_close((U * s) @ Vt, A, rtol=0, atol=1e-11 * float(A.norm()))
    torch.testing.assert_close(s, torch.linalg.svdvals(A), rtol=0, atol=1e-11 * float(A.norm()))
    for frame in (U.T @ U, Vt @ Vt.T):
        torch.testing.assert_close(frame, torch.eye(r, dtype=A.dtype), rtol=0, atol=1e-11)


def test_small_singular_values_keep_their_digits():
    """Eigenvalues of AᵀA would have lost the small ones altogether."""
    A, _ = conditioned(30, 20, 1e10)
    _, s, _ = svd_by_polar(A)
    exact = torch.logspace(0, -10, 20).double()
    torch.testing.assert_close(s[-1], exact[-1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", ORTHOGONAL)
@pytest.mark.parametrize("rank", [0, 3, 10])
def test_by_products_it_is_nearly_the_best_and_no_worse_than_nearest(dtype, rank, monkeypatch):
    monkeypatch.setattr(decompose, "by_products", lambda A: True)
    A = (problems.weight(12, rank) @ problems.weight(rank, 10, seed=1)).to(dtype)
    nearest = problems.orthonormal(12, 10, seed=2).to(dtype)
    U = polar(A, nearest=nearest)
    assert float((U.T @ U - torch.eye(10, dtype=dtype)).norm()) <= ORTHOGONAL[dtype]
    inner = float((U * A).sum())
    assert inner >= float((nearest * A).sum())
    assert inner == pytest.approx(float(torch.linalg.svdvals(A).sum()), rel=1e-4, abs=1e-12)


def test_where_nearest_offers_no_free_direction_the_svd_decides(monkeypatch):
    monkeypatch.setattr(decompose, "by_products", lambda A: True)
    axes = torch.eye(3, 2, dtype=torch.float64)
    with recording() as events:
        U = polar(axes * torch.tensor([1.0, 0.0]), nearest=axes[:, [1, 0]])
    assert "the polar iteration did not converge: decomposed instead" in events
    torch.testing.assert_close(U.T @ U, torch.eye(2, dtype=U.dtype), rtol=0, atol=EXACT)
