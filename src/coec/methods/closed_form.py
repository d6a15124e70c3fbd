"""The compensations with a closed form (METHODS §4)."""

import torch
from jaxtyping import Float
from torch import Tensor

from coec.config.recipe import RidgeOptions
from coec.linalg.decompose import polar, svd
from coec.linalg.gcv import global_scale
from coec.linalg.spd import solve_right
from coec.methods.objective import OutputProblem, kept_columns
from coec.types import SiteProblem, SiteResult

PRIOR, LARGEST = 9, 0.3
"""Where `ridge = auto`: tokens for every column that the slice counts as, and the largest λ
(docs/lab/LOG.md)."""


def none(problem: SiteProblem) -> SiteResult:
    """Prune only: `W̃ = W₀[:, K]`.

    Source: Wanda-sp; the baseline of every comparison.
    """
    return SiteResult(kept_columns(problem.weight, problem.kept))


def bias(problem: SiteProblem) -> SiteResult:
    """The slice, plus the mean output of what is removed as a bias: `W₀[:, dropped] μ_dropped`.

    With a target T it is what the slice lacks of the target's mean output, `T μ − W_K μ_K`.

    Source: FLAP (An et al. 2024).
    """
    W, dropped = problem.weight, problem.kept.dropped()
    mean = problem.gram.mean.to(W.dtype)
    lost = W[:, dropped] @ mean[dropped]
    if problem.target is not None:
        # W_dropped μ_dropped + (T − W₀) μ = T μ − W_K μ_K
        lost = lost + (problem.target - W) @ mean
    return SiteResult(kept_columns(W, problem.kept), bias=lost)


def least_squares(problem: SiteProblem, options: RidgeOptions) -> SiteResult:
    """Ridge regression of the wanted output on the kept inputs: `W̃ = Gyx (Gxx + Λ)⁻¹`.

    A ridge of 0 gives the minimum-norm least-squares solution.

    Source: ordinary ridge regression; the unconstrained refit the rotations are compared with.
    """
    start = torch.zeros_like(kept_columns(problem.weight, problem.kept))
    return _drawn_to(start, problem, options)


def ridge_to_slice(problem: SiteProblem, options: RidgeOptions) -> SiteResult:
    """Ridge on the correction: `W̃ = W_K + (Gyx − W_K Gxx)(Gxx + Λ)⁻¹`.

    The penalty is on the distance to the slice, so on the calibration data it is never worse than
    no compensation, for any Λ.

    Source: this project.
    """
    return _drawn_to(kept_columns(problem.weight, problem.kept), problem, options)


def _drawn_to(
    start: Float[Tensor, "m k"], problem: SiteProblem, options: RidgeOptions
) -> SiteResult:
    """Ridge regression whose penalty is on the distance to S: `S + (Gyx − S Gxx)(Gxx + Λ)⁻¹`.

    Λ is λ times the mean diagonal of Gxx. With `ridge = auto` it is `λ diag Gxx`, λ so large that S
    counts as `PRIOR` tokens for every column, or `LARGEST`.
    """
    target = OutputProblem.of_site(problem)
    scale = None
    if not isinstance(options.ridge, str):
        ridge = options.ridge
    else:
        energy = target.Gxx.diagonal().clone()  # a view would keep Gxx beside its successor
        ridge = min(LARGEST, PRIOR * len(energy) / max(problem.gram.tokens, 1))
        # A common ridge over channels of unit energy; one without any keeps its unit.
        scale = torch.where(energy > 0, energy.sqrt(), 1.0)
        target, start = target.scaled(scale), start * scale
    # Gyx − S Gxx → times (Gxx + λI)⁻¹
    residual = target.Gyx - start @ target.Gxx
    correction = solve_right(residual, target.Gxx, ridge, target.precision)
    W = start + correction
    return SiteResult(W if scale is None else W / scale, diagnostics={"ridge": ridge})


def rcpu(problem: SiteProblem) -> SiteResult:
    """Apply one left rotation and one scale: `W̃ = s* Q W_K`, `Q = polar(Gyx W_Kᵀ)`.

    Solves `min ‖Y − s Q W_K X_K‖_F  s.t.  QᵀQ = I`; `s* = ⟨Gyx, Q W_K⟩ / ⟨Q W_K, Q W_K Gxx⟩`.
    Computed on the thin SVD `W_K = U diag(s) R`:
    `Q U = polar(Gyx Rᵀ diag(s))`, which needs no m×m factor. The scale is applied only when it is
    positive; otherwise an event says so.

    Source: RCPU.
    """
    target = OutputProblem.of_site(problem)
    U, s, R = svd(kept_columns(problem.weight, problem.kept))
    # U → Q U = polar(Gyx Rᵀ diag(s)) → Ŵ = Q W_K → s* Ŵ
    W = (polar(target.Gyx @ (s[:, None] * R).T, nearest=U) * s) @ R
    linear, quadratic = float((target.Gyx * W).sum()), float((W @ target.Gxx * W).sum())
    scale = global_scale(linear, quadratic)
    return SiteResult(W * scale, diagnostics={"scale": scale})
