"""Dense hidden states carried through one block at a time, statistics gathered on the way.

Only the embedding, one block and the hidden states are ever in memory.
"""

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from coec.events import Progress
from coec.models.dense import Dense, Prefetcher
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import routed_inputs
from coec.streaming.layers import Layers, State, tokens_per_batch
from coec.types import Gram, GramSum

Item = TypeVar("Item")
LEAST_BATCHES = 8
"""Number of batches, at least, where sums over batches are shared out among workers, or where a
share of the batches stands for all."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Block of the dense model after its calibration pass.

    Attributes:
        block: its layout.
        tensors: its weights as stored, by their full names.
        grams: statistics of every site's inputs, by the site's name.
        holdout: the same over the validation windows; empty where there are none.
    """

    block: BlockLayout
    tensors: dict[str, Tensor]
    grams: dict[str, Gram]
    holdout: dict[str, Gram] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """Index of the block."""
        return self.block.index


@dataclass(frozen=True, eq=False)
class Sums:
    """Statistics of one block while they are summed, by the site's name."""

    fit: dict[str, GramSum] = field(default_factory=dict)
    validation: dict[str, GramSum] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Sums":
        """Return the sums on another device."""
        return Sums(*({n: g.to(device) for n, g in sums.items()} for sums in vars(self).values()))

    def grams(self) -> tuple[dict[str, Gram], dict[str, Gram]]:
        """Return the Grams of both; the sums are given away, so that each Gram can be freed."""
        fit, validation = (
            {name: sums.pop(name).gram() for name in list(sums)} for sums in vars(self).values()
        )
        return fit, validation


class DenseStream:
    """The dense model over fixed token windows, block by block.

    Batches are added to the sums one after the other: where one stream goes on with the sums of
    another, they come out as if one had run all windows.

    Args:
        dense: the model.
        windows: token ids, n × length.
        holdout: windows whose statistics are kept apart.
        device: where blocks run; hidden states wait on the CPU.
        dtype: of the forward pass.
        progress: called with ("calibrating", finished batches over all blocks, total).
    """

    def __init__(
        self,
        dense: Dense,
        windows: Int[Tensor, "n length"],
        *,
        holdout: Int[Tensor, "h length"] | None = None,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        self._dense, self._device, self._progress = dense, device, progress
        self._layers = Layers(dense, device=device, dtype=dtype)
        size = batch_size(windows.shape[1], tokens_per_batch(device, dense.shape.hidden))
        fit = windows.split(size)
        self._fit_batches = len(fit)
        # Validation windows come last, in batches of their own: no batch belongs to both sums.
        self._batches = fit if holdout is None else fit + holdout.split(size)
        self.states: dict[int, State] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Set `states` to those before the first block."""
        embedding = self._dense.tensor(self._dense.layout.embedding)
        self.states = dict(enumerate(self._layers.embed(self._batches, embedding)))

    @torch.no_grad()
    def advance(
        self,
        block: BlockLayout,
        tensors: Mapping[str, Tensor],
        sums: Sums | None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Carry `states` through the next block.

        Args:
            block: its layout.
            tensors: its weights as stored.
            sums: to which its statistics are added; None where they are not wanted.
            progress: called after every batch.
        """
        self._layers.load(block, tensors)
        layer = self._layers.modules[block.index]
        middle, end = self._fit_batches, len(self._batches)
        # Every batch once through the block; a hook sums the inputs of its consumers on the way.
        for windows, numbers in (("fit", range(middle)), ("validation", range(middle, end))):
            with ExitStack() as hooks:
                if sums is not None and numbers:
                    hooks.enter_context(summed_inputs(self._layers, block, getattr(sums, windows)))
                part = {number: self.states.pop(number) for number in numbers}
                self.states |= self._layers.through(layer, block.index, part, progress)
        self._layers.drop(block.index)

    def blocks(self, skip: Container[int] = ()) -> Iterator[Measured]:
        """Yield blocks in order, their statistics complete.

        Blocks in `skip` are only passed through; nothing runs behind the last that is yielded.
        """
        # Every block before the last one asked for is passed through, measured or not.
        indices = [b.index for b in self._dense.layout.blocks if b.index not in skip]
        if not indices:
            return
        self.begin()
        blocks = self._dense.layout.blocks[: indices[-1] + 1]
        counter, total = itertools.count(1), len(self._batches) * len(blocks)

        def count_batch() -> None:
            if self._progress:
                self._progress("calibrating", next(counter), total)

        # The block after this one is read meanwhile; without sums it is only passed through.
        with Prefetcher(self._dense, last=indices[-1]) as ahead:
            for block in blocks:
                tensors = ahead.tensors(block)
                sums = Sums() if block.index in indices else None
                self.advance(block, tensors, sums, count_batch)
                if sums is not None:
                    yield Measured(block, tensors, *sums.grams())


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
        weights: of the tokens of every run; None where all count alike.
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


def batch_size(length: int, tokens: int, windows: int | None = None) -> int:
    """Return how many windows of `length` are run at once, of so many tokens at most, or one.

    Given their number, they make LEAST_BATCHES batches at least.
    """
    size = tokens // length
    return max(1, size if windows is None else min(size, windows // LEAST_BATCHES))


def first_windows(windows: Int[Tensor, "n length"], tokens: int) -> Int[Tensor, "m length"]:
    """Return the first windows, as many as hold no more than `tokens` tokens, and one at least."""
    return windows[: max(1, tokens // windows.shape[1])]


def in_parts(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Split items into `count` runs of about equal length; some are empty where items are fewer."""
    return [items[n * len(items) // count : (n + 1) * len(items) // count] for n in range(count)]
