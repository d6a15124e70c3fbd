"""COEC as the source writes it: every step takes a singular value decomposition of the weight.

A readable reference, slow on purpose in nothing: each round takes three decompositions of Ŵ (m×k)
and one m×m Procrustes problem, and every product with Gxx is a dense one. With the `gradient`
right solve it computes what `coec(solver="gradient")` computes (METHODS §5), to rounding.
"""

import torch
from torch import Tensor

from coec.linalg.gcv import rescale
from coec.linalg.gradient import newton_schulz_polar, retract_cayley
from coec.linalg.right import tangent_
from coec.methods.objective import OutputProblem, kept_columns
from coec.types import Gram, KeptSet
from oracles import power


def literal(
    weight: Tensor,
    gram: Gram,
    kept: KeptSet,
    *,
    alpha: float = 0.9,
    kappa: float = 10.0,
    delta: float = 7e-4,
    iterations: int = 200,
    rounds: int = 50,
    tol: float = 1e-4,
) -> tuple[Tensor, list[float]]:
    """The compensated weight, and tempered relative errors of the slice and after every round."""
    problem = OutputProblem.of(weight, power(gram.xx, alpha), kept)
    curvature = float(torch.linalg.eigvalsh(problem.Gxx)[-1])
    W = kept_columns(weight, kept)
    errors = [problem.error(W)]
    W = rescaled(rotated_left(W, problem), problem, kappa)
    errors.append(problem.error(W))
    for _ in range(rounds):
        W = rescaled(rotated_right(W, problem, curvature, delta, iterations), problem, kappa)
        W = rescaled(rotated_left(W, problem), problem, kappa)
        errors.append(problem.error(W))
        if abs(errors[-2] - errors[-1]) < tol:
            break
    return W, errors


def rotated_left(W: Tensor, problem: OutputProblem) -> Tensor:
    """`polar(Gyx Ŵᵀ) Ŵ`, an m×m problem."""
    P, _, Qt = torch.linalg.svd(problem.Gyx @ W.T)
    return P @ (Qt @ W)


def rescaled(W: Tensor, problem: OutputProblem, kappa: float) -> Tensor:
    """New singular values under generalized cross-validation."""
    U, s, R = torch.linalg.svd(W, full_matrices=False)
    response = ((U.T @ problem.Gyx) * R).sum(dim=1)
    energy = ((R @ problem.Gxx) * R).sum(dim=1)
    return (U * rescale(s, response, energy, kappa=kappa).s) @ R


def rotated_right(
    W: Tensor, problem: OutputProblem, curvature: float, delta: float, iterations: int
) -> Tensor:
    """Projected gradient on the right singular vectors, in the channels' own basis."""
    U, s, R = torch.linalg.svd(W, full_matrices=False)
    b, k = R.shape
    C = s[:, None] * (U.T @ problem.Gyx)
    yy = problem.yy
    largest = 2 * float(s[0]) ** 2 * curvature / yy
    start = R
    first, RG = None, R @ problem.Gxx
    for _ in range(iterations):
        t, value = _scale_and_objective(R, RG, s, C, yy)
        first = value if first is None else first
        gradient = (2 * t * t / yy) * s.square()[:, None] * RG - (2 * t / yy) * C
        step = -tangent_(R, gradient) / (largest * t * t)
        step = step / max(1.0, float(step.norm()))
        moved = retract_cayley(R, step) if b == k else newton_schulz_polar(R + step)
        change = float((moved - R).norm()) / b**0.5
        R, RG = moved, moved @ problem.Gxx
        if change < delta:
            break
    _, last = _scale_and_objective(R, RG, s, C, yy)
    if first is not None and last > first:
        R = start
    return (U * s) @ R


def _scale_and_objective(
    R: Tensor, RG: Tensor, s: Tensor, C: Tensor, yy: float
) -> tuple[float, float]:
    quadratic = float((s.square()[:, None] * RG * R).sum())
    linear = float((C * R).sum())
    t = linear / quadratic if linear > 0 and quadratic > 0 else 1.0
    return t, (t * t * quadratic - 2 * t * linear + yy) / yy
