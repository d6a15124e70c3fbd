"""The source's right solver: projected gradient with an orthogonal retraction (METHODS §5.4.1)."""

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.events import record
from coec.linalg.polar import newton_schulz_polar
from coec.linalg.right import RightProblem
from coec.linalg.stiefel import retract_cayley, tangent
from coec.settings.options import Retraction
from coec.types import Convergence


def gradient(
    problem: RightProblem,
    R: Float[Tensor, "b k"],
    delta: float = 7e-4,
    iterations: int = 200,
    retraction: Retraction = "auto",
) -> tuple[Float[Tensor, "b k"], Convergence]:
    """Projected gradient from R with step `η/t²`, `η = 1/(2 s_max² λ_max(Gxx))`.

    Retraction: Newton-Schulz polar for rectangular frames, Cayley with a Newton-Schulz inverse for
    square ones. The step is shortened so that `‖step · gradient‖_F ≤ 1`.

    Args:
        problem: what to minimise, in the eigenbasis of Gxx.
        R: the start, orthonormal rows.
        delta: stop when `‖R⁺ − R‖_F / √b` falls below it.
        iterations: at most this many steps.
        retraction: `auto` as above, or `polar` for square frames too.

    Returns:
        The last R, or the start when the objective rose over the whole solve (recorded as an
        event), and how it ended.
    """
    b, k = R.shape
    cayley = b == k and retraction == "auto"
    # The Hessian 2t² diag(s²) ⊗ Gxx / yy has t² times this as its largest eigenvalue.
    curvature = 2 * float(problem.s.max()) ** 2 * float(problem.mu.max()) / problem.yy
    if not curvature > 0:
        return R, Convergence(0, "nothing to rotate: no energy in the kept inputs")
    start, history = R, [problem.objective(R)]
    reason = f"iteration limit {iterations}"
    for _ in range(iterations):
        t = problem.scale(R)
        # t → Riemannian gradient → step of norm at most 1 → retraction
        xi = tangent(R, problem.gradient(R, t))
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
