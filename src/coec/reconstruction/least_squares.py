"""Nonlinear least squares over token batches, and the products that Gauss–Newton asks for.

`E(θ) = Σ_t w_t ‖S (T_t − F_θ(h_t))‖²`, with F a part of a model, t its tokens, and S the identity,
or the root of a metric `M = SᵀS`. Nothing is kept of a batch but its inputs, targets and weights:
what lies between is computed again for every product.

Batches may lie in several places. Every place sums its own parts, and parts are added in their
order, so that a sum does not depend on how many places there are.
"""

import math
from abc import ABC, abstractmethod
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
Theta = dict[str, Tensor]
"""θ by name, in float32 or wider; or a direction in its space."""
TOKENS_PER_COLUMN = 4
"""Tokens for each column of a consumer, below which no sample of them stands for all."""
Linear = Callable[[Theta], Sequence[Tensor]]
"""The map from a direction δ to `Jᵀ w M J δ` of a batch, in the order of θ."""


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
        """Return the batch on another device."""
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return Batch(inputs, targets, self.weights.to(device), self.number)


@dataclass(frozen=True, eq=False)
class Factor:
    """Block of one matrix of θ in the Gauss–Newton matrix, taken for a Kronecker product.

    Attributes:
        rows: the diagonal of the output factor, of mean 1.
        columns: the input factor: the second moment of the inputs, every token counted by how much
            its output moves F.
        root: S, upper triangular, with the output factor `SᵀS`; None for `diag(rows)`.
    """

    rows: Float[Tensor, " out"]
    columns: Float[Tensor, "inp inp"]
    root: Float[Tensor, "out out"] | None = None


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
    """The problem `min_θ Σ_t w_t ‖S (T_t − F_θ(h_t))‖²`.

    Args:
        ask: gives what `Products` computes, wherever batches lie.
        curvature: number of tokens, in batches evenly spaced, that stand for all in products with
            `Jᵀ w M J` and in factors; None for all. Gradient and errors are of all.
        root: S; None for the identity.
    """

    def __init__(
        self, ask: Ask, curvature: int | None = None, root: Float[Tensor, "o o"] | None = None
    ) -> None:
        self._ask, self._root = ask, root
        self._added = set(ask(Products.added))
        self._tokens = dict(ask(Products.tokens))
        total, count = sum(self._tokens.values()), len(self._tokens)
        if curvature is not None and curvature < total:
            count = max(1, round(curvature / total * count))
        numbers = sorted(self._tokens)
        self._sample = frozenset(numbers[n * len(numbers) // count] for n in range(count))
        self._scale = total / sum(self._tokens[number] for number in self._sample)

    @classmethod
    def of(
        cls,
        products: "Products",
        curvature: int | None = None,
        root: Float[Tensor, "o o"] | None = None,
    ) -> "LeastSquares":
        """Return the problem whose batches all lie in this process."""

        def ask(
            method: Callable[Concatenate[Products, Arguments], Iterable[Value]],
            /,
            *args: Arguments.args,
            **kwargs: Arguments.kwargs,
        ) -> Iterable[Value]:
            return method(products, *args, **kwargs)

        return cls(ask, curvature, root)

    def energy(self) -> float:
        """`Σ_t w_t ‖S (T_t − h_t)‖²`: what errors are relative to, F adding to its inputs."""
        return math.fsum(self._ask(Products.energies))

    def error(self, theta: Theta) -> float:
        """`Σ_t w_t ‖S (T_t − F_θ(h_t))‖²`, summed in float64; NaN or Inf where F overflows."""
        return sum(self._ask(Products.errors, theta))

    def gradient(self, theta: Theta) -> Theta:
        """`Jᵀ w M r`, the direction in which the error falls fastest."""
        return _total(theta, self._ask(Products.gradients, theta))

    def linearise(self, theta: Theta) -> None:
        """Set the θ at which `normal` takes derivatives."""
        for _ in self._ask(Products.linearise, theta, self._sample):
            pass

    def normal(self, direction: Theta) -> Theta:
        """`Jᵀ w M J δ`, J at the θ of the last `linearise`.

        Where some batches stand for all, their sum is scaled up by the number of tokens.
        """
        total = _total(direction, self._ask(Products.normals, direction))
        return {name: value * self._scale for name, value in total.items()}

    def factors(self, theta: Theta, seed: int) -> dict[str, Factor]:
        """Kronecker factors of every matrix's own block of `Jᵀ w M J`.

        One random sign per token and output stands for the outputs (Hutchinson): with g what comes
        back to a matrix's output, `rows_i ∝ Σ_t g_ti²` and `columns = Σ_t ‖g_t‖² x_t x_tᵀ / out`.
        For a matrix whose output F adds as it is they are exact, with M for the output factor.
        """
        rows: dict[str, Tensor] = {}
        columns: dict[str, Tensor] = {}
        for summand in self._ask(Products.factors, theta, seed, self._sample):
            for name, (own_rows, own_columns) in summand.items():
                rows[name] = rows.get(name, 0) + own_rows.to(theta[name].device)
                columns[name] = columns.get(name, 0) + own_columns.to(theta[name].device)
        return {
            name: Factor(
                rows[name] / rows[name].mean().clamp_min(TINY),
                columns[name] * self._scale,
                self._root if name in self._added else None,
            )
            for name in theta
        }


Columns = tuple[Tensor, Tensor]
"""Of one matrix of θ, what `LeastSquares.factors` sums: rows (out) and columns (inp, inp)."""


class Products(ABC):
    """Products over the batches of one process, for a `LeastSquares`.

    Args:
        parts: batches in their order; every part is one summand of every sum.
        device: where to compute; batches may wait elsewhere.
        kept_bytes: of what products at one θ share that may stay there; the rest is made again.
        root: S; None for the identity.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Batch]],
        device: torch.device,
        kept_bytes: int = 0,
        root: Float[Tensor, "o o"] | None = None,
    ) -> None:
        self._parts, self._device, self._kept_bytes = parts, device, kept_bytes
        self._root = None if root is None else root.to(device)
        self._square = None if self._root is None else self._root.mT @ self._root
        self._room = kept_bytes
        self._added: tuple[str, ...] = ()
        self._linear: list[list[Linear]] = []

    def tokens(self) -> Iterator[tuple[int, int]]:
        """The number of every batch, and how many tokens it has."""
        return ((b.number, b.weights.numel()) for batches in self._parts for b in batches)

    def added(self) -> Iterable[str]:
        """The names of matrices whose output F adds as it is, maybe scaled."""
        return self._added

    def energies(self) -> Iterator[float]:
        """`Σ_t w_t ‖S (T_t − h_t)‖²` of every batch."""
        for b in self._moved():
            yield self._weighted(b, self._wanted(b))

    def errors(self, theta: Theta) -> Iterator[float]:
        """`Σ_t w_t ‖S (T_t − F_θ(h_t))‖²` of every batch, summed in float64."""
        theta = self._here(theta)
        for b in self._moved():
            with torch.no_grad():
                error = self._weighted(b, self._residual(theta, b))
            yield error

    def gradients(self, theta: Theta) -> Iterator[Theta]:
        """`Jᵀ w M r` of every part."""
        theta = self._here(theta)
        for batches in self._parts:
            total = _zeros(theta)
            for b in self._of(batches):
                _add(total, self._gradient(theta, b))
            yield total

    def linearise(self, theta: Theta, sample: Container[int]) -> Iterable[None]:
        """Set the θ at which `normals` takes derivatives, and the batches that it sums."""
        self._linear, self._room = [], self._kept_bytes  # the last ones make room first
        theta = self._here(theta)
        by_part = ([b for b in batches if b.number in sample] for batches in self._parts)
        self._linear = [[self._linearised(theta, b) for b in batches] for batches in by_part]
        return ()

    def normals(self, direction: Theta) -> Iterator[Theta]:
        """`Jᵀ w M J δ` of every part that has batches in the sample."""
        direction = self._here(direction)
        for linear in filter(None, self._linear):
            total = _zeros(direction)
            for normal in linear:
                _add(total, normal(direction))
            yield total

    def factors(
        self, theta: Theta, seed: int, sample: Container[int]
    ) -> Iterator[dict[str, Columns]]:
        """Yield, for every part that has batches in the sample, what `LeastSquares.factors` sums.

        The signs of a batch depend on the seed and its number alone, wherever it lies.
        """
        theta = self._here(theta)
        for batches in self._parts:
            sums: dict[str, Columns] = {}
            for b in self._of([b for b in batches if b.number in sample]):
                signs = _signs(b.targets, seed, b.number) * b.weights[..., None].sqrt()
                for name, (g, x) in self._backward(theta, b, signs).items():
                    g, x = g.flatten(0, -2).to(theta[name]), x.flatten(0, -2).to(theta[name])
                    share = g.square().sum(dim=1, keepdim=True) / g.shape[1]
                    rows, columns = sums.get(name, (0, 0))
                    with rounded_products(x.device):  # factors only precondition
                        own_columns = x.T @ (share * x)
                    sums[name] = (rows + g.square().sum(dim=0), columns + own_columns)
            if sums:
                yield sums

    @abstractmethod
    def _wanted(self, b: Batch) -> Tensor:
        """`T − h` of a batch."""

    @abstractmethod
    def _residual(self, theta: Theta, b: Batch) -> Tensor:
        """`T − F_θ(h)` of a batch, in float32 or wider."""

    @abstractmethod
    def _gradient(self, theta: Theta, b: Batch) -> Sequence[Tensor]:
        """`Jᵀ w M r` of a batch, in the order of θ."""

    @abstractmethod
    def _linearised(self, theta: Theta, b: Batch) -> Linear:
        """The map from δ to `Jᵀ w M J δ` of a batch, in the order of θ."""

    @abstractmethod
    def _backward(self, theta: Theta, b: Batch, g: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
        """`Jᵀ Sᵀ g` of a batch at the output of every matrix, and that matrix's input.

        At a matrix that is `added` it is g itself, by what F scales it.
        """

    def _weighted(self, b: Batch, residual: Tensor) -> float:
        """`Σ_t w_t ‖S r_t‖²`, summed in float64."""
        seen = times(residual, None if self._root is None else self._root.mT)
        return float((b.weights[..., None] * seen.square()).sum(dtype=torch.float64))

    def _metric(self, residual: Tensor) -> Tensor:
        """`M r`."""
        return times(residual, self._square)

    def _kept(self, size: int, make: Callable[[], Value]) -> Callable[[], Value]:
        """Return what gives something of so many bytes: made now, if there is room, else anew."""
        if size > self._room:
            return make
        self._room -= size
        value = make()
        return lambda: value

    def _here(self, theta: Theta) -> Theta:
        return {name: p.to(self._device) for name, p in theta.items()}

    def _moved(self) -> Iterator[Batch]:
        for batches in self._parts:
            yield from self._of(batches)

    def _of(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        for b in batches:
            yield b.to(self._device)


class DifferentiatedProducts(Products):
    """Products of any part of a model, by automatic differentiation.

    Nothing is kept of a batch: what lies between is computed again for every product.

    Args:
        function: `(θ, h) -> F_θ(h)`, differentiable; θ comes in the dtype of h.
        modules: the linear modules that θ are the weights of, by the same names; `function` calls
            each once. θ may be some rows of a weight, and several of them the same module's.
        rows: which rows, where θ are not all of them.
        quadratic: F is of second degree in θ, as attention is in its values and its output: then
            `J δ` is a difference of two values of F, without error, and fused attention can be
            used, which has no forward mode.
    """

    def __init__(
        self,
        function: Callable[[Theta, Tensor], Tensor],
        modules: Mapping[str, nn.Module],
        parts: Sequence[Sequence[Batch]],
        device: torch.device,
        *,
        rows: Mapping[str, slice] | None = None,
        quadratic: bool = False,
        kept_bytes: int = 0,
        root: Float[Tensor, "o o"] | None = None,
    ) -> None:
        super().__init__(parts, device, kept_bytes, root)
        self._function, self._modules, self._rows = function, modules, rows or {}
        self._quadratic = quadratic

    def _wanted(self, b: Batch) -> Tensor:
        return _difference(b.targets, b.inputs)

    def _residual(self, theta: Theta, b: Batch) -> Tensor:
        return _difference(b.targets, self._at(theta, b))

    def _gradient(self, theta: Theta, b: Batch) -> Sequence[Tensor]:
        leaves = _leaves(theta, b.inputs.dtype)
        out = self._function(leaves, b.inputs)
        residual = b.weights[..., None] * self._metric(_difference(b.targets, out.detach()))
        return torch.autograd.grad(out, list(leaves.values()), residual.to(out))

    def _linearised(self, theta: Theta, b: Batch) -> Linear:
        """Return forward mode for `J δ`, reverse mode for its adjoint.

        One pass serves both: what it computes for the derivative forward is there to go back.
        """

        def normal(direction: Theta) -> Sequence[Tensor]:
            batch = b.to(self._device)
            leaves = _leaves(theta, batch.inputs.dtype)
            if self._quadratic and batch.inputs.dtype.itemsize >= torch.float32.itemsize:
                tangent = self._central_difference(theta, direction, batch)  # narrower ones cancel
                out = self._function(leaves, batch.inputs)
            else:
                out, tangent = self._with_tangent(leaves, direction, batch)
            moved = batch.weights[..., None].to(tangent) * self._metric(tangent)
            return torch.autograd.grad(out, list(leaves.values()), moved)

        return normal

    def _backward(self, theta: Theta, b: Batch, g: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
        leaves = _leaves(theta, b.inputs.dtype)
        with watched(self._modules) as calls:
            out = self._function(leaves, b.inputs)
        g = times(g, self._root).to(out)
        back = torch.autograd.grad(out, [calls[name][1] for name in theta], g)
        return {
            name: (g_of[..., self._rows.get(name, slice(None))], calls[name][0])
            for name, g_of in zip(theta, back, strict=True)
        }

    def _with_tangent(self, leaves: Theta, direction: Theta, b: Batch) -> tuple[Tensor, Tensor]:
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
    def _central_difference(self, theta: Theta, direction: Theta, b: Batch) -> Tensor:
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

    def _at(self, theta: Theta, b: Batch) -> Tensor:
        return self._function({n: p.to(b.inputs.dtype) for n, p in theta.items()}, b.inputs)


PRIME, SEEDS = 1_000_003, 2**63
"""How seeds of batches are made: `seed · PRIME + number`, below SEEDS."""
TINY = 1e-30
"""Below this a factor is 0: nothing of the outputs depends on its matrix."""


@contextmanager
def watched(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Inputs and outputs of the modules, by name, as they are called."""
    calls: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            calls[name] = args[0].detach(), out

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in modules.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return `a − b` in float32 or wider: hidden states are large beside what is added to them."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) - b.to(wide)


def times(rows: Tensor, matrix: Tensor | None) -> Tensor:
    """Return rows times a matrix, in their dtype; None is the identity."""
    return rows if matrix is None else rows @ matrix.to(rows)


def _leaves(theta: Theta, dtype: torch.dtype) -> Theta:
    return {name: p.detach().to(dtype).requires_grad_() for name, p in theta.items()}


def _zeros(theta: Theta) -> Theta:
    return {name: torch.zeros_like(p) for name, p in theta.items()}


def _signs(like: Tensor, seed: int, number: int) -> Tensor:
    """Random signs of a batch, in the shape, dtype and place of a tensor."""
    generator = torch.Generator(like.device).manual_seed((seed * PRIME + number) % SEEDS)
    drawn = torch.randint(
        0, 2, like.shape, generator=generator, device=like.device, dtype=torch.int8
    )
    return drawn.to(like.dtype) * 2 - 1


def _total(theta: Theta, summands: Iterable[Theta]) -> Theta:
    total = _zeros(theta)
    for summand in summands:
        _add(total, [summand[name].to(total[name].device) for name in total])
    return total


def _add(total: Theta, summands: Sequence[Tensor]) -> None:
    for tensor, summand in zip(total.values(), summands, strict=True):
        tensor += summand
