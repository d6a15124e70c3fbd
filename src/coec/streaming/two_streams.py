"""The dense and the pruned model over the windows of one worker, a block at a time.

`coec.pipeline.reconstruct` leads. It solves blocks from the sums of every `TwoStreams`. Sums are
made in parts, and parts are added in their order wherever they lie, so the result does not depend
on how many workers hold the windows (METHODS §8).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.devices import summed_products
from coec.models.dense import Dense, Prefetcher
from coec.models.description import Description
from coec.reconstruction.block_training import Example
from coec.streaming.dense_stream import LEAST_BATCHES, batch_size, in_parts, summed_inputs
from coec.streaming.head import Head, Prediction
from coec.streaming.layers import Layers, State
from coec.streaming.token_weights import squares_of, token_weights
from coec.types import GramSum

SUMMANDS = LEAST_BATCHES
"""Summands of every sum over the windows, where there are batches enough."""
WindowKind = Literal["fit", "validation"]


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """A batch of windows; `number` is its index among all batches, wherever they lie."""

    number: int
    ids: Int[Tensor, "n length"]


Shard = Mapping[WindowKind, Sequence[Sequence[WindowBatch]]]
"""The windows of one worker, to fit on and for validation, in parts of several batches."""


def _zero() -> Float[Tensor, ""]:
    return torch.zeros((), dtype=torch.float64)


@dataclass(eq=False)
class ConsumerStatistics:
    """Sums over the inputs that a site's consumer has.

    Attributes:
        gram: the Gram of its inputs, tokens weighted.
        residual: `Σ w δ xᵀ`, δ the difference to the dense hidden state behind the site; None for
            no tokens.
        added, scale: inner products whose ratio is the factor by which a model scales what a site
            adds to the hidden state. They stay where they are summed, so that nothing waits.
    """

    gram: GramSum
    residual: Float[Tensor, "h d"] | None = None
    added: Tensor = field(default_factory=_zero)
    scale: Tensor = field(default_factory=_zero)

    def update(
        self,
        inputs: Float[Tensor, "... d"],
        consumed: Float[Tensor, "... h"],
        state: State,
        behind: State,
        target: State,
        weights: Float[Tensor, "n length"] | None,
    ) -> None:
        """Add a batch.

        Args:
            inputs, consumed: what the consumer takes, and makes of it.
            state, behind: before the site, and behind it.
            target: the dense model's states behind the site.
            weights: of the tokens; None where all count alike.
        """
        w = None if weights is None else weights.to(inputs.device)
        self.gram.update(inputs, w)
        residual = _flat(target) - _flat(behind)
        weighted = residual if w is None else residual * w.reshape(-1, 1).to(residual)
        self.add_residual(summed_products(weighted, inputs.flatten(0, -2)).double())
        # A model may scale what a site adds, by one number for all.
        added, consumed = _flat(behind) - _flat(state), _flat(consumed)
        self.added = self.added + _inner(added, consumed)
        self.scale = self.scale + _inner(consumed, consumed)

    def merge(self, statistics: "ConsumerStatistics") -> None:
        """Add the sums of another part."""
        self.gram.merge(statistics.gram)
        if statistics.residual is not None:
            self.add_residual(statistics.residual.to(self.gram.xx.device))
        self.added = self.added + statistics.added
        self.scale = self.scale + statistics.scale

    def add_residual(self, product: Float[Tensor, "h d"]) -> None:
        """Add `Σ w δ xᵀ` of a batch or part."""
        self.residual = product if self.residual is None else self.residual + product


@dataclass(eq=False)
class OpenBlock:
    """A block that the dense model has been run through, and the pruned one as far as it is solved.

    Attributes:
        behind_sites: the dense model's states behind every site where errors propagate, else
            behind the block alone; none behind a site that the pruned model has passed.
        before_site: the pruned model's states before the site that is solved next.
        weights: of the tokens, without which all count alike.
    """

    behind_sites: list[dict[int, State]]
    before_site: dict[int, State]
    weights: dict[int, Tensor] = field(default_factory=dict)

    @property
    def targets(self) -> dict[int, State]:
        """The dense model's states behind the block."""
        return self.behind_sites[-1]


class TwoStreams:
    """The hidden states of both models before one block, for the windows of one shard.

    A block is opened and measured: site after site, each solved before the next, where errors
    propagate, and else all at once in the dense model. Then both models advance through it.

    Args:
        dense: the model.
        pruned: the sizes of the pruned model.
        shard: the windows.
        device: where to compute.
        home: where hidden states wait.
        dtype: dtype of the forward passes.
        written: dtype of the written weights.
        propagate: solve every sublayer on the pruned model's inputs.
    """

    def __init__(
        self,
        dense: Dense,
        pruned: Description,
        shard: Shard,
        device: torch.device,
        *,
        home: torch.device,
        dtype: torch.dtype,
        written: torch.dtype,
        propagate: bool,
    ) -> None:
        self._dense, self._device = dense, device
        self._propagate, self._dtype, self._written = propagate, dtype, written
        self._batches = {
            b.number: b for by_part in shard.values() for batches in by_part for b in batches
        }
        self._parts = {
            windows_kind: [[b.number for b in batches] for batches in by_part]
            for windows_kind, by_part in shard.items()
        }
        self._dense_layers = Layers(dense, device=device, dtype=self._dtype, home=home)
        self._pruned_layers = Layers(pruned, device=device, dtype=self._dtype, home=home)
        self._pruned_sites = {site.key: site for site in pruned.layout.sites}
        self._prefetcher = Prefetcher(dense, last=len(dense.layout.blocks) - 1)
        self._begin()

    def _begin(self) -> None:
        """Go back to before the first block."""
        self._dense_states = self._pruned_states = dict[int, State]()
        ids = [batch.ids for batch in self._batches.values()]
        embedding = self._dense.tensor(self._dense.layout.embedding)
        dense = self._dense_layers.embed(ids, embedding)
        pruned = self._pruned_layers.embed(ids, embedding.to(self._written))
        self._dense_states = dict(zip(self._batches, dense, strict=True))
        self._pruned_states = dict(zip(self._batches, pruned, strict=True))
        self._index = 0
        self._opened: OpenBlock | None = None

    @property
    def _block(self) -> OpenBlock:
        assert self._opened is not None, "no block is open"
        return self._opened

    def rewind(self, limit: int) -> int:
        """Index of the current block; goes back to the first if it is beyond `limit`, or if states
        before it are gone.
        """
        if self._opened is not None:
            self._drop(self._index)
            self._opened = None
        streams = self._dense_states, self._pruned_states
        if self._index > limit or any(len(states) < len(self._batches) for states in streams):
            self._begin()
        return self._index

    @torch.no_grad()
    def open(self, index: int) -> None:
        """Run the dense model through a block, sublayer by sublayer where errors propagate."""
        block = self._dense.layout.blocks[index]
        layers, states = self._dense_layers, self._dense_states
        layers.load(block, self._prefetcher.tensors(block))
        if not self._propagate:
            behind = [layers.through(layers.modules[index], index, dict(states))]
        else:
            behind = []
            for site in block.sites:
                # States behind a site are its targets; those before the block nothing needs again.
                states = layers.through(layers.sublayer(block, site), index, states)
                behind.append(dict(states))
        self._opened = OpenBlock(behind, self._pruned_states)

    def examples(self, windows_kind: WindowKind) -> Iterator[Example]:
        """Yield every window of the open block: inputs, targets behind it, weights of tokens."""
        inputs, block = self._pruned_states, self._block
        for n in self._numbers(windows_kind):
            w = block.weights.get(n)
            weights = torch.ones(inputs[n].shape[:2]) if w is None else w
            yield from map(Example, inputs[n], block.targets[n], weights)

    def squares(self) -> Iterator[tuple[Float[Tensor, "n length"], ...]]:
        """Yield, for every part, each token's mean square of the dense state behind the block."""
        for numbers in self._parts["fit"]:
            squares = [squares_of(s) for s in self._arriving(self._block.targets, numbers)]
            yield torch.cat(squares).cpu().split([len(batch) for batch in squares])

    def _arriving(self, states: Mapping[int, State], numbers: Sequence[int]) -> Iterator[State]:
        """Yield batches on the device: everything is computed in one place, wherever they wait."""
        return self._dense_layers.arriving(states[n] for n in numbers)

    def weigh(self, floor: float, mean: float) -> None:
        """Set the weight of every token of the open block, without which all count alike.

        Args:
            floor: lower bound on a token's mean square.
            mean: mean weight of the tokens fitted on, by which all are divided.
        """
        targets = self._block.targets
        self._block.weights = {
            n: token_weights(squares_of(state), floor) / mean
            for n, state in zip(targets, self._arriving(targets, [*targets]), strict=True)
        }

    def measure_block(self, windows_kind: WindowKind) -> Iterator[dict[str, GramSum]]:
        """Yield, for every part, sums over the inputs of all consumers in the dense model."""
        layers, block = self._dense_layers, self._dense.layout.blocks[self._index]

        @torch.no_grad()
        def measured(numbers: Sequence[int]) -> dict[str, GramSum]:
            sums: dict[str, GramSum] = {}
            for n, state in zip(numbers, self._arriving(self._dense_states, numbers), strict=True):
                with summed_inputs(layers, block, sums, self._block.weights.get(n)):
                    layers.call(layers.modules[block.index], block.index, state)
            return sums

        for numbers in self._parts[windows_kind]:
            yield measured(numbers)  # and not kept beside the next

    def measure(self, number: int, windows_kind: WindowKind) -> Iterator[ConsumerStatistics]:
        """Yield, for every part, the statistics of a site's consumer behind dense producers."""
        block = self._dense.layout.blocks[self._index]
        site = block.sites[number]
        sublayer = self._dense_layers.sublayer(block, site)
        consumer = self._dense_layers.module(block, site.consumer)
        calls: list[tuple[Tensor, Tensor]] = []
        hook = consumer.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
        both = self._block.before_site, self._block.behind_sites[number]

        @torch.no_grad()
        def measured(numbers: Sequence[int]) -> ConsumerStatistics:
            statistics = ConsumerStatistics(GramSum(site.columns, self._device))
            arriving = (self._arriving(states, numbers) for states in both)
            for n, state, target in zip(numbers, *arriving, strict=True):
                behind = self._dense_layers.call(sublayer, self._index, state)
                x, consumed = calls.pop()
                w = self._block.weights.get(n)
                statistics.update(x, consumed, state, behind, target, w)
            return statistics

        try:
            for numbers in self._parts[windows_kind]:
                yield measured(numbers)  # and not kept beside the next
        finally:
            hook.remove()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the pruned model's layer the tensors that a sublayer needs."""
        self._pruned_layers.load(self._dense.layout.blocks[self._index], tensors, partial=True)

    @torch.no_grad()
    def advance_site(self, number: int) -> None:
        """Run the pruned model through a sublayer, as it was loaded."""
        opened, layers = self._block, self._pruned_layers
        block = self._dense.layout.blocks[self._index]
        opened.behind_sites[number] = {}
        # The first site's are those of the block too, on which it is trained.
        before = dict(opened.before_site) if number == 0 else opened.before_site
        sublayer = layers.sublayer(block, block.sites[number])
        opened.before_site = layers.through(sublayer, self._index, before)

    @torch.no_grad()
    def advance(
        self, index: int, written: Mapping[str, Tensor] | None, *, halfway: bool = False
    ) -> None:
        """Run both models through a solved block, the pruned one with the written tensors.

        Without them it has the dense block, and with none in the mapping it has no such block.

        Args:
            index: of the block.
            written: the tensors of the pruned block.
            halfway: the pruned model stands behind the first of two sites already, which has the
                very tensors that were written: only the second is run.
        """
        block, layers = self._dense.layout.blocks[index], self._dense_layers
        opened, self._opened = self._opened, None
        states, self._pruned_states = self._pruned_states, {}
        if opened is not None:
            self._dense_states = opened.targets
        else:
            layers.load(block, self._prefetcher.tensors(block))
            self._dense_states = layers.through(layers.modules[index], index, self._dense_states)
        if written:
            layers = self._pruned_layers
            layers.load(block, written)
        if written is None or written:
            part = layers.modules[index]
            if halfway:
                assert opened is not None
                states, part = opened.before_site, layers.sublayer(block, block.sites[-1])
            del opened  # with states that are passed
            states = layers.through(part, index, states)
        self._pruned_states = states
        self._drop(index)
        self._index = index + 1

    def predict(self, windows_kind: WindowKind, dense: bool) -> Iterator[Prediction]:
        """Yield how well every batch is predicted behind the last block, by either model."""
        states = self._dense_states if dense else self._pruned_states
        for n in self._numbers(windows_kind):
            yield self._head.predicted(states[n], self._dense_states[n], self._batches[n].ids)

    def _numbers(self, windows_kind: WindowKind) -> Iterator[int]:
        return (n for numbers in self._parts[windows_kind] for n in numbers)

    @cached_property
    def _head(self) -> Head:
        return Head(self._dense, device=self._device, dtype=self._dtype)

    def _drop(self, index: int) -> None:
        self._dense_layers.drop(index)
        self._pruned_layers.drop(index)


def shards(
    windows: Int[Tensor, "_ length"],
    validation: Int[Tensor, "_ length"] | None,
    workers: int = 1,
    *,
    tokens: int,
) -> list[Shard]:
    """Return the windows of every worker: consecutive whole parts, no more shards than parts.

    `tokens` are run at once, at most.
    """
    size = batch_size(windows.shape[1], tokens, len(windows))
    fit = windows.split(size)
    validation_batches = () if validation is None else validation.split(size)
    numbered = [WindowBatch(n, ids) for n, ids in enumerate((*fit, *validation_batches))]
    by_part: dict[WindowKind, Sequence[Sequence[WindowBatch]]] = {
        "fit": in_parts(numbered[: len(fit)], min(SUMMANDS, len(fit))),
        "validation": in_parts(numbered[len(fit) :], min(SUMMANDS, len(validation_batches))),
    }
    workers = min(workers, len(by_part["fit"]))
    by_kind = [in_parts(p, workers) for p in by_part.values()]
    return [dict(zip(by_part, shard, strict=True)) for shard in zip(*by_kind, strict=True)]


def _inner(a: Tensor, b: Tensor) -> Float[Tensor, ""]:
    return (a * b).sum(dtype=torch.float64)


def _flat(tensor: Tensor) -> Float[Tensor, "tokens d"]:
    """Return every token as a row, in float32 or wider."""
    return tensor.flatten(0, -2).to(torch.promote_types(tensor.dtype, torch.float32))
