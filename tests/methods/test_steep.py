"""Descents in float32 where the Gram is steep: as good as in float64, or done in float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import coec
import problems
from coec.methods import relative_errors
from coec.types import Gram, KeptSet, SiteResult

pytestmark = pytest.mark.unchecked  # whole solves

CHANNELS, OUTPUTS, KEPT, VALUES = 96, 48, 67, 16
LARGE = [3, 40]


@dataclass(frozen=True, eq=False)
class Problem:
    """One matrix to compensate."""

    weight: Tensor
    gram: Gram
    kept: Tensor
    value: Tensor | None = None

    def solved(self, dtype):
        """The true error of one solve, and its diagnostics."""
        result = coec.compensate(
            self.weight, self.gram, self.kept, value_weight=self.value, solve_dtype=dtype
        )
        return self.error(SiteResult(result.weight.double())), result.diagnostics

    def error(self, result):
        return relative_errors(self.weight, self.gram, KeptSet(self.kept, CHANNELS), result)[1]

    def check(self):
        """In float32 it is as good as in float64, or the slice, and an event says so."""
        (wide, _), (narrow, diagnostics) = map(self.solved, (torch.float64, torch.float32))
        slice_ = self.error(SiteResult(self.weight[:, self.kept]))
        is_slice = narrow == slice_ and diagnostics["events"]
        assert narrow <= 1.05 * wide + 1e-13 or is_slice, (narrow, wide)
        assert min(*diagnostics.get("errors_per_round", []), diagnostics["error_after"], 0) > -1e-5


def problem(large=1e3, power=0.5, tokens=6, aligned=False, compensated=True):
    """Two channels much larger than the others, their weights as much smaller, as in models."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = torch.arange(1, CHANNELS + 1, dtype=torch.float64) ** (-power / 2)
    X = scales[:, None] * normal(CHANNELS, tokens * CHANNELS)
    X = torch.linalg.qr(normal(CHANNELS, CHANNELS))[0] @ X
    W = normal(OUTPUTS, CHANNELS)
    X[LARGE] *= large
    if compensated:
        W[:, LARGE] /= large
    kept = torch.randperm(CHANNELS, generator=generator)
    kept = torch.cat([torch.tensor(LARGE), kept[(kept != 3) & (kept != 40)]])[:KEPT]
    value = normal(KEPT, VALUES) if aligned else None
    return Problem(W, Gram(X @ X.T, X.sum(dim=1), X.shape[1]), kept.sort().values, value)


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("large", [1e2, 1e4])
@pytest.mark.parametrize("compensated", [False, True])
def test_huge_channels_cost_a_narrow_descent_nothing(large, aligned, compensated):
    """Their solves ended at "errors" of 1e17, and what they had made was written."""
    problem(large, aligned=aligned, compensated=compensated).check()


@pytest.mark.parametrize("power", [1, 4])
def test_so_does_a_steep_spectrum_of_few_tokens(power):
    problem(1.0, power, tokens=1).check()


def test_an_ordinary_problem_stays_narrow():
    case = problem(1.0)
    wide = coec.compensate(case.weight, case.gram, case.kept)
    narrow = coec.compensate(case.weight, case.gram, case.kept, solve_dtype=torch.float32)
    assert narrow.diagnostics["events"] == []
    assert narrow.diagnostics["error_after"] != wide.diagnostics["error_after"]
    expected = wide.diagnostics["error_after"]
    assert narrow.diagnostics["error_after"] == pytest.approx(expected, rel=1e-2)


def test_a_named_method_above_the_slice_gives_way_to_it(monkeypatch):
    """A ridge that overwhelms the fit leaves less than the slice; a user's function is taken."""
    W, gram, kept = (
        problems.weight(8, 20),
        problems.gram("white", 20, tokens=150),
        problems.kept(20, 18),
    )
    result = coec.compensate(W, gram, kept, method="least-squares", ridge=100.0)
    assert torch.equal(result.weight, W[:, kept])
    said = "the relative error lies above the slice's"
    assert result.diagnostics["events"] == [f"{said}: slice kept"]
    assert result.diagnostics["error_after"] == result.diagnostics["error_before"]

    def halved(problem):
        return SiteResult(0.2 * problem.weight[:, problem.kept.indices])

    result = coec.compensate(W, gram, kept, method=halved)
    assert torch.equal(result.weight, 0.2 * W[:, kept])
    assert result.diagnostics["events"] == [said]
