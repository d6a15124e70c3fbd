"""What pruning each site costs the model's predictions, beside what it costs its own output.

The same relative error matters a hundred times more at one site than at another, and nothing in a
site's own statistics says where. So the KL divergence of the pruned model from the dense one is
shared out among the sites, by its derivatives on the way there (METHODS §10).
"""

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from coec.errors import NumericalError
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.layout import BlockLayout
from coec.reconstruction.block_training import step_tokens
from coec.streaming.dense_stream import first_windows
from coec.streaming.head import Head
from coec.streaming.layers import Layers, State

TOKENS = 4096
"""Of the windows that are run."""
_RULE = {0.5: 2 / 3, 1.0: 1 / 6}
"""Weights of derivatives, by the share of the way from the dense model to the pruned one at which
they are taken: Simpson's rule, as they are 0 at the start."""
_Parameters = tuple[Tensor, Tensor | None]
"""Weight and bias of a consumer."""


@dataclass(frozen=True, eq=False)
class CompensatedConsumer:
    """A consumer after pruning, in the dense model's shape: columns that went are 0."""

    weight: Float[Tensor, "m d"]
    bias: Float[Tensor, " m"] | None

    def to(self, dtype: torch.dtype) -> "CompensatedConsumer":
        """Return it in another dtype, on the CPU."""
        bias = None if self.bias is None else self.bias.to("cpu", dtype)
        return CompensatedConsumer(self.weight.to("cpu", dtype), bias)


class Sensitivity:
    """The dense model and models on the way to the pruned one, and what each pruned site costs.

    On the way, every consumer is changed by the same share. All advance over a few windows, a block
    at a time; hidden states before every block wait on the CPU, for the derivatives that `costs`
    takes back, a block at a time as well.
    """

    def __init__(
        self,
        dense: Dense,
        windows: Int[Tensor, "n length"],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._device, self._dtype = dense, device, dtype
        windows = first_windows(windows, TOKENS)
        batches = windows.split(step_tokens(windows.shape[1]) // windows.shape[1])
        self._layers = Layers(dense, device=device, dtype=dtype)
        self._dense = self._layers.embed(batches, dense.tensor(dense.layout.embedding))
        # All models share the embedding, so that their states begin as the same tensors.
        self._changed = dict.fromkeys(_RULE, self._dense)
        self._inputs: dict[int, dict[float, list[State]]] = {}
        self._compensated: dict[int, dict[str, CompensatedConsumer]] = {}

    @torch.no_grad()
    def advance(
        self,
        block: BlockLayout,
        tensors: Mapping[str, Tensor],
        compensated: Mapping[str, CompensatedConsumer],
    ) -> None:
        """Run all models through the next block.

        Args:
            block: its layout.
            tensors: its weights as stored, by full names.
            compensated: the pruned consumers, by `Site.key`, of the sites from which anything goes.
        """
        self._layers.load(block, tensors)
        compensated = {key: consumer.to(self._dtype) for key, consumer in compensated.items()}
        # Kept for the way back, which runs the block again to differentiate it.
        self._inputs[block.index], self._compensated[block.index] = dict(self._changed), compensated
        self._dense = [self._layers.advance(block.index, state) for state in self._dense]
        for share, states in self._changed.items():
            with self._replaced(block, compensated, share):
                self._changed[share] = [self._layers.advance(block.index, s) for s in states]
        self._layers.drop(block.index)

    def costs(self, progress: Progress | None = None) -> dict[str, float]:
        """Return what every pruned site costs, by `Site.key`, in nats per token.

        All blocks have been advanced through.

        Args:
            progress: called with ("allocating on the way back", done, blocks).

        Raises:
            NumericalError: the pruned model predicts nothing finite.
        """
        head = Head(self._model, device=self._device, dtype=self._dtype)
        # KL behind the last block → ∂KL/∂h, for both shares of the way
        gradients: dict[float, list[Tensor]] = {}
        divergence = torch.zeros((), device=self._device)
        for share, states in self._changed.items():
            gradients[share] = []
            for state, dense in zip(states, self._dense, strict=True):
                inputs = state.to(self._device).requires_grad_()
                total = head.divergence(inputs, dense)
                gradients[share] += torch.autograd.grad(total, inputs)
                divergence = divergence + total.detach()
        costs: dict[str, Tensor] = {}
        blocks = self._model.layout.blocks
        # ∂KL/∂h behind every block → before it; hooks add up the costs of its sites
        for passed, block in enumerate(reversed(blocks), start=1):
            self._back(block, gradients, costs)
            if progress:
                progress("allocating on the way back", passed, len(blocks))
        sums = {key: float(cost) for key, cost in costs.items()}
        if not math.isfinite(float(divergence) + math.fsum(sums.values())):
            raise NumericalError(
                "what pruning each site costs cannot be measured: the pruned model predicts "
                "nothing finite; remove less, or use allocation = adaptive"
            )
        tokens = sum(state.shape[0] * state.shape[1] for state in self._dense)
        return {key: cost / tokens for key, cost in sums.items()}

    def _back(
        self, block: BlockLayout, gradients: dict[float, list[Tensor]], costs: dict[str, Tensor]
    ) -> None:
        """Take derivatives from behind a block to before it; add up the costs of its sites."""
        self._layers.load(block, self._model.tensors(block))
        compensated, inputs = self._compensated.pop(block.index), self._inputs.pop(block.index)
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        costs |= dict.fromkeys(compensated, nothing)
        for share, behind in gradients.items():
            before = list[Tensor]()
            with self._replaced(block, compensated, share) as dense, ExitStack() as hooks:
                # Every pruned consumer notes the change of its output; its derivative follows.
                for key, (module, parameters) in dense.items():
                    noting = functools.partial(_note_cost, costs, key, parameters, share)
                    hooks.callback(module.register_forward_hook(noting).remove)
                for before_block, gradient in zip(inputs[share], behind, strict=True):
                    state = before_block.to(self._device).requires_grad_()
                    # h → F(h) → (∂F/∂h)ᵀ ∂KL/∂F(h)
                    out = self._layers.call(self._layers.modules[block.index], block.index, state)
                    before += torch.autograd.grad(out, state, gradient.to(out))
            gradients[share] = before
        self._layers.drop(block.index)

    @contextmanager
    def _replaced(
        self, block: BlockLayout, compensated: Mapping[str, CompensatedConsumer], share: float
    ) -> Iterator[dict[str, tuple[nn.Module, _Parameters]]]:
        """Change consumers by a share of what pruning changes; yield the dense ones, by
        `Site.key`.
        """
        sites = {site.key: site for site in block.sites if site.key in compensated}
        modules: dict[str, Any] = {
            key: self._layers.module(block, site.consumer) for key, site in sites.items()
        }
        dense = {key: (module, (module.weight, module.bias)) for key, module in modules.items()}
        for key, module in modules.items():
            weight, bias = compensated[key].weight, compensated[key].bias
            module.weight = self._between(module.weight, weight, share)
            if bias is not None:
                module.bias = self._between(module.bias, bias, share)
        try:
            yield dense
        finally:
            for key, module in modules.items():
                module.weight, module.bias = dense[key][1]

    def _between(self, dense: Tensor | None, pruned: Tensor, share: float) -> nn.Parameter:
        pruned = pruned.to(self._device)
        dense = torch.zeros_like(pruned) if dense is None else dense.detach()
        return nn.Parameter(dense.lerp(pruned, share), requires_grad=False)


def _note_cost(
    costs: dict[str, Tensor],
    key: str,
    dense: _Parameters,
    share: float,
    _: nn.Module,
    args: tuple[Tensor, ...],
    out: Tensor,
) -> None:
    """Add ⟨derivative by a consumer's output, its whole change⟩, weighted, once that is known."""
    # On the way by `share`, W is W₀ + share (W̃ − W₀): divided by it, the output's change is the
    # whole one, δ = (W̃ − W₀) x.
    change = (out.detach() - F.linear(args[0].detach(), *dense)) / share

    def add(gradient: Tensor) -> None:
        # The sum stays on the device: to read it would wait for it.
        costs[key] = costs[key] + _RULE[share] * (gradient * change).sum(dtype=torch.float64)

    out.register_hook(add)
