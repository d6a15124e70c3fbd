"""The right problem and its two solvers."""

import pytest
import torch

import oracles
import problems
from coec.events import recording
from coec.linalg import gradient as gradient_module
from coec.linalg.conjugate import conjugate
from coec.linalg.gradient import gradient
from coec.linalg.right import Alignment, RightProblem
from coec.linalg.stiefel import tangent
from tolerances import CLOSED_FORM, EXACT

SHAPES = [(4, 9), (6, 6), (1, 5), (1, 1)]
SOLVERS = {"conjugate": conjugate, "gradient": gradient}


def problem(b, k, *, seed=0, aligned=False):
    """A problem as the method makes it, U at its optimum, and a start not far from the answer."""
    generator = torch.Generator().manual_seed(seed)
    s = torch.rand(b, generator=generator, dtype=torch.float64) + 0.2
    mu = torch.logspace(-3, 0, k, dtype=torch.float64)
    truth = problems.orthonormal(k, b, seed).T
    start = oracles.polar_by_svd(truth + 0.15 * problems.weight(b, k, seed + 7))
    wanted = (s[:, None] * truth) + 0.05 * problems.weight(b, k, seed)
    yy = float((wanted.square() * mu).sum())
    U = oracles.polar_by_svd((wanted * mu) @ (s[:, None] * start).T)
    cross = s[:, None] * (U.T @ (wanted * mu))
    alignment = None
    if aligned:
        r = min(2, b)
        writer = problems.orthonormal(k, r, seed + 2)
        anchor = problems.orthonormal(k, r, seed + 3)
        target = writer.T @ anchor @ anchor.T @ writer
        alignment = Alignment(writer, target, s.topk(r).indices, 5.0)
    return RightProblem(s, mu, cross, yy, alignment), start


@pytest.mark.parametrize(("b", "k"), SHAPES)
@pytest.mark.parametrize("aligned", [False, True])
def test_objective_and_gradient_are_those_of_autograd(b, k, aligned):
    p, R = problem(b, k, aligned=aligned)
    variable = R.clone().requires_grad_()
    penalty = None
    if p.alignment:
        a = p.alignment
        projector = a.writer @ a.target @ a.writer.T

        def penalty(R):
            top = R[a.rows]
            inner = a.writer.T @ (top.T @ top - projector) @ a.writer
            return a.weight * inner.square().sum() / len(a.rows) ** 2

    value = oracles.right_objective(variable, p.s, p.mu.diag(), p.cross, p.yy, penalty)
    value.backward()
    assert p.objective(R) == pytest.approx(value.item(), rel=EXACT)
    expected = variable.grad
    torch.testing.assert_close(p.gradient(R, p.scale(R)), expected, rtol=0, atol=CLOSED_FORM)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("b", "k"), SHAPES)
@pytest.mark.parametrize("aligned", [False, True])
def test_a_solver_ends_lower_and_on_the_manifold(solver, b, k, aligned):
    p, start = problem(b, k, aligned=aligned)
    with recording():
        R, ended = SOLVERS[solver](p, start)
    torch.testing.assert_close(R @ R.T, torch.eye(b, dtype=R.dtype), rtol=0, atol=1e-11)
    assert p.objective(R) <= p.objective(start)
    assert ended.history[-1] == pytest.approx(p.objective(R), rel=EXACT)
    assert len(ended.history) == ended.iterations + 1
    assert ended.reason


@pytest.mark.parametrize("aligned", [False, True])
def test_every_step_of_the_conjugate_solver_goes_down(aligned):
    p, start = problem(5, 9, aligned=aligned)
    _, ended = conjugate(p, start)
    assert all(after <= before for before, after in zip(ended.history, ended.history[1:]))


@pytest.mark.parametrize(("b", "k"), [(4, 9), (6, 6)])
def test_the_conjugate_solver_ends_at_a_stationary_point(b, k):
    p, start = problem(b, k)
    R, ended = conjugate(p, start, tolerance=1e-15, iterations=2000)
    first = float(tangent(start, p.gradient(start, p.scale(start))).norm())
    last = float(tangent(R, p.gradient(R, p.scale(R))).norm())
    assert ended.converged
    assert last < 1e-6 * first


@pytest.mark.parametrize("seed", range(6))
def test_conjugate_is_no_worse_than_gradient(seed):
    p, start = problem(4, 8, seed=seed)
    with recording():
        ours, paper = conjugate(p, start)[0], gradient(p, start)[0]
    assert p.objective(ours) <= p.objective(paper) * (1 + 1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_start_at_the_answer_stays(solver):
    """R = truth, no noise: the gradient is zero there."""
    s = torch.tensor([2.0, 1.0], dtype=torch.float64)
    mu = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    truth = problems.orthonormal(3, 2).T
    p = RightProblem(s, mu, s.square()[:, None] * truth * mu, 20.0)
    R, ended = SOLVERS[solver](p, truth)
    torch.testing.assert_close(R, truth, rtol=0, atol=1e-7)
    assert ended.converged


@pytest.mark.parametrize("solver", SOLVERS)
def test_without_energy_there_is_nothing_to_rotate(solver):
    zero = torch.zeros(3, dtype=torch.float64)
    R = problems.orthonormal(3, 2).T
    p = RightProblem(torch.ones(2, dtype=torch.float64), zero, torch.zeros_like(R), 1.0)
    out, ended = SOLVERS[solver](p, R)
    assert torch.equal(out, R)
    assert "no energy" in ended.reason


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_iteration_limit_is_said(solver):
    p, start = problem(5, 9)
    with recording():
        _, ended = SOLVERS[solver](p, start, iterations=1)
    assert not ended.converged
    assert ended.reason == "iteration limit 1"


def test_a_long_step_is_capped_and_said_so():
    """Far from the answer the global scale is small, and the step goes like its inverse."""
    p, _ = problem(12, 30)
    far = problems.orthonormal(30, 12, seed=11).T
    far = far * float((p.cross * far).sum().sign())
    with recording() as events:
        R, ended = gradient(p, far)
    assert "right rotation: step capped at norm 1" in events
    assert p.objective(R) < p.objective(far)
    assert torch.isfinite(R).all()
    assert ended.reason


def test_a_gradient_solve_that_ends_higher_is_thrown_away(monkeypatch):
    p, start = problem(4, 9)
    turned = problems.orthonormal(9, 4, seed=9).T
    assert p.objective(turned) > p.objective(start)
    monkeypatch.setattr(gradient_module, "newton_schulz_polar", lambda A: turned)
    with recording() as events:
        R, ended = gradient(p, start)
    assert torch.equal(R, start)
    assert ended.reason == "objective rose"
    assert "rejected" in events[-1]
