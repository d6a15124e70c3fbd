"""Low rank in closed form on whole hidden states, an oracle for `coec prune --low-rank`."""

import torch

from coec.streaming.layers import Layers

CPU, DTYPE = torch.device("cpu"), torch.float32
RIDGE = 1e-3
"""Ridge of every Gram, relative to its mean diagonal."""


class Prototype:
    """The dense and the low-rank model over the same windows, a block at a time.

    Attributes:
        products: of the two factors of every weight, by name.
    """

    def __init__(self, dense, windows):
        self._model, self.products = dense, {}
        self._wide, self._low = (Layers(dense, device=CPU, dtype=DTYPE) for _ in range(2))
        embedding = dense.tensor(dense.layout.embedding)
        (self._dense,), (self._small,) = (
            layers.embed([windows], embedding) for layers in (self._wide, self._low)
        )

    @torch.no_grad()
    def solve(self, block, ranks):
        """Put products of low rank in the place of a block's weights."""
        tensors = self._model.tensors(block)
        for layers in (self._wide, self._low):
            layers.load(block, tensors)
        squares = self._wide.advance(block.index, self._dense).square().mean(dim=-1)
        weights = 1 / squares.clamp_min(1e-3 * float(squares.median()))
        self._weights = (weights / weights.mean()).reshape(-1, 1)
        for site in block.sites:
            behind = self._wide.call(self._wide.half(block, site), block.index, self._dense)
            producers = list(dict.fromkeys(rows.tensor for rows in site.producers))
            for names in (producers, [site.weight]):
                G, moved, residual = self._moments(block, site, names[0], behind)
                for name in names:
                    W = tensors[name].double()
                    product = residual if name == site.weight else W @ moved
                    self.products[name] = low_rank(W, G, product, ranks[name]).float()
                    module = self._low.module(block, name.removesuffix(".weight"))
                    module.weight = torch.nn.Parameter(self.products[name], requires_grad=False)
            self._small = self._low.call(self._low.half(block, site), block.index, self._small)
            self._dense = behind

    def _moments(self, block, site, name, behind):
        """`Σ w x̃ x̃ᵀ` of a layer's inputs, `Σ w (x − x̃) x̃ᵀ` and `Σ w (T − h̃) x̃ᵀ`."""
        inputs = []
        for layers, states in ((self._wide, self._dense), (self._low, self._small)):
            module = layers.module(block, name.removesuffix(".weight"))
            hook = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
            out = layers.call(layers.half(block, site), block.index, states)
            hook.remove()
        x, moved = (one.flatten(0, 1).double() for one in inputs)
        weighted = moved * self._weights
        missing = (behind - out).flatten(0, 1).double()
        return [left.T @ weighted for left in (moved, x - moved, missing)]


def low_rank(W, G, product, rank):
    """The matrix of rank r nearest to `W* = W + product (G + λ)⁻¹` under `G + λ`."""
    ridge = RIDGE * G.diagonal().mean() * torch.eye(len(G)).double()
    L = torch.linalg.cholesky(G + ridge)
    U, s, Vh = torch.linalg.svd(W @ L + torch.cholesky_solve(product.T, L).T @ L)
    nearest = (U[:, :rank] * s[:rank]) @ Vh[:rank]
    return torch.linalg.solve_triangular(L, nearest, upper=False, left=False)
