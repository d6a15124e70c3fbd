"""Eigenvalue and singular value decompositions that survive a failing or hanging routine.

Each function tries a chain of routines and takes the first finite answer; when it was not the
first routine's, an event says so. Calls on a CUDA device run under a time limit, since cuSOLVER
has been seen to hang on degenerate matrices (METHODS §5.7).
"""

import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.events import record
from coec.linalg.qdwh import svd_by_polar

Routine = Callable[[Tensor], tuple[Tensor, ...]]

GPU_TIME_LIMIT = 600.0
"""Seconds a decomposition on a CUDA device may take before the next routine is tried."""


def eigh(A: Float[Tensor, "n n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
    """Eigenvalues (ascending) and eigenvectors (columns) of a symmetric matrix.

    Raises:
        NumericalError: A is not finite, or every routine failed.
    """
    routines: list[tuple[str, Routine]] = [
        ("eigh", torch.linalg.eigh),
        ("eigh on the CPU in float64", _on_cpu(torch.linalg.eigh)),
        ("numpy eigh", _on_cpu(_numpy_eigh)),
    ]
    mu, Q = _first_success(routines, A, _limit(A))
    return mu, Q


def svd(
    A: Float[Tensor, "m n"],
) -> tuple[Float[Tensor, "m r"], Float[Tensor, " r"], Float[Tensor, "r n"]]:
    """The thin singular value decomposition `A = U diag(s) Vᵀ`, s descending.

    Raises:
        NumericalError: A is not finite, or every routine failed.
    """
    # Fastest first; then a second driver, which only CUDA has.
    gesdd = functools.partial(torch.linalg.svd, full_matrices=False)
    routines: list[tuple[str, Routine]] = [("gesdd", gesdd)]
    if by_products(A):
        routines = [("polar and eigh", svd_by_polar), *routines]
    if A.is_cuda:
        routines.append(("gesvd", functools.partial(gesdd, driver="gesvd")))
    routines.append(("gesdd on the CPU in float64", _on_cpu(gesdd)))
    routines.append(("numpy svd of the transpose", _on_cpu(_numpy_svd_of_transpose)))
    U, s, Vt = _first_success(routines, A, _limit(A))
    return U, s, Vt


def by_products(A: Tensor) -> bool:
    """True where an SVD costs dozens of products of its size: on a CUDA device."""
    return A.is_cuda


def _numpy_eigh(A: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(factor) for factor in np.linalg.eigh(A.numpy()))


def _numpy_svd_of_transpose(A: Tensor) -> tuple[Tensor, ...]:
    V, s, Ut = np.linalg.svd(A.numpy().T, full_matrices=False)
    return tuple(torch.from_numpy(np.ascontiguousarray(factor)) for factor in (Ut.T, s, V.T))


def _on_cpu(routine: Callable[[Tensor], Sequence[Tensor]]) -> Routine:
    def run(A: Tensor) -> tuple[Tensor, ...]:
        return tuple(factor.to(A) for factor in routine(A.double().cpu()))

    return run


def _limit(A: Tensor) -> float | None:
    return GPU_TIME_LIMIT if A.is_cuda else None


def _first_success(
    routines: Sequence[tuple[str, Routine]], A: Tensor, time_limit: float | None
) -> tuple[Tensor, ...]:
    if not _is_finite(A):
        raise NumericalError("a matrix to decompose holds NaN or Inf")
    failures: list[str] = []
    for name, routine in routines:
        try:
            factors = _run_within(time_limit, routine, A)
        except (RuntimeError, TimeoutError, np.linalg.LinAlgError, NumericalError) as error:
            failures.append(f"{name} failed ({str(error).splitlines()[0]})")
            continue
        if all(_is_finite(factor) for factor in factors):
            if failures:
                record(f"{'; '.join(failures)}; used {name} instead")
            return factors
        failures.append(f"{name} returned NaN or Inf")
    raise NumericalError(f"no decomposition of a {tuple(A.shape)} matrix: {'; '.join(failures)}")


def _is_finite(A: Tensor) -> bool:
    """Return whether all entries are finite; extremes propagate NaN, without a matrix of flags."""
    return A.numel() == 0 or all(bool(torch.isfinite(value)) for value in A.aminmax())


def _run_within(time_limit: float | None, routine: Routine, A: Tensor) -> tuple[Tensor, ...]:
    """Call `routine(A)`; past `time_limit` seconds it is abandoned and TimeoutError raised."""
    if time_limit is None:
        return routine(A)
    outcome: list[tuple[Tensor, ...] | BaseException] = []

    def work() -> None:
        try:
            outcome.append(routine(A))
        except BaseException as error:  # handed over to the waiting thread, which raises it
            outcome.append(error)

    # A daemon: a routine that hangs for ever must not keep the process from ending.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(time_limit)
    if not outcome:
        raise TimeoutError(f"no answer in {time_limit:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
