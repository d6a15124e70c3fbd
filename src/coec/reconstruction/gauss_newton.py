"""Damped Gauss–Newton steps, each by preconditioned conjugate gradients (METHODS §8).

A step solves `(Jᵀ w J + μ) δ = Jᵀ w r` roughly, as far as the error on held-out windows falls. It
is taken whole, by a half or by a quarter: the first of these that lowers the error, on held-out
windows as well; otherwise none is taken.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coec.errors import NumericalError
from coec.events import record
from coec.reconstruction.least_squares import SEEDS, LeastSquares, Theta
from coec.reconstruction.preconditioner import Preconditioner

LENGTHS = (1.0, 0.5, 0.25)
"""The fractions of a step that are tried."""
PATIENCE = 2
"""Iterations without a lower held-out error after which the one of the lowest is the step."""
_APART = 2**40
"""Between the seeds of one step's random signs and the next's."""


@dataclass(frozen=True)
class Step:
    """A Gauss–Newton step.

    Attributes:
        length: the fraction that was taken; 0 for none.
        error: afterwards, relative to the energy of the targets.
        held_out: the same on held-out windows; None where there are none.
        iterations: of conjugate gradients that it took.
        residual: of the linear system there, relative to its right-hand side; None where there is
            no finite solution.
    """

    length: float
    error: float
    held_out: float | None
    iterations: int
    residual: float | None


@dataclass(frozen=True, eq=False)
class Fitted:
    """End of a fit; errors are relative to `Σ_t w_t ‖T_t − h_t‖²`.

    Attributes:
        theta: the parameters.
        error: before the first step.
        held_out: the same on held-out windows; None where there are none.
        steps: those that were tried.
    """

    theta: Theta
    error: float
    held_out: float | None
    steps: list[Step] = field(default_factory=list)

    def taken_back(self) -> "Fitted":
        """Return the fit with no step taken."""
        error, held_out = self.error, self.held_out
        steps = [replace(step, length=0.0, error=error, held_out=held_out) for step in self.steps]
        return Fitted(self.theta, error, held_out, steps)

    def record(self) -> dict[str, Any]:
        """Return the record for the report, JSON-ready: numbers that are not finite are None."""
        last = self.steps[-1] if self.steps else None
        return {
            "error_before": _finite(self.error),
            "error_after": _finite(last.error if last else self.error),
            "holdout_before": _finite(self.held_out),
            "holdout_after": _finite(last.held_out if last else self.held_out),
            "steps": [
                {name: _finite(value) for name, value in asdict(step).items()}
                for step in self.steps
            ],
        }


def fit(
    problem: LeastSquares,
    held_out: LeastSquares | None,
    theta: Theta,
    *,
    steps: int,
    iterations: int,
    damping: float,
    seed: int,
    least_gain: float = 0.0,
) -> Fitted:
    """Lowers the error of a problem by at most so many steps; never raises it.

    Args:
        problem: what is fitted.
        held_out: the same over other windows, on which a step must not raise the error either, and
            which say after how many iterations it is best.
        theta: where to start.
        steps: at most so many; the first that is not taken is the last.
        iterations: of conjugate gradients in each, at most.
        damping: λ, relative to the mean diagonal of every matrix's block.
        seed: of the random signs in the preconditioner.
        least_gain: a whole step that lowers the error, the held-out one where there is one, by a
            smaller fraction is the last.
    """
    scale = problem.energy() or 1.0
    held_scale = (held_out.energy() or 1.0) if held_out else 1.0
    error = problem.error(theta) / scale
    held_error = held_out.error(theta) / held_scale if held_out else None
    fitted = Fitted(theta, error, held_error)
    for step in range(steps):
        try:
            signs = (seed + step * _APART) % SEEDS
            lowest = math.inf if held_error is None else held_error * held_scale
            delta, count, residual = _direction(
                problem, held_out, theta, lowest, iterations=iterations, damping=damping, seed=signs
            )
        except NumericalError as failure:
            record(f"a step of the reconstruction is not taken: {failure}")
            fitted.steps.append(Step(0.0, error, held_error, 0, None))
            break
        before = error if held_error is None else held_error
        for length in LENGTHS:
            new = {name: p + length * delta[name] for name, p in theta.items()}
            new_error = problem.error(new) / scale
            new_held = held_out.error(new) / held_scale if held_out else None
            if new_error < error and (
                held_error is None or (new_held is not None and new_held <= held_error)
            ):
                theta, error, held_error = new, new_error, new_held
                fitted.steps.append(Step(length, error, held_error, count, residual))
                break
        else:
            if not math.isfinite(new_error):
                record("a step of the reconstruction is not finite: taken back")
            fitted.steps.append(Step(0.0, error, held_error, count, residual))
            break
        gained = 1 - (error if held_error is None else held_error) / before if before > 0 else 0.0
        if length == LENGTHS[0] and gained < least_gain:
            break
    return Fitted(theta, fitted.error, fitted.held_out, fitted.steps)


def _direction(
    problem: LeastSquares,
    held_out: LeastSquares | None,
    theta: Theta,
    lowest: float,
    *,
    iterations: int,
    damping: float,
    seed: int,
) -> tuple[Theta, int, float]:
    """Return `δ` of one step, the iterations that made it, and the relative residual of its system.

    It is the iterate with the lowest error on held-out windows, the last where none is lower than
    `lowest`, that error at θ.
    """
    r = problem.gradient(theta)
    _check_finite(r)
    precondition = Preconditioner(problem.factors(theta, seed), damping)
    problem.linearise(theta)
    x = {name: torch.zeros_like(v) for name, v in r.items()}
    start = dot(r, r)
    z = precondition(r)
    p, rz = z, dot(r, z)
    best, count, waited = None, 0, 0
    while count < iterations and waited < PATIENCE:
        if rz <= 0:  # solved to the last bit
            break
        Hp = problem.normal(p)
        damped = precondition.damped(p)
        Hp = {name: Hp[name] + damped[name] for name in Hp}
        curvature = dot(p, Hp)
        if not curvature > 0:
            break
        alpha = rz / curvature
        x = {name: x[name] + alpha * p[name] for name in x}
        r = {name: r[name] - alpha * Hp[name] for name in r}
        z = precondition(r)
        rz, last = dot(r, z), rz
        p = {name: z[name] + rz / last * p[name] for name in z}
        count += 1
        if held_out is not None:
            error = held_out.error({name: v + x[name] for name, v in theta.items()})
            waited += best is not None
            if error < lowest:
                lowest, waited, best = error, 0, (x, count, dot(r, r))
    x, count, square = best or (x, count, dot(r, r))
    _check_finite(x)
    return x, count, math.sqrt(square / start) if start > 0 else 0.0


def dot(a: Theta, b: Theta) -> float:
    """The inner product over all matrices, summed in float64."""
    return sum(float((a[name] * b[name]).sum(dtype=torch.float64)) for name in a)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _check_finite(vector: dict[str, Tensor]) -> None:
    for name, block in vector.items():
        if not torch.isfinite(block).all():
            raise NumericalError(f"its direction for {name} holds NaN or Inf")
