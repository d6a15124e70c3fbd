"""Products of attention by hand, its map applied to all inputs once (METHODS §8)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from coec.reconstruction.gated import close, factor_of, rows_of
from coec.reconstruction.least_squares import (
    Batch,
    DifferentiatedProducts,
    Linear,
    Theta,
    watched,
)


class _Mixing(TorchFunctionMode):
    """Notes what fused attention would make of the inputs of the value projection, head by head.

    Args:
        calls: where `watched` leaves these inputs before attention is called.
        value: their name there.
    """

    def __init__(self, calls: Mapping[str, tuple[Tensor, Tensor]], value: str) -> None:
        super().__init__()
        self._calls, self._value = calls, value
        self.mixed: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and len(args) > 2 and self._value in self._calls:
            self.mixed = self._mix(*args[:3], **(kwargs or {}))
        return out

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "n heads length h"]:
        x = self._calls[self._value][0]
        values = x[:, None].expand(-1, value.shape[1], -1, -1)
        mixed = []
        for n in range(len(x)):  # maps of one window at a time
            window = slice(n, n + 1)
            mask = (
                attn_mask[window]
                if attn_mask is not None and len(attn_mask) == len(x)
                else attn_mask
            )
            mixed.append(
                F.scaled_dot_product_attention(
                    query[window], key[window], values[window], attn_mask=mask, **kwargs
                )
            )
        return torch.cat(mixed)


@dataclass(frozen=True, eq=False)
class HeldAttention:
    """Attention whose map is held, which adds `f · D a`, `a_q = A_q x V_gᵀ` of every query head q.

    Attributes:
        value, out: the names that θ has for V and D.
        heads, groups: query heads, and KV groups.
        factor: f.
    """

    value: str
    out: str
    heads: int
    groups: int
    factor: float

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        run: Callable[[Tensor], Tensor],
        state: Float[Tensor, "n length h"],
        modules: Mapping[str, nn.Module],
        rows: Mapping[str, slice],
    ) -> "HeldAttention | None":
        """Recognise a half-block by what it computes; None where it is something else.

        Args:
            run: the half-block, with the weights that its modules have.
            state: a batch of inputs.
            modules: of V and D, by the names that θ has for them, in this order.
            rows: which rows of them θ are.
        """
        if len(modules) != 2:
            return None
        value, out = modules
        with watched(modules) as calls, _Mixing(calls, value) as mixing:
            run(state)
        factor = factor_of(run, state, modules[out])
        if mixing.mixed is None or factor is None or len(calls) != 2:
            return None
        V, bias = (rows_of(t, rows[value]) for t in (modules[value].weight, modules[value].bias))
        heads, a = mixing.mixed.shape[1], calls[out][0]
        if a.shape[-1] % heads or len(V) % (width := a.shape[-1] // heads):
            return None
        attention = cls(value, out, heads, len(V) // width, factor)
        if heads % attention.groups:
            return None
        inner = attention.inner(attention.mixed(mixing.mixed), V)
        if bias is not None:
            inner = (
                inner
                + bias.view(attention.groups, 1, width)
                .expand(attention.groups, heads // attention.groups, width)
                .flatten()
            )
        return attention if close(inner, a.flatten(0, -2)) else None

    def mixed(self, by_head: Float[Tensor, "n heads length h"]) -> Float[Tensor, "groups rows h"]:
        """Return `A_q x` of every token and query head, those of one KV group together."""
        by_group = by_head.unflatten(1, (self.groups, -1)).permute(1, 0, 3, 2, 4)
        return by_group.flatten(1, 3).contiguous()

    def inner(
        self, mixed: Float[Tensor, "groups rows h"], V: Float[Tensor, "v h"]
    ) -> Float[Tensor, "tokens d"]:
        """Return D's input of values without a bias."""
        by_group = torch.bmm(mixed, V.unflatten(0, (self.groups, -1)).mT)
        per_group = self.heads // self.groups
        return by_group.unflatten(1, (-1, per_group)).permute(1, 0, 2, 3).flatten(1)

    def adjoint(
        self, mixed: Float[Tensor, "groups rows h"], g: Float[Tensor, "tokens d"]
    ) -> Float[Tensor, "v h"]:
        """Return the adjoint of `inner` in V."""
        by_head = g.unflatten(1, (self.groups, self.heads // self.groups, -1))
        by_group = by_head.permute(1, 0, 2, 3).flatten(1, 2)
        return torch.bmm(by_group.mT, mixed).flatten(0, 1)


class AttentionProducts(DifferentiatedProducts):
    """Products of attention, `Jᵀ w J δ` by hand from its inputs, mixed by its map.

    Args:
        attention: what is added.
        kept_bytes: of mixed inputs that may stay on the device; others are mixed again.
    """

    def __init__(
        self,
        attention: HeldAttention,
        function: Callable[[Theta, Tensor], Tensor],
        modules: Mapping[str, nn.Module],
        parts: Sequence[Sequence[Batch]],
        device: torch.device,
        *,
        kept_bytes: int,
        rows: Mapping[str, slice] | None = None,
        root: Float[Tensor, "h h"] | None = None,
    ) -> None:
        super().__init__(
            function, modules, parts, device, rows=rows, quadratic=True, kept_bytes=kept_bytes,
            root=root,
        )  # fmt: skip
        self._attention, self._added = attention, (attention.out,)

    def _backward(self, theta: Theta, b: Batch, g: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
        back, out = dict(super()._backward(theta, b, g)), self._attention.out
        back[out] = self._attention.factor * g, back[out][1]
        return back

    def _linearised(self, theta: Theta, b: Batch) -> Linear:
        attention = self._attention
        D = theta[attention.out].to(b.inputs.dtype)
        weights = (attention.factor**2 * b.weights.reshape(-1, 1)).to(D)
        size = b.inputs.numel() * b.inputs.element_size() * attention.heads
        kept = self._kept(size, lambda: self._mixed(theta, b))

        def normal(direction: Theta) -> Sequence[Tensor]:
            mixed, a = kept()
            delta = {name: d.to(D) for name, d in direction.items()}
            moved = (
                a @ delta[attention.out].T + attention.inner(mixed, delta[attention.value]) @ D.T
            )
            moved = weights * self._metric(moved)
            by_name = {
                attention.value: attention.adjoint(mixed, moved @ D),
                attention.out: moved.T @ a,
            }
            return [by_name[name] for name in direction]

        return normal

    @torch.no_grad()
    def _mixed(self, theta: Theta, b: Batch) -> tuple[Tensor, Tensor]:
        """Return the mixed inputs of a batch, and D's input."""
        attention = self._attention
        with watched(self._modules) as calls, _Mixing(calls, attention.value) as mixing:
            self._at(theta, b.to(self._device))
        assert mixing.mixed is not None  # `HeldAttention.of` saw it
        return attention.mixed(mixing.mixed), calls[attention.out][0].flatten(0, -2)
