"""The source's right solver: projected gradient with an orthogonal retraction (METHODS §5.4.1)."""

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.events import record
from coec.linalg.right import RightProblem, tangent_
from coec.types import Convergence

DELTA, ITERATIONS = 7e-4, 200
"""The source's rule for the end of a solve (METHODS §5.4)."""


def gradient(
    problem: RightProblem,
    R: Float[Tensor, "b k"],
    *,
    delta: float = DELTA,
    iterations: int = ITERATIONS,
) -> tuple[Float[Tensor, "b k"], Convergence]:
    """Projected gradient from R with step `η/t²`, `η = 1/(2 s_max² λ_max(Gxx))`.

    Retraction: Newton-Schulz polar for rectangular frames, Cayley with a Newton-Schulz inverse for
    square ones. The step is shortened so that `‖step · gradient‖_F ≤ 1`.

    Args:
        problem: what to minimise, in the eigenbasis of Gxx.
        R: the start, orthonormal rows.
        delta: stop when `‖R⁺ − R‖_F / √b` falls below it.
        iterations: at most this many steps.

    Returns:
        The last R, or the start when the objective rose over the whole solve (recorded as an
        event), and how it ended.
    """
    b, k = R.shape
    cayley = b == k
    # The Hessian 2t² diag(s²) ⊗ Gxx / yy has t² times this as its largest eigenvalue.
    curvature = 2 * float(problem.s.max()) ** 2 * float(problem.mu.max()) / problem.yy
    if not curvature > 0:
        return R, Convergence(0, "nothing to rotate: no energy in the kept inputs")
    start, history = R, [problem.objective(R)]
    reason = f"iteration limit {iterations}"
    for _ in range(iterations):
        t = problem.scale(R)
        # t → Riemannian gradient → step of norm at most 1 → retraction
        xi = tangent_(R, problem.gradient(R, t))
        step = -xi / (curvature * t * t)
        norm = float(step.norm())
        if norm > 1:
            record("right rotation: step capped at norm 1")
            step = step / norm
        try:
            R_next = retract_cayley(R, step) if cayley else newton_schulz_polar(R + step)
        except NumericalError as error:
            record(f"right rotation stopped: {error}")
            reason = str(error)
            break
        # The source stops by the change of R, not of the objective.
        change = float((R_next - R).norm()) / b**0.5
        R = R_next
        history.append(problem.objective(R))
        if change < delta:
            reason = f"rotation changed by less than delta = {delta:g}"
            break
    slack = 16 * torch.finfo(R.dtype).eps * abs(history[0])  # a rise by rounding is none
    if not history[-1] <= history[0] + slack:
        record("right rotation rejected: the gradient solver raised its objective")
        R, reason = start, "objective rose"
    return R, Convergence(len(history) - 1, reason, tuple(history))


def retract_cayley(R: Float[Tensor, "k k"], step: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """The Cayley retraction of a square frame: `(I + W/2)⁻¹ (I − W/2) R`, `W = −skew(ξ Rᵀ)`.

    The inverse is Newton-Schulz iterated from I, which converges quadratically while ‖W‖ < 2
    (the source's retraction for attention output projections).

    Raises:
        NumericalError: the iteration does not converge (a step of norm 2 or more).
    """
    # W/2 = −skew(ξ Rᵀ)/2; I + W/2 is never singular, as W is skew.
    S = step @ R.T
    half = 0.25 * (S.T - S)
    eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
    return newton_schulz_inverse(eye + half) @ (R - half @ R)


def newton_schulz_inverse(A: Float[Tensor, "n n"], iterations: int = 30) -> Float[Tensor, "n n"]:
    """`A⁻¹` by `X ← X (2 I − A X)` from `X = I`; converges when `‖I − A‖₂ < 1`.

    Raises:
        NumericalError: no convergence in `iterations` steps.
    """
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    tolerance = 10 * len(A) * torch.finfo(A.dtype).eps
    X = eye
    for _ in range(iterations + 1):
        # X ← X (2I − A X) = X + X (I − A X)
        gap = eye - A @ X
        if float(gap.norm()) <= tolerance:
            return X
        X = X + X @ gap
    raise NumericalError("Newton-Schulz inverse did not converge")


def newton_schulz_polar(A: Float[Tensor, "b k"], iterations: int = 30) -> Float[Tensor, "b k"]:
    """The polar factor of a full-rank wide matrix by `X ← 1.5 X − 0.5 X Xᵀ X`: products only.

    Converges quadratically for singular values in (0, √3), which a retraction's argument meets:
    a tangent step of norm at most 1 from orthonormal rows leaves them in [1, √2].

    Raises:
        NumericalError: no convergence in `iterations` steps (A is rank-deficient or far from
            orthonormal).
    """
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    tolerance = 10 * len(A) * torch.finfo(A.dtype).eps
    X = A
    for _ in range(iterations + 1):
        # X ← X + ½ (I − X Xᵀ) X = 1.5 X − 0.5 X Xᵀ X
        gap = eye - X @ X.T
        if float(gap.norm()) <= tolerance:
            return X
        X = X + 0.5 * (gap @ X)
    raise NumericalError("Newton-Schulz polar iteration did not converge")
