"""The ridge of a regression, chosen from the data (METHODS §4)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from coec.compensation.objective import OutputProblem
from coec.linalg.decompose import eigh

GRID: tuple[float, ...] = tuple(torch.logspace(-4, 1, 25, dtype=torch.float64).tolist())
"""What is tried, relative to the mean diagonal of Gxx."""


def channel_scale(Gxx: Float[Tensor, "k k"], *, standardize: bool) -> Float[Tensor, " k"]:
    """Return the unit of every channel: the root of its energy where it is standardised, else 1.

    A channel without energy keeps its own unit, 1.
    """
    energy = Gxx.diagonal()
    return torch.where(energy > 0, energy.sqrt(), 1.0) if standardize else torch.ones_like(energy)


def best_ridge(
    fitted: OutputProblem,
    start: Float[Tensor, "m k"],
    tokens: int,
    *,
    standardize: bool = False,
    unexplained: float = 0.0,
    held_out: OutputProblem | None = None,
) -> float:
    """Return the λ of `W̃ = S + (Gyx − S Gxx)(Gxx + λ I)⁻¹` with the lowest error on other text.

    `min over GRID of 𝓛(W̃)` on held-out statistics. Where there are none, of generalized
    cross-validation, `RSS(λ) / (1 − df(λ)/N)²` with `df = tr Gxx (Gxx + λ I)⁻¹`, which all outputs
    share. With `Gxx = Q diag(μ) Qᵀ`, `P = (Gyx − S Gxx) Q` and `f = 1/(μ + λ)` either is quadratic
    in f. Of equal scores the larger λ is taken.

    Args:
        fitted: the problem that the regression solves.
        start: S, what the penalty draws to: the slice, or 0.
        tokens: N. Weights of tokens are not counted, which would make it less.
        standardize: over channels of unit energy, so that λ I stands for `λ diag Gxx`.
        unexplained: energy of the outputs beside that of `T x`; it tells noise from signal.
        held_out: the problem over further windows.
    """
    scale = channel_scale(fitted.Gxx, standardize=standardize)
    fitted, start = fitted.scaled(scale), start * scale
    mu, Q = eigh(fitted.Gxx)
    mu = mu.clamp_min(0)
    # Gxx → Q, μ; W̃(λ) = S + P diag(f) Qᵀ with one row of f for every λ
    P = (fitted.Gyx - start @ fitted.Gxx) @ Q
    grid = torch.tensor(GRID, dtype=mu.dtype, device=mu.device)
    unit = float(fitted.Gxx.diagonal().mean())
    f = 1 / (mu + grid[:, None] * (unit if unit > 0 else 1.0))
    if held_out is not None:
        held_out = held_out.scaled(scale)
        # 𝓛 over the validation windows, but for constants: fᵀ (PᵀP ∘ Qᵀ Gxx Q) f − 2 fᵀ slope
        curvature = (P.T @ P).mul_(Q.T @ held_out.Gxx @ Q)
        slope = (P * ((held_out.Gyx - start @ held_out.Gxx) @ Q)).sum(dim=0)
        score = ((f @ curvature) * f).sum(dim=1) - 2 * f @ slope
    else:
        # RSS(λ) = RSS of S + Σ f (μ f − 2) ‖P_i‖², over (N − df)², which is GCV but for a factor N²
        lost = fitted.error(start) * fitted.yy + unexplained
        rss = lost + (f * (mu * f - 2)) @ P.square().sum(dim=0)
        freedom = tokens - (mu * f).sum(dim=1)
        score = torch.where(freedom > 0, rss.clamp_min(0) / freedom.square(), math.inf)
    # argmin of the reversed scores: of equal ones the largest λ.
    return GRID[len(GRID) - 1 - int(score.flip(0).argmin())]
