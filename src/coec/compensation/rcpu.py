"""RCPU: one left rotation and one scale (METHODS §4)."""

from coec.compensation.objective import OutputProblem, kept_columns
from coec.events import record
from coec.linalg.decompose import svd
from coec.linalg.polar import polar
from coec.types import SiteProblem, SiteResult


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
    W = (polar(target.Gyx @ (s[:, None] * R).T, nearest=U) * s) @ R
    linear, quadratic = float((target.Gyx * W).sum()), float((W @ target.Gxx * W).sum())
    scale = 1.0
    if linear > 0 and quadratic > 0:
        scale = linear / quadratic
    else:
        record("the global scale is not positive: not applied")
    return SiteResult(W * scale, diagnostics={"scale": scale})
