"""How a model calls its decoder layers, recorded in a pass without their weights.

Nothing of rotary embeddings, masks or positions is rebuilt: stand-ins for the layers note the
arguments that the model's own code passes them.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn

from coec.errors import ModelError

State = Float[Tensor, "_ length hidden"]
"""Hidden states of a batch."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments with which the model calls a layer, in addition to the hidden states."""


def decoder_of(model: Any) -> tuple[str, Any]:
    """Return the start of the names of a model's layers, and the module that runs them.

    Raises ModelError if no module has a list with a decoder layer for each one that is counted.
    """
    count = getattr(model.config, "num_hidden_layers", 0)
    for path, module in model.named_modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            return f"{path}.layers.".removeprefix("."), module
    model_type = model.config.model_type
    raise ModelError(
        f"model type '{model_type}' is not supported: no decoder layers are found in a "
        f"{type(model).__name__}"
    )


def imitate(layer: nn.Module, stand_in: nn.Module) -> None:
    """Copy the attributes of a layer: some models read them before the call, such as its type."""
    for name, value in vars(layer).items():
        if not name.startswith("_") and not hasattr(stand_in, name):
            setattr(stand_in, name, value)


class _Recorder(nn.Module):
    """Stand-in for a decoder layer that notes how it is called and passes hidden states through."""

    def __init__(
        self, layer: nn.Module, states: list[Tensor], calls: list[Call], *, in_tuple: bool
    ) -> None:
        super().__init__()
        self._states, self._calls, self._in_tuple = states, calls, in_tuple
        imitate(layer, self)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._states.append(hidden_states)
        self._calls.append((args, kwargs))
        return (hidden_states, None) if self._in_tuple else hidden_states


def recorded(
    decoder: Any, layers: Iterable[nn.Module], ids: Int[Tensor, "_ length"]
) -> tuple[State, list[Call]]:
    """Embed a batch; return the states before the first layer, and how each layer is called.

    Raises ModelError if the layers are called in an unknown way.
    """
    # Layers of some releases return a tuple, and their model takes its first element, which of a
    # tensor would be the first row: the shape that comes out tells which is meant.
    reason = "the hidden states have another shape"
    for in_tuple in (False, True):
        states: list[Tensor] = []
        calls: list[Call] = []
        decoder.layers = nn.ModuleList(
            _Recorder(layer, states, calls, in_tuple=in_tuple) for layer in layers
        )
        try:
            out = decoder(input_ids=ids, use_cache=False).last_hidden_state
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            continue
        if out.shape[:-1] == ids.shape and len(calls) == len(decoder.layers):
            return states[0], calls
    raise ModelError(
        f"the decoder layers of this type are called in an unknown way ({reason:.200})"
    )


def compute_buffers(decoder: Any, device: torch.device) -> None:
    """Compute a skeleton's buffers that are stored nowhere, in its layers and outside.

    These are no weights: rotary frequencies, and factors. Their classes compute them. Raises
    ModelError if one has no value.
    """
    for name, module in decoder.named_children():
        if type(module).__name__.endswith("RotaryEmbedding"):
            setattr(decoder, name, type(module)(config=decoder.config).to(device))
    owners = [module for module in decoder.modules() if own_buffers(module)]
    for module in owners:
        for name, buffer in own_buffers(module).items():
            if buffer.is_meta:
                no_value = math.nan if buffer.is_floating_point() else 0
                setattr(module, name, torch.full_like(buffer, no_value, device=device))
    # Weights are on the meta device, where it costs nothing that these functions fill them too.
    for module in owners:
        if not all(map(_has_value, own_buffers(module).values())):
            decoder._init_weights(module)
    if not all(_has_value(b) for module in owners for b in own_buffers(module).values()):
        decoder._init_weights(decoder)
    for path, module in decoder.named_modules():
        for name, buffer in own_buffers(module).items():
            if not _has_value(buffer):
                raise ModelError(
                    f"the installed transformers ({transformers.__version__}) has no value for "
                    f"{path}.{name} of a {decoder.config.model_type}: install a newer release"
                )


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module itself that are stored nowhere, by name."""
    unstored = module._non_persistent_buffers_set
    return {n: b for n, b in module.named_buffers(recurse=False) if n in unstored}


def _has_value(buffer: Tensor) -> bool:
    return not buffer.is_meta and bool(torch.isfinite(buffer).all())


@torch.no_grad()
def reads_tokens(model: Any) -> bool:
    """Return whether layers get more of the tokens than their hidden states.

    A dictionary among their arguments is one that they fill with what later layers read. Weights
    that are not a number reach whatever is made of the tokens: an argument of a layer with such a
    number, or the tokens themselves. `model` is a skeleton of its own.
    """
    _, decoder = decoder_of(model)
    layers = list(decoder.layers)
    compute_buffers(decoder, torch.device("cpu"))
    nothing = torch.full((1,), math.nan)
    outside = {
        name: nothing.to(tensor.dtype).expand(tensor.shape)
        for name, tensor in decoder.state_dict().items()
        if not name.startswith("layers.") and tensor.is_meta
    }
    decoder.load_state_dict(outside, strict=False, assign=True)
    ids = torch.tensor([[3, 1, 2, 5]])
    state, calls = recorded(decoder, layers, ids)
    return state.ndim != 3 or any(
        isinstance(value, dict)
        or bool(torch.isnan(value).any() if value.is_floating_point() else _same(value, ids))
        for args, kwargs in calls
        for value in _values([*args, *kwargs.values()])
    )


def _same(tensor: Tensor, ids: Tensor) -> bool:
    return tensor.shape == ids.shape and torch.equal(tensor.to(ids.dtype), ids)


def _values(value: Any) -> Iterator[Any]:
    """Yield the tensors and dictionaries in nested arguments."""
    if isinstance(value, Tensor | dict):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _values(entry)
