"""The method itself, and each of its safeguards."""

from importlib import import_module
from itertools import pairwise

import pytest
import torch

import coec
import oracles
import problems
from coec.errors import NumericalError
from coec.events import recording
from coec.methods import descent as descent_module
from coec.methods.objective import OutputProblem
from coec.types import Convergence, Gram, KeptSet
from outcomes import raising
from problems import case, descended, failing
from tolerances import CLOSED_FORM

coec_module = import_module("coec.methods.coec")

pytestmark = pytest.mark.unchecked  # whole solves

SHAPES = [(6, 10, 7), (10, 10, 7), (5, 9, 3), (1, 6, 4), (4, 5, 1)]
"""m, d, k: wide and tall slices, one row, one column."""


SOLVERS = ["joint", "gradient"]


def tempered_error(W0, gram, kept, W, alpha=0.9):
    """The objective it minimises."""
    with recording():
        G = oracles.power(gram.xx / gram.xx.diagonal().max().clamp_min(1e-300), alpha)
    return OutputProblem.of(W0, G, KeptSet(kept, W0.shape[1])).error(W)


@pytest.mark.parametrize("shape", SHAPES)
def test_alpha_zero_is_the_slice_to_the_bit(shape):
    W, gram, kept = case(*shape)
    assert torch.equal(coec.compensate(W, gram, kept, alpha=0.0).weight, W[:, kept])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_no_round_raises_the_error(shape, solver):
    diagnostics = descended(*case(*shape), solver=solver, tol=0.0, rounds=15).diagnostics
    errors = diagnostics["errors_per_round"]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(errors))
    if diagnostics["rounds"] == 15:
        assert diagnostics["reason"] == "round limit 15"
    else:  # only where nothing is left to gain
        assert solver != "gradient"
        assert errors[-1] >= errors[-2]
        assert diagnostics["reason"] == "objective fell by less than tol = 0"


@pytest.mark.parametrize("shape", [(6, 10, 7), (5, 5, 3), (7, 9, 7)])
def test_the_first_steps_are_the_literal_ones(shape):
    """Left rotation and rescale on factors: the same weight as on decompositions of Ŵ."""
    W, gram, kept = case(*shape, kind="white")
    result = descended(W, gram, kept, alpha=1.0, rounds=0)
    problem = OutputProblem.of(W, gram.xx, KeptSet(kept, W.shape[1]))
    expected = oracles.literal_left_then_rescale(W[:, kept], problem.Gxx, problem.Gyx)
    if min(len(W), len(kept)) % 2:  # an even number of modes has two medians
        torch.testing.assert_close(result.weight, expected, rtol=0, atol=CLOSED_FORM)
    assert problem.error(result.weight) == pytest.approx(problem.error(expected), rel=1e-2)


def test_two_sides_are_better_than_either_and_than_rcpu():
    W, gram, kept = case()
    tried = {name: {"rotation": name} for name in ("two-sided", "left", "right")}
    tried |= {name: {"method": name} for name in ("rcpu", "none")}
    errors = {
        name: tempered_error(W, gram, kept, coec.compensate(W, gram, kept, **options).weight)
        for name, options in tried.items()
    }
    assert errors["two-sided"] < min(errors["left"], errors["right"])
    assert errors["left"] < errors["none"]
    assert errors["two-sided"] < errors["rcpu"] < errors["none"]


@pytest.mark.parametrize("seed", range(5))
def test_a_right_rotation_alone_is_not_bound_by_a_left_one(seed):
    """Of more outputs than inputs RCPU, a left rotation, is far better."""
    W, gram, kept = case(40, 24, 16, "white", seed)
    result = coec.compensate(W, gram, kept, rotation="right", alpha=1.0)
    rcpu = coec.compensate(W, gram, kept, method="rcpu")
    assert not any("RCPU" in event for event in result.diagnostics["events"])
    error = result.diagnostics["error_after"]
    assert rcpu.diagnostics["error_after"] < error < result.diagnostics["error_before"]


# safeguards


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("solver", SOLVERS)
def test_an_indefinite_gram_is_survived_and_said(alpha, solver):
    """Under it the error has no lower bound: a weight that gains from that would be nonsense."""
    for seed in range(4):
        W, gram, kept = case(kind="indefinite", seed=seed)
        result = coec.compensate(W, gram, kept, alpha=alpha, solver=solver)
        assert any("indefinite Gram" in event for event in result.diagnostics["events"])
        errors = result.diagnostics["errors_per_round"]
        assert 0 <= errors[-1] <= errors[0]
        assert float(result.weight.norm()) < 2 * float(W.norm())


@pytest.mark.parametrize(
    "why", ["the dense output is 0 on the calibration data", "every kept column is 0"]
)
def test_where_nothing_can_be_gained_the_slice_stays_and_that_is_said(why):
    W, gram, kept = case(kind="zero" if "output" in why else "power law")
    if "column" in why:
        W[:, kept] = 0
    result = coec.compensate(W, gram, kept)
    assert torch.equal(result.weight, W[:, kept])
    assert f"{why}: slice kept" in result.diagnostics["events"]


broken = raising(NumericalError("no decomposition"))


def test_a_descent_that_breaks_down_falls_back_to_rcpu(monkeypatch):
    monkeypatch.setattr(coec_module.Descent, "__call__", broken)
    W, gram, kept = case()
    result = coec.compensate(W, gram, kept, alpha=1.0)
    expected = coec.compensate(W, gram, kept, method="rcpu")
    torch.testing.assert_close(result.weight, expected.weight)
    said = ["descent abandoned: no decomposition", "fell back to rcpu"]
    assert result.diagnostics["events"] == said
    assert result.diagnostics["reason"] == "fell back to rcpu"


def test_a_right_solver_that_goes_astray_is_caught(monkeypatch):
    """A solver that returns a bad frame: the rounds say so, the answer falls back."""
    ended = Convergence(1, "astray")
    monkeypatch.setattr(descent_module, "conjugate", lambda problem, R, **options: (-R, ended))
    W, gram, kept = case()
    result = coec.compensate(W, gram, kept, rotation="right")
    assert "a round raised the objective and was taken back" in result.diagnostics["events"]
    assert tempered_error(W, gram, kept, result.weight) <= tempered_error(W, gram, kept, W[:, kept])


# weights that are not full rank


def deficient(kind, seed=0):
    """A slice with modes that hold nothing, on well-conditioned statistics."""
    m, d, k = (30, 30, 20) if kind == "zero columns" else (12, 30, 20)
    W, gram, kept = case(m, d, k, kind="white", seed=seed)
    if kind == "duplicated rows":
        W[6:] = W[:6]
    elif kind == "zero rows":
        W[8:] = 0
    elif kind == "zero columns":
        W[:, kept[:5]] = 0
    elif kind == "low rank":
        W = problems.weight(m, 4, seed) @ problems.weight(4, d, seed + 1)
    elif kind == "decaying":
        W = W * torch.logspace(0, -6, m, dtype=W.dtype)[:, None]
    return W, gram, kept


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "kind", ["duplicated rows", "zero rows", "zero columns", "low rank", "decaying"]
)
def test_modes_that_hold_nothing_do_no_harm(kind, dtype, monkeypatch):
    """The joint solve stays on the manifold, and below RCPU."""
    real, gaps = descent_module.conjugate, []

    def watched(problem, R, **options):
        R, ended = real(problem, R, **options)
        gaps.append(float((R @ R.T - torch.eye(len(R), dtype=R.dtype)).norm()))
        return R, ended

    monkeypatch.setattr(descent_module, "conjugate", watched)
    for seed in range(4):
        W, gram, kept = deficient(kind, seed)
        single = Gram(gram.xx.to(dtype), gram.x.to(dtype), gram.tokens)
        errors = [
            tempered_error(W, gram, kept, coec.compensate(W, single, kept, **how).weight.double())
            for how in ({}, {"rotation": "left"})
        ]
        assert errors[0] <= errors[1] * (1 + 1e-3)
    assert max(gaps) <= {torch.float64: 1e-10, torch.float32: 1e-4}[dtype]


def test_a_round_that_breaks_down_costs_only_itself(monkeypatch):
    W, gram, kept = case(8, 14, 7)
    whole = descended(W, gram, kept, rounds=1)
    flaky = failing(descent_module.conjugate, NumericalError("no decomposition"), 2)
    monkeypatch.setattr(descent_module, "conjugate", flaky)
    result = coec.compensate(W, gram, kept)
    assert torch.equal(result.weight, whole.weight)
    assert "a round was abandoned: no decomposition" in result.diagnostics["events"]
