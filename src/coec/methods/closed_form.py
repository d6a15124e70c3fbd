"""The compensations with a closed form (METHODS §4)."""

import torch
from jaxtyping import Float
from torch import Tensor

from coec.config.recipe import RidgeOptions
from coec.linalg.decompose import polar, svd
from coec.linalg.gcv import global_scale
from coec.linalg.spd import channel_scale, solve_right
from coec.methods.objective import OutputProblem, kept_columns
from coec.types import SiteProblem, SiteResult

PRIOR, LARGEST = 9, 0.3
"""Tokens for every column that a correction of 0 counts as, and the largest λ (docs/lab/LOG.md)."""


def none(problem: SiteProblem) -> SiteResult:
    """Prune only: `W̃ = W₀[:, K]`.

    Source: Wanda-sp; the baseline of every comparison.
    """
    return SiteResult(kept_columns(problem.dense, problem.kept))


def bias(problem: SiteProblem) -> SiteResult:
    """The slice, and the mean output of the removed columns as a bias: `W₀[:, dropped] μ_dropped`.

    With a target T the bias is `T μ − W_K μ_K`.

    Source: FLAP (An et al. 2024).
    """
    W, dropped = problem.dense, problem.kept.dropped()
    mean = problem.gram.mean.to(W.dtype)
    lost = W[:, dropped] @ mean[dropped]
    if problem.target is not None:
        # W_dropped μ_dropped + (T − W₀) μ = T μ − W_K μ_K
        lost = lost + (problem.target - W) @ mean
    return SiteResult(kept_columns(W, problem.kept), bias=lost)


def least_squares(problem: SiteProblem, options: RidgeOptions) -> SiteResult:
    """Ridge regression of the wanted output on the kept inputs: `W̃ = Gyx (Gxx + Λ)⁻¹`.

    A ridge of 0 gives the minimum-norm least-squares solution.

    Source: ordinary ridge regression; the unconstrained refit, for comparison.
    """
    start = torch.zeros_like(kept_columns(problem.dense, problem.kept))
    return _drawn_to(start, problem, options)


def ridge_to_slice(problem: SiteProblem, options: RidgeOptions) -> SiteResult:
    """Ridge on the correction: `W̃ = W_K + (Gyx − W_K Gxx)(Gxx + Λ)⁻¹`.

    The penalty is on the distance to the slice, so the error on the calibration data is never above
    that of the slice, for any Λ.

    Source: this project.
    """
    return _drawn_to(kept_columns(problem.dense, problem.kept), problem, options)


def _drawn_to(
    start: Float[Tensor, "m k"], problem: SiteProblem, options: RidgeOptions
) -> SiteResult:
    """Ridge regression whose penalty is on the distance to S: `S + (Gyx − S Gxx)(Gxx + Λ)⁻¹`.

    Λ is λ times the mean diagonal of Gxx. For `ridge = auto` and `energy` it is λ diag Gxx, with
    λ = min(0.3, 9 k/N) and 1.
    """
    target = OutputProblem.of_site(problem)
    # Gyx − S Gxx → times (Gxx + Λ)⁻¹
    residual = target.Gyx - start @ target.Gxx
    if isinstance(options.ridge, str):
        known = {"auto": ridge_for(len(target.Gxx), problem.gram.tokens), "energy": 1.0}
        ridge = known[options.ridge]
        correction = solve_by_energy(residual, target.Gxx, ridge, target.precision)
    else:
        ridge = options.ridge
        correction = solve_right(residual, target.Gxx, ridge, target.precision)
    return SiteResult(start + correction, diagnostics={"ridge": ridge})


def ridge_for(columns: int, tokens: int) -> float:
    """`λ = min(0.3, 9 k/N)`: a correction of 0 counts as nine tokens for every column."""
    return min(LARGEST, PRIOR * columns / max(tokens, 1))


def solve_by_energy(
    B: Float[Tensor, "m k"], A: Float[Tensor, "k k"], ridge: float, precision: float = 0.0
) -> Float[Tensor, "m k"]:
    """`B (A + λ diag A)⁻¹`.

    Every channel is penalised by its own energy, so that the outputs do not depend on the units of
    channels.

    Args:
        B: right-hand side.
        A: Gram of the k columns.
        ridge: λ.
        precision: of the entries of A, see `coec.linalg.spd.noise`.
    """
    # A common ridge over channels of unit energy; one without any keeps its unit.
    scale = channel_scale(A)
    scaled = A / scale / scale[:, None]
    return solve_right(B / scale, scaled, ridge, precision) / scale


def rcpu(problem: SiteProblem) -> SiteResult:
    """Apply one left rotation and one scale: `W̃ = s* Q W_K`, `Q = polar(Gyx W_Kᵀ)`.

    Solves `min ‖Y − s Q W_K X_K‖_F  s.t.  QᵀQ = I`; `s* = ⟨Gyx, Q W_K⟩ / ⟨Q W_K, Q W_K Gxx⟩`.
    Computed on the thin SVD `W_K = U diag(s) R`:
    `Q U = polar(Gyx Rᵀ diag(s))`, which needs no m×m factor. The scale is applied only when it is
    positive; otherwise an event says so.

    Source: RCPU.
    """
    target = OutputProblem.of_site(problem)
    U, s, R = svd(kept_columns(problem.dense, problem.kept))
    # U → Q U = polar(Gyx Rᵀ diag(s)) → Ŵ = Q W_K → s* Ŵ
    W = (polar(target.Gyx @ (s[:, None] * R).T, nearest=U) * s) @ R
    linear, quadratic = float((target.Gyx * W).sum()), float((W @ target.Gxx * W).sum())
    scale = global_scale(linear, quadratic)
    return SiteResult(W * scale, diagnostics={"scale": scale})
