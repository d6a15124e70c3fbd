"""Values and outputs of attention at a lower rank inside the heads.

A KV group with the values V and the outputs O_h of its query heads adds `Σ_h O_h V z_h` to the
block, z_h what attention h has mixed. At rank r the group keeps r directions of its values that all
its heads share: `V ← R V`, R of r rows, and new outputs on them. The first R is the truncated SVD
of the product under the Gram: with `C = mean_h G_hh` of the consumer's inputs, the leading right
singular vectors of the stacked `O_h C^½`, times `C^-½`. For one head per group nothing of that rank
loses less of the group's own output; for several, their Grams are taken for alike.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from coec import compensate
from coec.linalg.decompose import eigh
from coec.models.layout import Site
from coec.types import Gram, KeptSet

RIDGE, STEPS = 1e-2, 60
"""Of a fitted basis: λ relative to the mean energy, and the most iterations of L-BFGS."""
LEAST = 1e-10
"""Energies of a head's directions count as at least this share of the largest."""


def reduced(
    tensors: Mapping[str, Tensor], site: Site, gram: Gram, rank: int, method: str, *, fitted: bool
) -> dict[str, Tensor]:
    """Values and outputs of one block at a rank, in the dense shapes: what is gone is zero.

    The heads' coordinates are changed so that the first `rank` of each are those that stay; from
    there on it is a consumer that loses columns.
    """
    assert site.value is not None
    weight, value = tensors[site.weight].double(), tensors[site.value.tensor].double()
    head_dim = len(value) // site.units
    heads = site.columns_per_unit // head_dim
    T = bases(weight, gram.xx, site.units, head_dim)
    kept = first_of_every(head_dim, site.columns // head_dim, rank)
    if fitted and rank < head_dim:
        T = fit(T, weight, gram.xx, rank)
    there = torch.block_diag(*T.repeat_interleave(heads, dim=0))
    back = torch.block_diag(*torch.linalg.inv(T).repeat_interleave(heads, dim=0))
    turned = replace(gram, xx=there @ gram.xx @ there.T, x=there @ gram.x, centred=None)
    values = T @ value.reshape(site.units, head_dim, -1)
    seen = values.repeat_interleave(heads, dim=0).flatten(0, 1)[kept.indices]
    result = compensate(weight @ back, turned, kept, method=method, value_weight=seen)
    values[:, rank:] = 0
    padded = torch.zeros_like(weight)
    padded[:, kept.indices] = result.weight
    return {site.value.tensor: values.flatten(0, 1), site.weight: padded}


def first_of_every(width: int, units: int, count: int) -> KeptSet:
    """The first `count` columns of every unit of so many."""
    columns = torch.arange(units * width).reshape(units, width)[:, :count]
    return KeptSet(columns.flatten(), units * width)


def bases(weight: Tensor, G: Tensor, groups: int, head_dim: int) -> Tensor:
    """For every group new coordinates of its values, of unit energy, the most important first.

    `T = Eᵀ C^-½`, with C the mean of the Grams of the group's heads and E the eigenvectors of
    `C^½ (Σ_h O_hᵀ O_h) C^½`, descending: its first r rows are the rank-r truncation of the SVD of
    the stacked `O_h C^½`.
    """
    blocks = G.reshape(len(G) // head_dim, head_dim, -1, head_dim)
    own = torch.stack([blocks[h, :, h] for h in range(len(blocks))])
    outputs = weight.reshape(len(weight), groups, -1, head_dim)
    found = []
    for group, C in enumerate(own.unflatten(0, (groups, -1)).mean(dim=1)):
        mu, E = eigh(C)
        size = mu.clamp_min(float(mu[-1]) * LEAST).sqrt()
        half, inverse = (E * size) @ E.T, (E / size) @ E.T
        stacked = outputs[:, group].flatten(0, 1) @ half
        _, directions = eigh(stacked.T @ stacked)
        found.append(directions.flip(1).T @ inverse)
    return torch.stack(found)


def fit(T: Tensor, weight: Tensor, G: Tensor, rank: int) -> Tensor:
    """The coordinates turned so that the first `rank` of all groups leave the least error.

    What is minimised is the error of the ridge regression of `W x` on them, over orthonormal rows
    in coordinates of unit energy, by L-BFGS from where they are.
    """
    groups, head_dim, _ = T.shape
    heads = len(G) // head_dim // groups
    wide = torch.block_diag(*T.repeat_interleave(heads, dim=0))
    G = wide @ G @ wide.T
    WG = weight @ torch.linalg.inv(wide) @ G
    turn = torch.eye(head_dim).to(G).repeat(groups, 1, 1)[:, :, :rank].clone().requires_grad_()

    def kept() -> Tensor:
        rows: Tensor = torch.linalg.qr(turn).Q.mT
        return rows

    def explained() -> Tensor:
        R = torch.block_diag(*kept().repeat_interleave(heads, dim=0))
        A, B = R @ G @ R.T, WG @ R.T
        A = A + RIDGE * A.diagonal().mean() * torch.eye(len(A)).to(A)
        return -(B * torch.linalg.solve(A, B, left=False)).sum()

    scale = float(explained().detach().abs())
    optimizer = torch.optim.LBFGS([turn], max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = explained() / scale
        value.backward()
        return value

    optimizer.step(closure)
    with torch.no_grad():
        whole = torch.linalg.qr(kept().mT, mode="complete").Q.mT
        whole[:, :rank] = kept()
    return whole @ T
