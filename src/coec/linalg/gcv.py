"""Per-mode shrinkage under generalized cross-validation (METHODS §5.3)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.events import record
from coec.linalg.decompose import rounding_level

GRID_POINTS = 120
GRID_DECADES = (-4.0, 5.0)

LEAD = 1e-3
"""How far leading singular values stay above the others, so that rounding cannot exchange them."""


@dataclass(frozen=True, eq=False)
class Rescaled:
    """New singular values, and the λ that made them.

    Attributes:
        s: singular values, in the order given.
        ridge: λ as a multiple of the median mode energy; None if no mode has information.
        clamped: number of modes that the band κ stopped.
    """

    s: Float[Tensor, " b"]
    ridge: float | None
    clamped: int


def rescale(
    s: Float[Tensor, " b"],
    response: Float[Tensor, " b"],
    energy: Float[Tensor, " b"],
    *,
    ridge: float | None = None,
    kappa: float = 10.0,
    leading: Int[Tensor, " r"] | None = None,
) -> Rescaled:
    """Singular values that minimise `Σ e_i (s_i − ρ_i/e_i)²`, shrunk to the global scale.

    `s_i(λ) = (ρ_i + λ m_i)/(e_i + λ)`, prior `m_i = s* s_i`, `s* = Σ s_i ρ_i / Σ s_i² e_i`, every
    value then clamped to `[m_i/κ, κ m_i]`. Each value lies between the prior and the mode's own
    optimum, so the objective never rises. Modes whose energy is at rounding level get the prior.
    The global scale is applied only when numerator and denominator are positive; otherwise an event
    says so.

    Args:
        s: current singular values, at least 0.
        response: `ρ_i = u_iᵀ Gyx r_i`.
        energy: `e_i = r_iᵀ Gxx r_i`.
        ridge: λ relative to the median energy; chosen by generalised cross-validation if None.
        kappa: κ, at least 1.
        leading: modes that must keep the largest values, as they have them in `s`; see `led`.
    """
    # The prior m = s* s, which modes without information keep.
    scale = global_scale(float((s * response).sum()), float((s.square() * energy).sum()))
    prior = s * scale
    informative = energy > rounding_level(energy)
    if not informative.any():
        return Rescaled(prior, None, 0)
    # λ → s(λ) = (ρ + λ m)/(e + λ), limited to the band [m/κ, κ m]
    e, rho, m = energy[informative], response[informative], prior[informative]
    median = float(e.median())
    relative = choose_ridge(e, rho, m, median) if ridge is None else ridge
    shrunk = (rho + relative * median * m) / (e + relative * median)
    banded = shrunk.clamp(min=m / kappa, max=m * kappa)
    out = prior.clone()
    out[informative] = banded
    if leading is not None:
        # The weights of what shrinking minimises: without the band the objective cannot rise here.
        out = led(out, energy.clamp_min(rounding_level(energy)) + relative * median, leading)
        # The band and the lead together can still raise it. The prior is in order, and cannot.
        before = _objective(prior, response, energy)
        slack = 16 * torch.finfo(s.dtype).eps * abs(before)
        if _objective(out, response, energy) > before + slack:
            record("keeping the lead would have raised the error: one scale for all modes instead")
            out = prior
    return Rescaled(out, relative, int((banded != shrunk).sum()))


def _objective(
    s: Float[Tensor, " b"], response: Float[Tensor, " b"], energy: Float[Tensor, " b"]
) -> float:
    return float((s.square() * energy).sum() - 2 * (s * response).sum())


def global_scale(linear: float, quadratic: float) -> float:
    """`s* = ⟨Gyx, Ŵ⟩ / ⟨Ŵ, Ŵ Gxx⟩` of these two; 1, and an event, where it is not positive."""
    scale = linear / quadratic if linear > 0 and quadratic > 0 else 0.0
    if 0 < scale < float("inf"):
        return scale
    record("the global scale is not positive: not applied")
    return 1.0


def led(
    s: Float[Tensor, " b"], weight: Float[Tensor, " b"], rows: Int[Tensor, " r"]
) -> Float[Tensor, " b"]:
    """The values nearest to s such that `rows` have the largest, by the factor 1 + `LEAD`.

    Solves `min Σ wᵢ (xᵢ − sᵢ)²  s.t.  xⱼ ≤ (1 − LEAD) xᵢ` for i in `rows` and every other j: values
    that are out of order are pooled at one threshold τ, where what pulls it up and down balances.

    Args:
        s: at least 0.
        weight: positive.
        rows: distinct indices.
    """
    # x = factor · y turns both bounds into one threshold τ: y ≥ τ for `rows`, y ≤ τ for the others.
    inside = torch.zeros(len(s), dtype=torch.bool, device=s.device)
    inside[rows] = True
    factor = torch.where(inside, 1.0, 1 - LEAD).to(s)
    v, order = (s / factor).sort()
    w, top = (weight * factor.square())[order], inside[order]
    # At τ = v: rows below it are raised to it, others above it are lowered.
    zero = torch.zeros_like(w)
    # The derivative at τ is pull · τ − goal; both are sums over the values that τ moves.
    raised, lowered = torch.where(top, w, zero), torch.where(top, zero, w)
    pull = raised.cumsum(0) + (lowered.sum() - lowered.cumsum(0))
    goal = (raised * v).cumsum(0) + ((lowered * v).sum() - (lowered * v).cumsum(0))
    # It rises with τ: the last breakpoint where it is not yet positive lies just before its zero.
    balanced = ((pull * v - goal) <= 0).nonzero().flatten()
    if len(balanced) == 0 or not float(pull[balanced[-1]]) > 0:
        return s
    tau = goal[balanced[-1]] / pull[balanced[-1]]
    return torch.where(inside, s.clamp_min(tau), s.clamp_max((1 - LEAD) * tau))


def choose_ridge(
    e: Float[Tensor, " n"], rho: Float[Tensor, " n"], m: Float[Tensor, " n"], median: float
) -> float:
    """The minimiser of GCV over 120 log-spaced λ in [1e-4, 1e5] × median energy, relative to it.

    `GCV(λ) = Σ e_i (s_i(λ) − s_i*)² / (1 − df/M)²`. Both are 0 at λ = 0; with
    `s_i(λ) − s_i* = λ (m_i − s_i*)/(e_i + λ)` and `1 − df/M = λ/M Σ 1/(e_i + λ)` the λ cancels,
    and the quotient below is exact at both ends. Ties break toward more shrinkage.
    """
    grid = torch.logspace(*GRID_DECADES, GRID_POINTS, dtype=torch.float64, device=e.device)
    # In units of the median energy, which is also λ's: the grid then is the same for every site.
    e, rho, m = e.double() / median, rho.double() / median, m.double()
    inverse = 1 / (e[None, :] + grid[:, None])
    # Σ e (s(λ) − s*)² = λ² Σ misfit/(e + λ)² and 1 − df/M = λ · mean 1/(e + λ): λ² cancels.
    misfit = (e * m - rho).square() / e
    gcv = (misfit * inverse.square()).sum(dim=1) / inverse.mean(dim=1).square()
    # argmin of the reversed scores: of equal ones the largest λ.
    best = len(gcv) - 1 - int(gcv.flip(0).argmin())
    return float(grid[best])
