"""The options of the compensations, one dataclass per method or family of methods."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from coec.errors import OptionError
from coec.settings.fields import Settings, setting

Rotation = Literal["two-sided", "left", "right", "better"]
Parameterization = Literal["stiefel", "full"]
Start = Literal["identity", "procrustes"]
Rescale = Literal["gcv", "fixed", "uniform"]
Solver = Literal["joint", "conjugate", "gradient"]
Retraction = Literal["auto", "polar"]

OF_THE_RIGHT_SOLVE = (
    "solver", "parameterization", "start", "retraction", "delta", "precision", "iterations",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The options of a method."""

    def idle(self) -> dict[str, str]:
        """Options that have no effect beside the others, and why."""
        return {}

    def check_parts(self, parts: Collection[str]) -> None:
        """Raises OptionError where the options do not go with these parts of a problem."""


@dataclass(frozen=True, kw_only=True)
class CoecOptions(Options):
    """Options of COEC (docs/METHODS.md §5).

    Attributes:
        alpha: Gram tempering exponent in [0, 1]; 1 is off, 0 returns the slice.
        rotation: Factors that are rotated; `better` rotates left and right separately and keeps the
            result of lower objective.
        parameterization: `stiefel` rotates the b×k frame, `full` all of O(k).
        start: Where every right solve starts: the current frame (`identity`) or the one-sided
            Procrustes solution.
        slices: Contiguous groups of output rows, each compensated on its own.
        rescale: Scales of the modes: by generalised cross-validation (`gcv`), by a `fixed` ridge,
            or one scale for all (`uniform`).
        rescale_ridge: Ridge of `rescale = fixed`, relative to the median mode energy.
        kappa: Largest factor, at least 1, between a mode's scale and the global one.
        solver: Solver of the right factor: `joint` (conjugate gradient, the left factor following),
            `conjugate` (the left factor fixed) or `gradient` (as published).
        retraction: Retraction of `gradient`: `auto` (Cayley for square frames, polar for others) or
            `polar`.
        delta: Change of the rotation below which `gradient` stops.
        precision: Relative decrease of the objective in a step, below which `joint` and `conjugate`
            stop.
        iterations: Largest number of steps in one right solve.
        rounds: Largest number of rounds.
        tol: Change of the objective in a round, relative to `‖Y‖²`, below which the rounds stop.
        lambda_a: Weight of the alignment penalty.
        r_p: Rank of the aligned subspaces, capped at the frame's.
    """

    alpha: float = setting(0.9, least=0, most=1)
    rotation: Rotation = setting("two-sided")
    parameterization: Parameterization = setting("stiefel")
    start: Start = setting("identity")
    slices: int = setting(1, least=1)
    rescale: Rescale = setting("gcv")
    rescale_ridge: float = setting(1.0, least=0)
    kappa: float = setting(10.0, least=1)
    solver: Solver = setting("joint")
    retraction: Retraction = setting("auto")
    delta: float = setting(7e-4, least=0)
    precision: float = setting(1e-4, least=0)
    iterations: int = setting(200, least=1)
    rounds: int = setting(50, least=0)
    tol: float = setting(1e-4, least=0)
    lambda_a: float = setting(50.0, least=0)
    r_p: int = setting(16, least=1)

    def idle(self) -> dict[str, str]:
        """Options that have no effect beside the others, and why."""
        if self.alpha == 0:
            return dict.fromkeys(self.record().keys() - {"alpha"}, "alpha = 0")
        idle: dict[str, str] = {}
        if self.lambda_a == 0:
            idle["r_p"] = "lambda_a = 0"
        if self.rescale != "fixed":
            idle["rescale_ridge"] = f"rescale = {self.rescale}"
        if self.rescale == "uniform":
            idle["kappa"] = "rescale = uniform"
        if self.solver == "gradient":
            idle["precision"] = "solver = gradient"
        else:
            idle |= dict.fromkeys(("delta", "retraction"), f"solver = {self.solver}")
        if self.rotation == "left":
            idle |= dict.fromkeys(OF_THE_RIGHT_SOLVE, "rotation = left")
        if self.rounds == 0:
            idle |= dict.fromkeys([*OF_THE_RIGHT_SOLVE, "tol"], "rounds = 0")
        return idle

    def check_parts(self, parts: Collection[str]) -> None:
        """The alignment penalty, on where there is a value projection, is on one frame."""
        if self.slices > 1 and "value" in parts and self.lambda_a > 0:
            raise OptionError(
                f"slices = {self.slices} does not go with alignment (lambda_a = {self.lambda_a:g}):"
                " its penalty is on the frame of the whole matrix, which slices do not have; set "
                "lambda_a = 0 to rotate slices, or leave slices out"
            )


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
