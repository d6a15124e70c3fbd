import pytest
import torch

import oracles
import problems
from coec.events import recording
from coec.linalg.decompose import rounding_level
from coec.linalg.spd import regularized_inverse, solve_right
from tolerances import CLOSED_FORM


@pytest.mark.parametrize(
    ("entries", "alpha", "raised"),
    [
        ([4.0, 0.0, 9.0], 0.5, [2.0, 0.0, 3.0]),
        ([1.0, 1e-17], 0.1, [1.0, 0.0]),  # noise is not magnified to (1e-17)^0.1 = 0.02
    ],
)
def test_a_diagonal_matrix_is_raised_entry_by_entry(entries, alpha, raised):
    G, expected = (torch.tensor(e, dtype=torch.float64).diag() for e in (entries, raised))
    torch.testing.assert_close(oracles.power(G, alpha), expected)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("diagonal", [[1.0, -0.1], [-1.0, -1.0]])
def test_an_indefinite_matrix_is_clamped_and_said_so(diagonal, alpha):
    G = torch.tensor(diagonal, dtype=torch.float64).diag()
    with recording() as events:
        torch.testing.assert_close(oracles.power(G, alpha), G.clamp_min(0))
    share = "-1.0e-01" if diagonal[0] > 0 else "-1.0e+00"
    assert events == [f"indefinite Gram: smallest eigenvalue {share} of the largest, clamped at 0"]


def test_the_first_power_forgives_what_float32_products_explain():
    """-3e-6 of the diagonal, -8e-8 of the largest eigenvalue."""
    G = torch.ones(40, 40, dtype=torch.float64) - 3e-6 * torch.eye(40, dtype=torch.float64)
    with recording() as events:
        assert oracles.power(G, 1) is G
    assert events == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [16, 200, 700])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_eigenvalues_that_are_zero_lie_below_the_rounding_level(n, dtype, decay):
    X = torch.randn(n, n // 2, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    X *= torch.arange(1, n // 2 + 1) ** -decay
    mu = torch.linalg.eigvalsh((X @ X.T).to(dtype))
    assert float(mu[: n - n // 2].abs().max()) < 0.5 * rounding_level(mu)
    assert float(mu[n - n // 2]) > rounding_level(mu)


@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 10.0])
def test_the_solution_satisfies_its_equation(ridge):
    A, B = problems.gram("power law", 8).xx, problems.weight(5, 8)
    X = solve_right(B, A, ridge)
    shifted = A + ridge * A.diagonal().mean() * torch.eye(8, dtype=A.dtype)
    torch.testing.assert_close(X @ shifted, B, rtol=0, atol=CLOSED_FORM)


def test_a_ridge_that_is_not_enough_falls_back_and_says_so():
    A = problems.gram("indefinite", 8).xx
    with recording() as events:
        X = solve_right(problems.weight(5, 8), A, 1e-9)
    assert torch.isfinite(X).all()
    assert "not positive definite" in events[0]


def test_a_regularized_inverse_inverts_in_its_units():
    G = problems.gram("power law", 9).xx
    for factor in (1.0, 2.0**600, 2.0**-600):
        inverse, ridge = regularized_inverse(G * factor, 1e-3)
        unit = ridge / float(1e-3 * G.diagonal().mean())
        regular = G * unit + ridge * torch.eye(9, dtype=G.dtype)
        torch.testing.assert_close(
            inverse @ regular, torch.eye(9, dtype=G.dtype), rtol=0, atol=1e-9
        )
        assert torch.equal(inverse, inverse.T)
        assert inverse.is_contiguous()


@pytest.mark.parametrize("negative", [-1e-4, -0.9e-3 / 2, -0.1])
def test_negative_eigenvalues_do_not_enlarge_a_regularized_inverse(negative):
    """Neither those that Cholesky finds nor those that the ridge only just outweighs."""
    G = torch.diag(torch.tensor([1.0, negative], dtype=torch.float64))
    with recording() as events:
        inverse, ridge = regularized_inverse(G, 1e-3)
    assert float(inverse.max()) <= 2 / ridge
    assert bool(events) == (negative < -2.5e-4)
