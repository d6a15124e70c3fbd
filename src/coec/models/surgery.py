"""Cut one block: rows of the producers, columns of the consumer (METHODS §1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.errors import NumericalError
from coec.models.layout import Rows, Site
from coec.types import KeptSet, SiteResult


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

    Raises:
        NumericalError: a compensated weight does not fit `dtype`.
    """
    out = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    owned: dict[str, list[tuple[Rows, KeptSet]]] = {}
    for cut in cuts:
        for rows in cut.site.producers:
            owned.setdefault(rows.tensor, []).append((rows, cut.units))
    for name, cut_rows in owned.items():
        out[name] = tensors[name][_kept_rows(len(tensors[name]), cut_rows)].to(dtype)
    for cut in cuts:
        if cut.result is None:
            continue
        site = cut.site
        out[site.weight] = cast(cut.result.weight, dtype, site.consumer)
        if cut.result.bias is not None:
            bias = with_bias(cut.result.bias, tensors.get(site.bias))
            out[site.bias] = cast(bias, dtype, site.consumer)
    return out


def with_bias(added: Float[Tensor, " m"], bias: Float[Tensor, " m"] | None) -> Float[Tensor, " m"]:
    """Add a compensation's bias to the consumer's bias, if it has one."""
    return added if bias is None else added + bias.to(added)


def value_rows(
    tensors: Mapping[str, Tensor], site: Site, units: KeptSet
) -> Float[Tensor, "k hidden"] | None:
    """The pruned value projection as the consumer sees it; None if the site is not attention.

    Each unit's rows are repeated for each of its query heads, in the order of `repeat_kv`, so that
    the rows are the kept columns of the consumer.
    """
    if site.value is None:
        return None
    rows = tensors[site.value.tensor][site.value.of(units)]
    heads = rows.reshape(len(units.indices), -1, rows.shape[1])
    return heads.repeat_interleave(site.columns_per_unit // heads.shape[1], dim=0).flatten(0, 1)


def with_rows(tensor: Float[Tensor, "n m"], new: Mapping[Rows, Tensor]) -> Float[Tensor, "n m"]:
    """Replace rows of a tensor; derivatives run through the new ones."""
    pieces, end = [], 0
    for rows in sorted(new, key=lambda rows: rows.start):
        pieces += [tensor[end : rows.start], new[rows]]
        end = rows.stop
    pieces = [piece for piece in [*pieces, tensor[end:]] if len(piece)]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _kept_rows(count: int, owned: list[tuple[Rows, KeptSet]]) -> Int[Tensor, " kept"]:
    """Indices of a tensor's rows that belong to kept units, or to no unit."""
    stays = torch.ones(count, dtype=torch.bool)
    for rows, units in owned:
        stays[rows.start : rows.stop] = False
        stays[rows.of(units)] = True
    return stays.nonzero().flatten()


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast a new weight for writing; raises NumericalError if it does not fit the dtype."""
    written = tensor.to(dtype).cpu().contiguous()
    if not torch.isfinite(written).all():
        raise NumericalError(
            f"the compensated {name} does not fit {dtype}: its largest entry is "
            f"{float(tensor.abs().max()):.3g}; write with dtype=float32 or dtype=bfloat16"
        )
    return written
