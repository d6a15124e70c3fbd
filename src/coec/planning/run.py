"""A run, resolved once: everything that recipe, model and machine decide before any work."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from coec.allocation import Importances
from coec.devices import DTYPES, FreeMemory
from coec.models.dense import Dense
from coec.planning.compute import ComputeConfig
from coec.planning.plan import Plan
from coec.planning.recipe import Recipe
from coec.planning.room import check_room, within
from coec.settings import SolveDtypeName


@dataclass(frozen=True, eq=False)
class Run:
    """Resolved pruning: plans, device and dtypes.

    Attributes:
        candidates: the plans among which held-out windows choose, by name; mostly there is one.
        device: where to compute.
        forward: dtype of the forward passes.
        solve: dtype of the iterations of a compensation.
        written: dtype of the written weights.
    """

    candidates: Mapping[str, Plan]
    device: torch.device
    forward: torch.dtype
    solve: torch.dtype
    written: torch.dtype

    @classmethod
    def of(
        cls,
        dense: Dense,
        candidates: Mapping[str, Plan],
        device: torch.device,
        solve: torch.dtype,
        *,
        collected: bool = False,
    ) -> "Run":
        """Resolve a run.

        Args:
            dense: the model.
            candidates: as `Plan.candidates` makes them.
            device: where to compute.
            solve: dtype of the iterations of a compensation.
            collected: whether statistics are there already.

        Raises:
            OptionError: it does not fit the machine, or its dtypes do not go together.
        """
        name: SolveDtypeName = "float64" if solve == torch.float64 else "float32"
        candidates = {key: _solved_in(plan, name) for key, plan in candidates.items()}
        plan = next(iter(candidates.values()))
        compute = ComputeConfig.of(plan, device, dense.dtype, measured=collected)
        memory = FreeMemory.of(device)
        check_room(plan, within(plan, compute, memory), memory)
        return cls(candidates, device, compute.forward, DTYPES[name], compute.written)

    @property
    def plan(self) -> Plan:
        """The plan; the first of several candidates."""
        return next(iter(self.candidates.values()))

    @property
    def recipe(self) -> Recipe:
        """The recipe, its defaults filled in."""
        return self.plan.recipe

    def allocated(self, importances: Importances) -> "Run":
        """Return the run whose widths by block are decided by the importance of units."""
        plans = {name: plan.allocated(importances) for name, plan in self.candidates.items()}
        return replace(self, candidates=plans)

    def choosing(self, name: str) -> "Run":
        """Return the run with one of its candidates alone."""
        return replace(self, candidates={name: self.candidates[name]})

    def briefly(self) -> "Run":
        """Return the run with little reconstruction: enough to compare candidates."""
        plans = {name: plan.briefly() for name, plan in self.candidates.items()}
        return replace(self, candidates=plans)


def _solved_in(plan: Plan, name: SolveDtypeName) -> Plan:
    pruning = replace(plan.recipe.pruning, solve_dtype=name)
    return replace(plan, recipe=replace(plan.recipe, pruning=pruning))
