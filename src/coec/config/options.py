"""The options of the compensations: one class for each method or family of methods."""

from typing import Literal

from pydantic import NonNegativeFloat

from coec.config.settings import Settings, setting


class Options(Settings):
    """Options of a method."""

    def idle(self) -> dict[str, str]:
        """Return options that have no effect with the others, and why."""
        return {}


class CoecOptions(Options):
    """Options of COEC (docs/METHODS.md §5)."""

    alpha: float = setting(0.9, ge=0, le=1)
    """Gram tempering exponent in [0, 1]; 1 is off, 0 returns the slice."""
    rotation: Literal["two-sided", "left", "right"] = "two-sided"
    """Factors that are rotated."""
    parameterization: Literal["stiefel", "full"] = "stiefel"
    """`stiefel` rotates the b×k frame, `full` all of O(k)."""
    rescale: Literal["gcv", "fixed"] = "gcv"
    """Ridge of the modes' scales: chosen by generalised cross-validation (`gcv`), or the median
    mode energy (`fixed`)."""
    kappa: float = setting(10.0, ge=1)
    """Largest factor, at least 1, between a mode's scale and the global one."""
    solver: Literal["joint", "gradient"] = "joint"
    """Solver of the right factor: `joint` (conjugate gradient, the left factor following) or
    `gradient` (as published)."""
    lambda_a: float = setting(50.0, ge=0)
    """Weight of the alignment penalty."""
    r_p: int = setting(16, ge=1)
    """Rank of the aligned subspaces, capped at the frame's."""

    def idle(self) -> dict[str, str]:
        """Return options that have no effect with the others, and why."""
        if self.alpha == 0:
            return dict.fromkeys(type(self).model_fields.keys() - {"alpha"}, "alpha = 0")
        idle = {"r_p": "lambda_a = 0"} if self.lambda_a == 0 else {}
        if self.rotation == "left":
            idle |= dict.fromkeys(("solver", "parameterization"), "rotation = left")
        return idle


class RidgeOptions(Options):
    """Options of the ridge regressions (docs/METHODS.md §4)."""

    ridge: NonNegativeFloat | Literal["auto"] = 1e-2
    """λ relative to the mean diagonal of Gxx, at least 0; `auto` penalises every channel by its own
    energy, the less the more tokens there are."""


OPTIONS_OF: dict[str, type[Options]] = {
    "coec": CoecOptions, "least-squares": RidgeOptions, "ridge-to-slice": RidgeOptions,
}  # fmt: skip
"""Options of every compensation that has some."""
