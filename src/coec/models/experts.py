"""Experts: one tensor for each in checkpoints, one parameter for all in the model that runs.

transformers 5 stacks experts as it loads, and takes them apart as it saves. What is read, pruned
and written here are the tensors of the files; they are stacked where a layer is to run.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coec.errors import ModelError
from coec.models.layout import ExpertNames

STACKED = "gate_up_proj", "down_proj"
"""The parameters of all experts of a block: experts × (gate rows, up rows) × hidden, and experts ×
hidden × channels."""


def stored_shapes(
    shapes: Mapping[str, torch.Size], names: ExpertNames | None
) -> dict[str, torch.Size]:
    """The tensors that checkpoints store, of those that a model has.

    Raises:
        ModelError: the installed transformers stacks no experts, as before release 5.
    """
    if names is None:
        return dict(shapes)
    found: dict[str, torch.Size] = {}
    for name, shape in shapes.items():
        place = _ExpertIndex.of(name, names.module)
        if place is None:
            found[name] = shape
        elif place.rest.startswith("experts.0."):
            raise ModelError(
                "models of experts need transformers 5: the installed release has a module for "
                "each, whose inputs come without the router's weights"
            )
        elif place.rest.removeprefix("experts.") in STACKED:
            for expert in range(shape[0]):
                for one, own in _of_expert(place.rest, shape[1:], names):
                    found[f"{place.prefix}{names.stored}.experts.{expert}.{one}.weight"] = own
        else:
            found[f"{place.prefix}{names.stored}.{place.rest}"] = shape
    return found


def stacked(tensors: Mapping[str, Tensor], names: ExpertNames | None) -> dict[str, Tensor]:
    """A model's tensors, of those that checkpoints store: the inverse of `stored_shapes`."""
    if names is None:
        return dict(tensors)
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        place = _ExpertIndex.of(name, names.stored)
        if place is None:
            found[name] = tensor
        elif parts := re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", place.rest):
            number, one = int(parts[1]), parts[2]
            experts.setdefault(place.prefix, {}).setdefault(number, {})[one] = tensor
        else:
            found[f"{place.prefix}{names.module}.{place.rest}"] = tensor
    for prefix, each in experts.items():
        module, ordered = f"{prefix}{names.module}.experts.", [each[n] for n in sorted(each)]
        both = [torch.cat([one[names.gate], one[names.up]]) for one in ordered]
        found[f"{module}{STACKED[0]}"] = torch.stack(both)
        found[f"{module}{STACKED[1]}"] = torch.stack([one[names.down] for one in ordered])
    return found


def routed_inputs(experts: nn.Module, args: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """What every expert's last projection reads, of the tokens routed to it, by its number.

    Each row is `p h`: the channels h of a token times the router's weight p of this expert, which
    the model applies behind the projection; as that is linear, what it adds to the hidden states is
    the projection of this row. One expert's rows are in memory at a time.

    Args:
        experts: the module of all experts of a block.
        args: as it is called: hidden states, and of every token the experts and their weights.
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
    """A tensor's name around a module of a block: what stands before it, and behind."""

    prefix: str
    rest: str

    @classmethod
    def of(cls, name: str, module: str) -> "_ExpertIndex | None":
        found = re.fullmatch(rf"((?:model\.layers\.\d+\.)?){re.escape(module)}\.(.+)", name)
        return None if found is None else cls(found[1], found[2])


def _of_expert(
    stack: str, shape: torch.Size, names: ExpertNames
) -> Iterator[tuple[str, torch.Size]]:
    """The projections of one expert in a stacked parameter, and their shapes."""
    if stack.endswith(STACKED[1]):
        yield names.down, shape
    else:
        yield names.gate, torch.Size((shape[0] // 2, *shape[1:]))
        yield names.up, torch.Size((shape[0] // 2, *shape[1:]))
