"""The dense and the pruned model over some of the windows: what one place holds and sums.

`coec.pipeline.reconstruct` leads. It solves blocks from the sums of every `TwoStreams`. Parts are
added in their order wherever they lie, so the result does not depend on how many workers hold the
windows (METHODS §8).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.layout import Rows, Site
from coec.models.prefetcher import Prefetcher
from coec.models.surgery import with_rows
from coec.planning import Plan
from coec.reconstruction import Batch, Products
from coec.streaming.dense_stream import LEAST_BATCHES, in_parts
from coec.streaming.head import Head
from coec.streaming.layers import Layers, State, to_host
from coec.streaming.prediction import Prediction
from coec.types import GramSum

PARTS = LEAST_BATCHES
"""So many summands every sum over the windows has, where there are batches enough."""
Kind = Literal["fit", "held"]


@dataclass(frozen=True, eq=False)
class Numbered:
    """A batch of windows.

    Attributes:
        number: among all batches.
        ids: its tokens.
    """

    number: int
    ids: Int[Tensor, "n length"]


Parts = Sequence[Sequence[Numbered]]
Given = Mapping[Kind, Parts]
"""Batches to fit on, and those that are held out, in parts."""


@dataclass(eq=False)
class Seen:
    """What one part shows of a site's consumer, on the inputs that it has.

    Attributes:
        gram: of its inputs, tokens weighted.
        missing: `Σ w δ xᵀ`, δ what is missing in the hidden states behind it; None where nothing
            is asked for.
        added, scale: inner products that tell by which number a model scales what a part adds.
    """

    gram: GramSum
    missing: Float[Tensor, "h d"] | None = None
    added: float = 0.0
    scale: float = 0.0

    def merge(self, other: "Seen") -> None:
        """Adds what another part shows."""
        self.gram.merge(other.gram)
        if other.missing is not None:
            self.miss(other.missing.to(self.gram.xx.device))
        self.added += other.added
        self.scale += other.scale

    def miss(self, product: Float[Tensor, "h d"]) -> None:
        """Adds to what is missing."""
        self.missing = product if self.missing is None else self.missing + product


class TwoStreams:
    """The two models, before one block after the other.

    Args:
        dense: the model.
        plan: the sizes of the pruned one, and how it is made.
        given: its windows, in parts.
        device: where to compute; hidden states wait on the CPU.
        dtype: of the forward pass.
        written: the dtype of the written weights, with which the pruned model is run on.
    """

    def __init__(
        self,
        dense: Dense,
        plan: Plan,
        given: Given,
        *,
        device: torch.device,
        dtype: torch.dtype,
        written: torch.dtype,
    ) -> None:
        self._dense, self._plan, self._how = dense, plan, plan.recipe.reconstruction
        self._device, self._dtype, self._written = device, dtype, written
        self._batches = {b.number: b for parts in given.values() for part in parts for b in part}
        self._parts = {
            kind: [[b.number for b in part] for part in parts] for kind, parts in given.items()
        }
        self._big = Layers(dense, device=device, dtype=dtype)
        pruned = Description.of(plan.output.config)
        self._small = Layers(pruned, device=device, dtype=dtype)
        self._smaller = {site.key: site for site in pruned.layout.sites}
        self._ahead = Prefetcher(dense, last=len(dense.layout.blocks) - 1)
        self.begin()

    def begin(self) -> Iterable[None]:
        """Goes back to before the first block."""
        ids = [batch.ids for batch in self._batches.values()]
        embedding = self._dense.tensor(self._dense.layout.embedding)
        above = self._big.embed(ids, embedding)
        below = self._small.embed(ids, embedding.to(self._written))
        self._above = dict(zip(self._batches, above, strict=True))
        self._below = dict(zip(self._batches, below, strict=True))
        self._at = 0
        self._close()
        return ()

    def _close(self) -> None:
        """Forgets the block that is open, if one is."""
        self._after: list[dict[int, State]] = []
        self._weights: dict[int, Tensor] = {}
        self._inside: dict[int, State] = {}
        self._products: dict[Kind, Products] = {}

    def stand(self, most: int) -> Iterable[int]:
        """The block before which the hidden states are, at most so far; what was open is closed."""
        if self._after:
            self._drop(self._at)
            self._close()
        if self._at > most:
            self.begin()
        return [self._at]

    def _numbers(self, kind: Kind) -> Iterator[int]:
        """Of the batches."""
        return (n for part in self._parts[kind] for n in part)

    # A block is opened, its sites are seen and fitted one after the other, and it is passed.

    @torch.no_grad()
    def open(self, index: int) -> Iterable[None]:
        """Runs the dense model through the parts of a block."""
        block = self._dense.layout.blocks[index]
        self._big.load(block, self._ahead.tensors(block))
        states = self._above
        for site in block.sites:
            half = self._big.half(block, site)
            states = {n: self._run(self._big, half, index, s) for n, s in states.items()}
            self._after.append(states)
        self._inside = self._below
        return ()

    def squares(self) -> Iterator[tuple[Float[Tensor, "n length"], ...]]:
        """Mean squares of the dense hidden states behind the block, of every batch of a part."""
        for part in self._parts["fit"]:
            yield tuple(_squares(self._after[-1][n]) for n in part)

    def weigh(self, least: float | None, mean: float) -> Iterable[None]:
        """Gives every token its weight.

        Args:
            least: smaller mean squares count as that much; None for equal weights.
            mean: of the weights of all tokens fitted on, by which they are divided.
        """
        for n, state in self._after[-1].items():
            if least is None:
                self._weights[n] = torch.ones(state.shape[:2])
            else:
                self._weights[n] = weights_of(_squares(state), least) / mean
        return ()

    @torch.no_grad()
    def see(self, number: int, kind: Kind) -> Iterator[Seen]:
        """What every part shows of the consumer of a site, with the dense weights before it."""
        block = self._dense.layout.blocks[self._at]
        site = block.sites[number]
        inputs, targets = self._inputs(number), self._after[number]
        half = self._big.half(block, site)
        consumer = half.get_submodule(site.consumer.removeprefix(block.prefix))
        seen: list[tuple[Tensor, Tensor]] = []
        for part in self._parts[kind]:
            found = Seen(GramSum(site.columns, self._device))
            hook = consumer.register_forward_hook(
                lambda module, args, out: seen.append((args[0], out))
            )
            try:
                for n in part:
                    state = inputs[n].to(self._device)
                    out = self._big.call(half, self._at, state)
                    x, consumed = seen.pop()
                    w = self._weights[n].to(self._device)
                    found.gram.update(x, w)
                    if self._how.propagate:
                        missing = _flat(targets[n].to(self._device)) - _flat(out)
                        weighted = missing * w.reshape(-1, 1).to(missing)
                        found.miss((weighted.T @ _flat(x)).double())
                        # A model may scale what a part adds, by one number for all.
                        part_added = _flat(out) - _flat(state)
                        found.added += _inner(part_added, _flat(consumed))
                        found.scale += _inner(_flat(consumed), _flat(consumed))
            finally:
                hook.remove()
            yield found

    def load(self, own: Mapping[str, Tensor]) -> Iterable[None]:
        """Gives the pruned model's layer what the half of a site needs."""
        self._small.load(self._dense.layout.blocks[self._at], own, part=True)
        return ()

    def prepare(self, number: int) -> Iterable[None]:
        """Makes a least-squares problem of the loaded weights of a site, for `product`."""
        block = self._dense.layout.blocks[self._at]
        site = block.sites[number]
        half = self._small.half(block, site)
        smaller = self._smaller[site.key]
        own = {t: t.removeprefix(block.prefix) for t in fitted_tensors(smaller)}
        held = {tensor: half.get_parameter(name).detach() for tensor, name in own.items()}
        rows = fitted_rows(smaller, held)
        index = self._at

        def function(theta: dict[str, Tensor], state: Tensor) -> Tensor:
            state_dict = {own[t]: p for t, p in whole(held, rows, theta).items()}
            call: Callable[..., Any] = lambda *args, **kwargs: functional_call(  # noqa: E731
                half, state_dict, args, kwargs
            )
            return self._small.call(call, index, state)

        inputs, targets = self._inputs(number), self._after[number]
        modules = {
            name: half.get_submodule(own[r.tensor].removesuffix(".weight"))
            for name, r in rows.items()
        }

        def batch(n: int) -> Batch:
            return Batch(inputs[n], targets[n], self._weights[n], n)

        self._products = {
            kind: Products(
                function,
                modules,
                [[batch(n) for n in part] for part in parts],
                self._device,
                rows={name: slice(r.start, r.stop) for name, r in rows.items()},
                quadratic=site.value is not None,
            )
            for kind, parts in self._parts.items()
        }
        return ()

    def product(self, kind: Kind, name: str, *arguments: Any) -> Iterable[Any]:
        """What `Products` computes, of the problem that was prepared."""
        found: Iterable[Any] = getattr(self._products[kind], name)(*arguments)
        return found

    @torch.no_grad()
    def enter(self, number: int) -> Iterable[None]:
        """Runs the pruned model through the half of a site, as it was loaded."""
        block = self._dense.layout.blocks[self._at]
        half = self._small.half(block, block.sites[number])
        self._inside = {
            n: self._run(self._small, half, self._at, s) for n, s in self._inside.items()
        }
        return ()

    @torch.no_grad()
    def go_past(self, index: int, written: Mapping[str, Tensor]) -> Iterable[None]:
        """Runs both models through a solved block, the pruned one as it is written."""
        block = self._dense.layout.blocks[index]
        if self._after:
            self._above = self._after[-1]
        else:
            self._big.load(block, self._ahead.tensors(block))
            self._above = {n: self._big.advance(index, s) for n, s in self._above.items()}
        self._small.load(block, written)
        self._below = {n: self._small.advance(index, s) for n, s in self._below.items()}
        self._drop(index)
        self._at = index + 1
        self._close()
        return ()

    # Behind the last block.

    def predict(
        self, kind: Kind, norm: Float[Tensor, " h"] | None, dense: bool
    ) -> Iterator[Prediction]:
        """How well every batch is predicted.

        Args:
            kind: of the windows.
            norm: another weight of the final norm, for the pruned model.
            dense: by the dense model itself.
        """
        head = self._head
        states = self._above if dense else self._below
        for number in self._numbers(kind):
            yield head.predicted(
                states[number], self._above[number], self._batches[number].ids, norm
            )

    def norms(self) -> Iterator[tuple[Float[Tensor, " h"], Float[Tensor, " h"]]]:
        """`Σ n̂ n` and `Σ n̂²` of every batch fitted on, as in `rescaled_norm`."""
        head = self._head
        for number in self._numbers("fit"):
            yield head.norm_sums(self._below[number], self._above[number])

    @cached_property
    def _head(self) -> Head:
        return Head(self._dense, device=self._device, dtype=self._dtype)

    def _inputs(self, number: int) -> Mapping[int, State]:
        """Of a site: the pruned model's where errors propagate, else the dense model's."""
        if self._how.propagate:
            return self._inside
        return self._after[number - 1] if number else self._above

    def _run(self, layers: Layers, half: nn.Module, index: int, state: State) -> State:
        return to_host(layers.call(half, index, state.to(self._device)))

    def _drop(self, index: int) -> None:
        self._big.drop(index)
        self._small.drop(index)


def given_of(
    windows: Int[Tensor, "_ length"],
    held_out: Int[Tensor, "_ length"] | None,
    size: int,
    places: int = 1,
) -> list[Given]:
    """The windows of every place: whole parts, in their order.

    Args:
        windows: to fit on.
        held_out: others, on which nothing may get worse.
        size: windows of a batch.
        places: how many there are; no more than parts.
    """
    fit = windows.split(size)
    held = () if held_out is None else held_out.split(size)
    numbered = [Numbered(n, ids) for n, ids in enumerate((*fit, *held))]
    kinds: dict[Kind, Parts] = {
        "fit": in_parts(numbered[: len(fit)], min(PARTS, len(fit))),
        "held": in_parts(numbered[len(fit) :], min(PARTS, len(held))),
    }
    places = min(places, len(kinds["fit"]))
    shares = [in_parts(parts, places) for parts in kinds.values()]
    return [dict(zip(kinds, own, strict=True)) for own in zip(*shares, strict=True)]


def weights_of(squares: Float[Tensor, "n length"], least: float) -> Float[Tensor, "n length"]:
    """What tokens weigh before all are divided by their mean: one over their mean squares."""
    return 1 / squares.clamp_min(least or 1.0)


def fitted_tensors(site: Site) -> set[str]:
    """The names of the tensors of which rows are fitted."""
    return {site.weight, *(rows.tensor for rows in site.fitted)}


def fitted_rows(site: Site, tensors: Mapping[str, Tensor]) -> dict[str, Rows]:
    """The rows of a pruned site that are fitted, by the names that θ has for them."""
    consumer = Rows(site.weight, 0, len(tensors[site.weight]))
    return {
        rows.tensor
        if rows.stop - rows.start == len(tensors[rows.tensor])
        else f"{rows.tensor}[{rows.start}:{rows.stop}]": rows
        for rows in (*site.fitted, consumer)
    }


def whole(
    tensors: Mapping[str, Tensor], rows: Mapping[str, Rows], theta: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors that θ are rows of, with θ in them."""
    parts: dict[str, dict[Rows, Tensor]] = {}
    for name, one in rows.items():
        parts.setdefault(one.tensor, {})[one] = theta[name]
    return {tensor: with_rows(tensors[tensor], own) for tensor, own in parts.items()}


def _squares(state: State) -> Float[Tensor, "n length"]:
    return state.float().square().mean(dim=-1)


def _inner(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum(dtype=torch.float64))


def _flat(tensor: Tensor) -> Float[Tensor, "tokens d"]:
    """Every token a row, in float32 or wider."""
    return tensor.flatten(0, -2).to(torch.promote_types(tensor.dtype, torch.float32))
