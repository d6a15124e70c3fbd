"""A model's decoder layers, one at a time: loaded, called as the model calls them, dropped again.

Layers are the model's own, called with the arguments that the model passed them in a recording pass
without weights: nothing of rotary embeddings, masks or positions is rebuilt.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.func import functional_call

from coec.devices import AHEAD, hand_back
from coec.errors import ModelError
from coec.models.calls import (
    Call,
    State,
    compute_buffers,
    decoder_of,
    own_buffers,
    recorded,
)
from coec.models.description import Description
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import dtype_of

HOST = torch.device("cpu")


class _Silent(nn.Module):
    """Stand-in for a module of a layer that adds nothing to the hidden states."""

    def __init__(self, *, in_tuple: bool) -> None:
        super().__init__()
        self._in_tuple = in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        zeros = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return (zeros, None) if self._in_tuple else zeros


class Layers:
    """The layers of a model over batches of windows of one length.

    Args:
        model: the model.
        device: where it computes.
        dtype: of the forward pass.
        home: where hidden states wait between two layers.
    """

    def __init__(
        self,
        model: Description,
        *,
        device: torch.device,
        dtype: torch.dtype,
        home: torch.device = HOST,
    ) -> None:
        self._device, self._dtype, self._home = device, dtype, home
        self._model = model.skeleton(dtype).requires_grad_(requires_grad=False)
        self._prefix, self._decoder = decoder_of(self._model)
        self.modules: list[nn.Module] = list(self._decoder.layers)
        compute_buffers(self._decoder, device)
        self._buffers = [
            {
                (path, n): b
                for path, part in layer.named_modules()
                for n, b in own_buffers(part).items()
            }
            for layer in self.modules
        ]
        self._calls: dict[int, list[Call]] = {}
        self._names, self._reads_tokens = model.names, model.reads_tokens
        self._outside = {name: model.shapes[name] for name in model.outside}
        self._experts = model.architecture.blocks.experts

    @torch.no_grad()
    def embed(
        self, batches: Mapping[int, Int[Tensor, "_ length"]], outside: Mapping[str, Tensor]
    ) -> dict[int, State]:
        """Return the hidden states before the first layer; note how each layer is called.

        Args:
            batches: token ids, by the number of the batch.
            outside: the tensors that are in no block, by full names.
        """
        weights = self._names.in_model(outside)
        self._give({name: t.to(self._device, self._dtype) for name, t in weights.items()})
        states = {}
        for number, batch in batches.items():
            ids = batch.to(self._device)
            state, calls = recorded(self._decoder, self.modules, ids)
            self._calls[self._key(number, len(batch))] = calls
            states[number] = self._at_home(state)
            if self._copies:
                self._copies.end()  # the host would run ahead of the copies otherwise
        self._give({name: t.to("meta") for name, t in weights.items()})
        return states

    def _give(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(weights, strict=False, assign=True)

    def _key(self, number: int, windows: int) -> int:
        """Return what tells calls apart: the batch if layers read its tokens, else its size."""
        return number if self._reads_tokens else windows

    def load(
        self, block: BlockLayout, tensors: Mapping[str, Tensor], *, partial: bool = False
    ) -> None:
        """Give a layer its weights, by full names; `partial`: some of them may be missing."""
        module = self.modules[block.index]
        for (path, name), buffer in self._buffers[block.index].items():
            setattr(module.get_submodule(path), name, buffer)
        local = self._local(block, tensors).items()
        state = {n: t.to(self._device, dtype_of(n, self._dtype)) for n, t in local}
        module.load_state_dict(state, assign=True, strict=not partial)

    def _local(self, block: BlockLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a block by their names in its layer."""
        prefix = f"{self._prefix}{block.index}."
        named = self._names.in_model(tensors)
        return {name.removeprefix(prefix): tensor for name, tensor in named.items()}

    def function(self, block: BlockLayout) -> Callable[[Mapping[str, Tensor], State], State]:
        """Return a layer as a function of its tensors, by full names, and a hidden state.

        Derivatives run through both. The tensors are cast to the dtype of the forward pass.
        """
        layer = self.modules[block.index]

        def run(tensors: Mapping[str, Tensor], state: State) -> State:
            self.note_calls(*state.shape[:2])
            cast = {n: t.to(dtype_of(n, self._dtype)) for n, t in tensors.items()}
            weights = self._local(block, cast)
            return self.call(
                lambda *args, **kwargs: functional_call(layer, weights, args, kwargs),
                block.index, state,
            )  # fmt: skip

        return run

    def note_calls(self, windows: int, length: int) -> None:
        """Note how each layer is called with so many windows, unless that is known."""
        if windows not in self._calls:
            ids = torch.zeros(windows, length, dtype=torch.int64)
            nothing = torch.zeros(1, device=self._device, dtype=self._dtype)
            self.embed({0: ids}, {n: nothing.expand(size) for n, size in self._outside.items()})

    def drop(self, index: int) -> None:
        """Free the weights of a layer."""
        self.modules[index].to("meta")
        hand_back()

    def advance(self, index: int, state: State) -> State:
        """Return a batch of hidden states after a layer."""
        return self.through(self.modules[index], index, {0: state})[0]

    def through(
        self,
        module: Callable[..., Any],
        index: int,
        states: dict[int, State],
    ) -> dict[int, State]:
        """Return the hidden states of batches after a module that is called as a layer is.

        The hidden states before it are removed from `states`, batch by batch. If states wait on
        the CPU and a GPU computes, batches are copied while others are computed.
        """
        numbers, behind = list(states), dict[int, State]()
        arriving = self.arriving(states.pop(number) for number in numbers)
        for number, state in zip(numbers, arriving, strict=True):
            out = self.call(module, index, state, number)
            behind[number] = self._at_home(out)
        if self._copies:
            self._copies.end()
        return behind

    def _at_home(self, state: State) -> State:
        """Return a batch where hidden states wait, which a GPU's copies reach when they `end`."""
        return self._copies.to_host(state) if self._copies else state.to(self._home)

    def arriving(self, states: Iterable[State]) -> Iterator[State]:
        """Yield hidden states on the device that computes, wherever they wait."""
        if self._copies:
            return self._copies.to_device(states)
        return (state.to(self._device) for state in states)

    @cached_property
    def _copies(self) -> "Copies | None":
        """None unless hidden states wait on the CPU and a GPU computes."""
        beside = self._device.type == "cuda" and self._home.type == "cpu"
        return Copies(self._device) if beside else None

    def experts(self, index: int) -> nn.Module | None:
        """Return the module of all experts of a layer; None where it has none."""
        if self._experts is None:
            return None
        modules = dict(self.modules[index].named_modules())
        return modules.get(self._experts.module)

    def module(self, block: BlockLayout, name: str) -> nn.Module:
        """Return a module of a block's layer by its full name."""
        return self.modules[block.index].get_submodule(name.removeprefix(block.prefix))

    def sublayer(self, block: BlockLayout, site: Site) -> nn.Module:
        """Return the sublayer of a site: a layer in which nothing else adds to the hidden state.

        Sublayers share the layer's modules and weights; run one after the other they are the layer.
        """
        layer = self.modules[block.index]
        sublayer = copy.copy(layer)
        sublayer._modules = dict(layer._modules)
        for other_site in block.sites:
            if other_site.name != site.name:
                child = other_site.consumer.removeprefix(block.prefix).partition(".")[0]
                # What follows attention takes attention's weights as well.
                sublayer._modules[child] = _Silent(in_tuple=other_site.value is not None)
        return sublayer

    def call(self, module: Callable[..., Any], index: int, state: State, number: int = 0) -> State:
        """Return the output of a module, called as the model calls its layer of this index.

        `number` is that of the batch that the states are of, if layers read its tokens.
        """
        args, kwargs = self._calls[self._key(number, len(state))][index]
        try:
            out = module(state, *args, **kwargs)
        except ValueError as error:  # what an earlier layer would have to hand on is missing
            name = self._model.config.model_type
            raise ModelError(f"layers of {name} cannot run one by one: {error!s:.200}") from error
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


class Copies:
    """Copies on two streams of a GPU, one per direction, parallel to the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._work = deque[torch.cuda.Event]()

    def to_device(self, states: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield tensors on the device; the copy of each begins before the one ahead is computed."""
        ahead: tuple[Tensor, torch.cuda.Event] | None = None
        for state in states:
            while len(self._work) > AHEAD:
                self._work.popleft().synchronize()
            with torch.cuda.stream(self._up):
                begun = state.to(self._device, non_blocking=True)
            following = begun, self._up.record_event()
            if ahead is not None:
                yield self._arrived(*ahead)
                self._note_work()
            ahead = following
        if ahead is not None:
            yield self._arrived(*ahead)
            self._note_work()

    def _arrived(self, state: Tensor, copied: torch.cuda.Event) -> Tensor:
        """Let the work that follows wait for a copy, whose memory is kept until that work ends."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        state.record_stream(computing)
        return state

    def _note_work(self) -> None:
        """Note the end of the work so far, and of the copies of what came of it."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        self._work.append(self._down.record_event())

    def to_host(self, state: Tensor) -> Tensor:
        """Return a tensor that is on the host by the `end`, in pages that a GPU copies directly."""
        there = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            there.copy_(state, non_blocking=True)
        state.record_stream(self._down)
        return there

    def end(self) -> None:
        """Wait for all copies to the host."""
        self._down.synchronize()
