"""Column scores: higher means keep (METHODS §3).

A score is any callable `(weight, gram) -> scores`, one number per input column of the consumer.
Add one by writing the function and listing it here.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import OptionError
from coec.types import Gram

Score = Callable[[Tensor, Gram], Tensor]


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


SELECTIONS: dict[str, Score] = {
    "rcpu": rcpu,
    "wanda-sp": wanda_sp,
    "flap": flap,
    "magnitude": magnitude,
    "random": random,
}


def resolve(selection: str) -> Score:
    """The score of that name; raises OptionError with the known names."""
    if selection not in SELECTIONS:
        raise OptionError(f"unknown selection '{selection}'; known: {', '.join(SELECTIONS)}")
    return SELECTIONS[selection]


def unit_scores(scores: Float[Tensor, " d"], units: int) -> Float[Tensor, " u"]:
    """The score of a unit of consecutive columns is the sum over its columns."""
    return scores.reshape(units, -1).sum(dim=1)
