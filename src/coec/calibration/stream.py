"""Dense hidden states carried through one block at a time, statistics gathered on the way.

Only the embedding, one block and the hidden states are ever in memory. Blocks are the model's own
decoder layers, called with the keyword arguments that the model itself passed them: those are
recorded, never rebuilt.
"""

import itertools
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from coec.errors import ModelError
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.description import compute_rotary
from coec.models.layout import BlockLayout
from coec.types import Gram, GramSum

TOKENS_PER_BATCH = 8192


@dataclass(frozen=True, eq=False)
class Measured:
    """One block of the dense model after its calibration pass.

    Attributes:
        block: which one, and where its units are.
        tensors: its weights as stored, by their full names.
        grams: statistics of every site's inputs, by the site's name.
        holdout: the same over the windows that were held out; empty where none were.
    """

    block: BlockLayout
    tensors: dict[str, Tensor]
    grams: dict[str, Gram]
    holdout: dict[str, Gram] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """Of the block."""
        return self.block.index


@dataclass(frozen=True, eq=False)
class _Call:
    """How the model calls one of its layers: everything but the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorder(nn.Module):
    """Stands in for a decoder layer, notes how it is called, and passes hidden states through."""

    def __init__(self, layer: nn.Module, calls: list[_Call], *, in_tuple: bool) -> None:
        super().__init__()
        self._calls, self._in_tuple = calls, in_tuple
        # Some models read attributes of a layer, such as its attention type, before the call.
        for name, value in vars(layer).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(_Call(args, kwargs))
        return (hidden_states,) if self._in_tuple else hidden_states


class DenseStream:
    """The dense model over fixed token windows, block by block.

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
        self._dense = dense
        self._device, self._dtype, self._progress = device, dtype, progress
        self._model = dense.skeleton(dtype)
        size = max(1, TOKENS_PER_BATCH // windows.shape[1])
        fit = windows.split(size)
        self._fit_batches = len(fit)
        self._batches = fit if holdout is None else fit + holdout.split(size)
        self._base = cast(Any, self._model.base_model)
        self._layers: list[nn.Module] = list(self._base.layers)

    @torch.no_grad()
    def blocks(self, skip: Container[int] = ()) -> Iterator[Measured]:
        """Yields blocks in order, their statistics complete.

        Args:
            skip: blocks that are only passed through, and not yielded; nothing runs behind the
                last one that is.
        """
        wanted = [b for b in self._dense.layout.blocks if b.index not in skip]
        if not wanted:
            return
        states, calls = self._embed()
        progress = self._counter(wanted[-1].index + 1)
        for block in self._dense.layout.blocks[: wanted[-1].index + 1]:
            tensors = self._load(block)
            fit: dict[str, GramSum] = {}
            held: dict[str, GramSum] = {}
            measured = block.index not in skip
            for sums, part in (
                (fit, range(self._fit_batches)),
                (held, range(self._fit_batches, len(states))),
            ):
                with self._accumulating(block, sums if measured else None):
                    for number in part:
                        states[number] = self._advance(block.index, states[number], calls)
                        progress()
            self._layers[block.index].to("meta")
            if measured:
                # Handed over: whoever takes a Gram out of the block can free it.
                yield Measured(
                    block,
                    tensors,
                    {name: fit.pop(name).gram() for name in list(fit)},
                    {name: held.pop(name).gram() for name in list(held)},
                )

    def _load(self, block: BlockLayout) -> dict[str, Tensor]:
        """The block's tensors, which its layer has as well, in the dtype of the forward pass."""
        tensors = self._dense.tensors(block)
        self._layers[block.index].load_state_dict(
            {
                name.removeprefix(block.prefix): tensor.to(self._device, self._dtype)
                for name, tensor in tensors.items()
            },
            assign=True,
        )
        return tensors

    def _advance(
        self, index: int, state: Float[Tensor, "b length h"], calls: dict[int, list[_Call]]
    ) -> Float[Tensor, "b length h"]:
        call = calls[len(state)][index]
        out = self._layers[index](state.to(self._device), *call.args, **call.kwargs)
        return (out[0] if isinstance(out, tuple) else out).cpu()

    def _counter(self, blocks: int) -> Callable[[], None]:
        """Reports one more finished batch at every call."""
        done, total = itertools.count(1), len(self._batches) * blocks

        def advance() -> None:
            if self._progress:
                self._progress("calibrating", next(done), total)

        return advance

    def _embed(self) -> tuple[list[Float[Tensor, "batch length hidden"]], dict[int, list[_Call]]]:
        """The first hidden states, and the calls of all layers for every batch size."""
        base = self._base
        embedding = self._dense.tensor(self._dense.layout.embedding)
        base.embed_tokens.weight = nn.Parameter(
            embedding.to(self._device, self._dtype), requires_grad=False
        )
        compute_rotary(self._model, self._device)
        base.norm = nn.Identity()
        states, calls = [], {}
        for batch in self._batches:
            state, calls[len(batch)] = self._record(batch)
            states.append(state)
        base.embed_tokens.to("meta")
        return states, calls

    def _record(
        self, batch: Int[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch length hidden"], list[_Call]]:
        """Embeds a batch and notes how the model calls each of its layers."""
        # Layers of some releases return a tuple, and their model takes its first element, which
        # of a tensor would be the first row: the shape that comes out tells which is meant.
        for in_tuple in (False, True):
            calls: list[_Call] = []
            self._base.layers = nn.ModuleList(
                _Recorder(layer, calls, in_tuple=in_tuple) for layer in self._layers
            )
            out = self._base(input_ids=batch.to(self._device), use_cache=False).last_hidden_state
            if out.shape[:-1] == batch.shape:
                return out.cpu(), calls
        raise ModelError("the decoder layers of this transformers release are called in a new way")

    @contextmanager
    def _accumulating(self, block: BlockLayout, sums: dict[str, GramSum] | None) -> Iterator[None]:
        """Adds the inputs of every site's consumer to `sums`, by site name; None adds nothing."""
        layer, hooks = self._layers[block.index], []
        if sums is not None:
            for site in block.sites:
                consumer = layer.get_submodule(site.consumer.removeprefix(block.prefix))
                hooks.append(consumer.register_forward_pre_hook(_accumulate(sums, site.name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _accumulate(sums: dict[str, GramSum], name: str) -> Callable[..., None]:
    """A forward pre-hook that adds a module's input to the sums."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs = args[0]
        if name not in sums:
            sums[name] = GramSum(inputs.shape[-1], inputs.device)
        sums[name].update(inputs)

    return hook
