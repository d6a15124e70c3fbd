"""Eigenvalue, singular value and polar decompositions that survive a failing or hanging routine.

`eigh` and `svd` try a chain of routines and take the first finite answer; if it was not the first
routine's, an event says so. Calls on a CUDA device run under a time limit, since cuSOLVER has been
seen to hang on degenerate matrices (METHODS §5.7). There an SVD costs dozens of products of its
size, and the polar factor comes first: by QDWH, of matrix products and Cholesky factors alone.
"""

import functools
import math
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from coec.devices import is_finite
from coec.errors import NumericalError
from coec.events import record

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
    if not is_finite(A):
        raise NumericalError("a matrix to decompose holds NaN or Inf")
    failures: list[str] = []
    for name, routine in routines:
        try:
            factors = _run_within(time_limit, routine, A)
        except (RuntimeError, TimeoutError, np.linalg.LinAlgError, NumericalError) as error:
            failures.append(f"{name} failed ({str(error).splitlines()[0]})")
            continue
        if all(is_finite(factor) for factor in factors):
            if failures:
                record(f"{'; '.join(failures)}; used {name} instead")
            return factors
        failures.append(f"{name} returned NaN or Inf")
    raise NumericalError(f"no decomposition of a {tuple(A.shape)} matrix: {'; '.join(failures)}")


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


def rounding_level(values: Float[Tensor, " n"]) -> float:
    """The size below which entries of a spectrum cannot be told from rounding: √n · eps · max.

    Eigenvalues that are 0 come out at less than half of it (docs/lab/LOG.md). The bound of the
    worst case, n · eps, would take eigenvalues of 1/600 of the largest for rounding, in float32 at
    n = 14336.
    """
    if len(values) == 0:
        return 0.0
    largest = float(values.abs().max())
    return math.sqrt(len(values)) * torch.finfo(values.dtype).eps * largest


def symmetric(S: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """The symmetric part, `(S + Sᵀ)/2`."""
    return 0.5 * (S + S.T)


def polar(
    A: Float[Tensor, "m b"], nearest: Float[Tensor, "m b"] | None = None
) -> Float[Tensor, "m b"]:
    """`argmax ⟨U, A⟩ s.t. UᵀU = I`, which is `P Qᵀ` of the thin SVD `A = P Σ Qᵀ` (m ≥ b).

    If A is rank-deficient the maximiser is not unique: the one closest to `nearest` is returned, so
    that directions without information do not turn. On a CUDA device `qdwh` is tried first.

    Args:
        nearest: orthonormal columns; None leaves the choice to the SVD.
    """
    if nearest is not None and by_products(A):
        U = _near_polar(A, nearest)
        if U is not None:
            return U
    # A → thin SVD P Σ Qᵀ → P Qᵀ, unique where no singular value is rounding
    P, sigma, Qt = svd(A)
    informative = sigma > rounding_level(sigma)
    rank = int(informative.sum())
    if nearest is None or rank == len(sigma):
        return P @ Qt
    record("polar factor of a singular matrix: directions without information kept as they were")
    # Split off the null space: there the same problem is solved for `nearest` instead of A.
    P, Q = P[:, :rank], Qt[:rank].T
    null = Qt[rank:].T
    # In a basis of what P leaves, every factor is orthogonal to P, even where `nearest` lies in P.
    remainder = torch.linalg.qr(P, mode="complete").Q[:, rank:]
    return P @ Q.T + remainder @ polar(remainder.T @ nearest @ null) @ null.T


def _near_polar(
    A: Float[Tensor, "m b"], nearest: Float[Tensor, "m b"]
) -> Float[Tensor, "m b"] | None:
    """The polar factor of `A/‖A‖_F + ε · nearest` by products, or None where that is no use.

    ε, a hundredth of the root of the rounding unit, keeps directions without information where they
    were, and bounds the condition. The result is never worse for A than `nearest`:
    `⟨U, A⟩ + ε ‖A‖_F ⟨U, nearest⟩` is largest at U and `⟨U, nearest⟩` at `nearest`.
    """
    size = float(A.norm())
    if not size > 0:
        return nearest
    epsilon = 0.01 * math.sqrt(torch.finfo(A.dtype).eps)
    try:
        return qdwh(torch.add(A / size, nearest, alpha=epsilon), epsilon)
    except NumericalError as error:
        record(f"{error}: decomposed instead")
        return None


def qdwh(A: Float[Tensor, "m b"], smallest: float, iterations: int = 30) -> Float[Tensor, "m b"]:
    """The polar factor by the dynamically weighted Halley iteration: products and Cholesky only.

    `X ← (β/γ) X + (a − β/γ) X (I + γ XᵀX)⁻¹` with the weights of Nakatsukasa, Bai and Gygi (2010)
    for singular values in [l, 1]; about six steps. γ is capped so that the Cholesky factor keeps
    half the digits, which costs a step or two for the smallest singular values.

    Args:
        A: full rank, singular values at most about 1.
        smallest: an estimate of the smallest singular value; too large costs steps, no accuracy.
        iterations: at most so many steps.

    Raises:
        NumericalError: no convergence (A is singular).
    """
    eps = torch.finfo(A.dtype).eps
    eye = torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
    near = nearly_orthogonal(A.dtype, A.shape[1])
    # The floor under l is the cap on γ.
    X, lower = A, max(smallest, eps**0.45)
    for _ in range(iterations):
        a, beta, gamma = _halley_weights(min(lower, 1.0))
        square = X.T @ X
        if float((square - eye).norm()) <= near:
            # A Newton-Schulz step squares the remaining error.
            return torch.addmm(X, X, square, beta=1.5, alpha=-0.5)
        # X (I + γ XᵀX)⁻¹ by Cholesky; the matrix has no eigenvalue below 1.
        L, info = torch.linalg.cholesky_ex(eye + gamma * square)
        if int(info) != 0:
            break
        solved = torch.cholesky_solve(X.T, L).T
        X = (beta / gamma) * X + (a - beta / gamma) * solved
        # Singular values move as x (a + β x²)/(1 + γ x²); so does their lower bound.
        lower = lower * (a + beta * lower**2) / (1 + gamma * lower**2)
    raise NumericalError("the polar iteration did not converge")


def nearly_orthogonal(dtype: torch.dtype, columns: int) -> float:
    """Return the `‖XᵀX − I‖_F` from which one Newton-Schulz step makes X orthonormal to rounding.

    Rounding alone leaves 3 eps √columns, which in float32 is more than √eps/10 from 8,000 columns
    on: the bound is at least 8 eps √columns.
    """
    eps = torch.finfo(dtype).eps
    return max(0.1 * math.sqrt(eps), 8 * eps * math.sqrt(columns))


def _halley_weights(lower: float) -> tuple[float, float, float]:
    """(a, β, γ) that are optimal for singular values in [lower, 1]; (3, 1, 3) at 1."""
    square = lower * lower
    d = (4 * (1 - square) / square**2) ** (1 / 3)
    a = math.sqrt(1 + d) + 0.5 * math.sqrt(
        8 - 4 * d + 8 * (2 - square) / (square * math.sqrt(1 + d))
    )
    beta = (a - 1) ** 2 / 4
    return a, beta, a + beta - 1


def svd_by_polar(
    A: Float[Tensor, "m n"],
) -> tuple[Float[Tensor, "m r"], Float[Tensor, " r"], Float[Tensor, "r n"]]:
    """The thin SVD of a full-rank matrix: `A = U_p H`, `H = V diag(s) Vᵀ`, so `U = U_p V`.

    At the price of a symmetric eigenproblem of the smaller side (Higham and Papadimitriou 1994).
    Frames are orthonormal to rounding; `U diag(s) Vᵀ` is A to 1e-9 of its norm in float64 and 1e-4
    in float32, at any condition, since `qdwh` caps its weights.

    Raises:
        NumericalError: A is singular.
    """
    if A.shape[0] < A.shape[1]:
        V, s, Ut = svd_by_polar(A.T)
        return Ut.T, s, V.T
    size = float(A.norm())
    if not size > 0:
        raise NumericalError("the polar factor of a zero matrix is not unique")
    # A → polar factor U_p → H = U_pᵀ A, symmetric up to rounding → its eigenvectors V, s ascending
    U = qdwh(A / size, 0.0)
    s, V = torch.linalg.eigh(symmetric(U.T @ A))
    return U @ V.flip(1), s.flip(0).clamp_min(0), V.flip(1).T
