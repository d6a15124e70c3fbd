"""Fit the last half-block to the dense model's predictions, by L-BFGS (METHODS §8)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coec.errors import NumericalError
from coec.reconstruction.least_squares import Theta

_HISTORY = 5
"""Pairs of differences that stand for the curvature, each twice as large as the parameters."""


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
    *,
    iterations: int,
) -> FittedLogits:
    """Minimise a mean KL divergence from θ on, and take the best of all points that were tried.

    It overfits late, so that held-out windows say which point is best. The start is one of them: it
    is never made worse there.

    Args:
        divergence: the mean over the windows fitted on, and its gradient.
        judge: the mean over held-out windows; without any, those fitted on judge.
        theta: the start.
        iterations: of L-BFGS, each with a line search under the strong Wolfe conditions.

    Raises:
        NumericalError: the divergence at the start is not finite.
    """
    names = list(theta)
    point = [theta[name].clone().requires_grad_() for name in names]
    best, scores = theta, list[float]()

    def evaluate() -> Tensor:
        nonlocal best
        at = {name: p.detach() for name, p in zip(names, point, strict=True)}
        value, gradient = divergence(at)
        score = value if judge is None else judge(at)
        if not scores and not math.isfinite(score):
            raise NumericalError("the predictions at the start are not finite")
        if scores and score < min(scores):
            best = {name: p.clone() for name, p in at.items()}
        scores.append(score if math.isfinite(score) else math.inf)
        for name, p in zip(names, point, strict=True):
            p.grad = gradient[name].to(p)
        return torch.tensor(value, dtype=torch.float64)

    optimizer = torch.optim.LBFGS(
        point, max_iter=iterations, history_size=_HISTORY, line_search_fn="strong_wolfe",
        tolerance_grad=0.0, tolerance_change=0.0,
    )  # fmt: skip
    optimizer.step(evaluate)
    return FittedLogits(best, scores[0], min(scores), len(scores))
