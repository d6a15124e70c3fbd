"""A model's decoder layers, one at a time: loaded, called as the model calls them, dropped again.

Layers are the model's own, called with the arguments that the model passed them in a recording pass
without weights: nothing of rotary embeddings, masks or positions is rebuilt.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from coec.devices import AHEAD, hand_back
from coec.errors import ModelError
from coec.models.description import Description, compute_buffers
from coec.models.layout import BlockLayout, Site
from coec.models.surgery import dtype_of, stacked

HOST = torch.device("cpu")
State = Float[Tensor, "_ length hidden"]
"""Hidden states of a batch."""
_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments with which the model calls a layer, in addition to the hidden states."""


def imitate(layer: nn.Module, stand_in: nn.Module) -> None:
    """Copy the attributes of a layer: some models read them before the call, such as its type."""
    for name, value in vars(layer).items():
        if not name.startswith("_") and not hasattr(stand_in, name):
            setattr(stand_in, name, value)


class _Recorder(nn.Module):
    """Stand-in for a decoder layer that notes how it is called and passes hidden states through."""

    def __init__(self, layer: nn.Module, calls: list[_Call], *, in_tuple: bool) -> None:
        super().__init__()
        self._calls, self._in_tuple = calls, in_tuple
        imitate(layer, self)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((args, kwargs))
        return (hidden_states,) if self._in_tuple else hidden_states


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
        self._base = cast(Any, self._model.base_model)
        self.modules: list[nn.Module] = list(self._base.layers)
        self._calls: dict[int, list[_Call]] = {}
        self._experts = model.architecture.blocks.experts

    @torch.no_grad()
    def embed(
        self, batches: Sequence[Int[Tensor, "_ length"]], embedding: Float[Tensor, "v hidden"]
    ) -> list[State]:
        """Return the hidden states before the first layer; note how each layer is called."""
        base, weight = self._base, embedding.to(self._device, self._dtype)
        compute_buffers(self._model, self._device)
        base.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)
        base.norm = nn.Identity()
        states = []
        for batch in batches:
            state, self._calls[len(batch)] = self._record(batch)
            states.append(self._at_home(state))
            if self._copies:
                self._copies.end()  # the host would run ahead of the copies otherwise
        base.embed_tokens.to("meta")
        return states

    def _record(self, batch: Int[Tensor, "_ length"]) -> tuple[State, list[_Call]]:
        """Embed a batch and note how the model calls each of its layers."""
        # Layers of some releases return a tuple, and their model takes its first element, which
        # of a tensor would be the first row: the shape that comes out tells which is meant.
        for in_tuple in (False, True):
            calls: list[_Call] = []
            self._base.layers = nn.ModuleList(
                _Recorder(layer, calls, in_tuple=in_tuple) for layer in self.modules
            )
            out = self._base(input_ids=batch.to(self._device), use_cache=False).last_hidden_state
            if out.shape[:-1] == batch.shape:
                return out, calls
        raise ModelError("the decoder layers of this transformers release are called in a new way")

    def load(
        self, block: BlockLayout, tensors: Mapping[str, Tensor], *, partial: bool = False
    ) -> None:
        """Give a layer its weights, by full names; `partial`: some of them may be missing."""
        local = {name.removeprefix(block.prefix): tensor for name, tensor in tensors.items()}
        state = stacked(local, self._experts)
        state = {n: t.to(self._device, dtype_of(n, self._dtype)) for n, t in state.items()}
        self.modules[block.index].load_state_dict(state, assign=True, strict=not partial)

    def function(self, block: BlockLayout) -> Callable[[Mapping[str, Tensor], State], State]:
        """Return a layer as a function of its tensors, by full names, and a hidden state.

        Derivatives run through both. The tensors are cast to the dtype of the forward pass.
        """
        layer = self.modules[block.index]

        def run(tensors: Mapping[str, Tensor], state: State) -> State:
            self.note_calls(*state.shape[:2])
            local = {
                name.removeprefix(block.prefix): tensor.to(dtype_of(name, self._dtype))
                for name, tensor in tensors.items()
            }
            weights = stacked(local, self._experts)
            return self.call(
                lambda *args, **kwargs: functional_call(layer, weights, args, kwargs),
                block.index, state,
            )  # fmt: skip

        return run

    def note_calls(self, windows: int, length: int) -> None:
        """Note how each layer is called with so many windows, unless that is known."""
        if windows not in self._calls:
            ids = torch.zeros(windows, length, dtype=torch.int64)
            nothing = torch.zeros(1, 1, device=self._device, dtype=self._dtype)
            self.embed([ids], nothing.expand(self._base.embed_tokens.weight.shape))

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
            out = self.call(module, index, state)
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
        module: Any = self.modules[index].get_submodule(self._experts.module)
        return getattr(module, "experts", None)

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

    def call(self, module: Callable[..., Any], index: int, state: State) -> State:
        """Return the output of a module, called as the model calls its layer of this index."""
        args, kwargs = self._calls[len(state)][index]
        out = module(state, *args, **kwargs)
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
