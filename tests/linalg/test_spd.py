import pytest
import torch

import oracles
import problems
from coec.events import recording
from coec.linalg.decompose import rounding_level
from coec.linalg.spd import noise, regularized_inverse, solve_right
from tolerances import CLOSED_FORM


def test_powers_multiply():
    G = problems.gram("power law", 9).xx
    torch.testing.assert_close(oracles.power(G, 0.5) @ oracles.power(G, 0.5), G, rtol=0, atol=1e-11)
    torch.testing.assert_close(
        oracles.power(oracles.power(G, 0.6), 0.5), oracles.power(G, 0.3), rtol=0, atol=1e-9
    )
    assert oracles.power(G, 1) is G


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


@pytest.mark.parametrize("alpha", [0.9, 1.0])
def test_rounding_below_zero_is_no_event(alpha):
    G = torch.diag(torch.tensor([1.0, -1e-8], dtype=torch.float64))
    with recording() as events:
        oracles.power(G, alpha)
    assert events == []


@pytest.mark.parametrize("kind", ["white", "rank one", "rank deficient", "dead channels", "zero"])
def test_the_first_power_is_the_matrix_itself_wherever_inputs_made_it(kind):
    for d in (1, 3, 8):
        G = problems.gram(kind, d).xx
        assert oracles.power(G, 1) is G


def test_the_first_power_forgives_what_float32_products_explain():
    """-3e-6 of the diagonal, -8e-8 of the largest eigenvalue."""
    G = torch.ones(40, 40, dtype=torch.float64) - 3e-6 * torch.eye(40, dtype=torch.float64)
    with recording() as events:
        assert oracles.power(G, 1) is G
    assert events == []


def test_rounding_level_of_nothing_is_zero():
    assert rounding_level(torch.zeros(0)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [16, 200, 700])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_eigenvalues_that_are_zero_lie_below_the_rounding_level(n, dtype, decay):
    X = torch.randn(n, n // 2, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    X *= torch.arange(1, n // 2 + 1) ** -decay
    mu = torch.linalg.eigvalsh((X @ X.T).to(dtype))
    assert float(mu[: n - n // 2].abs().max()) < 0.5 * rounding_level(mu)
    assert float(mu[n - n // 2]) > rounding_level(mu)


def test_the_many_small_directions_of_a_wide_gram_are_no_noise_in_float32():
    """As at a down_proj of Llama-3.1-8B, whose float32 solves fitted a quarter of the energy."""
    mu = torch.full((14336,), 1 / 4096)
    mu[-1] = 1.0
    assert bool((mu > noise(mu, torch.empty(1).expand(14336, 14336), mu, 0.0)).all())


@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 10.0])
def test_the_solution_satisfies_its_equation(ridge):
    A, B = problems.gram("power law", 8).xx, problems.weight(5, 8)
    X = solve_right(B, A, ridge)
    shifted = A + ridge * A.diagonal().mean() * torch.eye(8, dtype=A.dtype)
    torch.testing.assert_close(X @ shifted, B, rtol=0, atol=CLOSED_FORM)


def test_without_a_ridge_it_is_the_minimum_norm_solution():
    A = problems.gram("rank deficient", 8).xx
    B = problems.weight(5, 8) @ A
    expected = B @ torch.linalg.pinv(A, hermitian=True)
    torch.testing.assert_close(solve_right(B, A, 0.0), expected, rtol=0, atol=1e-8)


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


def test_nothing_at_all_is_inverted_as_the_identity():
    zero = torch.zeros(3, 3, dtype=torch.float64)
    inverse, ridge = regularized_inverse(zero, 1e-3)
    assert torch.equal(inverse, torch.eye(3, dtype=torch.float64))
    assert ridge == 1
