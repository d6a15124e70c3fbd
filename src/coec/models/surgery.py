"""Tensors of a block: rows and columns cut (METHODS §1), and what single experts read."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from coec.devices import is_finite
from coec.errors import NumericalError
from coec.models.architectures import WIDE
from coec.models.layout import BlockLayout, Rows, Site
from coec.models.names import is_transposed
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
    corrects = name.endswith(WIDE)
    return torch.promote_types(dtype, torch.float32) if corrects else dtype


def without_experts(
    tensors: Mapping[str, Tensor], block: BlockLayout, experts: KeptSet
) -> dict[str, Tensor]:
    """Leave out the removed experts of a block, and their rows of the router.

    The kept experts are numbered anew, in their order.
    """
    routers = {rows.tensor: (rows.dim, rows.of(experts)) for rows in block.router}
    # Old number of an expert → its number among the kept experts
    numbers = {old: new for new, old in enumerate(experts.indices.tolist())}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+\.experts\.)(\d+)(\..+)", name)
        if match is None:
            out[name] = tensor.index_select(*routers[name]) if name in routers else tensor
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
        if site.routed and any(rows.tensor.endswith("bias") for rows in site.producers):
            continue  # gpt-oss clamps its up projection, and adds 1
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
    if not is_finite(written):
        if torch.isnan(tensor).any():
            raise NumericalError(f"the new weight of {name} holds NaN")
        raise NumericalError(
            f"the compensated {name} does not fit {dtype}: its largest entry is "
            f"{float(tensor.abs().max()):.3g}; write with dtype=float32 or dtype=bfloat16"
        )
    return written


def routed_inputs(
    experts: Any, args: tuple[Tensor, ...]
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield each expert's number, its tokens, its last projection's inputs, norms of its outputs.

    Each row of inputs is `p h`: the channels h of a token that the expert gets times the router's
    weight p of this expert. The model applies p after the projection, which is linear, so that the
    projection of this row is the expert's contribution to the hidden states. `args` are the
    arguments of the module: hidden states, and the experts and weights of every token; or the
    weighted hidden states of all tokens, for one expert after the other.
    """
    if len(args) == 1:
        yield from _of_all(experts, *args)
        return
    hidden, index, weights = args
    for expert in range(len(experts.down_proj)):
        # Tokens of the expert, and at which of their experts' places its weight stands
        token, place = (index == expert).nonzero(as_tuple=True)
        p = weights[token, place, None]
        if not len(token):
            columns = experts.down_proj.shape[1 if is_transposed(experts) else 2]
            channels = hidden.new_zeros(0, columns)
            yield expert, token, channels, channels.sum(dim=-1)
            continue
        # The module itself, of these tokens and this expert alone
        out, channels = _noted(experts, hidden[token], torch.full_like(index[token, :1], expert), p)
        # float32 or wider, so that p h is not rounded to the narrow dtype of h.
        wide = torch.promote_types(channels.dtype, torch.float32)
        yield expert, token, channels.to(wide) * p, out.norm(dim=-1)


def _of_all(
    experts: Any, hidden: Float[Tensor, "tokens h"]
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield as `routed_inputs` where every expert gets all tokens, times its weight or 0."""
    count = len(experts.down_proj)
    out, channels = _noted(experts, hidden)
    by_expert = (t.reshape(count, -1, t.shape[-1]) for t in (hidden, channels, out))
    for expert, (inputs, inside, output) in enumerate(zip(*by_expert, strict=True)):
        token = inputs.any(dim=-1).nonzero().flatten()
        yield expert, token, inside[token], output[token].norm(dim=-1)


class _Inputs(TorchFunctionMode):
    """Notes what the products with a parameter of all experts read."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self._storage, self.read = parameter.untyped_storage().data_ptr(), list[Tensor]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        product = len(args) > 1 and all(isinstance(arg, Tensor) for arg in args[:2])
        if product and args[1].untyped_storage().data_ptr() == self._storage:
            self.read.append(args[0])
        return func(*args, **(kwargs or {}))


def _noted(experts: Any, *args: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a module of experts, and the inputs of their last projection."""
    noting = _Inputs(experts.down_proj)
    with noting:
        out: Tensor = experts.forward(*args)
    (channels,) = noting.read
    return out, channels
