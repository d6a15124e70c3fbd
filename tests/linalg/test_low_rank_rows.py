"""The nearest matrix of a rank, and the rows that it is stored as."""

import pytest
import torch

from coec.errors import NumericalError
from coec.events import recording
from coec.linalg.low_rank import pivot_rows, spectrum
from problems import gram, weight

RIDGE = 1e-3
SHAPES = [(7, 5), (5, 7), (6, 6), (30, 12)]


def metric(G, ridge=RIDGE):
    """`G + λ I`, as the docstring has it."""
    return G + ridge * G.diagonal().mean() * torch.eye(len(G), dtype=G.dtype)


def error(difference, G):
    return float((difference @ metric(G) * difference).sum())


def by_alternation(W, G, rank, seed):
    """Least error over `A B`, by least squares for one factor and then the other."""
    M, generator = metric(G), torch.Generator().manual_seed(seed)
    B = torch.randn(rank, W.shape[1], generator=generator, dtype=W.dtype)
    for _ in range(3000):
        A = W @ M @ B.T @ torch.linalg.inv(B @ M @ B.T)
        B = torch.linalg.solve(A.T @ A, A.T @ W)
    return A @ B


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_no_factors_come_nearer(shape, rank):
    W, G = weight(*shape), gram("power law", shape[1]).xx
    found = spectrum(W, G, RIDGE)
    ours = found.truncated(W, rank)
    assert torch.linalg.matrix_rank(ours) == rank
    tried = [error(W - by_alternation(W, G, rank, seed), G) for seed in range(3)]
    assert error(W - ours, G) == pytest.approx(min(tried), rel=1e-6)
    assert error(W - ours, G) == pytest.approx(float(found.errors[rank - 1]), rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_has_no_slope_in_either_factor(shape):
    W, G = weight(*shape), gram("power law", shape[1]).xx
    found = spectrum(W, G, RIDGE)
    left = found.basis[:, :3]
    residual, B = W - found.truncated(W, 3), left.T @ W
    scale = W.norm() * metric(G).norm()
    assert (residual @ metric(G) @ B.T).norm() < 1e-10 * scale * B.norm()
    assert (left.T @ residual @ metric(G)).norm() < 1e-10 * scale


def test_of_a_diagonal_the_entries_of_most_energy_stay():
    W = torch.diag(torch.tensor([1.0, 4.0, 2.0, 3.0]).double())
    G = torch.diag(torch.tensor([100.0, 1.0, 9.0, 0.01]).double())
    found = spectrum(W, G, 1e-9)
    torch.testing.assert_close(
        found.values, torch.tensor([10.0, 6.0, 4.0, 0.3]).double(), rtol=1e-4, atol=1e-4
    )
    kept = torch.diag(torch.tensor([1.0, 0.0, 2.0, 0.0]).double())
    torch.testing.assert_close(found.truncated(W, 2), kept)


def test_other_orders_and_other_axes_of_outputs_change_nothing_else():
    W, G = weight(8, 6), gram("power law", 6).xx
    turn = torch.linalg.qr(weight(8, 8, seed=1)).Q
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    plain = spectrum(W, G, RIDGE)
    for change in (turn, torch.eye(8).double()[order]):
        changed = spectrum(change @ W, G, RIDGE)
        torch.testing.assert_close(changed.values, plain.values)
        torch.testing.assert_close(changed.truncated(change @ W, 3), change @ plain.truncated(W, 3))
    scaled = spectrum(W, 1e6 * G, RIDGE)
    torch.testing.assert_close(scaled.truncated(W, 3), plain.truncated(W, 3))


@pytest.mark.parametrize("kind", ["rank-deficient", "zero"])
def test_few_or_no_inputs_are_no_failure(kind):
    W = weight(6, 9)
    G = torch.zeros(9, 9).double() if kind == "zero" else gram("power law", 9, tokens=2).xx
    with recording() as events:
        found = spectrum(W, G, RIDGE)
    assert torch.isfinite(found.truncated(W, 2)).all()
    assert bool(events) == (kind == "zero")
    torch.testing.assert_close(found.truncated(W, 6), W)


def test_what_is_not_finite_is_refused():
    with pytest.raises(NumericalError, match="NaN or Inf"):
        spectrum(weight(4, 4) * torch.inf, torch.eye(4).double(), RIDGE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_rows_and_coefficients_are_the_whole_matrix(shape, rank):
    W, G = weight(*shape), gram("power law", shape[1]).xx
    found = spectrum(W, G, RIDGE)
    near = found.truncated(W, rank)
    rows = pivot_rows(near, found.basis[:, :rank])
    torch.testing.assert_close(rows.matrix(), near, rtol=0, atol=1e-12)
    assert rows.pivots.shape == (rank, shape[1])
    assert rows.coefficients.shape == (shape[0] - rank, rank)
    assert sorted(rows.order.tolist()) == list(range(shape[0]))
    assert torch.equal(rows.pivots, near[rows.order[:rank]])
    assert rows.pivots.numel() + rows.coefficients.numel() == rank * (sum(shape) - rank)


@pytest.mark.parametrize("seed", range(4))
def test_coefficients_stay_small_where_rows_are_nearly_alike(seed):
    """The first rows taken as pivots would have coefficients of a billion."""
    W = weight(40, 24, seed)
    W[1:6] = W[:1] + 1e-9 * W[1:6]
    found = spectrum(W, torch.eye(24).double(), 1e-9)
    near = found.truncated(W, 12)
    first = near[12:] @ torch.linalg.pinv(near[:12], rtol=1e-15)
    rows = pivot_rows(near, found.basis[:, :12])
    assert first.abs().max() > 1e3
    assert rows.coefficients.abs().max() < 5
