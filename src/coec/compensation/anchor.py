"""The fixed part of the alignment penalty: what the value projection writes (METHODS §5.6)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from coec.compensation.frame import Frame, RotationTarget
from coec.errors import OptionError
from coec.linalg.alignment import Alignment
from coec.linalg.decompose import eigh, svd
from coec.linalg.products import power_of_two
from coec.linalg.spd import rounding_level
from coec.settings import CoecOptions
from coec.types import KeptSet


@dataclass(frozen=True, eq=False)
class Anchor:
    """The writer's frame and the anchor seen through it, in the channels' own basis.

    Attributes:
        writer: `U_v`, the leading left singular vectors of the pruned value projection, no more
            than its rank: those beyond are rounding, and any would do.
        target: `U_vᵀ Π_anchor U_v`, `Π_anchor = V Vᵀ`, `V = orth(V_full[K, :r_p])` with `V_full`
            the right singular vectors of the unpruned consumer, likewise.
        weight: `λ_a`.
        r_p: how many leading rows of the frame are aligned.
    """

    writer: Float[Tensor, "k r"]
    target: Float[Tensor, "r r"]
    weight: float
    r_p: int

    @classmethod
    def of(
        cls,
        weight: Float[Tensor, "m d"],
        value_weight: Float[Tensor, "k h"],
        kept: KeptSet,
        options: CoecOptions,
    ) -> "Anchor":
        """Build the anchor from the unpruned consumer and the pruned value projection."""
        k = len(kept.indices)
        if value_weight.shape[0] != k:
            raise OptionError(
                f"value_weight needs one row per kept column ({k}), got {value_weight.shape[0]}: "
                "repeat its rows per query head, in the consumer's column order"
            )
        # W_v, k×h → U_v, its leading left singular vectors
        U_v = _leading_left(value_weight, options.r_p)
        # W₀, m×d → V_full, its leading right singular vectors → V = orth(V_full[K]) → U_vᵀ V Vᵀ U_v
        V_full = _leading_left(weight.T, options.r_p)
        V = _leading_left(V_full[kept.indices], options.r_p)
        overlap = U_v.T @ V
        return cls(U_v, overlap @ overlap.T, options.lambda_a, options.r_p)

    def alignment(self, frame: Frame, target: RotationTarget) -> Alignment:
        """Return the penalty on the rows of the frame that lead now, in the dtype of the target."""
        # R is in the eigenbasis E of Gxx, and so must the writer be: U_v → Eᵀ U_v.
        rows, basis = frame.leading(self.r_p), target.basis
        return Alignment(basis.T @ self.writer.to(basis), self.target.to(basis), rows, self.weight)


def _leading_left(A: Float[Tensor, "m n"], count: int) -> Float[Tensor, "m r"]:
    """Left singular vectors, descending: as many as the rank, and at most so many.

    Eigenvectors of `A Aᵀ` cost a third to a half of an SVD, and exist where query heads repeat the
    rows of A, which the polar iteration of a GPU's SVD cannot divide by. Squaring halves the digits
    of small singular values: the SVD is for those, and for tall matrices, of which it is cheap.
    """
    if A.shape[0] <= A.shape[1]:
        unit = A / power_of_two(A)
        squares, Q = eigh(unit @ unit.T)
        s = squares.clamp_min(0).sqrt().flip(0)[:count]
        if float(s[-1]) > torch.finfo(A.dtype).eps ** 0.25 * float(s[0]):
            return Q.flip(1)[:, :count]
    U, s, _ = svd(A)
    return U[:, s > rounding_level(s)][:, :count]
