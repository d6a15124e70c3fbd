"""Selection: column scores, higher means keep; how many units stay, and which (METHODS §§1, 3).

A score is any callable `(weight, gram) -> scores`, one number per input column of the consumer. It
is given `units`, `keep` and `seed` by keyword, as far as it declares them. Add one by writing the
function and listing it here.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.methods.elimination import obs
from coec.types import Gram, KeptSet

Score = Callable[..., Tensor]


def rcpu(weight: Float[Tensor, "m d"], gram: Gram) -> Float[Tensor, " d"]:
    """Variance-aware: `‖W₀[:, j]‖₂ · ‖X_j‖₂ · Var(X_j)`.

    Source: RCPU.
    """
    return weight.norm(dim=0) * gram.energy.sqrt() * gram.variance


def wanda_sp(weight: Float[Tensor, "m d"], gram: Gram) -> Float[Tensor, " d"]:
    """Weight norm times input norm: `‖W₀[:, j]‖₂ · ‖X_j‖₂`.

    Source: Wanda (Sun et al. 2024) on whole columns, as in FLAP's comparison.
    """
    return weight.norm(dim=0) * gram.energy.sqrt()


def flap(weight: Float[Tensor, "m d"], gram: Gram) -> Float[Tensor, " d"]:
    """Weighted input feature variance: `‖W₀[:, j]‖₂² · Var(X_j)`.

    Source: FLAP (An et al. 2024).
    """
    return weight.square().sum(dim=0) * gram.variance


def magnitude(weight: Float[Tensor, "m d"], gram: Gram) -> Float[Tensor, " d"]:
    """The column norm alone, without data: `‖W₀[:, j]‖₂`.

    Source: a control.
    """
    return weight.norm(dim=0)


def random(weight: Float[Tensor, "m d"], gram: Gram, *, seed: int = 0) -> Float[Tensor, " d"]:
    """Uniform random numbers; the same seed gives the same columns.

    Source: a control.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(weight.shape[1], generator=generator, dtype=torch.float64)
    return scores.to(weight)


def expert_scores(experts: Sequence[Gram]) -> Float[Tensor, " experts"]:
    """Summed norm of what an expert adds to its tokens: `Σ_t ‖p(t) W h(t)‖₂`; 0 without tokens.

    p is the router's weight, h are the expert's channels and W is its last projection.

    Args:
        experts: statistics of the inputs `p h`, one Gram for each expert.

    Source: REAP (Lasby et al. 2025), which takes the mean over the expert's tokens (METHODS §9).
    """
    norms = [gram.output_norms or 0.0 for gram in experts]
    return torch.tensor(norms, dtype=torch.float64)


SELECTIONS: dict[str, Score] = {
    "rcpu": rcpu,
    "wanda-sp": wanda_sp,
    "flap": flap,
    "obs": obs,
    "magnitude": magnitude,
    "random": random,
}


def column_scores(
    score: Score,
    weight: Float[Tensor, "m d"],
    gram: Gram,
    *,
    units: int,
    keep: int,
    seed: int,
    ranges: int = 1,
) -> Float[Tensor, " d"]:
    """Return the scores of columns; a score gets only the arguments that it declares.

    Args:
        score: `(weight, gram) -> scores`, with any of the arguments after it by keyword.
        weight: `W₀`.
        gram: statistics of its inputs.
        units: number of units, each of the same number of consecutive columns.
        keep: how many of them will stay.
        seed: of random choices.
        ranges: number of equal groups of consecutive units; each keeps the same number of units.
    """
    offered = {"units": units, "keep": keep, "seed": seed, "ranges": ranges}
    declared = inspect.signature(score).parameters
    return score(weight, gram, **{name: offered[name] for name in offered if name in declared})


def unit_scores(scores: Float[Tensor, " d"], units: int) -> Float[Tensor, " u"]:
    """Sum the scores of columns over units, each with the same number of consecutive columns."""
    return scores.reshape(units, -1).sum(dim=1)


def kept_count(units: int, sparsity: float) -> int:
    """`⌈(1 − ρ) n⌉` in exact arithmetic on the decimal number written, at least 1.

    Binary arithmetic makes ⌈(1 − 0.7) · 10⌉ = 4; it is 3.
    """
    # repr gives the shortest decimal number of the float, which is the number that was written.
    return max(1, math.ceil((1 - Fraction(repr(float(sparsity)))) * units))


def keep_highest(scores: Float[Tensor, " u"], count: int, ranges: int = 1) -> KeptSet:
    """The `count` units of highest score, equally many per range; ties go to the lower index.

    Raises:
        NumericalError: a score is NaN.
    """
    if torch.isnan(scores).any():
        raise NumericalError("a selection score is NaN")
    # A stable sort keeps equal scores in the order of their indices.
    order = torch.argsort(scores.view(ranges, -1), dim=1, descending=True, stable=True)
    starts = torch.arange(0, len(scores), order.shape[1], device=order.device)
    kept = (order[:, : count // ranges] + starts[:, None]).flatten()
    return KeptSet(kept.sort().values, len(scores))
