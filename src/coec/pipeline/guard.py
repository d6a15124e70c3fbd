"""Hold a compensation to validation windows where tokens are few, and to the slice (METHODS §4)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from coec.compensation import relative_errors
from coec.compensation.objective import above, kept_columns
from coec.compensation.shrinkage import best_share, drawn_back, enough, few
from coec.events import record
from coec.types import Gram, KeptSet, SiteResult

TRUSTED = 2
"""Tokens per kept column from which an expert's compensation stands without a validation window."""


@dataclass(frozen=True, eq=False)
class Guard:
    """Statistics that check the compensation of one site; all tensors are float64, on one device.

    Attributes:
        weight: `W₀`.
        kept: the kept columns.
        gram: the statistics that the compensation is fitted on.
        validation: statistics of validation windows; None where there are none.
        target, validation_target: the weight whose outputs are the aim on either, where it is not
            W₀ (`SiteProblem.aim`).
    """

    weight: Float[Tensor, "m d"]
    kept: KeptSet
    gram: Gram
    validation: Gram | None = None
    target: Float[Tensor, "m d"] | None = None
    validation_target: Float[Tensor, "m d"] | None = None

    @property
    def trust(self) -> float:
        """Share of an expert's compensation that its number of tokens alone allows, from 0 to 1."""
        return min(self.gram.tokens / (TRUSTED * len(self.kept.indices)), 1.0)

    @property
    def few(self) -> bool:
        """True where there are fewer than `FEW` tokens for every kept column."""
        return few(self.gram.tokens, len(self.kept.indices))

    def guarded(
        self, result: SiteResult, tried: Callable[[], SiteResult], *, untried: float, windows: int
    ) -> SiteResult:
        """Return a compensation from few tokens, drawn back to the slice by its validation error.

        Args:
            result: the compensation.
            tried: returns the compensation that is tried on the validation windows, fitted without
                them.
            untried: share of the compensation that is followed where there are none.
            windows: number of calibration windows.
        """
        errors: dict[str, float] = {}
        if self.validation is not None:
            validation = self.validation, self.validation_target
            # θ is found for a compensation that did not see the validation windows.
            share = best_share(self.weight, self.kept, tried(), *validation)
            errors = {"holdout_before": share.before, "holdout_after": share.after}
            value, by = share.value, "by its validation error"
        else:
            value, by = untried, "without validation windows"
        diagnostics = {**result.diagnostics, **errors, "followed": value}
        if value < 1:
            record(
                f"few tokens: the compensation is shrunk towards plain slicing, {by}; "
                f"use {enough(windows, self.gram.tokens, self.kept.size)} windows or more"
            )
            result = drawn_back(self.weight, self.kept, result, value)
        return replace(result, diagnostics=diagnostics)

    def with_validation_errors(self, result: SiteResult) -> SiteResult:
        """Return the compensation with the slice's and its own validation error."""
        if self.validation is None:
            return result
        before, after = relative_errors(
            self.weight, self.validation, self.kept, result, target=self.validation_target
        )
        errors = {"holdout_before": before, "holdout_after": after}
        return replace(result, diagnostics={**result.diagnostics, **errors})

    def as_written(self, result: SiteResult, dtype: torch.dtype, *, checked: bool) -> SiteResult:
        """Return the compensation with the slice's and its own error, of weights as written.

        Where it is `checked`, the slice replaces a compensation whose error lies above the slice's.
        """

        def rounded(tensor: Tensor) -> Tensor:
            return tensor.to(dtype).to(self.weight)

        # Errors of what will be read: the slice and the compensation, both in the output dtype.
        W = rounded(result.weight)
        if not torch.isfinite(W).all():  # refused where it is cast
            return result
        bias = None if result.bias is None else rounded(result.bias)
        aim = self.weight if self.target is None else self.target
        before, after = relative_errors(
            rounded(self.weight), self.gram, self.kept, SiteResult(W, bias), target=aim
        )
        if checked and above(after, before, torch.float64):
            record(f"the relative error lies above the slice's once it is {dtype}: slice kept")
            slice_ = kept_columns(self.weight, self.kept)
            result, after = replace(result, weight=slice_, bias=None), before
            # The slice is θ = 0: its validation error is the one before.
            sliced = {"followed": 0.0, "holdout_after": result.diagnostics.get("holdout_before")}
            sliced = {name: value for name, value in sliced.items() if name in result.diagnostics}
            result = replace(result, diagnostics={**result.diagnostics, **sliced})
        errors = {"error_before": before, "error_after": after}
        return replace(result, diagnostics={**result.diagnostics, **errors})
