"""Nonlinear least squares over token batches, and the products that Gauss–Newton asks for.

`E(θ) = Σ_t w_t ‖T_t − F_θ(h_t)‖²`, with F a part of a model and t its tokens. Nothing is kept of a
batch but its inputs, targets and weights: what lies between is computed again for every product.

Batches may lie in several places. Every place sums its own parts, and parts are added in their
order, so that a sum does not depend on how many places there are.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from coec.linalg.products import rounded_products

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
Parameters = dict[str, Tensor]
"""θ by name, in float32 or wider; or a direction in its space."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of windows.

    Attributes:
        inputs: h, what the part of the model is given.
        targets: T, what it should make of that.
        weights: w, of every token.
        number: of the batch among all, wherever they lie.
    """

    inputs: Float[Tensor, "n length h"]
    targets: Float[Tensor, "n length o"]
    weights: Float[Tensor, "n length"]
    number: int = 0

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return Batch(inputs, targets, self.weights.to(device), self.number)


@dataclass(frozen=True, eq=False)
class Factor:
    """One matrix of θ in the Gauss–Newton matrix, taken for a Kronecker product.

    Attributes:
        rows: the diagonal of the output factor, of mean 1.
        columns: the input factor: the second moment of the inputs, every token counted by how much
            its output moves F.
    """

    rows: Float[Tensor, " out"]
    columns: Float[Tensor, "inp inp"]


class Ask(Protocol):
    """Computes a method of `Products` wherever batches lie; results come in the order of parts."""

    def __call__(
        self,
        method: "Callable[Concatenate[Products, Arguments], Iterable[Value]]",
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Iterable[Value]: ...


class LeastSquares:
    """The problem `min_θ Σ_t w_t ‖T_t − F_θ(h_t)‖²`.

    Args:
        ask: gives what `Products` computes, wherever batches lie.
        curvature: the share of the batches, evenly spaced, that stand for all in products with
            `Jᵀ w J`; gradient, errors and factors are of all.
    """

    def __init__(self, ask: Ask, curvature: float = 1.0) -> None:
        self._ask = ask
        self._tokens = dict(ask(Products.tokens))
        count = max(1, round(curvature * len(self._tokens)))
        numbers = sorted(self._tokens)
        self._sample = frozenset(numbers[n * len(numbers) // count] for n in range(count))

    @classmethod
    def of(cls, products: "Products", curvature: float = 1.0) -> "LeastSquares":
        """Return the problem whose batches all lie in this process."""

        def ask(
            method: Callable[Concatenate[Products, Arguments], Iterable[Value]],
            /,
            *args: Arguments.args,
            **kwargs: Arguments.kwargs,
        ) -> Iterable[Value]:
            return method(products, *args, **kwargs)

        return cls(ask, curvature)

    def energy(self) -> float:
        """`Σ_t w_t ‖T_t − h_t‖²`: what errors are relative to, F adding to its inputs."""
        return math.fsum(self._ask(Products.energies))

    def error(self, theta: Parameters) -> float:
        """`Σ_t w_t ‖T_t − F_θ(h_t)‖²`, summed in float64; NaN or Inf where F overflows."""
        return sum(self._ask(Products.errors, theta))

    def gradient(self, theta: Parameters) -> Parameters:
        """`Jᵀ w r`, the direction in which the error falls fastest."""
        return _total(theta, self._ask(Products.gradients, theta))

    def normal(self, theta: Parameters, direction: Parameters) -> Parameters:
        """`Jᵀ w J δ`.

        Where a share of the batches stands for all, their sum is scaled up by the number of tokens.
        """
        total = _total(theta, self._ask(Products.normals, theta, direction, self._sample))
        if len(self._sample) < len(self._tokens):
            sampled = sum(self._tokens[number] for number in self._sample)
            scale = sum(self._tokens.values()) / sampled
            total = {name: value * scale for name, value in total.items()}
        return total

    def factors(self, theta: Parameters, seed: int) -> dict[str, Factor]:
        """Kronecker factors of every matrix's own block of `Jᵀ w J`.

        One random sign per token and output stands for the outputs (Hutchinson): with g what comes
        back to a matrix's output, `rows_i ∝ Σ_t g_ti²` and `columns = Σ_t ‖g_t‖² x_t x_tᵀ / out`,
        exact where all rows of the Jacobian are alike, as those of the last matrix are.
        """
        rows: dict[str, Tensor] = {}
        columns: dict[str, Tensor] = {}
        for part in self._ask(Products.factors, theta, seed):
            for name, (own_rows, own_columns) in part.items():
                rows[name] = rows.get(name, 0) + own_rows.to(theta[name].device)
                columns[name] = columns.get(name, 0) + own_columns.to(theta[name].device)
        return {
            name: Factor(rows[name] / rows[name].mean().clamp_min(TINY), columns[name])
            for name in theta
        }


class Products:
    """What one place computes of its own batches, for a `LeastSquares`.

    Args:
        function: `(θ, h) -> F_θ(h)`, differentiable; θ comes in the dtype of h.
        modules: the linear modules that θ are the weights of, by the same names; `function` calls
            each once. θ may be some rows of a weight, and several of them the same module's.
        rows: which rows, where θ are not all of them.
        parts: batches in their order; what a part comes to is one summand of every sum.
        device: where to compute; batches may wait elsewhere.
        quadratic: F is of second degree in θ, as attention is in its values and its output: then
            `J δ` is a difference of two values of F, without error, and fused attention can be
            used, which has no forward mode.
    """

    def __init__(
        self,
        function: Callable[[Parameters, Tensor], Tensor],
        modules: Mapping[str, nn.Module],
        parts: Sequence[Sequence[Batch]],
        device: torch.device,
        *,
        rows: Mapping[str, slice] | None = None,
        quadratic: bool = False,
    ) -> None:
        self._function, self._modules, self._rows = function, modules, rows or {}
        self._parts, self._device, self._quadratic = parts, device, quadratic

    def tokens(self) -> Iterator[tuple[int, int]]:
        """The number of every batch, and how many tokens it has."""
        return ((b.number, b.weights.numel()) for part in self._parts for b in part)

    def energies(self) -> Iterator[float]:
        """`Σ_t w_t ‖T_t − h_t‖²` of every batch."""
        for b in self._moved():
            yield _weighted(b, _difference(b.targets, b.inputs))

    def errors(self, theta: Parameters) -> Iterator[float]:
        """`Σ_t w_t ‖T_t − F_θ(h_t)‖²` of every batch, summed in float64."""
        theta = self._here(theta)
        for b in self._moved():
            with torch.no_grad():
                error = _weighted(b, _difference(b.targets, self._at(theta, b)))
            yield error

    def gradients(self, theta: Parameters) -> Iterator[Parameters]:
        """`Jᵀ w r` of every part."""
        theta = self._here(theta)
        for part in self._parts:
            total = _zeros(theta)
            for b in self._of(part):
                leaves = _leaves(theta, b.inputs.dtype)
                out = self._function(leaves, b.inputs)
                residual = b.weights[..., None] * _difference(b.targets, out.detach())
                _add(total, torch.autograd.grad(out, list(leaves.values()), residual.to(out)))
            yield total

    def normals(
        self, theta: Parameters, direction: Parameters, sample: Container[int]
    ) -> Iterator[Parameters]:
        """`Jᵀ w J δ` of every part: forward mode for `J δ`, reverse mode for its adjoint.

        One pass serves both: what it computes for the derivative forward is there to go back.

        Args:
            sample: the numbers of the batches that are summed.
        """
        theta, direction = self._here(theta), self._here(direction)
        for part in self._parts:
            if not any(b.number in sample for b in part):
                continue
            total = _zeros(theta)
            for b in self._of([b for b in part if b.number in sample]):
                leaves = _leaves(theta, b.inputs.dtype)
                if self._quadratic and b.inputs.dtype.itemsize >= torch.float32.itemsize:
                    tangent = self._central_difference(theta, direction, b)  # narrower ones cancel
                    out = self._function(leaves, b.inputs)
                else:
                    out, tangent = self._with_tangent(leaves, direction, b)
                moved = b.weights[..., None].to(tangent) * tangent
                _add(total, torch.autograd.grad(out, list(leaves.values()), moved))
            yield total

    def factors(self, theta: Parameters, seed: int) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        """Of every part what `LeastSquares.factors` sums: rows and columns, by name.

        The signs of a batch depend on the seed and its number alone, wherever it lies.
        """
        theta = self._here(theta)
        for part in self._parts:
            sums: dict[str, tuple[Tensor, Tensor]] = {}
            for b in self._of(part):
                leaves = _leaves(theta, b.inputs.dtype)
                with _watched(self._modules) as seen:
                    out = self._function(leaves, b.inputs)
                signs = _signs(out, seed, b.number)
                back = torch.autograd.grad(
                    out, [seen[name][1] for name in theta], signs * b.weights[..., None].sqrt()
                )
                for name, gradient in zip(theta, back, strict=True):
                    own = gradient[..., self._rows.get(name, slice(None))]
                    g = own.flatten(0, -2).to(theta[name].dtype)
                    x = seen[name][0].flatten(0, -2).to(g)
                    share = g.square().sum(dim=1, keepdim=True) / g.shape[1]
                    rows, columns = sums.get(name, (0, 0))
                    with rounded_products(x.device):  # factors only precondition
                        own_columns = x.T @ (share * x)
                    sums[name] = (rows + g.square().sum(dim=0), columns + own_columns)
            yield sums

    def _with_tangent(
        self, leaves: Parameters, direction: Parameters, b: Batch
    ) -> tuple[Tensor, Tensor]:
        """F of a batch, to go back from, and `J δ`."""
        # Fused attention has no forward mode; its plain form has.
        with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(leaf, direction[name].to(leaf.dtype))
                for name, leaf in leaves.items()
            }
            out = forward_ad.unpack_dual(self._function(duals, b.inputs))
            assert out.tangent is not None  # every matrix of θ is used
            return out.primal, out.tangent.detach()

    @torch.no_grad()
    def _central_difference(self, theta: Parameters, direction: Parameters, b: Batch) -> Tensor:
        """`(F(θ + h δ) − F(θ − h δ)) / 2h`, with h so large that little cancels."""
        h = math.sqrt(
            sum(float(p.square().sum()) for p in theta.values())
            / max(sum(float(d.square().sum()) for d in direction.values()), TINY)
        )
        ahead, back = (
            self._at({name: theta[name] + sign * direction[name] for name in theta}, b)
            for sign in (h, -h)
        )
        return (ahead - back) / (2 * h)

    def _at(self, theta: Parameters, b: Batch) -> Tensor:
        return self._function({n: p.to(b.inputs.dtype) for n, p in theta.items()}, b.inputs)

    def _here(self, theta: Parameters) -> Parameters:
        return {name: p.to(self._device) for name, p in theta.items()}

    def _moved(self) -> Iterator[Batch]:
        for part in self._parts:
            yield from self._of(part)

    def _of(self, part: Sequence[Batch]) -> Iterator[Batch]:
        for b in part:
            yield b.to(self._device)


PRIME, SEEDS = 1_000_003, 2**63
"""How seeds of batches are made: `seed · PRIME + number`, below SEEDS."""
TINY = 1e-30
"""Below this a factor is 0: nothing of the outputs depends on its matrix."""


@contextmanager
def _watched(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Inputs and outputs of the modules, by name, as they are called."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            seen[name] = args[0].detach(), out

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _difference(one: Tensor, other: Tensor) -> Tensor:
    """In float32 or wider: hidden states are large beside what a part of a model adds to them."""
    wide = torch.promote_types(one.dtype, torch.float32)
    return one.to(wide) - other.to(wide)


def _weighted(b: Batch, residual: Tensor) -> float:
    """`Σ_t w_t ‖r_t‖²`, summed in float64."""
    return float((b.weights[..., None] * residual.square()).sum(dtype=torch.float64))


def _leaves(theta: Parameters, dtype: torch.dtype) -> Parameters:
    return {name: p.detach().to(dtype).requires_grad_() for name, p in theta.items()}


def _zeros(theta: Parameters) -> Parameters:
    return {name: torch.zeros_like(p) for name, p in theta.items()}


def _signs(like: Tensor, seed: int, number: int) -> Tensor:
    """Random signs of a batch, in the shape, dtype and place of a tensor."""
    generator = torch.Generator(like.device).manual_seed((seed * PRIME + number) % SEEDS)
    drawn = torch.randint(
        0, 2, like.shape, generator=generator, device=like.device, dtype=torch.int8
    )
    return drawn.to(like.dtype) * 2 - 1


def _total(theta: Parameters, parts: Iterable[Parameters]) -> Parameters:
    total = _zeros(theta)
    for part in parts:
        _add(total, [part[name].to(total[name].device) for name in total])
    return total


def _add(total: Parameters, parts: Sequence[Tensor]) -> None:
    for tensor, part in zip(total.values(), parts, strict=True):
        tensor += part
