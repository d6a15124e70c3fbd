"""What pruning each site costs the model's predictions, beside what it costs its own output.

The same relative error matters a hundred times more at one site than at another, and nothing in a
site's own statistics says where. So it is measured, twice for each site: in the dense model with
this site alone pruned, and in the pruned model with this site alone left whole. All of these models
are the dense one with some consumers replaced, and run side by side, a block at a time (METHODS
§10).
"""

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from coec.errors import NumericalError
from coec.models.dense import Dense
from coec.models.layout import BlockLayout, Site
from coec.streaming.dense_stream import first_windows
from coec.streaming.head import Head
from coec.streaming.layers import Layers, State

TOKENS = 4096
"""Of the windows that are run: two sets of hidden states for each site wait in memory at once."""
TRUNCATED_TOKENS = 2048
"""The same for truncated matrices: a set for each matrix and share."""
SHARES = (0.0, 0.1, 0.25, 0.45, 0.65, 0.85)
"""Shares of a matrix's parameters at whose ranks a truncation is measured; 0 is rank 1."""
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class RepairedConsumer:
    """A consumer after pruning, in the dense model's shape: columns that went are 0."""

    weight: Float[Tensor, "m d"]
    bias: Float[Tensor, " m"] | None


class _Variants:
    """Models that differ in few weights, run side by side over the first few windows.

    Hidden states wait on the CPU. About so many `tokens` are run.
    """

    def __init__(
        self,
        dense: Dense,
        windows: Int[Tensor, "n length"],
        tokens: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._device, self._dtype = dense, device, dtype
        self._windows = first_windows(windows, tokens)
        self._layers = Layers(dense, device=device, dtype=dtype)
        [self._dense] = self._layers.embed([self._windows], dense.tensor(dense.layout.embedding))

    def _through(self, block: BlockLayout, state: State) -> State:
        return self._layers.advance(block.index, state)

    def _run_on(self, block: BlockLayout, states: dict[_Key, State], new: Collection[_Key]) -> None:
        """Run the models that differ at an earlier block."""
        for key in states:
            if key not in new:
                states[key] = self._through(block, states[key])

    def _divergences(self, states: Mapping[_Key, State], advice: str) -> dict[_Key, float]:
        """Return mean KL divergences from the dense model; NumericalError where one is infinite."""
        head = Head(self._model, device=self._device, dtype=self._dtype)
        divergences = {}
        for key, state in states.items():
            divergences[key] = head.predicted(state, self._dense, self._windows).kl
            if not math.isfinite(divergences[key]):
                raise NumericalError(
                    "what pruning each site costs cannot be measured: a pruned model predicts "
                    f"nothing finite; {advice}"
                )
        return divergences

    def _parameter(self, tensor: Tensor | None) -> nn.Parameter | None:
        if tensor is None:
            return None
        return nn.Parameter(tensor.to(self._device, self._dtype), requires_grad=False)


class Truncations(_Variants):
    """Models that differ from the dense one in the rank of one matrix."""

    def __init__(
        self,
        dense: Dense,
        windows: Int[Tensor, "n length"],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(dense, windows, TRUNCATED_TOKENS, device=device, dtype=dtype)
        self._states: dict[tuple[str, int], State] = {}

    @torch.no_grad()
    def advance(
        self,
        block: BlockLayout,
        tensors: Mapping[str, Tensor],
        truncated: Iterable[tuple[str, int, Tensor]],
    ) -> None:
        """Run all models through the next block.

        Args:
            block: its layout.
            tensors: its weights as stored, by full names.
            truncated: names of its weights, ranks, and the weights of these ranks.
        """
        self._layers.load(block, tensors)
        earlier = set(self._states)
        for name, rank, weight in truncated:
            module: Any = self._layers.module(block, name.removesuffix(".weight"))
            before, module.weight = module.weight, self._parameter(weight)
            self._states[name, rank] = self._through(block, self._dense)
            module.weight = before
        self._run_on(block, self._states, self._states.keys() - earlier)
        self._dense = self._through(block, self._dense)
        self._layers.drop(block.index)

    def costs(self) -> dict[str, dict[int, float]]:
        """Return the mean KL divergence of every model from the dense one, by name and rank.

        Raises:
            NumericalError: one of the models predicts nothing finite.
        """
        costs: dict[str, dict[int, float]] = {}
        divergences = self._divergences(self._states, "use allocation = uniform")
        for (name, rank), divergence in divergences.items():
            costs.setdefault(name, {})[rank] = divergence
        return costs


class Sensitivity(_Variants):
    """Models that differ from the dense one, or from the pruned one, at a site.

    They run over the first few windows; hidden states wait on the CPU. The sites whose keys are in
    `measured` are those.
    """

    def __init__(
        self,
        dense: Dense,
        windows: Int[Tensor, "n length"],
        measured: Collection[str],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(dense, windows, TOKENS, device=device, dtype=dtype)
        self._measured = measured
        self._pruned = self._dense
        self._alone: dict[str, State] = {}
        self._whole: dict[str, State] = {}

    @torch.no_grad()
    def advance(
        self,
        block: BlockLayout,
        tensors: Mapping[str, Tensor],
        repaired: Mapping[str, RepairedConsumer],
    ) -> None:
        """Run all models through the next block.

        Args:
            block: its layout.
            tensors: its weights as stored, by full names.
            repaired: the pruned consumers, by `Site.key`, of the sites from which anything goes.
        """
        self._layers.load(block, tensors)
        sites = [site for site in block.sites if site.key in repaired]
        measured = [site for site in sites if site.key in self._measured]
        for site in measured:
            with self._pruned_at(block, [site], repaired):
                alone = self._through(block, self._dense)
            with self._pruned_at(block, [s for s in sites if s is not site], repaired):
                self._whole[site.key] = self._through(block, self._pruned)
            self._alone[site.key] = alone
        new_keys = {site.key for site in measured}
        self._dense = self._through(block, self._dense)
        self._run_on(block, self._alone, new_keys)
        with self._pruned_at(block, sites, repaired):
            self._pruned = self._through(block, self._pruned)
            self._run_on(block, self._whole, new_keys)
        self._layers.drop(block.index)

    def costs(self) -> dict[str, float]:
        """Return the cost of pruning every measured site, by `Site.key`: the mean of both ways.

        Each is a difference of mean KL divergences from the dense model, in nats per token.

        Raises:
            NumericalError: one of the models predicts nothing finite.
        """
        advice = "remove less, or use allocation = adaptive"
        [pruned] = self._divergences({"": self._pruned}, advice).values()
        costs = self._divergences(self._alone, advice)
        spared = self._divergences(self._whole, advice)
        return {key: (cost + pruned - spared[key]) / 2 for key, cost in costs.items()}

    @contextmanager
    def _pruned_at(
        self, block: BlockLayout, sites: Collection[Site], repaired: Mapping[str, RepairedConsumer]
    ) -> Iterator[None]:
        """Put the pruned consumers of some sites in the place of the dense ones."""
        modules: list[Any] = [self._layers.module(block, site.consumer) for site in sites]
        before = [(module.weight, module.bias) for module in modules]
        for module, site in zip(modules, sites, strict=True):
            consumer = repaired[site.key]
            module.weight = self._parameter(consumer.weight)
            module.bias = self._parameter(consumer.bias)
        try:
            yield
        finally:
            for module, (weight, bias) in zip(modules, before, strict=True):
                module.weight, module.bias = weight, bias
