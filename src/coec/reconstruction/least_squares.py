"""Nonlinear least squares over token batches, and the products that Gauss–Newton asks for.

`E(θ) = Σ_t w_t ‖T_t − F_θ(h_t)‖²`, with F a part of a model and t its tokens. Nothing is kept of a
batch but its inputs, targets and weights: what lies between is computed again for every product.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from coec.linalg.products import rounded_products

Parameters = dict[str, Tensor]
"""θ by name, in float32 or wider; or a direction in its space."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of windows.

    Attributes:
        inputs: h, what the part of the model is given.
        targets: T, what it should make of that.
        weights: w, of every token.
    """

    inputs: Float[Tensor, "n length h"]
    targets: Float[Tensor, "n length o"]
    weights: Float[Tensor, "n length"]


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


class LeastSquares:
    """The problem `min_θ Σ_t w_t ‖T_t − F_θ(h_t)‖²`.

    Args:
        function: `(θ, h) -> F_θ(h)`, differentiable; θ comes in the dtype of h.
        modules: the linear modules that θ are the weights of, by the same names; `function` calls
            each once. θ may be some rows of a weight, and several of them the same module's.
        rows: which rows, where θ are not all of them.
        batches: over which the sum runs.
        device: where to compute; batches may wait elsewhere.
        quadratic: F is of second degree in θ, as attention is in its values and its output: then
            `J δ` is a difference of two values of F, without error, and fused attention can be
            used, which has no forward mode.
        curvature: the share of the batches, evenly spaced, that stand for all in products with
            `Jᵀ w J`; gradient, errors and factors are of all.
    """

    def __init__(
        self,
        function: Callable[[Parameters, Tensor], Tensor],
        modules: Mapping[str, nn.Module],
        batches: Sequence[Batch],
        device: torch.device,
        *,
        rows: Mapping[str, slice] | None = None,
        quadratic: bool = False,
        curvature: float = 1.0,
    ) -> None:
        self._function, self._modules, self._rows = function, modules, rows or {}
        self._batches, self._device, self._quadratic = batches, device, quadratic
        count = max(1, round(curvature * len(batches)))
        self._sample = [batches[n * len(batches) // count] for n in range(count)]

    def energy(self) -> float:
        """`Σ_t w_t ‖T_t − h_t‖²`: what errors are relative to, F adding to its inputs."""
        return math.fsum(_weighted(b, _difference(b.targets, b.inputs)) for b in self._moved())

    @torch.no_grad()
    def error(self, theta: Parameters) -> float:
        """`Σ_t w_t ‖T_t − F_θ(h_t)‖²`, summed in float64; NaN or Inf where F overflows."""
        return sum(_weighted(b, _difference(b.targets, self._at(theta, b))) for b in self._moved())

    def gradient(self, theta: Parameters) -> Parameters:
        """`Jᵀ w r`, the direction in which the error falls fastest."""
        total = _zeros(theta)
        for b in self._moved():
            leaves = _leaves(theta, b.inputs.dtype)
            out = self._function(leaves, b.inputs)
            residual = b.weights[..., None] * _difference(b.targets, out.detach())
            _add(total, torch.autograd.grad(out, list(leaves.values()), residual.to(out)))
        return total

    def normal(self, theta: Parameters, direction: Parameters) -> Parameters:
        """`Jᵀ w J δ`: forward mode for `J δ`, reverse mode for its adjoint, batch by batch.

        One pass serves both: what it computes for the derivative forward is there to go back. Where
        a share of the batches stands for all, their sum is scaled up by the number of tokens.
        """
        total = _zeros(theta)
        for b in self._moved(self._sample):
            leaves = _leaves(theta, b.inputs.dtype)
            if self._quadratic and b.inputs.dtype.itemsize >= torch.float32.itemsize:
                tangent = self._central_difference(theta, direction, b)  # narrower ones cancel
                out = self._function(leaves, b.inputs)
            else:
                out, tangent = self._with_tangent(leaves, direction, b)
            moved = b.weights[..., None].to(tangent) * tangent
            _add(total, torch.autograd.grad(out, list(leaves.values()), moved))
        if len(self._sample) < len(self._batches):
            counts = [sum(b.weights.numel() for b in bs) for bs in (self._batches, self._sample)]
            total = {name: value * (counts[0] / counts[1]) for name, value in total.items()}
        return total

    def factors(self, theta: Parameters, generator: torch.Generator) -> dict[str, Factor]:
        """Kronecker factors of every matrix's own block of `Jᵀ w J`.

        One random sign per token and output stands for the outputs (Hutchinson): with g what comes
        back to a matrix's output, `rows_i ∝ Σ_t g_ti²` and `columns = Σ_t ‖g_t‖² x_t x_tᵀ / out`,
        exact where all rows of the Jacobian are alike, as those of the last matrix are.
        """
        rows: dict[str, Tensor] = {}
        columns: dict[str, Tensor] = {}
        for b in self._moved():
            leaves = _leaves(theta, b.inputs.dtype)
            with _watched(self._modules) as seen:
                out = self._function(leaves, b.inputs)
            signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
            back = torch.autograd.grad(
                out, [seen[name][1] for name in theta], signs * b.weights[..., None].sqrt()
            )
            for name, gradient in zip(theta, back, strict=True):
                own = gradient[..., self._rows.get(name, slice(None))]
                g = own.flatten(0, -2).to(theta[name].dtype)
                x = seen[name][0].flatten(0, -2).to(g)
                share = g.square().sum(dim=1, keepdim=True) / g.shape[1]
                rows[name] = rows.get(name, 0) + g.square().sum(dim=0)
                with rounded_products(x.device):  # factors only precondition
                    columns[name] = columns.get(name, 0) + x.T @ (share * x)
        return {
            name: Factor(rows[name] / rows[name].mean().clamp_min(TINY), columns[name])
            for name in theta
        }

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

    def _moved(self, batches: Sequence[Batch] | None = None) -> Iterator[Batch]:
        for b in self._batches if batches is None else batches:
            yield Batch(*(part.to(self._device) for part in (b.inputs, b.targets, b.weights)))


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


def _add(total: Parameters, parts: Sequence[Tensor]) -> None:
    for tensor, part in zip(total.values(), parts, strict=True):
        tensor += part
