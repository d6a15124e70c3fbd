"""How many floating-point operations each part of a compensation takes (docs/PERFORMANCE.md).

A multiplication and an addition are two operations. Decompositions are counted by their
divide-and-conquer algorithms with full accumulation of vectors, leading order, nothing deflated.
Elementwise work is left out beside products.
"""

from dataclasses import dataclass

GCV_POINTS = 120
"""Grid of the rescale (METHODS §5.3)."""


@dataclass(frozen=True)
class Consumer:
    """The sizes of one consumer.

    Attributes:
        name: in tables.
        m: its outputs.
        d: its inputs.
        k: how many of them are kept.
    """

    name: str
    m: int
    d: int
    k: int

    @property
    def b(self) -> int:
        """The frame's rank, `min(m, k)`."""
        return min(self.m, self.k)


def product(m: int, n: int, k: int) -> float:
    """`m×n` times `n×k`."""
    return 2.0 * m * n * k


def eigh(n: int) -> float:
    """All eigenpairs: tridiagonalise 4/3, divide and conquer 4/3, transform back 2 (times n³)."""
    return 14 / 3 * n**3


def thin_svd(m: int, n: int) -> float:
    """Thin SVD of an m×n matrix through a QR factorisation of the long side.

    For m ≥ n: QR 2mn² − 2n³/3, bidiagonalise 8n³/3, divide and conquer 8n³/3, both sides back 4n³,
    and Q applied 4mn² − 2n³.
    """
    m, n = max(m, n), min(m, n)
    return 6.0 * m * n**2 + 20 / 3 * n**3


def cholesky(n: int) -> float:
    """Of an n×n matrix."""
    return n**3 / 3


def inverse(n: int) -> float:
    """Of an n×n positive definite matrix: its Cholesky factor, and from that the inverse."""
    return cholesky(n) + 2 / 3 * n**3


def elimination(one: Consumer, panel: int = 128) -> float:
    """Greedy elimination of d − k columns, without the inverse it starts from; leading order.

    `WᵀW`, three rank-one updates of a triangle for every column that goes, on the columns that are
    left, and the three rows that it takes to form in a panel half filled.
    """
    m, d, k = one.m, one.d, one.k
    return m * d**2 + 3 * (d**3 - k**3) / 3 + 3 * panel * (d**2 - k**2) / 2


def triangular_solve(n: int, columns: int) -> float:
    """An n×n triangle against so many columns."""
    return float(n) ** 2 * columns


def gram(one: Consumer, tokens: int) -> float:
    """`Σ x xᵀ` as a full product."""
    return product(one.d, tokens, one.d)


def tempering(one: Consumer) -> float:
    """Eigenpairs of G, and with `G^α = F Fᵀ` the products `F_K F_Kᵀ`, `W₀ F`, `(W₀ F) F_Kᵀ`."""
    m, d, k = one.m, one.d, one.k
    return eigh(d) + product(k, d, k) + product(m, d, d) + product(m, d, k)


def eigenbasis(one: Consumer) -> float:
    """Eigenpairs of Gxx, and `Gyx E`."""
    return eigh(one.k) + product(one.m, one.k, one.k)


def factors(one: Consumer) -> float:
    """The one thin SVD of the slice, and R in the eigenbasis."""
    return thin_svd(one.m, one.k) + product(one.b, one.k, one.k)


def polar(m: int, b: int, steps: int = 6) -> float:
    """The polar factor of an m×b matrix by QDWH: `XᵀX`, Cholesky, two triangular solves a step."""
    step = product(b, m, b) + cholesky(b) + 2 * triangular_solve(b, m)
    return steps * step + 2 * product(m, b, b)


def left_rotation(one: Consumer) -> float:
    """`Gyx Rᵀ diag(s)` and its polar factor."""
    return product(one.m, one.k, one.b) + polar(one.m, one.b)


def rescale(one: Consumer) -> float:
    """`Uᵀ Gyx`, elementwise sums with R, and the grid of λ."""
    m, b, k = one.m, one.b, one.k
    return product(b, m, k) + 5.0 * b * k + 6.0 * GCV_POINTS * b


def right_problem(one: Consumer) -> float:
    """`C = diag(s) Uᵀ Gyx`."""
    return product(one.b, one.m, one.k)


def tangent(one: Consumer) -> float:
    """`Z − sym(Z Rᵀ) R`: two products."""
    return 2 * product(one.b, one.k, one.b)


def lower_gram(b: int, k: int, strip: int = 256) -> float:
    """The lower triangle of a Gram of b rows, in strips."""
    ends = [*range(strip, b, strip), b]
    return sum(product(end - start, k, end) for start, end in zip([0, *ends], ends))


def retraction(one: Consumer) -> float:
    """The lower triangle of `(R + ξ)(R + ξ)ᵀ`, its Cholesky factor, a triangular solve."""
    b, k = one.b, one.k
    return lower_gram(b, k) + cholesky(b) + triangular_solve(b, k)


def preconditioner(one: Consumer, inner: float = 4.0) -> float:
    """Of a step: the inner solve's diagonal and right side, and two products for every step of it.

    Where the left factor follows, one more for the planes.
    """
    return (2 + 2 * inner) * product(one.b, one.k, one.b)


def conjugate_step(one: Consumer, trials: float = 1.4) -> float:
    """One step of the `conjugate` right solve, without its preconditioner.

    Two tangents (gradient, direction), `trials` retractions.
    """
    return 2 * tangent(one) + trials * retraction(one)


def joint_step(one: Consumer, trials: float = 1.4) -> float:
    """One step of the `joint` solve: the same, U at every trial, the right problem at the end."""
    return conjugate_step(one, trials) + trials * left_rotation(one) + right_problem(one)


def gradient_step(one: Consumer, newton_schulz: int = 7) -> float:
    """One step of the `gradient` right solve: a tangent and a Newton-Schulz retraction.

    Each Newton-Schulz iteration is two products, of b×k factors for a rectangular frame; for a
    square one the Cayley form adds two products to it.
    """
    b, k = one.b, one.k
    cayley = 2 * product(k, k, k) if b == k else 0.0
    return tangent(one) + cayley + newton_schulz * 2 * product(b, k, b)


def assembly(one: Consumer) -> float:
    """`Ŵ = U diag(s) (R Eᵀ)`."""
    return product(one.b, one.k, one.k) + product(one.m, one.b, one.k)
