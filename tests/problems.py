"""Weights and Grams with a chosen character."""

import itertools

import torch

from coec.config.recipe import CoecOptions
from coec.linalg.alignment import Alignment
from coec.methods.coec import coec
from coec.types import Gram, KeptSet, SiteProblem

KINDS = (
    "power law",
    "steep",
    "white",
    "rank one",
    "rank deficient",
    "dead channels",
    "duplicated channels",
    "dependent channels",
    "constant channel",
    "indefinite",
    "zero",
)


def inputs(kind: str, d: int, tokens: int = 60, seed: int = 0) -> torch.Tensor:
    """X, d × tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X = normal(d, tokens)
    if kind == "power law":
        scales = torch.arange(1, d + 1, dtype=torch.float64) ** -1.0
        X = torch.linalg.qr(normal(d, d))[0] @ (scales[:, None] * X)
    elif kind == "steep":
        scales = torch.logspace(0, -14, d, dtype=torch.float64)
        X = torch.linalg.qr(normal(d, d))[0] @ (scales[:, None] * X)
    elif kind == "rank one":
        X = normal(d, 1) @ normal(1, tokens)
    elif kind == "rank deficient":
        rank = max(1, d // 2)
        X = normal(d, rank) @ normal(rank, tokens)
    elif kind == "dead channels":
        X[: max(1, d // 3)] = 0
    elif kind == "duplicated channels":
        X[-1] = X[0]
    elif kind == "dependent channels" and d > 2:
        X[-1] = X[:-1].sum(dim=0)
    elif kind == "constant channel":
        X[0] = 3
    elif kind == "zero":
        X = torch.zeros_like(X)
    return X


def gram(kind: str, d: int, tokens: int = 60, seed: int = 0, scale: float = 1.0) -> Gram:
    """Its statistics; `indefinite` has a clearly negative eigenvalue, as no true Gram has."""
    X = inputs(kind, d, tokens, seed) * scale
    G = X @ X.T
    if kind == "indefinite":
        generator = torch.Generator().manual_seed(seed)
        v = torch.randn(d, generator=generator, dtype=torch.float64)
        v = (v / v.norm())[:, None]
        G = G - 1.5 * float(v.T @ G @ v) * (v @ v.T)
    return Gram((G + G.T) / 2, X.sum(dim=1), tokens)


def weight(m: int, d: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """W₀, m × d."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return scale * torch.randn(m, d, generator=generator, dtype=torch.float64)


def kept(d: int, k: int, seed: int = 0) -> torch.Tensor:
    """k of d columns, sorted."""
    generator = torch.Generator().manual_seed(2000 + seed)
    return torch.randperm(d, generator=generator)[:k].sort().values


def case(m: int = 6, d: int = 10, k: int = 7, kind: str = "power law", seed: int = 0):
    """A weight, the statistics of its inputs, and the columns that stay."""
    return weight(m, d, seed), gram(kind, d, seed=seed), kept(d, k, seed)


def attention(seed: int = 0):
    """A case, and a value projection."""
    return *case(8, 12, 8, seed=seed), weight(8, 5, seed + 70)


def descended(W, gram, kept, value=None, *, rounds: int = 50, tol: float = 1e-4, **options):
    """The method by itself, with limits of its rounds other than its own."""
    problem = SiteProblem(W, gram, KeptSet(kept, W.shape[1]), value)
    return coec(problem, CoecOptions(**options), rounds=rounds, tol=tol)


def failing(function, error: Exception, number: int):
    """The function, but for the call of this number, counted from 1, which raises the error."""
    calls = itertools.count(1)

    def flaky(*args, **options):
        if next(calls) == number:
            raise error
        return function(*args, **options)

    return flaky


def alignment(k: int, r: int, rows: torch.Tensor, seed: int = 0) -> Alignment:
    """A penalty of weight 5 on rows of a frame of k columns, its writer of r."""
    writer, anchor = orthonormal(k, r, seed), orthonormal(k, 2, seed + 1)
    target = writer.T @ anchor @ anchor.T @ writer
    return Alignment(writer, target, rows, 5.0)


def orthonormal(m: int, b: int, seed: int = 0) -> torch.Tensor:
    """m × b with orthonormal columns."""
    generator = torch.Generator().manual_seed(3000 + seed)
    return torch.linalg.qr(torch.randn(m, b, generator=generator, dtype=torch.float64))[0]
