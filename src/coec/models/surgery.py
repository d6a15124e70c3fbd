"""Tensors of a block: rows and columns cut (METHODS §1), and experts stacked as layers run them.

Checkpoints have one tensor for each expert, the model that runs one parameter for all: transformers
5 stacks experts as it loads, and splits them as it saves. This package prunes and writes one tensor
for each expert, and also reads files with one for all; they are stacked where a layer is to run.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from coec.errors import ModelError, NumericalError
from coec.models.architectures import CORRECTION, ExpertNames
from coec.models.files import Header
from coec.models.layout import BlockLayout, Rows, Site
from coec.types import KeptSet, SiteResult

_STACKED = "gate_up_proj", "down_proj"
"""Parameters of all experts of a block: experts × (gate rows, up rows) × hidden, and experts ×
hidden × channels."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The change of one site: its kept units, and the consumer's new weight or None."""

    site: Site
    units: KeptSet
    result: SiteResult | None


def cut_block(
    tensors: Mapping[str, Tensor], cuts: Sequence[Cut], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Cut the block's tensors and cast them to `dtype`; keys are full names.

    A site that keeps everything and has no new weight keeps its tensors as they are, bit for bit.
    Raises NumericalError if a compensated weight does not fit `dtype`.
    """
    out = {name: tensor.to(dtype_of(name, dtype)) for name, tensor in tensors.items()}
    # Producers by tensor: several sites or projections may own rows of the same one.
    owned: dict[str, list[tuple[Rows, KeptSet]]] = {}
    for cut in cuts:
        for rows in cut.site.producers:
            owned.setdefault(rows.tensor, []).append((rows, cut.units))
    for name, cut_rows in owned.items():
        out[name] = tensors[name][_kept_rows(len(tensors[name]), cut_rows)].to(dtype)
    # Consumers: their columns come with the new weight, compensated or sliced.
    for cut in cuts:
        if cut.result is None:
            continue
        site = cut.site
        out[site.weight] = cast(cut.result.weight, dtype, site.consumer)
        if cut.result.bias is not None:
            bias = with_bias(cut.result.bias, tensors.get(site.bias))
            out[site.bias] = cast(bias, dtype, site.consumer)
    return out


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor among weights in `dtype`: at least float32 for corrections."""
    corrects = name.endswith(CORRECTION)
    return torch.promote_types(dtype, torch.float32) if corrects else dtype


def without_experts(
    tensors: Mapping[str, Tensor], block: BlockLayout, experts: KeptSet
) -> dict[str, Tensor]:
    """Leave out the removed experts of a block, and their rows of the router.

    The kept experts are numbered anew, in their order.
    """
    routers = {rows.tensor: rows.of(experts) for rows in block.router}
    # Old number of an expert → its number among the kept experts
    numbers = {old: new for new, old in enumerate(experts.indices.tolist())}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+\.experts\.)(\d+)(\..+)", name)
        if match is None:
            out[name] = tensor[routers[name]] if name in routers else tensor
        elif int(match[2]) in numbers:
            out[f"{match[1]}{numbers[int(match[2])]}{match[3]}"] = tensor
    return out


def channel_units(
    tensors: Mapping[str, Tensor], sites: Iterable[Site]
) -> dict[str, Float[Tensor, "..."]]:
    """Return a factor for every tensor, which brings the channels of gated MLPs to common units.

    Rows of the up projection over c and columns of the down projection times c are the same
    function, bit for bit as c is a power of two. The rows get a root mean square of about 1.
    """
    factors = dict.fromkeys(tensors, torch.ones((), dtype=torch.float64))
    for site in sites:
        weights = [r.tensor for r in site.producers if r.tensor.endswith("weight")]
        up = weights[-1]
        if site.value is not None or len(weights) < 2 or up not in tensors:
            continue  # attention, an MLP without a gate, an expert that is gone
        # In a matrix of both, the up projection is the second half.
        first = len(tensors[up]) // 2 if up == weights[0] else 0
        sizes = tensors[up][first:].double().square().mean(dim=1).sqrt()
        c = torch.where(sizes > 0, sizes, 1.0).log2().round().exp2()
        rows = torch.cat([torch.ones(first, dtype=c.dtype), 1 / c.cpu()])
        factors[up], factors[site.weight] = rows[:, None], c.cpu()
        if (bias := up.removesuffix("weight") + "bias") in tensors:
            factors[bias] = rows
    return factors


def with_bias(added: Float[Tensor, " m"], bias: Float[Tensor, " m"] | None) -> Float[Tensor, " m"]:
    """Add a compensation's bias to the consumer's bias, if it has one."""
    return added if bias is None else added + bias.to(added)


def value_rows(
    tensors: Mapping[str, Tensor], site: Site, units: KeptSet
) -> Float[Tensor, "k hidden"] | None:
    """Return the pruned value projection as the consumer sees it; None unless it is attention.

    Each unit's rows are repeated for each of its query heads, in the order of `repeat_kv`, so that
    the rows are the kept columns of the consumer.
    """
    if site.value is None:
        return None
    rows = tensors[site.value.tensor][site.value.start : site.value.stop]
    # Rows of all KV heads → rows that the kept units read → once for every query head of a unit
    heads = rows.unflatten(0, (site.groups or site.units, -1))
    heads = heads[units.indices.cpu() * len(heads) // site.units]
    return heads.repeat_interleave(site.columns_per_unit // heads.shape[1], dim=0).flatten(0, 1)


def _kept_rows(count: int, owned: list[tuple[Rows, KeptSet]]) -> Int[Tensor, " kept"]:
    """Return the indices of a tensor's rows that belong to kept units, or to no unit."""
    stays = torch.ones(count, dtype=torch.bool)
    for rows, units in owned:
        stays[rows.start : rows.stop] = False
        stays[rows.of(units)] = True
    return stays.nonzero().flatten()


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast a new weight for writing; raises NumericalError if it does not fit the dtype."""
    written = tensor.to(dtype).cpu().contiguous()
    if not torch.isfinite(written).all():
        if torch.isnan(tensor).any():
            raise NumericalError(f"the new weight of {name} holds NaN")
        raise NumericalError(
            f"the compensated {name} does not fit {dtype}: its largest entry is "
            f"{float(tensor.abs().max()):.3g}; write with dtype=float32 or dtype=bfloat16"
        )
    return written


def stacked(tensors: Mapping[str, Tensor], names: ExpertNames | None) -> dict[str, Tensor]:
    """Stack a checkpoint's tensors as the model that runs has them: inverse of `unstacked`."""
    if names is None:
        return dict(tensors)
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        prefix, suffix = _split(name, names.stored)
        if not suffix:
            state[name] = tensor
        elif match := re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", suffix):
            number, module = int(match[1]), match[2]
            experts.setdefault(prefix, {}).setdefault(number, {})[module] = tensor
        else:
            state[f"{prefix}{names.module}.{suffix}"] = tensor
    for prefix, by_number in experts.items():
        ordered = [by_number[n] for n in sorted(by_number)]
        gate_up = [torch.cat([expert[names.gate], expert[names.up]]) for expert in ordered]
        module = f"{prefix}{names.module}.experts."
        state[f"{module}{_STACKED[0]}"] = torch.stack(gate_up)
        state[f"{module}{_STACKED[1]}"] = torch.stack([expert[names.down] for expert in ordered])
    return state


def unstacked(state: Mapping[str, Tensor], names: ExpertNames | None) -> dict[str, Tensor]:
    """Take a running model's tensors apart as checkpoints have them: inverse of `stacked`.

    Raises ModelError for a model that has a module for each expert, as transformers 4.57 builds it.
    """
    if names is None:
        return dict(state)
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if _split(name, names.module)[1].startswith("experts.0."):
            raise ModelError(
                "models of experts need transformers 5: the installed release has a module for "
                "each, whose inputs come without the router's weights"
            )
        for stored, piece in _parts(name, tensor.shape, names).items():
            tensors[stored] = tensor if piece is None else tensor[piece].contiguous()
    return tensors


def unstacked_headers(
    headers: Mapping[str, Header], names: ExpertNames | None
) -> dict[str, Header]:
    """Take files' tensors of all experts apart, as some programs save them; others stay.

    Raises ModelError if an expert is also in the files by itself.
    """
    if names is None:
        return dict(headers)
    apart: dict[str, Header] = {}
    for name, header in headers.items():
        for stored, piece in _parts(name, header.shape, names).items():
            if piece is None:
                apart[stored] = header
                continue
            if stored in headers:
                raise ModelError(
                    f"{stored} is in the files by itself and in {name}: loaders differ in which "
                    "they read"
                )
            shape = piece[1].stop - piece[1].start, header.shape[2]
            apart[stored] = replace(header, shape=shape, piece=piece)
    return apart


def _parts(
    name: str, shape: Sequence[int], names: ExpertNames
) -> dict[str, tuple[int, slice] | None]:
    """Return the tensors of a checkpoint that a tensor of a running model becomes, by name: itself,
    or where every expert's projections are in the tensor of all experts.

    The gate projection is the first half of the rows, the up projection the second.
    """
    prefix, suffix = _split(name, names.module)
    parameter = suffix.removeprefix("experts.")
    if parameter not in _STACKED or len(shape) != 3:
        return {f"{prefix}{names.stored}.{suffix}" if suffix else name: None}
    modules = (names.gate, names.up) if parameter == _STACKED[0] else (names.down,)
    experts, rows = shape[0], shape[1] // len(modules)
    return {
        f"{prefix}{names.stored}.experts.{expert}.{module}.weight": (
            expert, slice(part * rows, (part + 1) * rows),
        )
        for expert in range(experts)
        for part, module in enumerate(modules)
    }  # fmt: skip


def _split(name: str, module: str) -> tuple[str, str]:
    """Split a tensor's name around that of a module of its block; empty if it is in no such."""
    match = re.fullmatch(rf"((?:model\.layers\.\d+\.)?){re.escape(module)}\.(.+)", name)
    return (match[1], match[2]) if match else ("", "")


def routed_inputs(
    experts: nn.Module, args: Iterable[Tensor]
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield each expert's number, its tokens, its last projection's inputs, norms of its outputs.

    Each row of inputs is `p h`: the channels h of a token that the expert gets times the router's
    weight p of this expert. The model applies p after the projection, which is linear, so that the
    projection of this row is the expert's contribution to the hidden states. One expert's rows are
    in memory at a time; `args` are the arguments of the module: hidden states, and the experts and
    weights of every token.
    """
    hidden, index, weights = args
    gate_up: Tensor = experts.gate_up_proj  # type: ignore[assignment]
    down: Tensor = experts.down_proj  # type: ignore[assignment]
    for expert, weight in enumerate(gate_up):
        # Tokens of the expert, and at which of their experts' places its weight stands
        token, place = (index == expert).nonzero(as_tuple=True)
        # x → (gate, up) → h = act(gate) ⊙ up → p h → ‖W p h‖
        gate, up = nn.functional.linear(hidden[token], weight).chunk(2, dim=-1)
        channels: Tensor = experts.act_fn(gate) * up  # type: ignore[operator]
        # float32 or wider, so that p h is not rounded to the narrow dtype of h.
        wide = torch.promote_types(channels.dtype, torch.float32)
        inputs = channels.to(wide) * weights[token, place, None]
        yield (
            expert,
            token,
            inputs,
            nn.functional.linear(inputs, down[expert].to(inputs)).norm(dim=-1),
        )
