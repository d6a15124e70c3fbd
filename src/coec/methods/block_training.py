"""A block trained as a whole, by stochastic steps, towards the dense model's hidden states.

The block is the model's own layer under automatic differentiation, so that every architecture can,
and no derivative is written by hand (METHODS §8).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError

Theta = dict[str, Tensor]
"""Weights by name, in float32 or wider."""
STEP_TOKENS = 512
"""Tokens of a step, about: whole windows."""
_BETAS = (0.9, 0.95)
"""Decay of AdamW's first and second moments; a pass over little text has few dozen steps."""
_WARM_UP = 0.05
"""Share of all steps over which the learning rate rises."""


@dataclass(frozen=True, eq=False)
class Example:
    """A window of one block.

    Attributes:
        inputs: hidden states of the pruned model before the block.
        targets: hidden states of the dense model after it.
        weights: of every token.
    """

    inputs: Float[Tensor, "length h"]
    targets: Float[Tensor, "length h"]
    weights: Float[Tensor, " length"]


Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(outputs, targets, weights)` of some windows → the objective, summed over their tokens."""


@dataclass(frozen=True)
class Training:
    """Settings of the training of a block.

    Attributes:
        objective: the mean of this over tokens is minimised.
        passes: over the examples.
        rate: learning rate, relative to the size of a matrix.
        seed: draws the order of the examples in every pass.
        written: dtype to which every weight is rounded before the error is measured, by its name.
        ends_when_worse: end with a pass that leaves the validation error above the start's.
    """

    objective: Objective
    passes: int
    rate: float
    seed: int
    written: Mapping[str, torch.dtype]
    ends_when_worse: bool = False


def step_tokens(length: int) -> int:
    """Return the tokens of a step over windows of a length: about STEP_TOKENS."""
    return max(1, STEP_TOKENS // length) * length


def relative_error(examples: Sequence[Example], device: torch.device) -> Objective:
    """Make the objective `Σ_t w_t ‖T_t − f(h_t)‖²` over its mean where f is 0, `w_t ‖T_t‖²`.

    The mean is computed on the device, wherever the examples lie.
    """
    energy = sum(
        (_squares(e.targets.to(device)) * e.weights.to(device)).sum().double() for e in examples
    )
    mean = float(energy) / sum(len(e.weights) for e in examples)

    def objective(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        wide = torch.promote_types(outputs.dtype, torch.float32)
        return (_squares(targets.to(wide) - outputs.to(wide)) * weights).sum() / mean

    return objective


@dataclass(frozen=True, eq=False)
class TrainedBlock:
    """Result of the training of a block.

    Attributes:
        theta: the weights of lowest validation error; the start is one of the candidates.
        taken: number of passes after which they were; 0 for the start.
        fitted: mean of the objective over each pass's steps.
        errors: the objective at the start and after every pass, on the validation windows.
    """

    theta: Theta
    taken: int
    fitted: list[float]
    errors: list[float]

    def record(self) -> dict[str, Any]:
        """Return the record for the report, JSON-ready."""
        return {"taken": self.taken, "fitted": self.fitted, "errors": self.errors}


def train_block(
    block: Callable[[Theta, Float[Tensor, "n length h"]], Float[Tensor, "n length h"]],
    start: Theta,
    examples: Sequence[Example],
    validation: Sequence[Example],
    training: Training,
) -> TrainedBlock:
    """Minimise an objective over all weights of a block by AdamW, and take the best state.

    The rate of every weight matrix is `rate` times the root mean square of its entries at the
    start, after a short warm-up falling linearly to 0: a matrix then moves by a share of its size,
    whatever that is, and one that is 0 stays. The state of lowest validation error is taken, or of
    lowest error on the windows trained on where there are no others. A training that diverges ends.

    Args:
        block: `(θ, h) → f_θ(h)`, differentiable in θ.
        start: the weights, on the device that computes.
        examples: the windows trained on; each is run once in a pass, in an order drawn anew.
        validation: windows that are not trained on.
        training: objective, passes and rate.

    Raises:
        NumericalError: the objective at the start is not finite.
    """
    device = next(iter(start.values())).device
    length = len(examples[0].weights)
    size = step_tokens(length) // length
    objective, passes = training.objective, training.passes
    steps = passes * math.ceil(len(examples) / size)
    theta = {name: p.detach().clone().requires_grad_() for name, p in start.items()}
    # A group for every tensor, since each has a separate learning rate.
    groups = [{"params": [p], "lr": training.rate * _root_mean_square(p)} for p in theta.values()]
    optimiser = torch.optim.AdamW(groups, betas=_BETAS, weight_decay=0.0, fused=True)
    # Rate × share by step: up over `warm` steps, then down to 0 after the last.
    warm = max(1, round(_WARM_UP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )

    def validation_error(at: Theta) -> float:
        # Measured as it will be written, rounded to the output dtype.
        written = training.written
        rounded = {name: p.detach().to(written[name]).to(p.dtype) for name, p in at.items()}
        windows, tokens = validation or examples, 0
        total = torch.zeros((), dtype=torch.float64, device=device)
        with torch.no_grad():
            for batch in _batches(windows, range(len(windows)), size, device):
                outputs = block(rounded, batch.inputs)
                total += objective(outputs, batch.targets, batch.weights)
                tokens += batch.weights.numel()
        return float(total) / tokens

    # Candidates are the start and the state after every pass.
    errors, fitted = [validation_error(theta)], list[float]()
    if not math.isfinite(errors[0]):
        raise NumericalError("the outputs of the block at the start are not finite")
    best, taken = {name: p.detach().clone() for name, p in theta.items()}, 0
    generator = torch.Generator().manual_seed(training.seed)
    tokens = sum(len(example.weights) for example in examples)
    for number in range(1, passes + 1):
        total = torch.zeros((), dtype=torch.float64, device=device)
        order = torch.randperm(len(examples), generator=generator).tolist()
        for batch in _batches(examples, order, size, device):
            loss = objective(block(theta, batch.inputs), batch.targets, batch.weights)
            # The loss is a sum over tokens; a step takes its mean, whatever the size of the batch.
            (loss / batch.weights.numel()).backward()
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
            # The sum stays on the device: to read it at every step would wait for the step.
            total += loss.detach()
        error = validation_error(theta)
        if not math.isfinite(float(total) + error):
            break
        fitted.append(float(total) / tokens)
        errors.append(error)
        if error < min(errors[:-1]):
            best, taken = {name: p.detach().clone() for name, p in theta.items()}, number
        elif training.ends_when_worse and error > errors[0]:
            break
    return TrainedBlock(best, taken, fitted, errors)


def _batches(
    examples: Sequence[Example], order: Sequence[int], size: int, device: torch.device
) -> Iterator[Example]:
    """Yield windows, `size` at a time, on the device."""
    for first in range(0, len(order), size):
        windows = [examples[n] for n in order[first : first + size]]
        yield Example(
            *(
                torch.stack([getattr(w, name) for w in windows]).to(device, non_blocking=True)
                for name in ("inputs", "targets", "weights")
            )
        )


def _squares(states: Float[Tensor, "*tokens h"]) -> Float[Tensor, "*tokens"]:
    """Return every token's squared norm, in float32 or wider."""
    return states.to(torch.promote_types(states.dtype, torch.float32)).square().sum(dim=-1)


def _root_mean_square(weight: Tensor) -> float:
    return float(weight.detach().square().mean().sqrt())
