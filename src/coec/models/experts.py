"""Experts: one tensor for each in checkpoints, one parameter for all in the model that runs.

transformers 5 stacks experts as it loads, and splits them as it saves. This package reads, prunes
and writes the tensors of the files; they are stacked where a layer is to run.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coec.errors import ModelError
from coec.models.block_patterns import ExpertNames

_STACKED = "gate_up_proj", "down_proj"
"""Parameters of all experts of a block: experts × (gate rows, up rows) × hidden, and experts ×
hidden × channels."""


def stored_shapes(
    shapes: Mapping[str, torch.Size], names: ExpertNames | None
) -> dict[str, torch.Size]:
    """Shapes of the tensors that checkpoints store, from those of the model that runs.

    Raises:
        ModelError: the installed transformers stacks no experts, as before release 5.
    """
    if names is None:
        return dict(shapes)
    stored: dict[str, torch.Size] = {}
    for name, shape in shapes.items():
        place = _ExpertIndex.of(name, names.module)
        if place is None:
            stored[name] = shape
        elif place.suffix.startswith("experts.0."):
            raise ModelError(
                "models of experts need transformers 5: the installed release has a module for "
                "each, whose inputs come without the router's weights"
            )
        elif place.suffix.removeprefix("experts.") in _STACKED:
            for expert in range(shape[0]):
                for module, matrix in _expert_shapes(place.suffix, shape[1:], names):
                    prefix = f"{place.prefix}{names.stored}.experts"
                    stored[f"{prefix}.{expert}.{module}.weight"] = matrix
        else:
            stored[f"{place.prefix}{names.stored}.{place.suffix}"] = shape
    return stored


def stacked(tensors: Mapping[str, Tensor], names: ExpertNames | None) -> dict[str, Tensor]:
    """Stack a checkpoint's tensors as the model that runs has them: inverse of `stored_shapes`."""
    if names is None:
        return dict(tensors)
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        place = _ExpertIndex.of(name, names.stored)
        if place is None:
            state[name] = tensor
        elif match := re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", place.suffix):
            number, module = int(match[1]), match[2]
            experts.setdefault(place.prefix, {}).setdefault(number, {})[module] = tensor
        else:
            state[f"{place.prefix}{names.module}.{place.suffix}"] = tensor
    for prefix, by_number in experts.items():
        ordered = [by_number[n] for n in sorted(by_number)]
        gate_up = [torch.cat([expert[names.gate], expert[names.up]]) for expert in ordered]
        module = f"{prefix}{names.module}.experts."
        state[f"{module}{_STACKED[0]}"] = torch.stack(gate_up)
        state[f"{module}{_STACKED[1]}"] = torch.stack([expert[names.down] for expert in ordered])
    return state


def routed_inputs(experts: nn.Module, args: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert's number, and the inputs of its last projection for the tokens it gets.

    Each row is `p h`: the channels h of a token times the router's weight p of this expert. The
    model applies p after the projection, which is linear, so that the projection of this row is the
    expert's contribution to the hidden states. One expert's rows are in memory at a time.

    Args:
        experts: the module of all experts of a block.
        args: its arguments: hidden states, and the experts and weights of every token.
    """
    hidden, index, weights = args
    gate_up: Tensor = experts.gate_up_proj  # type: ignore[assignment]
    for expert, weight in enumerate(gate_up):
        token, place = (index == expert).nonzero(as_tuple=True)
        gate, up = nn.functional.linear(hidden[token], weight).chunk(2, dim=-1)
        channels: Tensor = experts.act_fn(gate) * up  # type: ignore[operator]
        wide = torch.promote_types(channels.dtype, torch.float32)
        yield expert, channels.to(wide) * weights[token, place, None]


@dataclass(frozen=True)
class _ExpertIndex:
    """The name of a tensor in a module of a block, split around the module's name."""

    prefix: str
    suffix: str

    @classmethod
    def of(cls, name: str, module: str) -> "_ExpertIndex | None":
        match = re.fullmatch(rf"((?:model\.layers\.\d+\.)?){re.escape(module)}\.(.+)", name)
        return None if match is None else cls(match[1], match[2])


def _expert_shapes(
    stack: str, shape: torch.Size, names: ExpertNames
) -> Iterator[tuple[str, torch.Size]]:
    """Yield the projections of one expert in a stacked parameter, and their shapes."""
    if stack.endswith(_STACKED[1]):
        yield names.down, shape
    else:
        yield names.gate, torch.Size((shape[0] // 2, *shape[1:]))
        yield names.up, torch.Size((shape[0] // 2, *shape[1:]))
