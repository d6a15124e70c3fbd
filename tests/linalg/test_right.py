"""The right problem and its two solvers."""

from itertools import pairwise

import pytest
import torch

import oracles
import problems
from coec.events import recording
from coec.linalg import conjugate as conjugate_module
from coec.linalg import gradient as gradient_module
from coec.linalg.conjugate import conjugate
from coec.linalg.gradient import gradient
from coec.linalg.right import FLOOR, SLACK, JointProblem, RightProblem, tangent_
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
        alignment = problems.alignment(k, r, s.topk(r).indices, seed + 2)
    return RightProblem(s, mu, cross, yy, alignment), start


def penalty(alignment, R):
    """What alignment adds, projectors written out; differentiable in R."""
    if alignment is None:
        return 0.0
    writer, top = alignment.writer, R[alignment.rows]
    inner = writer.T @ (top.T @ top - writer @ alignment.target @ writer.T) @ writer
    return alignment.weight * inner.square().sum() / len(alignment.rows) ** 2


@pytest.mark.parametrize(("b", "k"), SHAPES)
@pytest.mark.parametrize("aligned", [False, True])
def test_objective_and_gradient_are_those_of_autograd(b, k, aligned):
    p, R = problem(b, k, aligned=aligned)
    variable = R.clone().requires_grad_()
    value = oracles.right_objective(variable, p.s, p.mu.diag(), p.cross, p.yy)
    value = value + penalty(p.alignment, variable)
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
    if solver == "conjugate":  # every step of which goes down
        assert all(after <= before for before, after in pairwise(ended.history))


def gradient_norm(p, R):
    return float(tangent_(R, p.gradient(R, p.scale(R))).norm())


@pytest.mark.parametrize(("b", "k"), [(4, 9), (6, 6)])
def test_the_conjugate_solver_ends_at_a_stationary_point(b, k):
    p, start = problem(b, k)
    R, ended = conjugate(p, start, tolerance=1e-15, iterations=2000)
    assert "iteration limit" not in ended.reason
    assert gradient_norm(p, R) < 1e-6 * gradient_norm(p, start)


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


@pytest.mark.parametrize(("b", "k"), [(4, 9), (6, 6), (1, 5)])
def test_the_preconditioner_inverts_the_hessian_on_the_tangent_space(monkeypatch, b, k):
    """P (H + ε) z = g, and z is tangent."""
    monkeypatch.setattr(conjugate_module, "MULTIPLIER", 1e-14)
    monkeypatch.setattr(conjugate_module, "WORKING", torch.float64)
    p, R = problem(b, k)
    t = p.scale(R)
    g = tangent_(R, p.gradient(R, t))
    z = conjugate_module._precondition(p.at(R), t, g, None)
    torch.testing.assert_close(tangent_(R, z.clone()), z, rtol=0, atol=1e-10 * float(z.norm()))
    H = torch.outer(2 * t * t / p.yy * p.s.square(), p.mu)
    H = H + conjugate_module.SHIFT * H.mean()
    torch.testing.assert_close(tangent_(R, H * z), g, rtol=0, atol=1e-9 * float(g.norm()))


# the left factor following


def joint(m, b, k, *, seed=0, aligned=False):
    """The same with Gyx itself, b = min(m, k)."""
    p, start = problem(b, k, seed=seed, aligned=aligned)
    noise = 0.3 * problems.weight(m, k, seed + 20) * p.mu
    Gyx = problems.orthonormal(m, b, seed + 1) @ (p.cross / p.s[:, None]) + noise
    U = problems.orthonormal(m, b, seed + 21)
    return JointProblem(p.s, p.mu, Gyx, 10 * p.yy, U, p.alignment), start


JOINT_SHAPES = [(4, 4, 9), (6, 6, 6), (9, 6, 6), (1, 1, 5), (5, 1, 1)]


@pytest.mark.parametrize("shape", JOINT_SHAPES)
@pytest.mark.parametrize("aligned", [False, True])
def test_the_joint_objective_is_the_one_of_the_nuclear_norm(shape, aligned):
    """Value and gradient, by autograd through the singular values of Gyx Rᵀ diag(s)."""
    p, R = joint(*shape, aligned=aligned)
    variable = R.clone().requires_grad_()
    linear = torch.linalg.svdvals((p.Gyx @ variable.T) * p.s).sum()
    quadratic = (p.s.square()[:, None] * variable.square() * p.mu).sum()
    value = 1 - linear.square() / (quadratic * p.yy)
    value = value + penalty(p.alignment, variable)
    value.backward()
    point = p.at(R)
    assert point.value == pytest.approx(value.item(), rel=CLOSED_FORM)
    gradient = point.touching().gradient(R, point.scale())
    torch.testing.assert_close(gradient, variable.grad, rtol=0, atol=CLOSED_FORM)


@pytest.mark.slow
@pytest.mark.parametrize("shape", JOINT_SHAPES)
@pytest.mark.parametrize("aligned", [False, True])
def test_joint_steps_go_down_and_end_stationary(shape, aligned):
    p, start = joint(*shape, aligned=aligned)
    R, ended = conjugate(p, start, tolerance=1e-14, iterations=3000)
    assert all(after <= before for before, after in pairwise(ended.history))
    gap = R @ R.T - torch.eye(len(R), dtype=R.dtype)
    assert float(gap.norm()) < 1e-11
    last, first = (gradient_norm(p.at(place).touching(), place) for place in (R, start))
    assert last <= 1e-5 * first + 1e-9


def test_a_completed_frame_gives_the_same_joint_objective():
    """Modes without a singular value have no left vector."""
    p, R = joint(4, 4, 9)
    rest = torch.linalg.qr(R.T, mode="complete").Q[:, 4:].T
    full = JointProblem(torch.cat([p.s, p.s.new_zeros(5)]), p.mu, p.Gyx, p.yy, p.U)
    square = torch.cat([R, rest])
    assert full.at(square).value == pytest.approx(p.at(R).value, rel=EXACT)
    ended = conjugate(full, square)[1]
    assert ended.history[-1] < ended.history[0]


def test_the_slack_makes_up_the_curvature_of_a_plane():
    """Two modes on eigenvectors, no residual: the curvature along the rotation, by differences."""
    s = torch.tensor([2.0, 1.5], dtype=torch.float64)
    mu = torch.tensor([1.0, 0.4], dtype=torch.float64)
    R, U = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    energy = float((s.square() * mu).sum())
    p = JointProblem(s, mu, torch.diag(s * mu), 4 * energy, U)
    fixed, held = p.at(R), RightProblem(s, mu, (s.square() * mu).diag(), 4 * energy)

    def curvature(problem, h=1e-3):
        values = []
        for w in (torch.tensor(-h), torch.tensor(0.0), torch.tensor(h)):
            turn = torch.tensor([[w.cos(), w.sin()], [-w.sin(), w.cos()]], dtype=torch.float64)
            q = float((s.square() * (turn @ R).square().mul(mu).sum(dim=1)).sum())
            lin = problem.at(turn @ R).linear
            values.append((q - 2 * lin) / p.yy)
        return (values[0] - 2 * values[1] + values[2]) / h**2

    assert fixed.scale() == pytest.approx(1.0)
    # Both entries of a plane count in a preconditioner: half the curvature for each.
    soft, hard = curvature(p) / 2, curvature(held) / 2
    floor = FLOOR * float(torch.outer(2 * s.square() / p.yy, mu).mean())
    expected = 1 / (soft + SLACK * hard + floor) - 1 / (hard + SLACK * hard + floor)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert float(p.slack(fixed, turn)[0, 1]) == pytest.approx(expected, rel=1e-4)
    assert hard > 5 * soft
