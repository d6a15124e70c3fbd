"""Device and dtypes of a run."""

from dataclasses import dataclass

import torch

from coec.devices import DTYPES, choose_forward_dtype, choose_solve_dtype, stored_dtype
from coec.planning.machines import Machine
from coec.planning.sizes import PlanSizes
from coec.streaming.self_text import GROUP


@dataclass(frozen=True)
class ComputeConfig:
    """Device and dtypes of a run; they change its result by rounding only.

    Attributes:
        device: cpu or cuda.
        stored, forward, written: dtypes of the dense weights, of the dense pass, of the result.
        solve: dtype of the compensation's iterations.
        measured: True where statistics are given, and no text is run.
        at_once: number of windows that the model samples together.
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
        plan: PlanSizes,
        device: torch.device,
        stored: torch.dtype | None = None,
        *,
        measured: bool = False,
        machine: Machine | None = None,
    ) -> "ComputeConfig":
        """Resolve the dtypes that a run of a plan has on a device.

        Args:
            plan: sizes and settings.
            device: where the run is computed.
            stored: dtype of the dense weights; None for that in the configuration.
            measured: statistics are given.
            machine: a GPU that is not here; its data sheet then decides `solve`.
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
    def forward_name(self) -> str:
        """Name of the forward dtype."""
        return str(self.forward).removeprefix("torch.")

    @property
    def solve_name(self) -> str:
        """Name of the compensation's dtype."""
        return str(self.solve).removeprefix("torch.")
