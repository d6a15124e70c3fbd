"""The compensations with a closed form (METHODS §4)."""

from jaxtyping import Float
from torch import Tensor

from coec.compensation.objective import Reconstruction, kept_columns
from coec.errors import OptionError
from coec.linalg.spd import solve_right
from coec.types import Compensation, Gram, KeptSet


def none(weight: Float[Tensor, "m d"], gram: Gram, kept: KeptSet) -> Compensation:
    """Prune only: `W̃ = W₀[:, K]`.

    Source: Wanda-sp; the baseline of every comparison.
    """
    return Compensation(kept_columns(weight, kept))


def bias(weight: Float[Tensor, "m d"], gram: Gram, kept: KeptSet) -> Compensation:
    """The slice, plus the mean output of what is removed as a bias: `W₀[:, dropped] μ_dropped`.

    Source: FLAP (An et al. 2024).
    """
    dropped = kept.dropped()
    return Compensation(
        kept_columns(weight, kept), bias=weight[:, dropped] @ gram.mean[dropped].to(weight.dtype)
    )


def least_squares(
    weight: Float[Tensor, "m d"], gram: Gram, kept: KeptSet, *, ridge: float = 1e-2
) -> Compensation:
    """Ridge regression of the dense output on the kept inputs: `W̃ = Gyx (Gxx + λ I)⁻¹`.

    Source: ordinary ridge regression; the unconstrained refit the rotations are compared with.

    Args:
        ridge: λ relative to the mean diagonal of Gxx, at least 0; 0 gives the minimum-norm
            least-squares solution.
    """
    _check_ridge(ridge)
    problem = Reconstruction.of(weight, gram.xx, kept, gram.precision)
    return Compensation(solve_right(problem.Gyx, problem.Gxx, ridge, problem.precision))


def ridge_to_slice(
    weight: Float[Tensor, "m d"], gram: Gram, kept: KeptSet, *, ridge: float = 1e-2
) -> Compensation:
    """Ridge on the correction: `W̃ = W_K + (Gyx − W_K Gxx)(Gxx + λ I)⁻¹`.

    The penalty is on the distance to the slice, so on the calibration data it is never worse than
    no compensation, for any λ.

    Source: this project.

    Args:
        ridge: λ relative to the mean diagonal of Gxx, at least 0.
    """
    _check_ridge(ridge)
    problem = Reconstruction.of(weight, gram.xx, kept, gram.precision)
    W_K = kept_columns(weight, kept)
    residual = problem.Gyx - W_K @ problem.Gxx
    return Compensation(W_K + solve_right(residual, problem.Gxx, ridge, problem.precision))


def _check_ridge(ridge: float) -> None:
    if not 0 <= ridge < float("inf"):
        raise OptionError(f"ridge must be a number of at least 0, got {ridge}")
