"""Preconditioned Riemannian conjugate gradient on St(b, k) (METHODS §5.4.2)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.events import record
from coec.linalg.decompose import symmetric
from coec.linalg.right import Point, Problem, retract_cholesky, tangent_
from coec.types import Convergence

TOLERANCE, ITERATIONS = 1e-4, 200

ARMIJO = 1e-4
BACKTRACKS = 30
TRIALS, AGREE = 5, 0.1
"""A trial step within 10 % of the parabola's minimum is taken, and so is the best of 6."""

SMALL = 1e-3
"""Below this fraction of the output's energy an objective is not worth relative precision."""

MULTIPLIER, MULTIPLIER_STEPS = 0.03, 40
"""How well a preconditioned direction is made tangent before it is projected (docs/lab/LOG.md)."""

SHIFT = 0.05
"""The preconditioner's ε, relative to the mean of the Hessian's diagonal (see docs/lab/LOG.md)."""

WORKING = torch.float32
"""The preconditioner's dtype."""


def conjugate(
    problem: Problem,
    R: Float[Tensor, "b k"],
    *,
    tolerance: float = TOLERANCE,
    iterations: int = ITERATIONS,
) -> tuple[Float[Tensor, "b k"], Convergence]:
    """Conjugate gradient from R, Polak-Ribière+, every accepted step lowering the true objective.

    The Euclidean Hessian `2t² diag(s²) ⊗ Gxx / yy` is diagonal in the eigenbasis of Gxx, so its
    inverse on the tangent space, the preconditioner, costs an elementwise division and a few
    products for the multiplier.

    Args:
        problem: what to minimise, in the eigenbasis of Gxx.
        R: the start, orthonormal rows.
        tolerance: stop when a step lowers the objective by less than this fraction of it (or of
            1e-3, where it is smaller than that).
        iterations: at most this many steps.
    """
    point = problem.at(R)
    t, history = point.scale(), [point.value]
    if not float(_curvature(problem, t, R.dtype).sum()) > 0:
        return R, Convergence(0, "nothing to rotate: no energy in the kept inputs")
    g_old, d, gz_old, step = None, None, 0.0, 1.0
    for _ in range(iterations):
        # Euclidean gradient → Riemannian gradient g = ∇ − sym(∇ Rᵀ) R
        g = point.touching().gradient(R, t)
        S = g @ R.T
        g.addmm_(symmetric(S), R, alpha=-1)
        # g → preconditioned gradient z
        z = _precondition(point, t, g, problem.slack(point, S))
        del S
        gz = float((g * z).sum())
        if not gz > 0:  # truncated or rounded away: the gradient itself
            z, gz = g, float(g.square().sum())
        # z → direction d = −z + β d_old. β is Polak-Ribière+, ⟨g − g_old, z⟩ / ⟨g_old, z_old⟩ and
        # at least 0, which restarts; g_old is taken as it is, d_old is carried over by projection.
        if d is None or g_old is None:
            d = z.to(R.dtype).neg()
        else:
            beta = max(0.0, (gz - float((g_old * z).sum())) / gz_old)
            del g_old
            d = d.mul_(beta).sub_(z)
        d = tangent_(R, d)
        # A direction that does not descend gives way to −z.
        slope = float((g * d).sum())
        if not slope < 0:
            d, slope = tangent_(R, z.to(R.dtype).neg()), -gz
        del z
        if not slope < -1e-16 * abs(point.value):
            return R, _ended(history, "gradient vanished")
        # R → retraction of R + step · d, by a line search on the true objective
        moved = _line_search(point, d, slope, step)
        if moved is None:
            return R, _ended(history, "no descent at rounding level")
        before = point.value
        point, step = moved
        del moved
        R, t = point.R, point.scale()
        history.append(point.value)
        if before - point.value < tolerance * max(abs(point.value), SMALL):
            return R, _ended(history, f"relative decrease below {tolerance:g}")
        g_old, gz_old = g, gz
    return R, _ended(history, f"iteration limit {iterations}")


def _curvature(problem: Problem, t: float, dtype: torch.dtype) -> Float[Tensor, "b k"]:
    """The diagonal of the Euclidean Hessian, `2 t² s_i² max(μ_j, 0) / yy`."""
    rows = (2 * t * t / problem.yy) * problem.s.square()
    return torch.outer(rows.to(dtype), problem.mu.clamp_min(0).to(dtype))


def _precondition(
    point: Point, t: float, g: Float[Tensor, "b k"], turn: Float[Tensor, "b b"] | None
) -> Float[Tensor, "b k"]:
    """The tangent z with `P (H + ε) z = g`: Newton's step, were the frame flat; in float32.

    `z = (H + ε)⁻¹ (g − M R)`, the symmetric multiplier M such that z is tangent; ε keeps flat
    directions bounded. The curvature of the alignment penalty is part of H. Where the left factor
    follows R, planes of modes are softer than H says: their slack is added. M is truncated: the
    direction that z goes into is projected.

    A direction that is somewhat off costs steps, never accuracy: the objective, the gradient, the
    projections and the line search are in the dtype of R. So few digits do here, and on a CUDA
    device tensor cores may round the factors of products to TF32.

    Args:
        t: the scale.
        g: the gradient, tangent.
        turn: the slack, a skew matrix to multiply R with; None for none.
    """
    # g → (H + ε)⁻¹ (g − M R), plus the slack that the left factor gives
    size = float(g.norm()) or 1.0  # squares of a small gradient would leave the range of float32
    R, z = point.R.to(WORKING), (g / size).to(WORKING)
    with rounded_products(R.device):
        inverse = _curvature(point.problem, t, WORKING)
        inverse.add_(SHIFT * float(inverse.mean())).reciprocal_()
        # X → (H + ε)⁻¹ X, in place, H with the curvature of the alignment penalty
        alignment = point.problem.alignment
        divide = (
            alignment.divided(R, inverse)
            if alignment and alignment.stiff
            else lambda X: X.mul_(inverse)
        )
        z = _made_tangent(divide, inverse, R, divide(z))
        if turn is not None:
            z.addmm_((turn / size).to(WORKING), R)
    return z.mul_(size)


def _made_tangent(
    divide: Callable[[Tensor], Tensor],
    inverse: Float[Tensor, "b k"],
    R: Float[Tensor, "b k"],
    z: Float[Tensor, "b k"],
) -> Float[Tensor, "b k"]:
    """`z − (H + ε)⁻¹ (M R)`, in place, M symmetric such that it is tangent, by conjugate gradient.

    The operator `M → sym((H + ε)⁻¹(M R) Rᵀ)` is positive definite; its diagonal without alignment,
    `(w_ij + w_ji)/2` with `w = inverse (R∘R)ᵀ`, is the preconditioner. A few steps reach
    MULTIPLIER. M itself is not formed: what its parts come to is taken off as they are found.

    Args:
        divide: `X → (H + ε)⁻¹ X`, in place.
        inverse: its elementwise part.
        z: `(H + ε)⁻¹` of a gradient.
    """
    # Solve sym((H + ε)⁻¹(M R) Rᵀ) = sym(z Rᵀ) for M by preconditioned conjugate gradient.
    w = inverse @ R.square().T
    diagonal = (w + w.T).mul_(0.5)
    residual = symmetric(z @ R.T)
    y = residual / diagonal
    p, inner = y, float((residual * y).sum())
    size = float(residual.norm())
    for _ in range(MULTIPLIER_STEPS):
        if float(residual.norm()) <= MULTIPLIER * size:
            break
        # p → (H + ε)⁻¹(p R), what p takes off z → its symmetric part, the operator's image of p
        component = divide(p @ R)
        image = symmetric(component @ R.T)
        length = inner / float((p * image).sum())
        z.sub_(component, alpha=length)
        residual.sub_(image, alpha=length)
        y = residual / diagonal
        before, inner = inner, float((residual * y).sum())
        p = torch.add(y, p, alpha=inner / before)
    return z


def _line_search(
    start: Point, d: Float[Tensor, "b k"], slope: float, step: float
) -> tuple[Point, float] | None:
    """The lowest point found on the retraction curve and its step; None without enough decrease.

    The parabola through the value, the slope and a trial's value says where the next trial goes,
    until it agrees with the trial: nearly exact, which keeps the directions conjugate.
    """
    value = start.value
    lowest: tuple[Point, float] | None = None
    for trial in range(BACKTRACKS):
        try:
            candidate = retract_cholesky(start.R, d, step)
        except NumericalError:
            record("a step too long to retract without losing digits was shortened")
            step *= 0.25
            continue
        point = start.problem.at(candidate)
        new = point.value
        # f(s) ≈ value + slope · s + (rise / 2) (s / step)²; its minimum is at `best`.
        rise = 2 * (new - value - step * slope)
        best = -slope * step * step / rise if rise > 0 else 4 * step
        # Armijo: a step must lower the objective by a share of the slope's prediction.
        sufficient = new <= value + ARMIJO * step * slope
        if sufficient and (lowest is None or new < lowest[0].value):
            lowest = point, step
        elif lowest is not None:
            break
        if lowest is not None and (abs(best - step) < AGREE * step or trial >= TRIALS):
            break
        # Towards the parabola's minimum: at most ten times shorter, and at most four times longer,
        # or half as long where the decrease was not sufficient.
        step = min(max(best, 0.1 * step), (4 if sufficient else 0.5) * step)
    return lowest


def _ended(history: list[float], reason: str) -> Convergence:
    return Convergence(len(history) - 1, reason, tuple(history))


@contextmanager
def rounded_products(device: torch.device) -> Iterator[None]:
    """Let tensor cores of a CUDA device round the factors of float32 products to TF32.

    For preconditioners, which need few digits. The setting before is restored.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
