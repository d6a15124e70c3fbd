"""The options of the compensations, one dataclass per method or family of methods."""

from dataclasses import dataclass
from typing import Literal

from coec.settings.fields import Settings, setting

Rotation = Literal["two-sided", "left", "right"]
Parameterization = Literal["stiefel", "full"]
Rescale = Literal["gcv", "fixed"]
Solver = Literal["joint", "gradient"]


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Options of a method."""

    def idle(self) -> dict[str, str]:
        """Options that have no effect next to the others, and why."""
        return {}


@dataclass(frozen=True, kw_only=True)
class CoecOptions(Options):
    """Options of COEC (docs/METHODS.md §5).

    Attributes:
        alpha: Gram tempering exponent in [0, 1]; 1 is off, 0 returns the slice.
        rotation: Factors that are rotated.
        parameterization: `stiefel` rotates the b×k frame, `full` all of O(k).
        rescale: Ridge of the modes' scales: chosen by generalised cross-validation (`gcv`), or the
            median mode energy (`fixed`).
        kappa: Largest factor, at least 1, between a mode's scale and the global one.
        solver: Solver of the right factor: `joint` (conjugate gradient, the left factor follows) or
            `gradient` (as published).
        lambda_a: Weight of the alignment penalty.
        r_p: Rank of the aligned subspaces, capped at the frame's.
    """

    alpha: float = setting(0.9, least=0, most=1)
    rotation: Rotation = setting("two-sided")
    parameterization: Parameterization = setting("stiefel")
    rescale: Rescale = setting("gcv")
    kappa: float = setting(10.0, least=1)
    solver: Solver = setting("joint")
    lambda_a: float = setting(50.0, least=0)
    r_p: int = setting(16, least=1)

    def idle(self) -> dict[str, str]:
        """Options that have no effect next to the others, and why."""
        if self.alpha == 0:
            return dict.fromkeys(self.record().keys() - {"alpha"}, "alpha = 0")
        idle: dict[str, str] = {}
        if self.lambda_a == 0:
            idle["r_p"] = "lambda_a = 0"
        if self.rotation == "left":
            idle |= dict.fromkeys(("solver", "parameterization"), "rotation = left")
        return idle


@dataclass(frozen=True, kw_only=True)
class RidgeOptions(Options):
    """Options of the ridge regressions (docs/METHODS.md §4).

    Attributes:
        ridge: λ relative to the mean diagonal of Gxx, at least 0; `auto` penalises every channel by
            its own energy, the less the more tokens there are.
    """

    ridge: float | Literal["auto"] = setting(1e-2, least=0)


COMPENSATION_OPTIONS: dict[str, type[Options]] = {
    "coec": CoecOptions,
    "least-squares": RidgeOptions,
    "ridge-to-slice": RidgeOptions,
}
"""The options of every compensation that has some."""
