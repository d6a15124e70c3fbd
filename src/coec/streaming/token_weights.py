"""Weights of tokens by the mean squares of their hidden states, which the next norm divides by."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

_SMALLEST = 1e-3
"""Lower bound on mean squares of hidden states, as a share of their median."""


def squares_of(state: Float[Tensor, "n length h"]) -> Float[Tensor, "n length"]:
    """Return every token's mean square."""
    return state.float().square().mean(dim=-1)


def least_square(squares: Iterable[Float[Tensor, "n length"]]) -> float:
    """Return the least mean square that a token's weight is computed from."""
    return _SMALLEST * float(torch.cat([batch.flatten() for batch in squares]).median())


def token_weights(squares: Float[Tensor, "n length"], floor: float) -> Float[Tensor, "n length"]:
    """Return the weights of tokens, not yet of mean 1: the inverse of their mean squares."""
    # The floor is 0 where half of the states are 0: 1 keeps weights finite.
    return 1 / squares.clamp_min(floor or 1.0)
