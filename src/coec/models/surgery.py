"""Cutting one block: rows of the producers, columns of the consumer (METHODS §1)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.models.architectures import VALUE, Shape, Site
from coec.types import KeptSet, SiteResult


@dataclass(frozen=True, eq=False)
class Cut:
    """What happens to one site of a block: which units stay, and the consumer's new weight."""

    site: Site
    units: KeptSet
    compensation: SiteResult


def cut_block(tensors: dict[str, Tensor], cuts: list[Cut], dtype: torch.dtype) -> dict[str, Tensor]:
    """The block's tensors after the cuts, cast to `dtype`; names relative to the block.

    A site that keeps everything keeps its tensors as they are, bit for bit.

    Raises:
        NumericalError: a compensated weight does not fit `dtype`.
    """
    out = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for cut in cuts:
        if cut.units.everything:
            continue
        for producer in cut.site.producers:
            for name in (f"{producer}.weight", f"{producer}.bias"):
                if name in tensors:
                    out[name] = _unit_rows(tensors[name], cut.units).to(dtype)
        consumer = cut.site.consumer
        out[f"{consumer}.weight"] = _cast(cut.compensation.weight, dtype, consumer)
        if cut.compensation.bias is not None:
            bias = cut.compensation.bias
            existing = tensors.get(f"{consumer}.bias")
            if existing is not None:
                bias = bias + existing.to(bias)
            out[f"{consumer}.bias"] = _cast(bias, dtype, consumer)
    return out


def value_rows(
    tensors: dict[str, Tensor], shape: Shape, units: KeptSet
) -> Float[Tensor, "k hidden"]:
    """The pruned value projection as `o_proj` sees it: each head's rows repeated per query head.

    The order is that of `repeat_kv`, so the rows are the kept columns of `o_proj`.
    """
    rows = _unit_rows(tensors[f"{VALUE}.weight"], units)
    heads = rows.reshape(len(units.kept), shape.head_dim, -1)
    return heads.repeat_interleave(shape.group, dim=0).flatten(0, 1)


def _unit_rows(tensor: Tensor, units: KeptSet) -> Tensor:
    """The rows that the kept units own; rows divide evenly among units."""
    return tensor[units.columns(tensor.shape[0] // units.size).kept.to(tensor.device)]


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    cast = tensor.to(dtype).cpu().contiguous()
    if not torch.isfinite(cast).all():
        raise NumericalError(
            f"the compensated {name} does not fit {dtype}: its largest entry is "
            f"{float(tensor.abs().max()):.3g}; write with dtype=float32 or dtype=bfloat16"
        )
    return cast
