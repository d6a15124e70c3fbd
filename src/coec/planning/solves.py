"""What solving one site takes: tables of parts, whose amounts are functions of its sizes.

Products, decompositions and triangular solves are counted by `coec.planning.operations`.
Elementwise work and calls of operators were counted with a dispatch mode at several sizes, and
tests count them again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coec.planning import operations
from coec.planning.machines import Kernel, Work
from coec.planning.operations import Consumer


@dataclass(frozen=True)
class SolverSteps:
    """How long a descent runs: means over the sites of the small trained models.

    Attributes:
        rounds: of the alternation.
        steps: of all right solves together, typically.
        least, most: the same, of the quickest and of the slowest model; wide synthetic MLPs and
            random attention, which take more, included.
        trials: points that a line search looks at, per step.
        inner: iterations of the preconditioner's multiplier, per step.
        aligned: whether the alignment penalty is on.
    """

    rounds: float
    steps: float
    least: float
    most: float
    trials: float
    inner: float
    aligned: bool = False


MLP = SolverSteps(rounds=2.1, steps=20, least=12, most=70, trials=1.6, inner=4.6)
ATTENTION = SolverSteps(
    rounds=3.1, steps=30, least=19, most=92, trials=1.7, inner=10.5, aligned=True
)
"""They depend on the data: docs/PERFORMANCE.md, `The plan against runs`."""
WIDE = "float64"
"""Of decompositions, closed forms and errors, whatever the dtype of the iterations."""
STEPS = {"gradient": 6.0, "conjugate": 2.0, "joint": 1.0}
"""Steps of the right solvers, relative to those of `joint`."""
RANK = 16
"""Of the aligned subspaces (`r_p`)."""
PAIRS = RANK * (RANK + 1) // 2
"""Entries of a symmetric matrix of that size."""


@dataclass(frozen=True)
class Part:
    """One kind of work in something that is executed.

    Attributes:
        kernel: its kind.
        amount: of one execution.
        size: what the rate depends on.
        times: how often, in one step or one solve.
        dtype: of the numbers; None for that of the solve.
    """

    kernel: Kernel
    amount: Callable[[Consumer, SolverSteps], float]
    size: Callable[[Consumer], float]
    times: Callable[[SolverSteps], float] = lambda course: 1.0
    dtype: str | None = None

    def work(self, one: Consumer, course: SolverSteps, dtype: str, times: float) -> Work:
        """The same of one consumer, so many times."""
        return Work(
            self.kernel,
            self.amount(one, course),
            max(1.0, self.size(one)),
            times * self.times(course),
            "" if self.kernel in ("call", "elementwise", "reduce") else self.dtype or dtype,
        )


def _frame(one: Consumer) -> float:
    """The size of a product of b×k frames."""
    return float(one.b * one.b * one.k) ** (1 / 3)


def _left(one: Consumer) -> float:
    return float(one.m * one.k * one.b) ** (1 / 3)


def _rank(one: Consumer) -> float:
    return float(one.b)


def _bytes(one: Consumer) -> float:
    return 8.0 * one.b * one.k


JOINT_STEP: dict[str, Part] = {
    "tangents": Part("product", lambda o, c: 2 * operations.tangent(o), _frame),
    "preconditioner": Part(
        "product", lambda o, c: operations.preconditioner(o, c.inner), _frame, dtype="float32"
    ),
    "planes": Part(
        "product", lambda o, c: operations.product(o.b, o.k, o.b), _frame, dtype="float32"
    ),
    "retractions": Part(
        "product", lambda o, c: operations.lower_gram(o.b, o.k), _frame, lambda c: c.trials
    ),
    "factors of retractions": Part(
        "cholesky", lambda o, c: operations.cholesky(o.b), _rank, lambda c: c.trials
    ),
    "triangles of retractions": Part(
        "triangular", lambda o, c: operations.triangular_solve(o.b, o.k), _rank, lambda c: c.trials
    ),
    "left factor": Part(
        "product",
        lambda o, c: operations.product(o.m, o.k, o.b),
        _left,
        lambda c: c.trials,
    ),
    "right problem": Part("product", lambda o, c: operations.right_problem(o), _left),
    # Tables of r_p² columns, whatever the width.
    "alignment": Part(
        "product",
        lambda o, c: 2.0 * c.aligned * (2 * RANK**5 + RANK**3 * (o.b + o.k)),
        lambda o: float(RANK**2),
    ),
    "core of the alignment": Part(
        "cholesky",
        lambda o, c: 2.0 * c.aligned * operations.inverse(PAIRS),
        lambda o: float(PAIRS),
    ),
    # Entries picked by index, about as slow as sums by way of a copy.
    "pairs of the alignment": Part(
        "reduce", lambda o, c: 8.0 * 8 * RANK**4 * c.aligned, lambda o: 8.0 * RANK**4
    ),
    "elementwise": Part(
        "elementwise",
        lambda o, c: 8.0 * ((50 + 3 * c.inner) * o.b * o.k + (98 + 10 * c.inner) * o.b**2),
        _bytes,
    ),
    "elementwise, alignment": Part(
        "elementwise",
        lambda o, c: 8.0 * c.aligned
        * ((21 + 3 * c.inner) * o.b * o.k + (20 + 1.2 * c.inner) * RANK**4),
        _bytes,
    ),
    "calls": Part(
        "call", lambda o, c: 1.0, lambda o: 1.0,
        lambda c: 111 + 74 * c.trials + 19 * c.inner + c.aligned * (116 + 15 * c.inner),
    ),
}  # fmt: skip
"""One step of `joint`, without the polar factor of the left side at every trial."""

DESCENT: dict[str, Part] = {
    "eigenpairs of G": Part(
        "eigh", lambda o, c: operations.eigh(o.d), lambda o: float(o.d), dtype=WIDE
    ),
    "tempering": Part(
        "product", lambda o, c: operations.tempering(o) - operations.eigh(o.d),
        lambda o: float(o.d), dtype=WIDE,
    ),
    "eigenpairs of Gxx": Part(
        "eigh", lambda o, c: operations.eigh(o.k), lambda o: float(o.k), dtype=WIDE
    ),
    "eigenbasis": Part(
        "product", lambda o, c: operations.eigenbasis(o) - operations.eigh(o.k), _left, dtype=WIDE
    ),
    "assembly": Part("product", lambda o, c: operations.assembly(o), _left, dtype=WIDE),
    "rescales": Part(
        "product", lambda o, c: operations.product(o.b, o.m, o.k), _left, lambda c: 3 + c.rounds
    ),
    "elementwise": Part(
        "elementwise", lambda o, c: 8.0 * (40 * o.d**2 + 185 * o.m * o.k), lambda o: 8.0 * o.d * o.m
    ),
    "calls": Part("call", lambda o, c: 1.0, lambda o: 1.0, lambda c: 600 + 130 * c.rounds),
}  # fmt: skip
"""What a descent does besides its steps."""

ERRORS: dict[str, Part] = {
    "errors": Part(
        "product", lambda o, c: 6 * operations.product(o.m, o.d, o.d), lambda o: float(o.d),
        dtype=WIDE,
    ),
    "elementwise": Part("elementwise", lambda o, c: 60.0 * o.d**2, lambda o: 8.0 * o.d**2),
    "calls": Part("call", lambda o, c: 1.0, lambda o: 1.0, lambda c: 400.0),
}  # fmt: skip
"""Scores, checks of statistics, and the relative errors of every method; half of it on held-out
windows."""


def polar_factors(one: Consumer, dtype: str, device: str, times: float) -> Iterator[Work]:
    """Polar factors of m×b matrices: by QDWH on a GPU, by an SVD elsewhere."""
    m, b = max(one.m, one.b), one.b
    if device != "cuda":
        yield Work("svd", operations.thin_svd(m, b), float(b), times, dtype)
        yield Work("product", operations.product(m, b, b), float(b), times, dtype)
        return
    step = operations.product(b, m, b)
    yield Work("product", step, float(b), times * 7, dtype)
    yield Work("cholesky", operations.cholesky(b), float(b), times * 6, dtype)
    yield Work("triangular", operations.triangular_solve(b, m), float(b), times * 12, dtype)
    yield Work("elementwise", 8.0 * 12 * m * b, 8.0 * m * b, times * 6)
    yield Work("call", 1.0, 1.0, times * 80)


def svd(m: int, n: int, dtype: str, device: str, times: float = 1.0) -> Iterator[Work]:
    """Thin singular value decompositions: on a GPU through a polar factor and eigenpairs."""
    count, b = operations.thin_svd(m, n), min(m, n)
    if device != "cuda":
        yield Work("svd", count, float(b), times, dtype)
        return
    yield from polar_factors(Consumer("", max(m, n), b, b), dtype, device, times)
    yield Work("eigh", operations.eigh(b), float(b), times, dtype)


def coec(
    one: Consumer, course: SolverSteps, dtype: str, device: str, options: Mapping[str, Any]
) -> list[Work]:
    """A whole compensation by COEC."""
    if options.get("alpha") == 0:
        return []
    steps = min(course.steps, course.rounds * options["iterations"])
    steps *= STEPS[options["solver"]]
    rounds = min(course.rounds, options["rounds"])
    sides = 0.0 if options["rotation"] == "left" or not rounds else 1.0
    found = [part.work(one, course, dtype, 1.0) for part in DESCENT.values()]
    found += [part.work(one, course, dtype, steps * sides) for part in JOINT_STEP.values()]
    found += svd(one.m, one.k, dtype, device)
    found += rcpu(one, device)  # beside which the untempered error is held
    followed = steps * sides * course.trials if options["solver"] == "joint" else 0.0
    found += polar_factors(one, dtype, device, 2 + 2 * rounds + followed)
    if course.aligned:
        found += [*svd(one.k, one.m, dtype, device), *svd(one.d, one.m, dtype, device)]
    if options["rotation"] == "better":
        found *= 2
    return found


def closed_form(one: Consumer) -> list[Work]:
    """Ridge regressions: normal equations by Cholesky."""
    m, d, k = one.m, one.d, one.k
    return [
        Work("product", operations.product(m, d, d) + operations.product(m, k, k), d, 1.0, WIDE),
        Work("cholesky", operations.inverse(k), k, 1.0, WIDE),
        Work("triangular", 2 * operations.triangular_solve(k, m), k, 1.0, WIDE),
        Work("elementwise", 8.0 * (8 * k**2 + 12 * m * d), 8.0 * k**2),
        Work("call", 1.0, 1.0, 150),
    ]


def rcpu(one: Consumer, device: str) -> list[Work]:
    """One left rotation and one scale."""
    m, d, k = one.m, one.d, one.k
    product = operations.product(m, d, d) + operations.product(m, k, k)
    product += 2 * operations.product(m, k, one.b)
    return [
        Work("product", product, d, 1.0, WIDE),
        *svd(m, k, WIDE, device),
        *polar_factors(one, WIDE, device, 1.0),
        Work("call", 1.0, 1.0, 150),
    ]


def greedy_selection(one: Consumer, units: int, kept: int) -> list[Work]:
    """The selection `obs`, in float64: units of one column in panels, others one by one."""
    d, single = one.d, units == one.d
    removed = units - kept
    if not removed:
        return []
    work = [
        Work("cholesky", operations.inverse(d), d, 1.0, "float64"),
        Work("product", operations.elimination(one), d, 1.0, "float64"),
        Work("elementwise", 8.0 * 12 * d**2, 8.0 * d**2),
    ]
    if single:  # a panel is half filled, on average: three products of a vector with it
        strip = 64.0 * d * 8
        work += [
            Work("elementwise", 3 * strip + 40 * 8.0 * d, strip, removed),
            Work("call", 1.0, 1.0, 87.0 * removed + 60),
        ]
    else:
        work += [Work("call", 1.0, 1.0, removed * (93.0 + 11 * units))]
    return work


def errors(one: Consumer) -> list[Work]:
    """What every method takes besides."""
    return [part.work(one, MLP, WIDE, 1.0) for part in ERRORS.values()]
