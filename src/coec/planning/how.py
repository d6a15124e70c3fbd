"""Where and in what a run is done."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from coec.devices import DTYPES, choose_forward_dtype, choose_solve_dtype, stored_dtype
from coec.planning.machines import Machine
from coec.streaming.self_text import GROUP

if TYPE_CHECKING:
    from coec.planning.plan import Plan


@dataclass(frozen=True)
class ComputeConfig:
    """Where and in what a run is done.

    Attributes:
        device: cpu or cuda.
        stored, forward, written: dtypes of the dense weights, of the dense pass, of the result.
        solve: that of the compensation.
        measured: there are statistics already, and no text is run.
        at_once: windows that the model writes together, where it writes any.
    """

    device: str
    stored: torch.dtype
    forward: torch.dtype
    written: torch.dtype
    solve: torch.dtype
    measured: bool = False
    at_once: int = GROUP

    @classmethod
    def of(
        cls,
        plan: "Plan",
        device: torch.device,
        stored: torch.dtype | None = None,
        *,
        measured: bool = False,
        machine: Machine | None = None,
    ) -> "ComputeConfig":
        """As a run of a plan would be done on a device.

        Args:
            plan: what is asked for.
            device: where.
            stored: the dtype of the weights; None for what the configuration says.
            measured: whether statistics are given.
            machine: where that is not here: its data sheet decides what this device would.
        """
        pruning = plan.recipe.pruning
        stored = stored_dtype(plan.output.config) if stored is None else stored
        return cls(
            device.type,
            stored,
            choose_forward_dtype(plan.recipe.calibration.forward_dtype, stored, device),
            DTYPES[pruning.dtype] if pruning.dtype else stored,
            choose_solve_dtype(pruning.solve_dtype, device)
            if machine is None
            else machine.solve_dtype(pruning.solve_dtype),
            measured,
        )

    @property
    def passes(self) -> str:
        """The forward dtype, by name."""
        return str(self.forward).removeprefix("torch.")

    @property
    def solves(self) -> str:
        """The dtype of the compensation, by name."""
        return str(self.solve).removeprefix("torch.")
