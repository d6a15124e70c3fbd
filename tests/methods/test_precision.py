"""How much the working precision of a compensation decides, on matrices of a trained model."""

from itertools import islice
from unittest import mock

import pytest
import torch

import coec
from benchmarks.instances import sites
from coec.linalg import conjugate as conjugate_module

pytestmark = pytest.mark.slow  # descents to the end on trained matrices

LOSS = 1e-4
"""Of the relative error, and of the objective with alignment."""


@pytest.fixture(scope="module")
def found(shared):
    """Attention and MLP of the first block of wt2-llama."""
    return list(islice(sites(shared), 2))


def solved(instance, dtype=torch.float64):
    """The objective where the descent ended, and how many steps it took."""
    value = None if instance.value is None else instance.value.to(dtype)
    diagnostics = coec.compensate(
        instance.weight.to(dtype), instance.gram.to(dtype), instance.kept, value_weight=value
    ).diagnostics
    ends = diagnostics.get("objectives_per_round", diagnostics["errors_per_round"])
    return ends[-1], sum(diagnostics["right_iterations"])


@pytest.fixture(scope="module")
def ends(found):
    """Where descents in float64 end."""
    return [solved(instance) for instance in found]


def test_float32_and_float64_end_at_the_same_loss(found, ends):
    for instance, (objective, _) in zip(found, ends, strict=True):
        assert solved(instance, torch.float32)[0] == pytest.approx(objective, abs=LOSS)


def test_the_preconditioner_needs_no_float64(found, ends):
    """The same objective, after as many steps."""
    for instance, (objective, steps) in zip(found, ends, strict=True):
        with mock.patch.object(conjugate_module, "WORKING", torch.float64):
            expected, taken = solved(instance)
        assert objective == pytest.approx(expected, rel=LOSS)
        assert steps <= taken + 1
