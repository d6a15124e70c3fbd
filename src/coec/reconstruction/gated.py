"""Products of a gated MLP by hand, its activations kept while θ stays (METHODS §8)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from coec.reconstruction.least_squares import Batch, Linear, Products, Theta, times, watched

_MATRICES = 3
"""Matrices of a gated MLP."""


@dataclass(frozen=True, eq=False)
class GatedMlp:
    """A gated MLP, which adds to the hidden state `f · (D (φ(G x + b) ⊙ (U x + c)) + d)`.

    Attributes:
        gate, up, down: the names that θ has for G, U and D.
        activation: φ, which takes every entry by itself.
        biases: b, c and d; None for those that are not there.
        factor: f.
    """

    gate: str
    up: str
    down: str
    activation: Callable[[Tensor], Tensor]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    factor: float

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        run: Callable[[Tensor], Tensor],
        state: Float[Tensor, "n length h"],
        modules: Mapping[str, nn.Module],
        rows: Mapping[str, slice],
        around: nn.Module,
    ) -> "GatedMlp | None":
        """Recognise a half-block by what it computes; None where it is something else.

        Args:
            run: the half-block, with the weights that its modules have.
            state: a batch of inputs.
            modules: of G, U and D, by the names that θ has for them, in this order.
            rows: which rows of them θ are.
            around: the module that holds them, and the activation.
        """
        siblings = [m for m in around.children() if m not in modules.values()]
        if len(modules) != _MATRICES or len(siblings) != 1:
            return None
        weights = {name: rows_of(module.weight, rows[name]) for name, module in modules.items()}
        biases = [rows_of(module.bias, rows[name]) for name, module in modules.items()]
        gate, up, down = modules
        with watched(modules) as calls:
            run(state)
        factor = factor_of(run, state, modules[down])
        if factor is None or len(calls) != _MATRICES:
            return None
        mlp = cls(gate, up, down, siblings[0], (biases[0], biases[1], biases[2]), factor)
        return mlp if close(mlp.inner(weights, calls[gate][0]), calls[down][0]) else None

    def activations(self, theta: Theta, x: Float[Tensor, "tokens h"]) -> "Activations":
        """Return the activations of some tokens; θ and x are of one dtype."""
        b, c, _ = self.biases
        g = _linear(x, theta[self.gate], b).detach().requires_grad_()
        with torch.enable_grad():
            s = self.activation(g)
        (slope,) = torch.autograd.grad(s.sum(), g)
        u = _linear(x, theta[self.up], c)
        s = s.detach()
        return Activations(x, s, slope * u, s * u)

    def inner(self, theta: Theta, x: Float[Tensor, "... h"]) -> Float[Tensor, "... k"]:
        """Return D's input."""
        b, c, _ = self.biases
        return self.activation(_linear(x, theta[self.gate], b)) * _linear(x, theta[self.up], c)

    def outer(self, theta: Theta, a: Float[Tensor, "... k"]) -> Float[Tensor, "... h"]:
        """Return what is added."""
        return self.factor * _linear(a, theta[self.down], self.biases[2])


@dataclass(frozen=True, eq=False)
class Activations:
    """Activations of some tokens and their derivatives, of which D's input `a = s ⊙ u` is linear.

    Attributes:
        x: inputs of G and U.
        s: `φ(g)`, by which a moves with u.
        p: `φ'(g) ⊙ u`, by which a moves with g.
        a: inputs of D.
    """

    x: Float[Tensor, "tokens h"]
    s: Float[Tensor, "tokens k"]
    p: Float[Tensor, "tokens k"]
    a: Float[Tensor, "tokens k"]


class GatedProducts(Products):
    """Products of a gated MLP, 8 matrix products for `Jᵀ w J δ` where differentiation takes 11.

    Its batches hold the inputs x of G and U, and as targets what is to be added to the hidden
    state, `T − h`.

    Args:
        mlp: what is added.
        kept_bytes: of activations that may stay on the device; others are computed again.
        root: as in `Products`.
    """

    def __init__(
        self,
        mlp: GatedMlp,
        parts: Sequence[Sequence[Batch]],
        device: torch.device,
        *,
        kept_bytes: int = 0,
        root: Float[Tensor, "h h"] | None = None,
    ) -> None:
        super().__init__(parts, device, kept_bytes, root)
        self._mlp, self._added = mlp, (mlp.down,)

    def _wanted(self, b: Batch) -> Tensor:
        return _wide(b.targets)

    def _residual(self, theta: Theta, b: Batch) -> Tensor:
        theta = _cast(theta, b)
        return _wide(b.targets) - _wide(self._mlp.outer(theta, self._mlp.inner(theta, b.inputs)))

    def _gradient(self, theta: Theta, b: Batch) -> Sequence[Tensor]:
        mlp, theta = self._mlp, _cast(theta, b)
        at = mlp.activations(theta, b.inputs.flatten(0, -2))
        residual = _wide(b.targets).flatten(0, -2) - _wide(mlp.outer(theta, at.a))
        weighted = mlp.factor * b.weights.reshape(-1, 1) * self._metric(residual)
        return self._adjoint(theta, at, weighted.to(at.x))

    def _linearised(self, theta: Theta, b: Batch) -> Linear:
        theta, f = _cast(theta, b), self._mlp.factor

        def activations() -> tuple[Activations, Tensor]:
            moved_batch = b.to(self._device)
            weights = (f * f * moved_batch.weights.reshape(-1, 1)).to(moved_batch.inputs)
            return self._mlp.activations(theta, moved_batch.inputs.flatten(0, -2)), weights

        size = b.inputs.shape[:-1].numel() * b.inputs.element_size()
        size *= b.inputs.shape[-1] + 3 * len(theta[self._mlp.up])
        kept = self._kept(size, activations)

        def normal(direction: Theta) -> Sequence[Tensor]:
            at, weights = kept()
            moved = self._metric(self._moved_by(theta, at, direction))
            return self._adjoint(theta, at, weights * moved)

        return normal

    def _moved_by(self, theta: Theta, at: Activations, direction: Theta) -> Tensor:
        """`J δ / f`."""
        mlp, delta = self._mlp, {name: d.to(at.x) for name, d in direction.items()}
        da = at.s * (at.x @ delta[mlp.up].T) + at.p * (at.x @ delta[mlp.gate].T)
        return at.a @ delta[mlp.down].T + da @ theta[mlp.down].T

    def _adjoint(self, theta: Theta, at: Activations, g: Tensor) -> Sequence[Tensor]:
        """`Jᵀ g / f`, in the order of θ."""
        mlp, rho = self._mlp, g @ theta[self._mlp.down]
        by_name = {
            mlp.gate: (at.p * rho).T @ at.x, mlp.up: (at.s * rho).T @ at.x, mlp.down: g.T @ at.a,
        }  # fmt: skip
        return [by_name[name] for name in theta]

    def _backward(self, theta: Theta, b: Batch, g: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
        mlp, theta = self._mlp, _cast(theta, b)
        at = mlp.activations(theta, b.inputs.flatten(0, -2))
        g = (mlp.factor * g).flatten(0, -2).to(at.x)
        rho = times(g, self._root) @ theta[mlp.down]
        by_name = {mlp.gate: (at.p * rho, at.x), mlp.up: (at.s * rho, at.x), mlp.down: (g, at.a)}
        return {name: by_name[name] for name in theta}


@torch.no_grad()
def factor_of(
    run: Callable[[Tensor], Tensor], state: Float[Tensor, "n length h"], consumer: nn.Module
) -> float | None:
    """Return the number f by which a half-block scales its consumer's output before adding it.

    None where it does more with it, as a norm would: every token is given another multiple of ones.
    """
    ones = torch.ones_like(state) * torch.arange(1, 1 + state.shape[1]).to(state)[:, None]
    hook = consumer.register_forward_hook(lambda *_: ones)
    try:
        added = run(torch.zeros_like(state))
    finally:
        hook.remove()
    factor = float((added.double() * ones.double()).sum() / ones.double().square().sum())
    return factor if close(added, factor * ones) else None


def rows_of(tensor: Any, rows: slice) -> Any:
    """Return some rows of a parameter, which may be None."""
    return None if tensor is None else tensor.detach()[rows]


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors differ by no more than rounding makes likely."""
    tolerance = math.sqrt(torch.finfo(b.dtype).eps)
    return float((a - b).norm()) <= tolerance * float(b.norm())


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _cast(theta: Theta, b: Batch) -> Theta:
    return {name: p.to(b.inputs.dtype) for name, p in theta.items()}


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
