"""Fit the last half-block to the dense model's predictions, by L-BFGS (METHODS §8)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.reconstruction.least_squares import TINY, Factor, Theta

_HISTORY = 5
"""Pairs of differences that stand for the curvature, each twice as large as the parameters."""
_FIRST_GAIN = 0.2
"""What the first step would gain, were the divergence linear: no curvature is known before it."""


@dataclass(frozen=True, eq=False)
class FittedLogits:
    """End of a fit to predictions.

    Attributes:
        theta: the point of lowest divergence on the windows that judge.
        before, after: that divergence at the start and at `theta`, in nats per token.
        evaluations: number of points at which divergence and gradient were computed.
    """

    theta: Theta
    before: float
    after: float
    evaluations: int

    def record(self) -> dict[str, Any]:
        """Return the record for the report, JSON-ready."""
        scores = {"kl_before": self.before, "kl_after": self.after}
        return {**scores, "evaluations": self.evaluations}


def fit_logits(
    divergence: Callable[[Theta], tuple[float, Theta]],
    judge: Callable[[Theta], float] | None,
    theta: Theta,
    factors: Mapping[str, Factor],
    *,
    iterations: int,
    damping: float,
) -> FittedLogits:
    """Minimise a mean KL divergence from θ on, and take the best of all points that were tried.

    It overfits late, so that held-out windows say which point is best. The start is one of them: it
    is never made worse there.

    Args:
        divergence: the mean over the windows fitted on, and its gradient.
        judge: the mean over held-out windows; without any, those fitted on judge.
        theta: the start.
        factors: Kronecker factors of every matrix's curvature, of any scale: L-BFGS runs in
            coordinates in which they are the identity.
        iterations: of L-BFGS, each with a line search under the strong Wolfe conditions.
        damping: λ, relative to the mean of each factor's diagonal.

    Raises:
        NumericalError: the divergence at the start, or a factor, is not finite.
    """
    coordinates = {name: _Coordinates(factors[name], damping) for name in theta}
    best, scores = theta, list[float]()

    def evaluate(at: Theta) -> tuple[float, Theta]:
        nonlocal best
        value, gradient = divergence(at)
        score = value if judge is None else judge(at)
        if not scores and not math.isfinite(score):
            raise NumericalError("the predictions at the start are not finite")
        if scores and score < min(scores):
            best = {name: p.clone() for name, p in at.items()}
        scores.append(score if math.isfinite(score) else math.inf)
        return value, {name: c.gradient(gradient[name]) for name, c in coordinates.items()}

    value, gradient = evaluate(theta)
    slopes = torch.cat([g.flatten() for g in gradient.values()])
    # The unit of φ in which the first step of torch, g / max(1, Σ|g|), gains this much.
    root = math.sqrt(_FIRST_GAIN * max(value, 0.0)) / (float(slopes.norm()) or TINY)
    unit = root * max(1.0, root * float(slopes.abs().sum()))
    if not 0 < unit < math.inf:
        return FittedLogits(theta, scores[0], scores[0], len(scores))
    point = {
        name: torch.zeros(g.shape, dtype=g.dtype, device=g.device, requires_grad=True)
        for name, g in gradient.items()
    }
    at_start = True

    def closure() -> Tensor:
        nonlocal value, gradient, at_start
        if not at_start:
            moved = {name: c.moved(unit * point[name].detach()) for name, c in coordinates.items()}
            value, gradient = evaluate({name: p + moved[name] for name, p in theta.items()})
        at_start = False
        for name, p in point.items():
            p.grad = (unit * gradient[name]).contiguous()
        return torch.tensor(value, dtype=torch.float64)

    torch.optim.LBFGS(
        list(point.values()), max_iter=iterations, history_size=_HISTORY,
        line_search_fn="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0,
    ).step(closure)  # fmt: skip
    return FittedLogits(best, scores[0], min(scores), len(scores))


class _Coordinates:
    """Coordinates φ of one matrix, `θ − θ₀ = rows^(−½) φ L⁻¹` with `L Lᵀ` the damped columns.

    Raises:
        NumericalError: the factor is not finite.
    """

    def __init__(self, factor: Factor, damping: float) -> None:
        columns = factor.columns
        shift = damping * float(columns.diagonal().mean()) or TINY
        eye = torch.eye(len(columns), dtype=columns.dtype, device=columns.device)
        self._L, failed = torch.linalg.cholesky_ex(columns + shift * eye)
        if failed or not torch.isfinite(self._L).all():
            raise NumericalError("the curvature at the start is not finite")
        self._scale = (factor.rows + damping).clamp_min(TINY).rsqrt()[:, None]

    def moved(self, phi: Float[Tensor, "out inp"]) -> Float[Tensor, "out inp"]:
        """Return `θ − θ₀`."""
        return self._scale * torch.linalg.solve_triangular(self._L, phi, upper=False, left=False)

    def gradient(self, by_theta: Float[Tensor, "out inp"]) -> Float[Tensor, "out inp"]:
        """Return the gradient in φ of what has this one in θ: the adjoint of `moved`."""
        g = self._scale * by_theta
        return torch.linalg.solve_triangular(self._L.mT, g, upper=True, left=False)
