"""Seconds and operations of a compensation by phase, counted as they are run."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import operations, record
from coec.methods.descent import Descent
from coec.methods.frame import Frame, RotationTarget
from coec.methods.objective import OutputProblem
from coec.linalg.conjugate import rounded_products

PHASES = {
    "tempering": (OutputProblem, "tempered"),
    "eigenbasis": (RotationTarget, "of"),
    "svd": (Frame, "of"),
    "left": (Frame, "rotated_left"),
    "rescale": (Frame, "rescaled"),
    "right": (Descent, "turned_right"),
    "assembly": (Frame, "weight"),
}
"""Where each phase is entered; what else a compensation does is `REST`."""

REST = "rest"

Rates = dict[torch.dtype, float]
"""Operations per second of a product."""

DECOMPOSITIONS = {
    "eigh": lambda A: operations.eigh(A.shape[-1]),
    "svd": lambda A: operations.thin_svd(A.shape[-2], A.shape[-1]),
}


class Counter(TorchDispatchMode):
    """Adds up the operations of products, Cholesky factors and triangular solves as they are run.

    About 10 μs per operator, once warm: a millisecond in a step, less than what
    `torch.utils.flop_counter` takes.

    Args:
        rates: operations per second of a product in every dtype, for `floor`.
        operators: what an operator's arguments say of its operations.
    """

    def __init__(
        self,
        rates: Rates | None = None,
        operators: Mapping[Any, Callable[..., float]] | None = None,
    ) -> None:
        super().__init__()
        self.rates = rates or {}
        self.operators = OPERATORS if operators is None else operators
        self.operations = 0.0
        self.floor = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Counts, and runs the operator."""
        if count := self.operators.get(func):
            self.add(count(*args), args[0].dtype)
        return func(*args, **(kwargs or {}))

    def add(self, operations: float, dtype: torch.dtype) -> None:
        """Operations in one dtype, and the seconds that they take at its rate."""
        self.operations += operations
        self.floor += operations / self.rates.get(dtype, math.inf)


def _product(A: Tensor, B: Tensor) -> float:
    return operations.product(A.shape[0], A.shape[1], B.shape[1])


OPERATORS: dict[Any, Callable[..., float]] = {
    torch.ops.aten.mm.default: _product,
    torch.ops.aten.mm.out: _product,
    torch.ops.aten.mm.dtype: _product,
    torch.ops.aten.addmm.default: lambda C, A, B: _product(A, B),
    torch.ops.aten.addmm_.default: lambda C, A, B: _product(A, B),
    torch.ops.aten.mv.default: lambda A, x: 2.0 * A.numel(),
    torch.ops.aten.linalg_cholesky_ex.default: lambda A, *_: operations.cholesky(len(A)),
    torch.ops.aten.cholesky_inverse.default: lambda L, *_: 2 / 3 * len(L) ** 3,
    torch.ops.aten.cholesky_solve.default: lambda B, L, *_: (
        2 * operations.triangular_solve(len(L), B.numel() // len(L))
    ),
    torch.ops.aten.linalg_solve_triangular.default: lambda A, B, *_: operations.triangular_solve(
        len(A), B.numel() // len(A)
    ),
}


def product_rates(device: torch.device) -> Rates:
    """Of both dtypes that a compensation multiplies in: float32 as its preconditioner does."""
    with rounded_products(device):
        narrow = record.matmul_rate(device, torch.float32)
    return {torch.float64: record.matmul_rate(device, torch.float64), torch.float32: narrow}


@dataclass
class Meter:
    """Seconds and operations by phase of what runs inside `running`; `told` hears of each."""

    device: torch.device
    rates: Rates = field(default_factory=dict)
    told: Callable[[str, float], None] = lambda phase, seconds: None
    seconds: dict[str, float] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    decompositions: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counter = Counter(self.rates)
        self._phase = REST

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Meters one compensation."""
        with contextlib.ExitStack() as stack:
            for phase, (owner, name) in PHASES.items():
                inner = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, self._entering(phase, inner)))
            for routine, operations_of in DECOMPOSITIONS.items():
                for module in _importers(routine):
                    inner = getattr(module, routine)
                    wrapped = self._decomposing(routine, operations_of, inner)
                    stack.enter_context(mock.patch.object(module, routine, wrapped))
            stack.enter_context(self.counter)
            began = self._now()
            yield
            whole = self._now() - began
        for sums, total in (
            (self.seconds, whole),
            (self.operations, self.counter.operations),
            (self.floors, self.counter.floor),
        ):
            sums[REST] = total - sum(sums.values())

    def _entering(self, phase: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            outer, self._phase = self._phase, phase
            began, operations, floor = self._now(), self.counter.operations, self.counter.floor
            out = inner(*args, **named)
            seconds = self._now() - began
            self.told(phase, seconds)
            self._add(self.seconds, phase, seconds)
            self._add(self.operations, phase, self.counter.operations - operations)
            self._add(self.floors, phase, self.counter.floor - floor)
            self._phase = outer
            return out

        return run

    def _decomposing(
        self, routine: str, operations_of: Callable[[Tensor], float], inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        def run(A: Tensor) -> Any:
            began, before = self._now(), (self.counter.operations, self.counter.floor)
            out = inner(A)
            self.counter.operations, self.counter.floor = before  # counted by formula instead
            self.counter.add(operations_of(A), A.dtype)
            self._add(self.decompositions, f"{routine} in {self._phase}", self._now() - began)
            return out

        return run

    def phases(self) -> dict[str, dict[str, float]]:
        """Seconds, operations, the floor at the rates, and its share, of every phase."""
        return {
            phase: {
                "seconds": seconds,
                "operations": self.operations[phase],
                "floor_seconds": self.floors[phase],
                "share_of_peak": self.floors[phase] / seconds if seconds > 0 else 0.0,
            }
            for phase, seconds in self.seconds.items()
        }

    def _now(self) -> float:
        record.synchronize(self.device)
        return record.clock() if self.device.type == "cpu" else time.perf_counter()

    @staticmethod
    def _add(sums: dict[str, float], name: str, value: float) -> None:
        sums[name] = sums.get(name, 0.0) + value


def _importers(routine: str) -> list[Any]:
    """Modules of the package that call the routine by name, its home excepted."""
    home = sys.modules["coec.linalg.decompose"]
    function = getattr(home, routine)
    return [
        module for name, module in list(sys.modules.items())
        if name.startswith("coec.") and module is not home
        and getattr(module, routine, None) is function
    ]  # fmt: skip
