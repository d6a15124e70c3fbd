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
        rotation: Which side turns; `better` runs left and right alone and keeps what ends lower.
        parameterization: `stiefel` turns the b×k frame, `full` the whole of O(k).
        start: Of every right solve: where the frame is, or the one-sided Procrustes solution.
        slices: Contiguous groups of output rows, each compensated on its own.
        rescale: `gcv`, `fixed` (λ = rescale_ridge × median mode energy) or `uniform` (one scale).
        rescale_ridge: For `rescale = "fixed"`.
        kappa: The band of a mode around the global scale, at least 1.
        solver: `joint` (conjugate gradient, the left factor following), `conjugate` (the left
            factor held) or `gradient` (the source's).
        retraction: Of `gradient`: `auto` (Cayley for square frames, polar for others) or `polar`.
        delta: `gradient` stops when the rotation changes by less.
        precision: `joint` and `conjugate` stop when a step lowers the objective by a smaller
            fraction.
        iterations: At most so many steps in one right solve.
        rounds: At most so many rounds.
        tol: Stop when a round changes the objective, relative to `‖Y‖²`, by less.
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
