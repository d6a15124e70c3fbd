"""Work of single steps: products, decompositions and elementwise traffic, a formula each.

A multiplication and an addition are two operations. Cholesky factors and triangular solves count as
products of the same shape, which take as long. Bytes of elementwise traffic and calls of operators
were counted with a dispatch mode.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from coec.planning.compute import ComputeConfig
from coec.planning.machines import Work


def product(m: float, n: float, k: float, times: float = 1.0, dtype: str = "float64") -> Work:
    """Multiply m×n by n×k: 2mnk."""
    return Work("product", 2.0 * m * n * k, float(m * n * k) ** (1 / 3), times, dtype)


def eigenpairs(n: int, times: float = 1.0, dtype: str = "float64") -> Work:
    """Find all eigenpairs of n×n: 14/3 n³ (tridiagonalise 4/3, divide and conquer 4/3, back 2)."""
    return Work("eigen", 14 / 3 * n**3, n, times, dtype)


def polar(m: int, n: int, device: str, dtype: str, times: float = 1.0) -> list[Work]:
    """Find the polar factor of m×n: six QDWH steps of 6mn² + n³; an SVD elsewhere than on a GPU."""
    m, n = max(m, n), min(m, n)
    if device == "cpu":
        return [*svd(m, n, device, dtype, times), product(m, n, n, times, dtype)]
    return [
        product(m, n, n, 19 * times, dtype),
        product(n, n, n, 3 * times, dtype),
        Work("elementwise", 96.0 * m * n, 8.0 * m * n, 6 * times),
        Work("call", 80.0, 1.0, times),
    ]


def svd(m: int, n: int, device: str, dtype: str, times: float = 1.0) -> list[Work]:
    """Decompose m×n: 6mn² + 20/3 n³; on a GPU by a polar factor and the eigenpairs of n×n."""
    m, n = max(m, n), min(m, n)
    if device == "cpu":
        return [Work("eigen", 6.0 * m * n**2 + 20 / 3 * n**3, n, times, dtype)]
    return [*polar(m, n, device, dtype, times), eigenpairs(n, times, dtype)]


def statistics(d: int, tokens: float, batches: float, count: int) -> list[Work]:
    """Sum Grams of d columns: 2d²·tokens in float32, and the sums in float64."""
    traffic = 100.0 * d * tokens + 20.0 * d**2 * batches
    return [
        product(d, tokens / batches, d, batches * count, "float32"),
        Work("elementwise", traffic, 4.0 * d * tokens / batches, count),
        Work("call", 25.0 * batches, 1.0, count),
    ]


class SiteSize(NamedTuple):
    """Sizes of a consumer: m outputs, d inputs in `units` units, of which k inputs stay.

    The alignment penalty applies to attention.
    """

    m: int
    d: int
    k: int
    units: int
    attention: bool = False


def errors(site: SiteSize) -> list[Work]:
    """Score units, check statistics and measure errors: 12md²."""
    traffic = Work("elementwise", 60.0 * site.d**2, 8.0 * site.d**2)
    return [product(site.m, site.d, site.d, 6.0), traffic, Work("call", 400.0)]


def elimination(site: SiteSize) -> list[Work]:
    """Select by `obs`: n³ for an inverse, md² + d³ − k³, and 192(d² − k²) for panels of columns."""
    m, d, k = site.m, site.d, site.k
    removed = site.units * (d - k) // d
    calls = 87.0 if site.units == d else 93.0 + 11 * site.units
    return [
        Work("product", m * d**2 + 2 * d**3 - k**3 + 192.0 * (d**2 - k**2), d, 1.0, "float64"),
        Work("elementwise", 1856.0 * d, 512.0 * d, removed),
        Work("call", calls * removed),
    ]


def ridge(site: SiteSize) -> list[Work]:
    """Regress: 2md² + 2mk², a Cholesky factor of k×k and two solves with m columns."""
    m, d, k = site.m, site.d, site.k
    return [product(m, d, d), product(m, k, k, 3.0), product(k, k, k / 2), Work("call", 150)]


def rcpu(site: SiteSize, device: str) -> list[Work]:
    """Rotate on the left and rescale: 2md² + 6mk², an SVD and a polar factor of m×k."""
    m, d, k = site.m, site.d, site.k
    work = [product(m, d, d), product(m, k, k, 3.0), Work("call", 150)]
    return work + svd(m, k, device, "float64") + polar(m, k, device, "float64")


class DescentLength(NamedTuple):
    """Length of COEC's descent at one site: means over the sites of small trained models.

    `steps` counts those of all right solves; a step tries `trials` lengths, and its preconditioner
    takes `inner` iterations (docs/PERFORMANCE.md, `The plan against runs`).
    """

    rounds: float
    steps: float
    trials: float
    inner: float


_MLP_STEPS = {"least": 12, "typical": 20, "most": 70}
_ATTENTION_STEPS = {"least": 19, "typical": 30, "most": 92}
_SOLVERS = {"gradient": 6.0, "conjugate": 2.0, "joint": 1.0}
"""Steps of the right solvers, relative to those of `joint`."""


def usual_descent(site: SiteSize, effort: str = "typical") -> DescentLength:
    """Descent of usual length, or of the least or the most steps that were seen."""
    if site.attention:
        return DescentLength(3.1, _ATTENTION_STEPS[effort], 1.7, 10.5)
    return DescentLength(2.1, _MLP_STEPS[effort], 1.6, 4.6)


def coec(
    site: SiteSize, descent: DescentLength, compute: ComputeConfig, options: Mapping[str, Any]
) -> list[Work]:
    """Compensate by COEC: rcpu, eigenpairs of d×d and k×k, 2md² + 2mdk + 2k²d + 4mk² + 4bk² + 2mbk,
    an SVD of m×k (in attention three), two polar factors and 2mbk per round, and steps.

    A step of t trials and i inner iterations takes products of b×k frames, 4 + 1.5t (tangents,
    retractions) and 3 + 2i in float32 (preconditioner), 1 + t of m×k by k×b, and t polar factors.
    """
    m, d, k, b, t, i = site.m, site.d, site.k, min(site.m, site.k), descent.trials, descent.inner
    device, dtype = compute.device, compute.solve_name
    rounds = min(descent.rounds, options["rounds"])
    steps = min(descent.steps, descent.rounds * options["iterations"])
    steps *= _SOLVERS[options["solver"]] * (rounds > 0 and options["rotation"] != "left")
    followed = steps * t if options["solver"] == "joint" else 0.0
    numbers, calls = (50 + 3 * i) * b * k + (98 + 10 * i) * b**2, 111 + 74 * t + 19 * i
    if site.attention:  # the alignment, with tables of 16⁴ entries
        numbers += (21 + 3 * i) * b * k + (84 + 1.2 * i) * 16**4
        calls += 116 + 15 * i
    work = [
        *rcpu(site, device), *svd(m, k, device, dtype, 3.0 if site.attention else 1.0),
        *polar(m, b, device, dtype, 2 + 2 * rounds + followed), eigenpairs(d), eigenpairs(k),
        product(m, d, d), product(m, d, k), product(k, d, k), product(m, k, k, 2),
        product(b, k, k, 2), product(m, b, k), product(m, b, k, 3 + rounds, dtype),
        Work("elementwise", 320.0 * d**2 + 1480.0 * m * k, 8.0 * d * m),
        Work("call", 600 + 130 * rounds),
        product(b, k, b, (4 + 1.5 * t) * steps, dtype), product(b, b, b / 2, t * steps, dtype),
        product(b, k, b, (3 + 2 * i) * steps, "float32"), product(m, k, b, (1 + t) * steps, dtype),
        Work("elementwise", 8.0 * numbers, 8.0 * b * k, steps), Work("call", calls, 1.0, steps),
    ]  # fmt: skip
    return work * (2 if options["rotation"] == "better" else 1)
