"""What every compensation minimises: the relative reconstruction error over the kept inputs."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from coec.types import KeptSet


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """`𝓛(W) = (⟨W, W Gxx⟩ − 2 ⟨W, Gyx⟩ + yy) / yy` (METHODS §4).

    Attributes:
        Gxx: `G[K, K]`.
        Gyx: `W₀ G[:, K]`.
        yy: `tr(W₀ G W₀ᵀ) = ‖Y‖_F²`.
    """

    Gxx: Float[Tensor, "k k"]
    Gyx: Float[Tensor, "m k"]
    yy: float

    @classmethod
    def of(
        cls, weight: Float[Tensor, "m d"], G: Float[Tensor, "d d"], kept: KeptSet
    ) -> "Reconstruction":
        """The problem of replacing `weight` by its kept columns under the second moment G."""
        K = kept.kept
        WG = weight @ G
        return cls(G[K][:, K], WG[:, K], float((WG * weight).sum()))

    def error(self, W: Float[Tensor, "m k"]) -> float:
        """`𝓛(W)`; 0 when the dense output is itself 0 on the calibration data."""
        if not self.yy > 0:
            return 0.0
        quadratic = float((W @ self.Gxx * W).sum())
        return (quadratic - 2 * float((W * self.Gyx).sum()) + self.yy) / self.yy


def kept_columns(weight: Float[Tensor, "m d"], kept: KeptSet) -> Float[Tensor, "m k"]:
    """`W_K = W₀[:, K]`, the uncompensated slice."""
    return torch.index_select(weight, 1, kept.kept)
