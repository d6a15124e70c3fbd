"""Products of local least squares, against explicit Jacobians on small problems in float64."""

import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, vjp
from torch.nn import functional as F

from coec.reconstruction import Batch, DifferentiatedProducts, LeastSquares, fit
from coec.reconstruction.preconditioner import Preconditioner

H, D = 5, 7
NAMES = {"gate": "gate.weight", "up": "up.weight", "down": "down.weight"}


class Gated(nn.Module):
    """A gated MLP that adds to its inputs."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(H, D), nn.Linear(H, D)
        self.down = nn.Linear(D, H)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Bilinear(nn.Module):
    """Values mixed by a fixed map, then an output: what attention is when its map is held."""

    def __init__(self, length=4):
        super().__init__()
        self.value, self.out = nn.Linear(H, D), nn.Linear(D, H)
        self.register_buffer("mixing", torch.rand(length, length).softmax(-1))

    def forward(self, x):
        return x + self.out(self.mixing @ self.value(x))


def of(function, modules, parts, curvature=None, **more):
    """The problem of these batches, each a part."""
    products = DifferentiatedProducts(
        function, modules, [[b] for b in parts], torch.device("cpu"), **more
    )
    return LeastSquares.of(products, curvature)


def problem(module, names, batches=2, seed=0, quadratic=False, curvature=None):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    module = module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(normal(*p.shape))
    parts = [
        Batch(normal(3, 4, H), normal(3, 4, H), normal(3, 4).square(), number)
        for number in range(batches)
    ]

    def function(theta, x):
        return functional_call(module, {names[n]: p for n, p in theta.items()}, x)

    modules = {n: module.get_submodule(name.removesuffix(".weight")) for n, name in names.items()}
    theta = {n: module.get_parameter(name).detach().clone() for n, name in names.items()}
    made = of(function, modules, parts, quadratic=quadratic, curvature=curvature)
    made.modules = modules
    return made, function, parts, theta


def gated(**more):
    return problem(Gated(), NAMES, **more)


def bilinear(**more):
    return problem(Bilinear(), {"value": "value.weight", "out": "out.weight"}, **more)


def normal(made, theta, direction):
    made.linearise(theta)
    return made.normal(direction)


def flat(theta):
    return torch.cat([p.flatten() for p in theta.values()])


def jacobian(function, theta, x):
    columns = []
    for name, p in theta.items():
        for i in range(p.numel()):
            unit = {n: torch.zeros_like(q) for n, q in theta.items()}
            unit[name].view(-1)[i] = 1
            columns.append(jvp(lambda t: function(t, x), (theta,), (unit,))[1].flatten())
    return torch.stack(columns, dim=1)


def normal_matrix(function, parts, theta):
    total = 0
    for b in parts:
        J = jacobian(function, theta, b.inputs)
        w = b.weights[..., None].expand_as(b.targets).flatten()
        total = total + J.T @ (w[:, None] * J)
    return total


@pytest.mark.parametrize("make", [gated, bilinear])
@pytest.mark.parametrize("quadratic", [False, True])
def test_products_are_those_of_the_jacobian(make, quadratic):
    if make is gated and quadratic:
        pytest.skip("a gated MLP is of higher degree")
    made, function, parts, theta = make(quadratic=quadratic)
    matrix = normal_matrix(function, parts, theta)
    delta = {n: torch.randn_like(p) for n, p in theta.items()}
    torch.testing.assert_close(flat(normal(made, theta, delta)), matrix @ flat(delta))
    gradient = 0
    for b in parts:
        out, back = vjp(lambda t, b=b: function(t, b.inputs), theta)
        gradient = gradient + flat(back(b.weights[..., None] * (b.targets - out))[0])
    torch.testing.assert_close(flat(made.gradient(theta)), gradient)


@pytest.mark.parametrize(("make", "quadratic"), [(gated, False), (bilinear, True)])
def test_a_metric_is_that_of_outputs_multiplied_by_its_root(make, quadratic):
    made, function, parts, theta = make()
    S = torch.randn(H, H, dtype=torch.float64)
    by_metric = of(function, made.modules, parts, quadratic=quadratic, root=S)
    seen = of(
        lambda theta, x: function(theta, x) @ S.T, made.modules,
        [Batch(b.inputs, b.targets @ S.T, b.weights, b.number) for b in parts],
        quadratic=quadratic,
    )  # fmt: skip
    delta = {n: torch.randn_like(p) for n, p in theta.items()}
    assert by_metric.error(theta) == pytest.approx(seen.error(theta), rel=1e-12)
    energy = sum(
        float((b.weights[..., None] * ((b.targets - b.inputs) @ S.T).square()).sum()) for b in parts
    )
    assert by_metric.energy() == pytest.approx(energy, rel=1e-12)
    torch.testing.assert_close(flat(by_metric.gradient(theta)), flat(seen.gradient(theta)))
    one, other = (normal(problem, theta, delta) for problem in (by_metric, seen))
    torch.testing.assert_close(flat(one), flat(other))
    factors = by_metric.factors(theta, 3), seen.factors(theta, 3)
    for name in theta:
        for part in ("rows", "columns"):
            torch.testing.assert_close(*(getattr(f[name], part) for f in factors))


def test_a_gated_mlp_is_not_quadratic():
    """What the flag promises matters: the difference of two values is then no derivative."""
    (plain, _, _, theta), (wrong, *_) = gated(), gated(quadratic=True)
    delta = {n: torch.randn_like(p) for n, p in theta.items()}
    one, other = flat(normal(plain, theta, delta)), flat(normal(wrong, theta, delta))
    assert float((one - other).norm() / one.norm()) > 0.01


def test_the_error_is_the_weighted_sum():
    made, function, parts, theta = gated()
    expected = sum(
        (b.weights[..., None] * (b.targets - function(theta, b.inputs)).square()).sum().item()
        for b in parts
    )
    assert made.error(theta) == pytest.approx(expected, rel=1e-12)


def test_the_last_matrix_has_its_exact_factor():
    """Every row of the consumer sees the same inputs: one second moment, and rows of 1."""
    made, function, parts, theta = gated()
    factor = made.factors(theta, seed=0)["down"]
    block = normal_matrix(function, parts, theta)[-D * H :, -D * H :]
    torch.testing.assert_close(factor.rows, torch.ones(H, dtype=torch.float64))
    torch.testing.assert_close(torch.kron(torch.eye(H).double(), factor.columns), block)


def test_the_other_factors_have_the_right_trace_on_average():
    made, function, parts, theta = gated()
    matrix = normal_matrix(function, parts, theta)
    traces = []
    for seed in range(400):
        one = made.factors(theta, seed)["gate"]
        traces.append(float(one.rows.sum() * one.columns.trace()))
    size = D * H
    assert sum(traces) / 400 == pytest.approx(float(matrix[:size, :size].trace()), rel=0.05)


def test_the_preconditioner_inverts_its_kronecker_product():
    made, _, _, theta = gated()
    factors = made.factors(theta, seed=0)
    precondition = Preconditioner(factors, damping=0.1)
    residual = {n: torch.randn_like(p) for n, p in theta.items()}
    found = precondition(residual)
    for name, factor in factors.items():
        block = torch.kron(factor.rows.diag(), factor.columns)
        mean = float(block.diagonal().mean())
        damped = precondition.damped(theta)[name]
        torch.testing.assert_close(damped, 0.1 * mean * theta[name], rtol=1e-9, atol=0)
        block = block + 0.1 * mean * torch.eye(len(block), dtype=block.dtype)
        expected = torch.linalg.solve(block, residual[name].flatten())
        torch.testing.assert_close(found[name].flatten(), expected)


def options(**more):
    return {"steps": 3, "iterations": 30, "damping": 1e-6, "seed": 0, **more}


def test_a_linear_problem_is_solved_by_one_step():
    """With producers held, the consumer is weighted least squares, whose solution is known."""
    made, function, parts, theta = problem(Gated(), {"down": "down.weight"}, batches=4)
    found = fit(made, None, theta, **options(steps=1, damping=1e-9))
    module = {"down": torch.zeros_like(theta["down"])}
    A, B = [], []
    for b in parts:
        w = b.weights.flatten()[:, None].sqrt()
        A.append(w * jacobian_inputs(function, theta, b))
        B.append(w * (b.targets - function(module, b.inputs)).flatten(0, 1))
    best = torch.linalg.lstsq(torch.cat(A), torch.cat(B)).solution.T
    torch.testing.assert_close(found.theta["down"], best, rtol=1e-6, atol=1e-6)


def jacobian_inputs(function, theta, b):
    """The inputs of `down`, read off by giving it unit rows."""
    zero = function({"down": torch.zeros_like(theta["down"])}, b.inputs)
    columns = []
    for i in range(D):
        unit = torch.zeros_like(theta["down"])
        unit[0, i] = 1
        columns.append((function({"down": unit}, b.inputs) - zero)[..., 0].flatten())
    return torch.stack(columns, dim=1)


def test_errors_fall_at_every_step_and_end_as_reported():
    made, _, _, theta = gated()
    found = fit(made, None, theta, **options(damping=0.1))
    errors = [found.error, *(step.error for step in found.steps)]
    assert all(after < before for before, after in itertools.pairwise(errors))
    assert made.error(found.theta) / made.energy() == pytest.approx(errors[-1], rel=1e-12)


def test_a_step_that_harms_held_out_windows_is_not_taken():
    made, function, parts, theta = gated(batches=2)
    fitted, other = parts
    exact = Batch(other.inputs, function(theta, other.inputs).detach(), other.weights, 1)
    problems = [of(function, made.modules, [one]) for one in (fitted, exact)]
    assert fit(problems[0], None, theta, **options()).steps[0].length > 0
    found = fit(*problems, theta, **options())
    assert found.held_out == 0
    assert [step.length for step in found.steps] == [0]
    assert torch.equal(flat(found.theta), flat(theta))


@pytest.mark.parametrize("seed", range(4))
def test_a_step_has_the_iterations_that_held_out_windows_like_best(seed, monkeypatch):
    """Until two in a row are no better: those that would have followed are not made."""
    made, function, parts, theta = problem(Gated(), NAMES, seed=seed)
    fitted, other = (of(function, made.modules, [one]) for one in parts)
    one = options(steps=1, damping=1e-3)
    scores = [other.error(theta)]
    for count in range(1, 31):
        step = fit(fitted, None, theta, **one | {"iterations": count})
        assert step.steps[0].length == 1, "no step is shortened here"
        scores.append(other.error(step.theta))
    best = next(
        k
        for k in range(1, 29)
        if scores[k] < min(scores[:k]) and scores[k] <= min(scores[k + 1 : k + 3])
    )
    found = fit(fitted, other, theta, **one)
    assert found.steps[0].iterations == best
    assert found.steps[0].held_out * other.energy() == pytest.approx(scores[best])
    calls, normal = [], LeastSquares.normal
    monkeypatch.setattr(LeastSquares, "normal", lambda *given: calls.append(1) or normal(*given))
    fit(fitted, other, theta, **one)
    assert len(calls) == best + 2


def test_the_best_there_is_stays():
    made, function, parts, theta = gated()
    exact = [Batch(b.inputs, function(theta, b.inputs), b.weights, b.number) for b in parts]
    same = of(function, made.modules, exact)
    found = fit(same, None, theta, **options())
    assert found.error == 0
    assert [step.length for step in found.steps] == [0]
    assert torch.equal(flat(found.theta), flat(theta))


def test_a_step_that_is_not_finite_is_taken_back_and_recorded():
    made, function, parts, theta = gated()
    start = flat(theta)

    def brittle(given, x):
        """Defined at the start alone."""
        there = torch.equal(flat({n: p.detach() for n, p in given.items()}), start)
        return function(given, x) if there else function(given, x) * torch.nan

    from coec.events import recording

    broken = of(brittle, made.modules, parts)
    with recording() as events:
        found = fit(broken, None, theta, **options())
    assert torch.equal(flat(found.theta), start)
    assert any("not finite" in event or "NaN" in event for event in events)
    assert found.steps[0].length == 0


def test_the_same_seed_gives_the_same_fit():
    made, *_, theta = gated()
    one, other = (fit(made, None, theta, **options(damping=0.1)).theta for _ in range(2))
    assert torch.equal(flat(one), flat(other))


def test_a_matrix_on_which_nothing_depends_stays():
    module = Gated()
    made, _, _, theta = problem(module, NAMES)
    theta["down"] = torch.zeros_like(theta["down"])  # nothing comes back to gate and up
    found = fit(made, None, theta, **options(steps=1, damping=0.1))
    torch.testing.assert_close(found.theta["gate"], theta["gate"])
    assert found.steps[0].length == 1


@pytest.mark.parametrize("make", [gated, bilinear])
@pytest.mark.parametrize(("tokens", "taken"), [(24, (0, 2)), (1, (0,)), (36, (0, 1, 2))])
def test_some_batches_stand_for_all(make, tokens, taken):
    """Products and factors are those of the batches taken, scaled up; gradient and error of all."""
    torch.manual_seed(0)
    whole, function, parts, theta = make(batches=4)
    torch.manual_seed(0)
    some = make(batches=4, curvature=tokens)[0]
    direction = {n: torch.randn_like(p) for n, p in theta.items()}
    jacobians = {n: jacobian(function, theta, parts[n].inputs) for n in taken}
    wanted = sum(
        J.T
        @ (
            parts[n].weights[..., None].expand_as(parts[n].targets).flatten()
            * (J @ flat(direction))
        )
        for n, J in jacobians.items()
    ) * (4 / len(taken))
    torch.testing.assert_close(flat(normal(some, theta, direction)), wanted)
    assert some.error(theta) == whole.error(theta)
    assert torch.equal(flat(some.gradient(theta)), flat(whole.gradient(theta)))
    of_taken = of(function, whole.modules, [parts[n] for n in taken]).factors(theta, 5)
    for name, factor in some.factors(theta, 5).items():
        torch.testing.assert_close(factor.columns, of_taken[name].columns * (4 / len(taken)))
        torch.testing.assert_close(factor.rows, of_taken[name].rows)


def test_sums_do_not_depend_on_where_the_batches_lie():
    """Two places with two and three batches of five parts: the same to the bit as one place."""
    whole, function, parts, theta = gated(batches=5)
    places = [
        DifferentiatedProducts(function, whole.modules, [[b] for b in own], torch.device("cpu"))
        for own in (parts[:2], parts[2:])
    ]

    def ask(method, *arguments):
        for place in places:
            yield from method(place, *arguments)

    for curvature in (None, 20):
        one, two = (of(function, whole.modules, parts, curvature), LeastSquares(ask, curvature))
        delta = {n: torch.randn_like(p) for n, p in theta.items()}
        assert one.energy() == two.energy()
        assert one.error(theta) == two.error(theta)
        for found in ([made.gradient(theta) for made in (one, two)],
                      [normal(made, theta, delta) for made in (one, two)]):  # fmt: skip
            assert torch.equal(*map(flat, found))
        factors = [made.factors(theta, 7) for made in (one, two)]
        for name in theta:
            for part in ("rows", "columns"):
                assert torch.equal(*(getattr(f[name], part) for f in factors))


def test_signs_of_a_batch_are_its_own():
    made, function, parts, theta = gated(batches=2)
    same = [Batch(parts[0].inputs, parts[0].targets, parts[0].weights, n) for n in (0, 1)]
    first, second = (of(function, made.modules, [b]).factors(theta, 3)["gate"] for b in same)
    again = of(function, made.modules, same[:1]).factors(theta, 3)["gate"]
    other = of(function, made.modules, same[:1]).factors(theta, 4)["gate"]
    assert torch.equal(first.columns, again.columns)
    assert not torch.equal(first.columns, second.columns)
    assert not torch.equal(first.columns, other.columns)
