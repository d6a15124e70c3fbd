import pytest
import torch

import oracles
import problems
from coec.events import recording
from coec.linalg.gcv import LEAD, global_scale, led, rescale
from tolerances import CLOSED_FORM


def modes(seed=0, n=9):
    """s, ρ, e of a random problem."""
    generator = torch.Generator().manual_seed(seed)
    s = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
    e = torch.logspace(0, -3, n, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return s, e * (1.3 * s + 0.3 * noise), e


def scale_of(s, rho, e):
    return global_scale(float((s * rho).sum()), float((s.square() * e).sum()))


def objective(s, rho, e):
    return float((s.square() * e).sum() - 2 * (s * rho).sum())


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_literal_rule(seed):
    """Against an SVD, a grid and degrees of freedom written out (n odd: one median only)."""
    m, k = 7, 9
    G, W = problems.gram("power law", k, seed=seed).xx, problems.weight(m, k, seed=seed)
    Gyx = problems.weight(m, k, seed=seed + 50) @ G + W @ G
    U, s, Vt = torch.linalg.svd(W, full_matrices=False)
    out = rescale(s, ((U.T @ Gyx) * Vt).sum(1), ((Vt @ G) * Vt).sum(1))
    expected = oracles.gcv_rescale(W, G, Gyx)
    torch.testing.assert_close((U * out.s) @ Vt, expected, rtol=0, atol=CLOSED_FORM)


@pytest.mark.parametrize("ridge", [None, 1e-9])
@pytest.mark.parametrize("seed", range(8))
def test_no_ridge_raises_the_objective_or_leaves_the_band(ridge, seed):
    s, rho, e = modes(seed)
    out = rescale(s, rho, e, ridge=ridge)
    assert objective(out.s, rho, e) <= objective(s, rho, e) + 1e-14
    rho[2], rho[5] = 1e3, -1e3
    out = rescale(s, rho, e, ridge=ridge, kappa=2.0)
    ratio = out.s / (s * scale_of(s, rho, e))
    assert bool(((ratio <= 2 * (1 + 1e-12)) & (ratio >= (1 - 1e-12) / 2)).all())
    assert out.clamped > 0


def test_a_mode_without_energy_gets_the_prior_and_no_vote():
    s, rho, e = modes()
    e[-1], rho[-1] = 1e-30, 1e3
    out = rescale(s, rho, e)
    trimmed = rescale(s[:-1], rho[:-1], e[:-1])
    assert float(out.s[-1]) == pytest.approx(float(s[-1]) * scale_of(s, rho, e))
    assert out.ridge == trimmed.ridge


@pytest.mark.parametrize(
    ("linear", "quadratic", "scale"), [(-1.0, 2.0, 1.0), (1.0, -2.0, 1.0), (4.0, 2.0, 2.0)]
)
def test_a_scale_is_applied_only_when_positive(linear, quadratic, scale):
    with recording() as events:
        assert global_scale(linear, quadratic) == scale
    assert events == ["the global scale is not positive: not applied"] * (scale == 1)


# leading modes


def pooled_slowly(s, w, rows):
    """Every threshold of a fine grid, the cheapest kept."""
    inside = torch.zeros(len(s), dtype=torch.bool)
    inside[rows] = True
    best = (float("inf"), s)
    for tau in torch.linspace(0, float(s.max()) / (1 - LEAD), 5001, dtype=s.dtype):
        x = torch.where(inside, s.clamp_min(tau), s.clamp_max((1 - LEAD) * tau))
        cost = float((w * (x - s).square()).sum())
        if cost < best[0]:
            best = (cost, x)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_leading_modes_are_put_in_the_lead_at_the_least_cost(seed):
    s, _, e = modes(seed)
    w = e.flip(0) + 0.05
    rows = torch.tensor([1, 4, 6])
    x = led(s, w, rows)
    others = torch.tensor([j for j in range(len(s)) if j not in rows])
    assert float(x[others].max()) <= (1 - LEAD) * float(x[rows].min()) * (1 + 1e-12)
    assert float((w * (x - s).square()).sum()) <= pooled_slowly(s, w, rows)[0] * (1 + 1e-6)


@pytest.mark.parametrize("kappa", [1.5, 10.0])
@pytest.mark.parametrize("ridge", [None, 0.3])
@pytest.mark.parametrize("seed", range(60))
def test_keeping_the_lead_does_not_raise_the_objective(ridge, seed, kappa):
    s, rho, e = modes(seed)
    rho = rho + (seed % 3) * (rho - rho.mean())
    rows = s.topk(3).indices
    s = led(s, e, rows)
    with recording() as events:
        out = rescale(s, rho, e, ridge=ridge, kappa=kappa, leading=rows)
    assert not any("keeping the lead" in event for event in events)
    assert objective(out.s, rho, e) <= objective(s, rho, e) + 1e-14
    assert set(out.s.topk(3).indices.tolist()) == set(rows.tolist())
