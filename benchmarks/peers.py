"""Solvers of the right problem: ours, the source's, and those of pymanopt and geoopt.

Every solver gets the same problem in the eigenbasis of Gxx, the same start, one thread and float64.
Peers minimise the objective with the optimal scale t eliminated,

    f(R) = 1 − L² / (Q · yy),  L = ⟨C, R⟩,  Q = ⟨diag(s²) R diag(μ), R⟩,

with derivatives written by hand. A `Trace` notes the time of every objective value that a solver
computes for itself; nothing is computed for the trace's sake.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from benchmarks import record
from coec.linalg.conjugate import SHIFT, conjugate
from coec.linalg.gradient import gradient
from coec.linalg.right import RightProblem

Solve = Callable[[RightProblem, Tensor, "Trace"], None]

STALL_FRACTION = 1e-6
"""A solver that gains less than this in a tenth of its time limit is stopped."""


class OutOfTimeError(Exception):
    """Raised inside an objective to end a solver at its limit, or when it no longer advances."""


@dataclass
class Trace:
    """The best objective so far over the time since the solver was called.

    Attributes:
        limit: seconds the solver may take.
        times, values: improvements only.
        ended: why the solver stopped.
    """

    limit: float
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    evaluations: int = 0
    ended: str = "converged"
    setting: str = ""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Time counts from now."""
        self._began = record.clock()
        self._checked = (0.0, math.inf)

    def note(self, value: float) -> None:
        """Takes one objective value.

        Raises:
            OutOfTimeError: the limit is reached, or nothing was gained for a tenth of it.
        """
        now = record.clock() - self._began
        self.evaluations += 1
        if not self.values or value < self.values[-1]:
            self.times.append(now)
            self.values.append(value)
        if now > self.limit:
            raise OutOfTimeError(f"time limit {self.limit:g} s")
        since, before = self._checked
        if now - since > 0.1 * self.limit:
            if self.best > before * (1 - STALL_FRACTION):
                raise OutOfTimeError("no progress")
            self._checked = (now, self.best)

    @property
    def best(self) -> float:
        """The lowest objective seen."""
        return self.values[-1] if self.values else math.inf

    @property
    def spent(self) -> float:
        """When the last improvement came."""
        return self.times[-1] if self.times else 0.0

    def time_to(self, target: float) -> float:
        """Seconds until the objective was at most `target`; infinity where it never was."""
        reached = (t for t, value in zip(self.times, self.values) if value <= target)
        return next(reached, math.inf)

    def curve(self, points: int = 200) -> dict[str, list[float]]:
        """At most so many points of the trace, for plots."""
        step = max(1, math.ceil(len(self.times) / points))
        keep = sorted({*range(0, len(self.times), step), len(self.times) - 1} - {-1})
        return {
            "seconds": [self.times[i] for i in keep],
            "objective": [self.values[i] for i in keep],
        }


def run(solve: Solve, problem: RightProblem, R: Tensor, limit: float) -> Trace:
    """One solver on one problem."""
    trace = Trace(limit)
    try:
        solve(problem, R.clone(), trace)
    except OutOfTimeError as end:
        trace.ended = str(end)
    return trace


class _Traced(RightProblem):
    """A problem that notes every objective its solver asks for."""

    trace: Trace

    @classmethod
    def of(cls, problem: RightProblem, trace: Trace) -> "_Traced":
        traced = cls(problem.s, problem.mu, problem.cross, problem.yy, problem.alignment)
        object.__setattr__(traced, "trace", trace)
        return traced

    def objective(self, R: Tensor) -> float:
        value = super().objective(R)
        self.trace.note(value)
        return value


def ours(problem: RightProblem, R: Tensor, trace: Trace) -> None:
    """`conjugate`, run on far past its usual stop."""
    traced = _Traced.of(problem, trace)
    trace.restart()
    _, end = conjugate(traced, R, tolerance=1e-12, iterations=1_000_000)
    trace.ended = end.reason


def source(problem: RightProblem, R: Tensor, trace: Trace) -> None:
    """`gradient`, run on past its δ."""
    traced = _Traced.of(problem, trace)
    trace.restart()
    _, end = gradient(traced, R, delta=1e-12, iterations=1_000_000)
    trace.ended = end.reason


class Eliminated:
    """The objective and its derivatives in numpy, for `X = Rᵀ` (k×b), as pymanopt has it."""

    def __init__(self, problem: RightProblem, trace: Trace) -> None:
        self.trace = trace
        self.s2 = problem.s.square().numpy()
        self.mu = problem.mu.numpy()
        self.C = np.ascontiguousarray(problem.cross.T.numpy())
        self.yy = problem.yy
        self._point: np.ndarray | None = None

    def cost(self, X: np.ndarray) -> float:
        """The objective at X."""
        L, Q = self._sums(X)
        value = 1 - L * L / (Q * self.yy) if L > 0 and Q > 0 else 1 + (Q - 2 * L) / self.yy
        self.trace.note(float(value))
        return float(value)

    def gradient(self, X: np.ndarray) -> np.ndarray:
        """Its Euclidean gradient."""
        t = self._scale(X)
        return (2 * t * t / self.yy) * self._weighted(X) - (2 * t / self.yy) * self.C

    def hessian(self, X: np.ndarray, V: np.ndarray) -> np.ndarray:
        """Its Euclidean Hessian along V, the derivative of t included."""
        L, Q = self._sums(X)
        t = L / Q if L > 0 and Q > 0 else 1.0
        MX = self._weighted(X)
        dt = (float(np.vdot(self.C, V)) - 2 * t * float(np.vdot(MX, V))) / Q if L > 0 else 0.0
        return (2 / self.yy) * (t * t * self._weighted(V) + 2 * t * dt * MX - dt * self.C)

    def precondition(self, X: np.ndarray, g: np.ndarray) -> np.ndarray:
        """The package's own preconditioner, written for pymanopt."""
        t = self._scale(X)
        H = (2 * t * t / self.yy) * (np.maximum(self.mu, 0)[:, None] * self.s2)
        Z = g / (H + SHIFT * H.mean())
        S = X.T @ Z
        return Z - 0.5 * X @ (S + S.T)

    def _weighted(self, X: np.ndarray) -> np.ndarray:
        return (self.mu[:, None] * X) * self.s2

    def _sums(self, X: np.ndarray) -> tuple[float, float]:
        """L and Q; a solver asks at one point for the value and then for the gradient."""
        if X is not self._point:
            self._point = X
            self._L = float(np.vdot(self.C, X))
            self._Q = float((self.mu @ (X * X)) @ self.s2)
        return self._L, self._Q

    def _scale(self, X: np.ndarray) -> float:
        L, Q = self._sums(X)
        return L / Q if L > 0 and Q > 0 else 1.0


def pymanopt_cg(beta_rule: str = "HestenesStiefel", preconditioned: bool = False) -> Solve:
    """The conjugate gradient of pymanopt with its adaptive line search.

    Args:
        beta_rule: how directions are combined; Hestenes-Stiefel is pymanopt's default.
        preconditioned: with this package's preconditioner, which a user would have to know.
    """

    def solve(problem: RightProblem, R: Tensor, trace: Trace) -> None:
        from pymanopt.optimizers import ConjugateGradient

        stated, start = _stated(problem, R, trace, preconditioned)
        optimizer = ConjugateGradient(beta_rule=beta_rule, **_patience(trace))
        trace.restart()
        trace.ended = optimizer.run(stated, initial_point=start).stopping_criterion

    return solve


def pymanopt_tr(preconditioned: bool = False) -> Solve:
    """The trust regions of pymanopt with the exact Hessian."""

    def solve(problem: RightProblem, R: Tensor, trace: Trace) -> None:
        from pymanopt.optimizers import TrustRegions

        stated, start = _stated(problem, R, trace, preconditioned)
        optimizer = TrustRegions(**_patience(trace))
        trace.restart()
        trace.ended = optimizer.run(stated, initial_point=start).stopping_criterion

    return solve


def _stated(
    problem: RightProblem, R: Tensor, trace: Trace, preconditioned: bool
) -> tuple[object, np.ndarray]:
    import pymanopt

    b, k = R.shape
    manifold = pymanopt.manifolds.Stiefel(k, b)
    f = Eliminated(problem, trace)
    on_manifold = pymanopt.function.numpy(manifold)
    stated = pymanopt.Problem(
        manifold,
        on_manifold(f.cost),
        euclidean_gradient=on_manifold(f.gradient),
        euclidean_hessian=on_manifold(f.hessian),
        preconditioner=f.precondition if preconditioned else None,
    )
    return stated, np.ascontiguousarray(R.T.numpy())


def _patience(trace: Trace) -> dict[str, float]:
    """Nothing but the trace's limit ends a run before it has converged."""
    return {
        "max_time": 10 * trace.limit,
        "max_iterations": 10**9,
        "max_cost_evaluations": 10**9,
        "min_gradient_norm": 1e-12,
        "min_step_size": 1e-14,
        "verbosity": 0,
    }


@dataclass(frozen=True)
class Geoopt:
    """Optimizers of geoopt on its Euclidean Stiefel manifold (QR retraction), best learning rate.

    Each rate is tried for `pilot` of the time limit; the one with the lowest objective runs anew.
    The search is not counted. Rates of `sgd` are multiples of `1/L`, L the largest curvature at the
    start; those of `adam` are lengths of a step as a multiple of √b, since geoopt normalises by the
    norm of the whole gradient.
    """

    optimizer: str
    pilot: float = 0.05

    def rates(self) -> tuple[float, ...]:
        """What is tried."""
        return (1.0, 3.0, 10.0, 30.0) if self.optimizer == "sgd" else (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)

    def __call__(self, problem: RightProblem, R: Tensor, trace: Trace) -> None:
        """Searches, then runs."""
        found: dict[float, float] = {}
        for rate in self.rates():
            attempt = Trace(self.pilot * trace.limit)
            try:
                self._descend(problem, R, rate, attempt)
            except OutOfTimeError:
                found[rate] = attempt.best
        best = min(found, key=lambda rate: found[rate])
        trace.setting = f"learning rate {best:g}"
        self._descend(problem, R, best, trace)

    def _descend(self, problem: RightProblem, R: Tensor, rate: float, trace: Trace) -> None:
        import geoopt

        weight = problem.s.square() * problem.mu[:, None]
        C = problem.cross.T.contiguous()
        manifold = geoopt.EuclideanStiefel()
        X = geoopt.ManifoldParameter(R.T.contiguous(), manifold=manifold)
        optimizer: torch.optim.Optimizer
        if self.optimizer == "sgd":
            t = problem.scale(R)
            lipschitz = 2 * t * t * float(weight.max()) / problem.yy
            optimizer = geoopt.optim.RiemannianSGD([X], lr=rate / lipschitz, momentum=0.9)
        else:
            optimizer = geoopt.optim.RiemannianAdam([X], lr=rate * len(R) ** 0.5)
        trace.restart()
        with torch.no_grad():
            while True:
                MX = weight * X
                L, Q = float((C * X).sum()), float((MX * X).sum())
                t = L / Q if L > 0 and Q > 0 else 1.0
                trace.note((t * t * Q - 2 * t * L + problem.yy) / problem.yy)
                X.grad = (2 * t * t / problem.yy) * MX - (2 * t / problem.yy) * C
                optimizer.step()


OURS = "coec conjugate"
SOLVERS: dict[str, Solve] = {
    OURS: ours,
    "coec gradient": source,
    "pymanopt cg": pymanopt_cg(),
    "pymanopt cg, Polak-Ribière": pymanopt_cg("PolakRibiere"),
    "pymanopt tr": pymanopt_tr(),
    "geoopt sgd": Geoopt("sgd"),
    "geoopt adam": Geoopt("adam"),
    "pymanopt cg, our preconditioner": pymanopt_cg("PolakRibiere", preconditioned=True),
    "pymanopt tr, our preconditioner": pymanopt_tr(preconditioned=True),
}
PEERS = [name for name in SOLVERS if name.startswith(("pymanopt", "geoopt"))]
BORROWED = [name for name in PEERS if "our preconditioner" in name]
"""Peers that are handed this package's idea: listed, but no baseline."""
