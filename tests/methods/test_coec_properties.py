"""What holds for every matrix: any shape, any spectrum, any scale."""

import pytest
import torch
from hypothesis import strategies as st

import coec
import oracles
import problems
from coec.config.recipe import CoecOptions
from coec.events import recording
from coec.methods.objective import OutputProblem
from coec.types import Gram, KeptSet
from properties import holds

pytestmark = pytest.mark.unchecked  # thousands of solves
ALPHA, LAMBDA = 0.9, 50.0


def cases(rows, kept, dropped):
    """A matrix with its statistics, and maybe a value projection."""
    return st.fixed_dictionaries(
        {
            "m": st.integers(1, rows),
            "k": st.integers(1, kept),
            "dropped": st.integers(1, dropped),
            "kind": st.sampled_from(problems.KINDS),
            "seed": st.integers(0, 1000),
            "scale": st.sampled_from([1e-30, 1e-6, 1.0, 1e30]),
            "size": st.sampled_from([1e-30, 1.0, 1e30]),
            "aligned": st.booleans(),
        }
    )


OPTIONS = st.fixed_dictionaries(
    {
        "solver": st.sampled_from(["joint", "gradient"]),
        "rotation": st.sampled_from(["two-sided", "left", "right"]),
        "parameterization": st.sampled_from(["stiefel", "full"]),
        "rescale": st.sampled_from(["gcv", "fixed"]),
        "kappa": st.sampled_from([1.0, 10.0]),
        "alpha": st.sampled_from([0.5, 0.9, 1.0]),
    }
)


class Case:
    """The matrices of a drawn case, and the tempered objective."""

    def __init__(self, m, k, dropped, kind, seed, scale, size, aligned, alpha=ALPHA):
        d = k + dropped
        self.weight = problems.weight(m, d, seed, size)
        self.gram = problems.gram(kind, d, seed=seed, scale=scale)
        self.kept = problems.kept(d, k, seed)
        self.value = problems.weight(k, 1 + seed % 4, seed + 5) if aligned else None
        with recording():
            G = oracles.power(self.gram.xx / self.gram.energy.max().clamp_min(1e-300), alpha)
        self.tempered = Gram(G, self.gram.x, self.gram.tokens)

    def compensate(self, **options):
        for name in CoecOptions(**options).idle():
            options.pop(name, None)
        given = (self.weight, self.gram, self.kept)
        return coec.compensate(*given, value_weight=self.value, **options)

    def error(self, W):
        kept = KeptSet(self.kept, self.weight.shape[1])
        return OutputProblem.of(self.weight, self.tempered.xx, kept).error(W)

    @property
    def slice(self):
        return self.weight[:, self.kept]

    def rcpu(self):
        return coec.compensate(self.weight, self.tempered, self.kept, method="rcpu").weight


def never_worse(case):
    """Finite, and at or below the slice and RCPU on the objective that is minimised."""
    result = case.compensate()
    assert torch.isfinite(result.weight).all()
    before, after = (
        LAMBDA * result.diagnostics.get(f"alignment_{when}", 0.0) for when in ("before", "after")
    )
    limit = min(case.error(case.slice), case.error(case.rcpu())) + before
    assert case.error(result.weight) + after <= limit + 1e-9 * max(1.0, limit)


@holds(1, cases(24, 24, 16))
def test_never_worse_than_the_slice_or_rcpu(case):
    never_worse(Case(**case))


@holds(15, cases(300, 300, 100))
def test_nor_with_larger_matrices(case):
    never_worse(Case(**case))


@holds(3, cases(16, 16, 12), OPTIONS)
def test_no_combination_of_options_is_worse_than_the_slice(case, options):
    case = Case(**case | {"aligned": False}, alpha=options["alpha"])
    result = case.compensate(**options)
    assert torch.isfinite(result.weight).all()
    limit = case.error(case.slice)
    # The gradient solver is the source's, which promises no more than the rounding of its stop.
    assert case.error(result.weight) <= limit + 1e-6 * max(1.0, limit)
