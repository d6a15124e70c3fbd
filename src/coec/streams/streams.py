"""The dense and the pruned model over the calibration windows, one block at a time (METHODS §8).

Only the embedding, one block and the hidden states are in memory. Sums over the windows are made in
fixed parts, and the parts are added in their order, so that the result does not depend on how many
processes share the windows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from coec import parallel
from coec.devices import summed_products, tokens_per_batch
from coec.methods.block_training import Example
from coec.methods.closed_form import ridge_for, solve_by_energy
from coec.models.calls import State
from coec.models.dense import Dense, Prefetcher
from coec.models.files import JsonDict
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import routed_inputs
from coec.planning.plan import Plan
from coec.streams.head import Head, Prediction
from coec.streams.layers import Layers
from coec.types import Gram, GramSum

PARTS = 8
"""Summands of every sum over the windows, if there are so many batches."""
CARRIED = 0.6
"""Share of the error made so far that a consumer aims to take back (docs/lab/LOG.md)."""
_LEAST_SQUARE = 1e-3
"""Lower bound on the mean squares of hidden states, as a share of their median."""


class BlockSums(dict[str, GramSum]):
    """Sums over the inputs of a block's consumers, by the site's name."""

    def merge(self, other: "BlockSums") -> None:
        """Add the sums of another part."""
        for name, total in other.items():
            if name in self:
                self[name].merge(total)
            else:
                self[name] = total


@dataclass(eq=False)
class ConsumerSums:
    """Sums over the inputs of one site's consumer in the pruned model.

    Attributes:
        gram: of the inputs, tokens weighted.
        residual: `Σ w δ xᵀ`, δ the difference to the dense hidden state after the site.
        added, scale: inner products whose ratio is the factor by which a model scales the output
            that a site adds to the hidden state. They stay on their device, so that nothing waits.
    """

    gram: GramSum
    residual: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    added: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    scale: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def update(
        self,
        inputs: Float[Tensor, "... d"],
        consumed: Float[Tensor, "... h"],
        states: tuple[State, State, State],
        weights: Float[Tensor, "n length"] | None,
    ) -> None:
        """Add a batch: the consumer's inputs and outputs, the states before and after the site,
        and the dense model's states after it.
        """
        before, after, target = map(_flat, states)
        w = None if weights is None else weights.to(inputs.device)
        self.gram.update(inputs, w)
        residual = target - after
        weighted = residual if w is None else residual * w.reshape(-1, 1).to(residual)
        product = summed_products(weighted, inputs.flatten(0, -2)).double()
        self.residual = product if self.residual.ndim == 0 else self.residual + product
        # A model may scale the output that a site adds, by one number for all.
        added, consumed = after - before, _flat(consumed)
        self.added = self.added + (added * consumed).sum(dtype=torch.float64)
        self.scale = self.scale + (consumed * consumed).sum(dtype=torch.float64)

    def merge(self, other: "ConsumerSums") -> None:
        """Add the sums of another part."""
        self.gram.merge(other.gram)
        self.residual = self.residual + other.residual.to(self.residual.device)
        self.added = self.added + other.added
        self.scale = self.scale + other.scale

    def statistics(self, weight: Float[Tensor, "m d"]) -> tuple[Gram, Float[Tensor, "m d"]]:
        """Return the Gram of the inputs, and the target of the consumer.

        The consumer has to add a share of the residual δ of the hidden states as well:
        `T = W₀ + .6 (Σ w δ xᵀ)(G + λ diag G)⁻¹`. Over windows that earlier blocks were also
        fitted on, the residual is smaller than elsewhere and the inputs predict it better,
        increasingly with every block: the whole of it would be too much.
        """
        gram = self.gram.gram()
        gram.check_finite()
        scale = float(self.scale)
        factor = float(self.added) / scale if scale > 0 else 1.0
        residual = self.residual.to(gram.xx) / (factor or 1.0)
        ridge = ridge_for(len(gram.xx), gram.tokens)
        change = solve_by_energy(residual, gram.xx, ridge, gram.precision)
        return gram, weight.to(gram.xx) + CARRIED * change


class Streams:
    """The hidden states of both models before one block, for the windows of this process.

    If blocks do not depend on each other, there is the dense model alone: `measure` sums the inputs
    of a block's consumers and passes the block. Otherwise a block is opened, which runs the dense
    model through it; its sites are measured, and `advance` takes the pruned model through it.

    Args:
        plan: sizes, dtypes, device, and whether errors propagate and blocks are trained.
        dense: the model.
        fit, validation: token ids of the windows of all processes.
        pruned: run the pruned model too, if blocks depend on each other.
    """

    def __init__(
        self,
        plan: Plan,
        dense: Dense,
        fit: Int[Tensor, "n length"],
        validation: Int[Tensor, "h length"] | None = None,
        *,
        pruned: bool = True,
    ) -> None:
        self._plan, self._dense = plan, dense
        size = batch_size(fit, tokens_per_batch(plan.device, dense.shape.hidden))
        batches = [*fit.split(size), *(() if validation is None else validation.split(size))]
        last = -(-len(fit) // size)
        # Numbers of all batches, in parts → the parts of this process
        self._fit = parallel.share(in_parts(range(last)))
        self._validation = parallel.share(in_parts(range(last, len(batches))))
        self._ids = {n: batches[n] for part in (*self._fit, *self._validation) for n in part}
        layers = [dense, plan.pruned_model] if plan.sequential and pruned else [dense]
        self._layers, *pruned_layers = (
            Layers(model, device=plan.device, dtype=plan.forward, home=plan.home)
            for model in layers
        )
        self._pruned_layers = pruned_layers[0] if pruned_layers else None
        self._prefetcher = Prefetcher(dense, last=len(dense.layout.blocks) - 1)
        self._index = 0
        self._after_sites: list[dict[int, State]] = []
        self._before_site: dict[int, State] = {}
        self._weights: dict[int, Tensor] = {}
        # States before the first block
        outside = dense.outside_tensors()
        self._dense_states = self._layers.embed(self._ids, outside)
        self._pruned_states: dict[int, State] = {}
        if self._pruned_layers is not None:
            outside = {name: tensor.to(plan.written) for name, tensor in outside.items()}
            self._pruned_states = self._pruned_layers.embed(self._ids, outside)

    @torch.no_grad()
    def measure(
        self, block: BlockLayout, to: int = 0
    ) -> tuple[dict[str, Tensor], BlockSums | None]:
        """Return a block's stored tensors, and its sums on one process; pass it."""
        self._catch_up(block.index)
        tensors, layer = self._load(block), self._layers.modules[block.index]

        def part(numbers: Sequence[int]) -> BlockSums:
            sums = BlockSums()
            with summed_inputs(self._layers, block, sums):
                states = {n: self._dense_states.pop(n) for n in numbers}
                self._dense_states |= self._layers.through(layer, block.index, states)
            return sums

        total = parallel.sum_to(to, map(part, self._fit))
        self._drop(block)
        return tensors, total

    @torch.no_grad()
    def open(self, block: BlockLayout) -> dict[str, Tensor]:
        """Run the dense model through a block, site by site if errors propagate.

        Returns the block's stored tensors.
        """
        self._catch_up(block.index)
        tensors, layers, states = self._load(block), self._layers, self._dense_states
        self._before_site = self._pruned_states
        if self._plan.propagates:
            self._after_sites = []
            for site in block.sites:
                # States after a site are its targets; nothing needs the block's inputs again.
                states = layers.through(layers.sublayer(block, site), block.index, states)
                self._after_sites.append(dict(states))
        else:
            layer = layers.modules[block.index]
            self._after_sites = [layers.through(layer, block.index, dict(states))]
        if self._plan.trains:
            self._weigh()
        return tensors

    def block_sums(self, block: BlockLayout) -> BlockSums | None:
        """Return the sums of an open block over the dense model's inputs, on the first process."""

        @torch.no_grad()
        def part(numbers: Sequence[int]) -> BlockSums:
            sums, layer = BlockSums(), self._layers.modules[block.index]
            arriving = self._arriving(self._dense_states, numbers)
            for n, state in zip(numbers, arriving, strict=True):
                with summed_inputs(self._layers, block, sums, self._weights.get(n)):
                    self._layers.call(layer, block.index, state)
            return sums

        total: BlockSums | None = parallel.sum_to(0, map(part, self._fit))
        return total

    def site_sums(self, block: BlockLayout, number: int) -> ConsumerSums | None:
        """Return the sums of a site of an open block over the pruned model's inputs, with dense
        producers, on the first process.
        """
        site, layers = block.sites[number], self._layers
        sublayer, consumer = layers.sublayer(block, site), layers.module(block, site.consumer)
        calls: list[tuple[Tensor, Tensor]] = []
        hook = consumer.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))

        @torch.no_grad()
        def part(numbers: Sequence[int]) -> ConsumerSums:
            sums = ConsumerSums(GramSum(site.columns, self._plan.device))
            both = (self._before_site, self._after_sites[number])
            arriving = (self._arriving(states, numbers) for states in both)
            for n, state, target in zip(numbers, *arriving, strict=True):
                after = layers.call(sublayer, block.index, state)
                inputs, consumed = calls.pop()
                sums.update(inputs, consumed, (state, after, target), self._weights.get(n))
            return sums

        try:
            total: ConsumerSums | None = parallel.sum_to(0, map(part, self._fit))
            return total
        finally:
            hook.remove()

    @torch.no_grad()
    def advance_site(self, block: BlockLayout, number: int, written: Mapping[str, Tensor]) -> None:
        """Run the pruned model through a site of an open block, with the tensors so far."""
        assert self._pruned_layers is not None
        layers, site = self._pruned_layers, block.sites[number]
        others = {name for s in block.sites if s.name != site.name for name in s.tensors}
        tensors = {name: tensor for name, tensor in written.items() if name not in others}
        # Biases of a format that has them everywhere, if nobody computed any
        for name, shape in self._plan.pruned_shapes.items():
            inside = name.startswith(block.prefix) and name.endswith(".bias")
            if inside and name not in tensors and name not in others:
                tensors[name] = torch.zeros(shape, dtype=self._plan.written)
        layers.load(block, tensors, partial=True)
        self._after_sites[number] = {}
        # The block is trained on the states before its first site.
        before = dict(self._before_site) if number == 0 else self._before_site
        self._before_site = layers.through(layers.sublayer(block, site), block.index, before)

    def examples(self) -> tuple[list[Example], list[Example]]:
        """Return all windows of an open block, fitted on and for validation, on the first process:
        the pruned model's states before it, the dense model's after it, weights of tokens.
        """
        inputs, targets = self._pruned_states, self._after_sites[-1]

        def window(numbers: Sequence[int]) -> Iterator[Example]:
            for n in numbers:
                yield from map(Example, inputs[n], targets[n], self._weights[n])

        fit, validation = (
            list(parallel.gathered(example for numbers in parts for example in window(numbers)))
            for parts in (self._fit, self._validation)
        )
        return fit, validation

    @torch.no_grad()
    def advance(self, block: BlockLayout, written: Mapping[str, Tensor]) -> None:
        """Run the models through a block, the pruned one with the written tensors.

        A block that was measured is passed already.
        """
        if self._index > block.index:
            return
        self._catch_up(block.index)
        after, self._after_sites = self._after_sites, []
        if after:
            self._dense_states = after[-1]
        else:
            self._pass_dense(block)
        if self._pruned_layers is not None:
            layers, states = self._pruned_layers, self._pruned_states
            layers.load(block, written)
            part: nn.Module = layers.modules[block.index]
            # Solving has taken the pruned model to the last of two sites already.
            if after and self._plan.propagates and not self._plan.trains and len(block.sites) == 2:
                states, part = self._before_site, layers.sublayer(block, block.sites[-1])
            self._pruned_states = self._before_site = {}
            self._pruned_states = layers.through(part, block.index, states)
        self._drop(block)

    def predictions(self) -> JsonDict:
        """Return how well the pruned model predicts the validation windows, after the last block;
        nothing if there are none.

        Predictions of windows that it was fitted on say nothing about others: on a real model the
        KL of fitted windows was less than half of the KL elsewhere (docs/lab/LOG.md).
        """
        if not self._plan.validation_count or self._pruned_layers is None:
            return {}
        self._catch_up(len(self._dense.layout.blocks))

        def part(numbers: Sequence[int]) -> Prediction:
            sums = Prediction()
            for n in numbers:
                states = self._pruned_states[n], self._dense_states[n]
                sums.merge(self.head.predicted(*states, self._ids[n]))
            return sums

        sums = parallel.lead(lambda total: total, parallel.sum_to(0, map(part, self._validation)))
        return {
            "windows": "held out", "count": self._plan.validation_count,
            "dense": sums.baseline_perplexity, **sums.record(),
        }  # fmt: skip

    def pruned_function(self, block: BlockLayout) -> Callable[[Mapping[str, Tensor], State], State]:
        """Return a block of the pruned model as a function of its tensors and a hidden state."""
        assert self._pruned_layers is not None
        return self._pruned_layers.function(block)

    @cached_property
    def head(self) -> Head:
        """The end of the dense model, which pruning leaves as it is."""
        return Head(self._dense, device=self._plan.device, dtype=self._plan.forward)

    def _weigh(self) -> None:
        """Weigh every token of an open block by the inverse mean square of its dense state after
        the block, by which the next norm divides. The mean weight is 1 over the windows fitted on.
        """
        targets = self._after_sites[-1]

        def squares(numbers: Sequence[int]) -> list[Tensor]:
            means = [_mean_squares(state) for state in self._arriving(targets, numbers)]
            return list(torch.cat(means).cpu().split([len(batch) for batch in means]))

        floor, mean = parallel.lead(
            _weights_of,
            [batch for part in parallel.gathered(map(squares, self._fit)) for batch in part],
        )
        arriving = self._arriving(targets, [*targets])
        self._weights = {
            n: 1 / _mean_squares(state).clamp_min(floor) / mean
            for n, state in zip(targets, arriving, strict=True)
        }

    def _arriving(self, states: Mapping[int, State], numbers: Sequence[int]) -> Iterator[State]:
        """Yield batches on the device that computes."""
        return self._layers.arriving(states[n] for n in numbers)

    def _catch_up(self, index: int) -> None:
        """Run the dense model through blocks before one that the pruned model leaves out."""
        while self._index < index:
            block = self._dense.layout.blocks[self._index]
            self._pass_dense(block)
            self._drop(block)

    def _pass_dense(self, block: BlockLayout) -> None:
        self._load(block)
        layer = self._layers.modules[block.index]
        self._dense_states = self._layers.through(layer, block.index, self._dense_states)

    def _load(self, block: BlockLayout) -> dict[str, Tensor]:
        tensors = self._prefetcher.tensors(block)
        self._layers.load(block, tensors)
        return tensors

    def _drop(self, block: BlockLayout) -> None:
        self._layers.drop(block.index)
        if self._pruned_layers is not None:
            self._pruned_layers.drop(block.index)
        self._index = block.index + 1


@contextmanager
def summed_inputs(
    layers: Layers,
    block: BlockLayout,
    sums: dict[str, GramSum],
    weights: Float[Tensor, "n length"] | None = None,
) -> Iterator[None]:
    """Add the inputs that every site's consumer has inside the `with` block to `sums`.

    Args:
        layers: that run.
        block: whose sites they are.
        sums: by the site's name; a site that is missing is added.
        weights: of the tokens of every run; None if all count alike.
    """
    routed = [site for site in block.sites if site.routed]
    experts = layers.experts(block.index)

    def add(site: Site, inputs: Tensor, of_rows: Tensor | None) -> None:
        if site.name not in sums:
            sums[site.name] = GramSum(site.columns, inputs.device)
        sums[site.name].update(inputs, of_rows)

    def add_routed(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        # Weights of the tokens that the expert gets, in the order of its rows.
        for expert, token, inputs, norms in routed_inputs(module, args):  # some get no token
            of_rows = None if weights is None else weights.flatten().to(token.device)[token]
            add(routed[expert], inputs, of_rows)
            sums[routed[expert].name].add_outputs(norms)

    with ExitStack() as hooks:
        if experts is not None:
            hooks.callback(experts.register_forward_pre_hook(add_routed).remove)
        for site in (site for site in block.sites if not site.routed):
            consumer = layers.module(block, site.consumer)
            handle = consumer.register_forward_pre_hook(
                lambda _, args, site=site: add(site, args[0], weights)
            )
            hooks.callback(handle.remove)
        yield


def batch_size(windows: Int[Tensor, "n length"], tokens: int) -> int:
    """Return how many windows run at once: of so many tokens at most, in PARTS batches at least."""
    return max(1, min(tokens // windows.shape[1], len(windows) // PARTS))


def in_parts(items: Sequence[int]) -> list[Sequence[int]]:
    """Split items into PARTS runs of about equal length, none of them empty."""
    count = min(PARTS, len(items))
    return [items[n * len(items) // count : (n + 1) * len(items) // count] for n in range(count)]


def _weights_of(squares: Sequence[Float[Tensor, "n length"]]) -> tuple[float, float]:
    """Return the least mean square that a weight is computed from, and the mean weight."""
    floor = _LEAST_SQUARE * float(torch.cat([batch.flatten() for batch in squares]).median())
    floor = floor or 1.0  # if half of the states are 0
    sums = [(1 / batch.clamp_min(floor)).sum(dtype=torch.float64) for batch in squares]
    return floor, math.fsum(torch.stack(sums).tolist()) / sum(batch.numel() for batch in squares)


def _mean_squares(state: State) -> Float[Tensor, "n length"]:
    """Return every token's mean square."""
    return state.float().square().mean(dim=-1)


def _flat(tensor: Tensor) -> Float[Tensor, "tokens d"]:
    """Return every token as a row, in float32 or wider."""
    return tensor.flatten(0, -2).to(torch.promote_types(tensor.dtype, torch.float32))
