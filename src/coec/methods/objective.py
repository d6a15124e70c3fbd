"""The objective of every compensation: the relative reconstruction error over the kept inputs."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from coec.errors import NumericalError
from coec.linalg.spd import power_of_two, root
from coec.types import Gram, KeptSet, SiteProblem, SiteResult

RISE = 1e-6
"""How much larger, relatively, an error must be to be called larger."""

ROUNDING = 16
"""A relative error is a difference of numbers of size 1: known to so many eps of its dtype."""


@dataclass(frozen=True, eq=False)
class OutputProblem:
    """`𝓛(W) = (⟨W, W Gxx⟩ − 2 ⟨W, Gyx⟩ + yy) / yy` (METHODS §4).

    Attributes:
        Gxx: `G[K, K]`.
        Gyx: `T G[:, K]`, T the map to the wanted outputs (`SiteProblem.weight`), W₀ on the inputs
            of the dense model.
        yy: `tr(T G Tᵀ) = ‖Y‖_F²`.
        precision: of the entries of Gxx, see `coec.linalg.spd.noise`.
    """

    Gxx: Float[Tensor, "k k"]
    Gyx: Float[Tensor, "m k"]
    yy: float
    precision: float = 0.0

    @classmethod
    def of(
        cls,
        aim: Float[Tensor, "m d"],
        G: Float[Tensor, "d d"],
        kept: KeptSet,
        precision: float = 0.0,
    ) -> "OutputProblem":
        """Return the problem of giving `T x` from the kept columns, under the second moment G."""
        K = kept.indices
        TG = aim @ G
        return cls(G[K][:, K], TG[:, K], float((TG * aim).sum(dim=1).sum()), precision)

    @classmethod
    def of_site(cls, problem: SiteProblem) -> "OutputProblem":
        """Return the problem of one site, under its raw second moment."""
        return cls.of(problem.weight, problem.gram.xx, problem.kept, problem.gram.precision)

    @classmethod
    def tempered(
        cls,
        aim: Float[Tensor, "m d"],
        G: Float[Tensor, "d d"],
        kept: KeptSet,
        alpha: float,
        precision: float = 0.0,
    ) -> "OutputProblem":
        """Return the problem under `(G/u)^α = F Fᵀ`, which is not formed itself.

        The unit u, a power of two about the largest channel energy, keeps every number moderate.
        Directions of G that are noise are left out of F.
        """
        unit = power_of_two(G.diagonal())
        F = root(G, alpha, unit, precision)
        if F is None:
            plain = cls.of(aim, G, kept)
            return cls(plain.Gxx / unit, plain.Gyx / unit, plain.yy / unit, precision)
        # F, d×d → F_K and T F → Gxx = F_K F_Kᵀ, Gyx = T F F_Kᵀ; G^α itself is never formed
        F_K, TF = F[kept.indices], aim @ F
        del F
        return cls(F_K @ F_K.T, TF @ F_K.T, float(TF.square().sum(dim=1).sum()))

    def error(self, W: Float[Tensor, "m k"]) -> float:
        """`𝓛(W)`; 0 if the wanted outputs are 0 on the calibration data."""
        yy = self.yy
        if not yy > 0:
            return 0.0
        quadratic = float((W @ self.Gxx * W).sum())
        return (quadratic - 2 * float((W * self.Gyx).sum()) + yy) / yy


def relative_errors(
    weight: Float[Tensor, "m d"],
    gram: Gram,
    kept: KeptSet,
    result: SiteResult,
    *,
    target: Float[Tensor, "m d"] | None = None,
) -> tuple[float, float]:
    """`𝓛` of the slice and of a compensation, bias included, on any statistics (METHODS §4).

    `𝓛(W) = tr(Δ G Δᵀ) / yy`, `Δ = T − W̃`, W̃ holding W at the kept columns and 0 elsewhere: one
    quadratic form. Unlike `OutputProblem.error` it is no difference of numbers of the size of yy,
    so small errors keep their digits. Nothing of the size of G is formed.

    Args:
        target: T, if it is not the weight (`SiteProblem.weight`).
    """
    aim = weight if target is None else target
    yy = output_energy(aim, gram.xx)
    if not math.isfinite(yy):
        raise NumericalError("the energy of the dense output overflows: solve in float64")

    def error(W: Float[Tensor, "m k"]) -> float:
        # Δ = T − W̃, with columns of T outside K → tr(Δ G Δᵀ), below 0 by rounding alone
        lost = aim.index_add(1, kept.indices, W, alpha=-1)
        return max(output_energy(lost, gram.xx), 0.0) / yy if yy > 0 else 0.0

    before, after = error(kept_columns(weight, kept)), error(result.weight)
    if result.bias is not None and yy > 0:
        # ‖Y − W̃X − b 1ᵀ‖² = ‖Y − W̃X‖² − 2 bᵀ Σ (T x − W̃ x_K) + N ‖b‖²
        residual = aim @ gram.x - result.weight @ gram.x[kept.indices]
        after += float(result.bias @ (gram.tokens * result.bias - 2 * residual)) / yy
    return before, max(after, 0.0)  # below 0 by rounding alone


def output_energy(W: Float[Tensor, "m d"], G: Float[Tensor, "d d"]) -> float:
    """`tr(W G Wᵀ) = ‖W X‖_F²`."""
    return float((W @ G).mul_(W).sum())


def rounding(dtype: torch.dtype) -> float:
    """Return how far a relative error may be off by rounding alone."""
    return ROUNDING * torch.finfo(dtype).eps


def above(error: float, bound: float, dtype: torch.dtype) -> bool:
    """Return whether an error or objective exceeds another by more than rounding and `RISE`."""
    return error > bound * (1 + RISE) + rounding(dtype)


def kept_columns(weight: Float[Tensor, "m d"], kept: KeptSet) -> Float[Tensor, "m k"]:
    """`W_K = W₀[:, K]`, the uncompensated slice."""
    return torch.index_select(weight, 1, kept.indices)
