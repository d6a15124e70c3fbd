"""The dense model and one of low rank, solved beside it a block at a time (benchmarks.low_rank)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coec.models.dense import Dense
from coec.models.layout import BlockLayout, Site
from coec.reconstruction import Batch, DifferentiatedProducts, LeastSquares, fit
from coec.reconstruction.least_squares import Factor, Theta, watched
from coec.reconstruction.logits import fit_logits
from coec.streaming.head import Head, rescaled_norm
from coec.streaming.layers import Layers, State

CPU, DTYPE = torch.device("cpu"), torch.float32
BATCH = 8
"""Windows that are run together."""
CURVATURE = 16_384
"""Tokens that stand for all in the iterations of a step."""
RIDGE = 1e-3
"""Of every Gram, relative to its mean diagonal."""
Ranks = dict[str, int]
"""Ranks of weights, by name."""


@dataclass(frozen=True)
class Variant:
    """What is added to low rank in closed form.

    Attributes:
        hidden: weights that add to the hidden state aim at the dense one, and tokens are weighted.
        by_error: ranks follow the error and its cost to the predictions; else all layers keep the
            same share of their parameters.
        steps: Gauss–Newton steps that fit all factors of a half-block; with any, the last MLP is
            fitted to the predictions and the final norm rescaled, as `best` has it.
    """

    hidden: bool = False
    by_error: bool = False
    steps: int = 0


class Streams:
    """The dense and the low-rank model over the same windows, a block at a time.

    Attributes:
        spectra: singular values of every `W* L`, by the weight's name.
        layers: the factors `B` and `A` of every weight, as modules in a row.
    """

    def __init__(self, dense: Dense, fitted: Tensor, held: Tensor, variant: Variant) -> None:
        self._model, self._variant = dense, variant
        self._fit = len(fitted.split(BATCH))
        self._ids = [*fitted.split(BATCH), *held.split(BATCH)]
        self._wide, self._low = (Layers(dense, device=CPU, dtype=DTYPE) for _ in range(2))
        embedding = dense.tensor(dense.layout.embedding)
        self._dense = self._wide.embed(self._ids, embedding)
        self._small = self._low.embed(self._ids, embedding)
        self._weights: list[Tensor] = []
        self.spectra: dict[str, Tensor] = {}
        self.layers: dict[str, nn.Sequential] = {}

    def solve(self, block: BlockLayout, ranks: Ranks, *, replace: bool) -> None:
        """Solves the layers of a block; without `replace` the second model stays the dense one."""
        tensors = self._model.tensors(block)
        for layers in (self._wide, self._low):
            layers.load(block, tensors)
        self._weigh(block)
        for site in block.sites:
            behind = self._behind(self._wide, block, site, self._dense)
            producers = list(dict.fromkeys(rows.tensor for rows in site.producers))
            for names in (producers, [site.weight]):
                G, moved, residual = self._moments(block, site, names[0], behind)
                for name in names:
                    W = tensors[name].double()
                    aims_at_hidden = self._variant.hidden and name == site.weight
                    product = residual if aims_at_hidden else W @ moved
                    self._factor(name, W, G, product, ranks[name])
                if replace:
                    self._put(block, names)
            if replace and self._variant.steps:
                self._fitted(block, site, [*producers, site.weight], behind)
            self._small = self._behind(self._low, block, site, self._small)
            self._dense = behind

    def products(self) -> dict[str, Tensor]:
        """Every `A B`, by the weight's name."""
        pairs = {name: (first.weight, last.weight) for name, (first, last) in self._pairs()}
        return {name: (A.double() @ B.double()).float() for name, (B, A) in pairs.items()}

    def end(self) -> dict[str, Tensor]:
        """The final norm's weight, rescaled, where held-out windows are predicted better by it."""
        head = Head(self._model, device=CPU, dtype=DTYPE)
        pairs = list(zip(self._small, self._dense, strict=True))
        norm = rescaled_norm(head.norm, (head.norm_sums(*pair) for pair in pairs[: self._fit]))
        held = list(zip(pairs[self._fit :], self._ids[self._fit :], strict=True))
        before, after = (
            sum(head.predicted(*states, ids, given).cross_entropy for states, ids in held)
            for given in (None, norm)
        )
        return {self._model.layout.norm: norm} if after < before else {}

    def _behind(
        self, layers: Layers, block: BlockLayout, site: Site, states: list[State]
    ) -> list[State]:
        half = layers.half(block, site)
        with torch.no_grad():
            return [layers.call(half, block.index, state) for state in states]

    def _weigh(self, block: BlockLayout) -> None:
        """Weights of tokens: the inverse of their mean squares behind the block, of mean 1."""
        with torch.no_grad():
            states = [self._wide.advance(block.index, state) for state in self._dense]
        squares = [state.square().mean(dim=-1) for state in states]
        floor = 1e-3 * float(torch.cat(squares[: self._fit]).median())
        weights = [1 / s.clamp_min(floor) for s in squares]
        mean = torch.cat(weights[: self._fit]).mean()
        hidden = self._variant.hidden
        self._weights = [w / mean if hidden else torch.ones_like(w) for w in weights]

    @torch.no_grad()
    def _moments(
        self, block: BlockLayout, site: Site, name: str, behind: list[State]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Σ w x̃ x̃ᵀ` of a layer's inputs, `Σ w (x − x̃) x̃ᵀ` and `Σ w (T − h̃) x̃ᵀ`."""
        both = [(self._wide, self._dense), (self._low, self._small)]
        halves = [layers.half(block, site) for layers, _ in both]
        modules = [layers.module(block, name.removesuffix(".weight")) for layers, _ in both]
        sums: list[Any] = [0, 0, 0]
        for n in range(self._fit):
            with watched(dict(enumerate(modules))) as calls:  # type: ignore[arg-type]
                _, out = (
                    layers.call(half, block.index, states[n])
                    for (layers, states), half in zip(both, halves, strict=True)
                )
            x, inputs = (calls[i][0].flatten(0, 1).double() for i in range(2))  # type: ignore[index]
            weighted = inputs * self._weights[n].reshape(-1, 1)
            missing = (behind[n] - out).flatten(0, 1).double()
            for i, left in enumerate((inputs, x - inputs, missing)):
                sums[i] = sums[i] + left.T @ weighted
        return sums[0], sums[1], sums[2]

    def _factor(self, name: str, W: Tensor, G: Tensor, product: Tensor, rank: int) -> None:
        """Keeps the factors of rank r nearest to `W* = W + product (G + λ)⁻¹` under `G + λ`."""
        ridge = RIDGE * G.diagonal().mean() * torch.eye(len(G)).double()
        L = torch.linalg.cholesky(G + ridge)
        whitened = W @ L + torch.cholesky_solve(product.T, L).T @ L
        U, s, Vh = torch.linalg.svd(whitened, full_matrices=False)
        self.spectra[name] = s
        root = s[:rank].sqrt()
        B = torch.linalg.solve_triangular(L, root[:, None] * Vh[:rank], upper=False, left=False)
        first, last = (nn.Linear(*size, bias=False) for size in ((len(G), rank), (rank, len(W))))
        first.weight = nn.Parameter(B.float(), requires_grad=False)
        last.weight = nn.Parameter((U[:, :rank] * root).float(), requires_grad=False)
        self.layers[name] = nn.Sequential(first, last)

    def _put(self, block: BlockLayout, names: Iterable[str]) -> None:
        """Puts factors in the place of layers."""
        layer = self._low.modules[block.index]
        for name in names:
            layer.set_submodule(local(block, name), self.layers[name])

    def _pairs(self) -> Iterable[tuple[str, tuple[Any, Any]]]:
        return ((name, (pair[0], pair[1])) for name, pair in self.layers.items())

    def _fitted(
        self, block: BlockLayout, site: Site, names: list[str], behind: list[State]
    ) -> None:
        """Fits all factors of a half-block, and those of the last to the predictions."""
        half = self._low.half(block, site)
        modules = {
            f"{local(block, name)}.{i}.weight": factor
            for name in names
            for i, factor in enumerate(self.layers[name].children())
        }

        def function(theta: Theta, state: Tensor) -> Tensor:
            def call(*args: Any, **kwargs: Any) -> Any:
                return functional_call(half, theta, args, kwargs)

            return self._low.call(call, block.index, state)

        batches = [
            [Batch(*parts, n)]
            for n, parts in enumerate(zip(self._small, behind, self._weights, strict=True))
        ]
        problem, held = (
            LeastSquares.of(DifferentiatedProducts(function, modules, part, CPU), CURVATURE)
            for part in (batches[: self._fit], batches[self._fit :])
        )
        theta = {name: cast(Tensor, factor.weight).detach() for name, factor in modules.items()}
        theta = fit(
            problem, held, theta, steps=1 if site.value else self._variant.steps, iterations=10,
            damping=0.1, seed=block.index, least_gain=0.02,
        ).theta  # fmt: skip
        if site == self._model.layout.sites[-1]:
            theta = self._by_predictions(
                function, theta, behind, problem.factors(theta, block.index)
            )
        for name, factor in modules.items():
            factor.weight = nn.Parameter(theta[name], requires_grad=False)

    def _by_predictions(
        self,
        function: Callable[[Theta, Tensor], Tensor],
        theta: Theta,
        behind: list[State],
        factors: Mapping[str, Factor],
    ) -> Theta:
        """The factors of the last half-block, fitted to what the dense model predicts."""
        head = Head(self._model, device=CPU, dtype=DTYPE)

        def divergence(theta: Theta, *, part: slice, gradient: bool = True) -> tuple[float, Theta]:
            theta = {name: p.detach().requires_grad_(gradient) for name, p in theta.items()}
            total, tokens = 0.0, 0
            for state, dense in zip(self._small[part], behind[part], strict=True):
                out = function(theta, state)
                value, slope = head.divergence(out.detach(), dense, gradient=gradient)
                total, tokens = total + value, tokens + dense.shape[:2].numel()
                if gradient:
                    out.backward(slope)
            slopes = {name: p.grad for name, p in theta.items() if p.grad is not None}
            return total / tokens, {n: (g / tokens).contiguous() for n, g in slopes.items()}

        fitted = partial(divergence, part=slice(self._fit))
        judged = partial(divergence, part=slice(self._fit, None), gradient=False)
        return fit_logits(
            fitted, lambda at: judged(at)[0], theta, factors, iterations=10, damping=0.1
        ).theta


def local(block: BlockLayout, name: str) -> str:
    """Name of a weight's module within its block."""
    return name.removeprefix(block.prefix).removesuffix(".weight")
