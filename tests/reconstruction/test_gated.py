"""A gated MLP is recognised by what it computes, and its products are those of differentiation."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from coec.reconstruction import (
    Batch,
    DifferentiatedProducts,
    GatedMlp,
    GatedProducts,
    LeastSquares,
    fit,
)
from coec.reconstruction.preconditioner import Preconditioner

H, K = 5, 7
CPU = torch.device("cpu")


class Mlp(nn.Module):
    def __init__(self, activation, bias=True):
        super().__init__()
        self.gate_up = nn.Linear(H, 2 * K, bias=bias)  # of which θ are two ranges of rows
        self.down = nn.Linear(K, H, bias=bias)
        self.act = activation

    def forward(self, x):
        g, u = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(g) * u)


class Half(nn.Module):
    def __init__(self, activation=None, bias=True, factor=1.0, after=None):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(H), Mlp(activation or nn.SiLU(), bias)
        self.factor, self.after = factor, after or nn.Identity()
        generator = torch.Generator().manual_seed(0)
        for p in self.double().parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)

    def forward(self, h):
        return h + self.factor * self.after(self.mlp(self.norm(h)))


ROWS = {"gate": slice(0, K), "up": slice(K, 2 * K), "down": slice(0, H)}


def modules(half):
    return {"gate": half.mlp.gate_up, "up": half.mlp.gate_up, "down": half.mlp.down}


def recognised(half, dtype=torch.float64, rows=ROWS):
    half = half.to(dtype)
    state = torch.randn(3, 4, H, dtype=dtype)
    return GatedMlp.of(half, state, modules(half), rows, half.mlp)


def problems(half, kept_bytes, curvature=None, root=None):
    """The same problem by differentiation and by hand, and its θ."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batches = [Batch(normal(3, 4, H), normal(3, 4, H), normal(3, 4).square(), n) for n in range(3)]
    made = modules(half)
    theta = {n: m.weight.detach()[ROWS[n]].clone() for n, m in made.items()}

    def function(theta, h):
        gate_up = torch.cat([theta["gate"], theta["up"]])
        new = {"mlp.gate_up.weight": gate_up, "mlp.down.weight": theta["down"]}
        return functional_call(half, new, h)

    by_hand = [Batch(half.norm(b.inputs).detach(), b.targets - b.inputs, b.weights, b.number)
               for b in batches]  # fmt: skip
    plain = DifferentiatedProducts(
        function, made, [[b] for b in batches], CPU, rows=ROWS, root=root
    )
    gated = GatedProducts(
        recognised(half), [[b] for b in by_hand], CPU, kept_bytes=kept_bytes, root=root
    )
    return (
        LeastSquares.of(plain, curvature, root),
        LeastSquares.of(gated, curvature, root),
        theta,
    )


@pytest.mark.parametrize("root", [None, torch.randn(H, H, dtype=torch.float64)], ids=["", "S"])
@pytest.mark.parametrize("kept_bytes", [0, 1500, 10**9], ids=["none", "some", "all"])
@pytest.mark.parametrize(
    "half",
    [
        {}, {"bias": False}, {"factor": 0.22}, {"activation": nn.GELU(approximate="tanh")},
        {"activation": nn.ReLU(), "factor": 3.0},
    ],
    ids=str,
)  # fmt: skip
def test_products_by_hand_are_those_of_differentiation(half, kept_bytes, root):
    plain, gated, theta = problems(Half(**half), kept_bytes, curvature=24, root=root)
    direction = {name: torch.randn_like(p) for name, p in theta.items()}
    for at in (theta, {name: 0.9 * p for name, p in theta.items()}):  # what was kept is let go
        for problem in (plain, gated):
            problem.linearise(at)
        assert gated.energy() == pytest.approx(plain.energy(), rel=1e-12)
        assert gated.error(at) == pytest.approx(plain.error(at), rel=1e-12)
        pairs = [
            (plain.gradient(at), gated.gradient(at)),
            (plain.normal(direction), gated.normal(direction)),
        ]
        for name in theta:
            for one, other in pairs:
                torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-10)
        factors = plain.factors(at, 7), gated.factors(at, 7)
        assert factors[1]["down"].root is root
        for name in theta if root is None else ("gate", "up"):
            for part in ("rows", "columns"):
                one, other = (getattr(f[name], part) for f in factors)
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_with_a_metric_the_added_matrix_has_its_exact_block():
    """Outputs times inputs: what is solved with it alone is solved in one iteration."""
    S = torch.randn(H, H, dtype=torch.float64).triu() + 2 * torch.eye(H, dtype=torch.float64)
    plain, gated, theta = problems(Half(factor=0.3), 10**9, root=S)
    factors = gated.factors(theta, seed=0)
    assert torch.equal(factors["down"].rows, torch.ones(H, dtype=torch.float64))
    plain.linearise(theta)
    nothing = {name: torch.zeros_like(p) for name, p in theta.items()}
    delta = torch.randn_like(theta["down"])
    moved = plain.normal(nothing | {"down": delta})["down"]
    torch.testing.assert_close(moved, S.T @ S @ delta @ factors["down"].columns)
    precondition = Preconditioner(factors, 0.1)
    damped = {"down": moved + precondition.damped(nothing | {"down": delta})["down"]}
    torch.testing.assert_close(precondition(nothing | damped)["down"], delta)


def test_the_fit_is_the_same():
    plain, gated, theta = problems(Half(), 10**9)
    ends = [
        fit(problem, None, theta, steps=2, iterations=4, damping=0.1, seed=0)
        for problem in (plain, gated)
    ]
    assert ends[0].steps[0].length > 0
    for name in theta:
        torch.testing.assert_close(ends[0].theta[name], ends[1].theta[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_factor_is_found(dtype):
    tolerance = {"rel": 0.01 if dtype == torch.bfloat16 else 1e-6}
    assert recognised(Half(), dtype).factor == 1.0
    assert recognised(Half(factor=0.22), dtype).factor == pytest.approx(0.22, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_is_something_else_is_not_taken_for_a_gated_mlp(dtype):
    assert recognised(Half(after=nn.RMSNorm(H)), dtype) is None
    swapped = {"gate": ROWS["up"], "up": ROWS["gate"], "down": ROWS["down"]}
    assert recognised(Half(), dtype, swapped) is None
    half = Half()
    half.mlp.more = nn.Identity()
    assert recognised(half, dtype) is None
