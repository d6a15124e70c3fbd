"""Solvers of the right problem: ours, the source's, and those of pymanopt and geoopt.

Every solver gets the same problem in the eigenbasis of Gxx, the same start, one thread and float64.
Peers minimise the objective with the optimal scale t eliminated,

    f(R) = 1 − L² / (Q · yy),  L = ⟨C, R⟩,  Q = ⟨diag(s²) R diag(μ), R⟩,

with derivatives written by hand. Peers "as stated" get s, Gxx, C and yy with a dense Gxx instead,
and differentiate f automatically: the eigenbasis is this package's idea. A `Trace` notes
the time of every objective value that a solver computes for itself; nothing is computed for its
sake.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks import record
from coec.linalg.conjugate import SHIFT, conjugate
from coec.linalg.gradient import gradient
from coec.linalg.right import Point, RightProblem

Solve = Callable[[RightProblem, Tensor, "Trace"], None]

STALL_GAIN, STALL_WINDOW, STALL_EVALUATIONS = 1e-6, 0.15, 100
"""A solver is stopped that gains less than this fraction, in this part of its time limit and in at
least so many evaluations. Trust regions evaluate rarely: for them an idle spell is no stall."""


class OutOfTimeError(Exception):
    """Raised inside an objective to end a solver at its limit, or when it no longer advances."""


@dataclass
class Trace:
    """The best objective so far over the time since the solver was called.

    Attributes:
        limit: seconds the solver may take.
        times, values: improvements only.
        ended, ended_after: why the solver stopped, and when.
    """

    limit: float
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    evaluations: int = 0
    ended: str = "converged"
    ended_after: float = 0.0
    setting: str = ""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Time counts from now."""
        self._began = record.clock()
        self._checked = (0.0, 0, math.inf)

    def note(self, value: float) -> None:
        """Takes one objective value.

        Raises:
            OutOfTimeError: the limit is reached, or the solver stalls.
        """
        now = record.clock() - self._began
        self.evaluations += 1
        self.ended_after = now
        if not self.values or value < self.values[-1]:
            self.times.append(now)
            self.values.append(value)
        if now > self.limit:
            raise OutOfTimeError(f"time limit {self.limit:g} s")
        since, evaluations, before = self._checked
        waited = now - since > STALL_WINDOW * self.limit
        if waited and self.evaluations - evaluations >= STALL_EVALUATIONS:
            if self.best > before * (1 - STALL_GAIN):
                raise OutOfTimeError("no progress")
            self._checked = (now, self.evaluations, self.best)

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

    def curve(self, points: int = 60) -> dict[str, list[float]]:
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

    def at(self, R: Tensor) -> Point:
        point = super().at(R)
        self.trace.note(point.value)
        return point


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


class AsStated:
    """The same problem with a dense Gxx, in a basis of no consequence, for automatic derivatives.

    Attributes:
        start: the same start, `X = Rᵀ`.
        values_only: note no evaluation that is part of a derivative: trust regions differentiate
            at one point again and again, which is no stall.
    """

    def __init__(
        self, problem: RightProblem, R: Tensor, trace: Trace, *, values_only: bool = False
    ) -> None:
        self.values_only = values_only
        k = R.shape[1]
        generator = torch.Generator().manual_seed(0)
        E = torch.linalg.qr(torch.randn(k, k, generator=generator, dtype=R.dtype)).Q
        self.trace = trace
        self.s2, self.yy = problem.s.square(), problem.yy
        self.Gxx = (E * problem.mu) @ E.T
        self.C = E @ problem.cross.T
        self.start = E @ R.T

    def cost(self, X: Tensor) -> Tensor:
        """The objective at X."""
        L = (self.C * X).sum()
        Q = ((self.Gxx @ X * X).sum(dim=0) * self.s2).sum()
        value = 1 - L * L / (Q * self.yy) if L > 0 and Q > 0 else 1 + (Q - 2 * L) / self.yy
        if not (self.values_only and X.requires_grad):
            self.trace.note(float(value.detach()))
        return value


Form = Literal["by hand", "preconditioned", "as stated"]


def pymanopt_cg(form: Form = "by hand", beta_rule: str = "HestenesStiefel") -> Solve:
    """The conjugate gradient of pymanopt with its adaptive line search.

    Args:
        form: how the problem is given; `preconditioned` is by hand with this package's
            preconditioner.
        beta_rule: how directions are combined; Hestenes-Stiefel is pymanopt's default.
    """

    def solve(problem: RightProblem, R: Tensor, trace: Trace) -> None:
        from pymanopt.optimizers import ConjugateGradient

        stated, start = _stated(problem, R, trace, form)
        optimizer = ConjugateGradient(beta_rule=beta_rule, **_patience(trace))
        trace.restart()
        trace.ended = _reason(optimizer.run(stated, initial_point=start).stopping_criterion)

    return solve


def pymanopt_tr(form: Form = "by hand") -> Solve:
    """The trust regions of pymanopt with the exact Hessian."""

    def solve(problem: RightProblem, R: Tensor, trace: Trace) -> None:
        from pymanopt.optimizers import TrustRegions

        stated, start = _stated(problem, R, trace, form)
        optimizer = TrustRegions(**_patience(trace))
        trace.restart()
        trace.ended = _reason(optimizer.run(stated, initial_point=start).stopping_criterion)

    return solve


def _stated(
    problem: RightProblem, R: Tensor, trace: Trace, form: Form
) -> tuple[object, np.ndarray]:
    import pymanopt

    b, k = R.shape
    manifold = pymanopt.manifolds.Stiefel(k, b)
    if form == "as stated":
        plain = AsStated(problem, R, trace, values_only=True)
        automatic = pymanopt.function.pytorch(manifold)
        return pymanopt.Problem(manifold, automatic(plain.cost)), plain.start.numpy()
    f = Eliminated(problem, trace)
    on_manifold = pymanopt.function.numpy(manifold)
    stated = pymanopt.Problem(
        manifold,
        on_manifold(f.cost),
        euclidean_gradient=on_manifold(f.gradient),
        euclidean_hessian=on_manifold(f.hessian),
        preconditioner=f.precondition if form == "preconditioned" else None,
    )
    return stated, np.ascontiguousarray(R.T.numpy())


def _reason(text: str) -> str:
    """Without elapsed seconds, which are not the trace's."""
    return text.removeprefix("Terminated - ").split(" iterations,")[0] + " steps"


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
    form: Form = "by hand"
    pilot: float = 0.05

    def rates(self) -> tuple[float, ...]:
        """What is tried."""
        return (1.0, 3.0, 10.0, 30.0) if self.optimizer == "sgd" else (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)

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
        plain = AsStated(problem, R, trace) if self.form == "as stated" else None
        start = plain.start if plain else R.T.contiguous()
        X = geoopt.ManifoldParameter(start.clone(), manifold=geoopt.EuclideanStiefel())
        optimizer: torch.optim.Optimizer
        if self.optimizer == "sgd":
            t = problem.scale(R)
            lipschitz = 2 * t * t * float(weight.max()) / problem.yy
            optimizer = geoopt.optim.RiemannianSGD([X], lr=rate / lipschitz, momentum=0.9)
        else:
            optimizer = geoopt.optim.RiemannianAdam([X], lr=rate * len(R) ** 0.5)
        trace.restart()
        while plain:
            optimizer.zero_grad()
            plain.cost(X).backward()
            optimizer.step()
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
    "pymanopt cg, Polak-Ribière": pymanopt_cg(beta_rule="PolakRibiere"),
    "pymanopt tr": pymanopt_tr(),
    "geoopt sgd": Geoopt("sgd"),
    "geoopt adam": Geoopt("adam"),
    "pymanopt cg, as stated": pymanopt_cg("as stated"),
    "pymanopt tr, as stated": pymanopt_tr("as stated"),
    "geoopt sgd, as stated": Geoopt("sgd", "as stated"),
    "pymanopt cg, our former preconditioner": pymanopt_cg("preconditioned", "PolakRibiere"),
    "pymanopt tr, our former preconditioner": pymanopt_tr("preconditioned"),
}
PEERS = [name for name in SOLVERS if name.startswith(("pymanopt", "geoopt"))]
BORROWED = [name for name in PEERS if "our former preconditioner" in name]
"""Peers that are handed this package's preconditioner too: listed, but no baseline."""
STATED = [name for name in PEERS if "as stated" in name]
