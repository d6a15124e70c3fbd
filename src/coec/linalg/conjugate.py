"""Preconditioned Riemannian conjugate gradient on St(b, k) (METHODS §5.4.2)."""

from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.linalg.right import RightProblem
from coec.linalg.stiefel import retract_cholesky, tangent
from coec.types import Convergence

ARMIJO = 1e-4
BACKTRACKS = 30
SHIFT = 0.05
"""The preconditioner's ε, relative to the mean of the Hessian's diagonal (see docs/LOG.md)."""


def conjugate(
    problem: RightProblem,
    R: Float[Tensor, "b k"],
    *,
    tolerance: float = 1e-6,
    iterations: int = 200,
) -> tuple[Float[Tensor, "b k"], Convergence]:
    """Conjugate gradient from R, Polak-Ribière+, with Armijo backtracking on the true objective.

    The Euclidean Hessian `2t² diag(s²) ⊗ Gxx / yy` is diagonal in the eigenbasis of Gxx, so the
    preconditioner is an elementwise division. Every accepted step lowers the objective.

    Args:
        problem: what to minimise, in the eigenbasis of Gxx.
        R: the start, orthonormal rows.
        tolerance: stop when a step lowers the objective by less than this fraction of it.
        iterations: at most this many steps.
    """
    value, t = problem.objective(R), problem.scale(R)
    H = _hessian(problem, t)
    if not bool(H.any()):
        return R, Convergence(True, 0, "nothing to rotate: no energy in the kept inputs")
    g = tangent(R, problem.gradient(R, t))
    z = _precondition(R, g, H)
    d, gz = -z, float((g * z).sum())
    history = [value]
    for _ in range(iterations):
        slope = float((g * d).sum())
        if not slope < 0:
            d, slope = -z, -gz
        if not slope < -1e-16 * abs(value):
            return R, _ended(True, history, "gradient vanished")
        curvature = float((H * d.square()).sum())
        moved = _line_search(
            problem, R, d, value, slope, -slope / curvature if curvature > 0 else 1.0
        )
        if moved is None:
            return R, _ended(True, history, "no descent at rounding level")
        R, new = moved
        decrease, value, t = value - new, new, problem.scale(R)
        history.append(value)
        if decrease < tolerance * abs(value):
            return R, _ended(True, history, f"relative decrease below {tolerance:g}")
        g_old, H = tangent(R, g), _hessian(problem, t)
        g = tangent(R, problem.gradient(R, t))
        z = _precondition(R, g, H)
        gz_old, gz = gz, float((g * z).sum())
        beta = max(0.0, (gz - float((g_old * z).sum())) / gz_old)
        d = tangent(R, beta * d) - z
    return R, _ended(False, history, f"iteration limit {iterations}")


def _hessian(problem: RightProblem, t: float) -> Float[Tensor, "b k"]:
    """The diagonal of the Euclidean Hessian, `2 t² s_i² max(μ_j, 0) / yy`."""
    weight = (2 * t * t / problem.yy) * problem.s.square()
    return weight[:, None] * problem.mu.clamp_min(0)


def _precondition(
    R: Float[Tensor, "b k"], g: Float[Tensor, "b k"], H: Float[Tensor, "b k"]
) -> Float[Tensor, "b k"]:
    """`P (H + ε)⁻¹ g`, positive definite on the tangent space; ε keeps flat directions bounded."""
    return tangent(R, g / (H + SHIFT * H.mean()))


def _line_search(
    problem: RightProblem,
    R: Float[Tensor, "b k"],
    d: Float[Tensor, "b k"],
    value: float,
    slope: float,
    step: float,
) -> tuple[Float[Tensor, "b k"], float] | None:
    """The first point with sufficient decrease on the retraction curve, and its objective."""
    for _ in range(BACKTRACKS):
        try:
            candidate = retract_cholesky(R, step * d)
        except NumericalError:
            step *= 0.25
            continue
        new = problem.objective(candidate)
        if new <= value + ARMIJO * step * slope:
            return candidate, new
        step *= 0.5
    return None


def _ended(converged: bool, history: list[float], reason: str) -> Convergence:
    return Convergence(converged, len(history) - 1, reason, tuple(history))
