"""Greedy elimination against the naive one, known answers, and what breaks numbers."""

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import coec
import oracles
import problems
from coec.errors import NumericalError
from coec.events import recording
from coec.methods import elimination
from coec.methods.elimination import obs, removal_path
from coec.methods.selection import SELECTIONS, keep_highest, unit_scores
from coec.types import Gram
from properties import holds

DEFINED = [kind for kind in problems.KINDS if kind not in ("indefinite", "zero")]
"""Kinds of Gram under which the formula needs no safeguard."""


@pytest.fixture(autouse=True)
def _small_strips(monkeypatch):
    """So that a matrix of a few columns is updated in several strips, as a large one is."""
    monkeypatch.setattr(elimination, "_STRIP", 7)


def removal_order(W, G, units, keep, *panel):
    return [unit for unit, _ in removal_path(W, G, units, keep, *panel)]


def kept(W, gram, units, keep):
    return keep_highest(unit_scores(obs(W, gram, units=units, keep=keep), units), keep).indices


@pytest.mark.parametrize("kind", DEFINED)
@pytest.mark.parametrize(
    ("m", "d", "units"),
    [(40, 24, 24), (3, 33, 33), (7, 24, 6), (30, 24, 2)],
)
def test_the_order_is_that_of_the_formula(kind, m, d, units):
    W, G = problems.weight(m, d), problems.gram(kind, d).xx
    order = oracles.greedy_elimination(
        *oracles.of_unit_energy(W, G), units, 1
    )  # how many go decides where it ends
    for keep in (1, units // 2, units - 1):
        expected = order[: units - keep]
        for panel in (1, 3, 128):
            assert removal_order(W, G, units, keep, panel) == expected, panel


def test_an_indefinite_gram_is_clamped_and_said_so():
    W, G = problems.weight(5, 24), problems.gram("indefinite", 24).xx
    scaled, unit = oracles.of_unit_energy(W, G)
    mu, E = torch.linalg.eigh(unit + 0.1 * unit.diagonal().diag())
    clamped = (E * mu.clamp_min(0)) @ E.T
    # λ is of the Gram that was given.
    ridge = 1e-3 * float(unit.diagonal().mean() / clamped.diagonal().mean())
    with recording() as events:
        order = removal_order(W, G, 24, 3, 5)
    assert order == oracles.greedy_elimination(scaled, clamped, 24, 3, ridge, damping=0)
    assert len(events) == 1
    assert "indefinite Gram" in events[0]


def test_one_of_a_duplicated_pair_goes_first_and_the_other_takes_its_place():
    W, gram = problems.weight(6, 12), problems.gram("duplicated channels", 12, tokens=100)
    gone = removal_order(W, gram.xx, 12, 11)
    assert gone[0] in (0, 11)
    left = torch.tensor([j for j in range(12) if j != gone[0]])
    result = coec.compensate(W, gram, left, method="least-squares", ridge=0.0)
    assert result.diagnostics["error_after"] < 1e-12
    # Scores that do not know of the pair would keep both before all others.
    W[:, [0, 11]] *= 2
    assert {0, 11} & set(removal_order(W, gram.xx, 12, 4))
    assert {0, 11} <= set(keep_highest(SELECTIONS["wanda-sp"](W, gram), 2).indices.tolist())


def test_equal_costs_keep_the_lower_index():
    W = torch.ones(3, 8, dtype=torch.float64)
    eye = torch.eye(8, dtype=torch.float64)
    assert removal_order(W, eye, 8, 3, 2) == [7, 6, 5, 4, 3]
    assert removal_order(W, eye, 4, 2) == [3, 2]
    # The same numbers up to rounding.
    assert removal_order(W, eye * (1 + 1e-14 * torch.rand(8).double()), 8, 3, 2) == [7, 6, 5, 4, 3]


@pytest.mark.parametrize("units", [24, 6])
@pytest.mark.parametrize("size", [2.0**-600, 2.0**-40, 2.0**600])
def test_scales_do_not_matter(units, size):
    W, G = problems.weight(5, 24), problems.gram("power law", 24).xx
    order = removal_order(W, G, units, 2, 3)
    assert removal_order(W * size, G, units, 2, 3) == order
    assert removal_order(W, G * size, units, 2, 3) == order
    assert removal_order(W / size, G * size, units, 2, 3) == order


@pytest.mark.parametrize("units", [24, 6])
def test_nor_do_the_scales_of_channels(units):
    W, G = problems.weight(5, 24), problems.gram("power law", 24).xx
    scale = 10.0 ** torch.linspace(-3, 3, units, dtype=torch.float64).repeat_interleave(24 // units)
    assert removal_order(W / scale, G * scale * scale[:, None], units, 2, 3) == removal_order(
        W, G, units, 2, 3
    )


def test_greed_beats_scores_of_single_columns():
    """Channels in threes, x, y and x + y: any two carry all, and one more is lost for good."""
    X = problems.inputs("white", 20, tokens=200)
    X = torch.cat([X[:10], X[10:], X[:10] + X[10:]])
    gram = Gram(X @ X.T, X.sum(dim=1), X.shape[1])
    W = problems.weight(40, 30)
    A, _ = elimination.regularized_inverse(gram.xx, 1e-3, 0.1)
    scores = {name: SELECTIONS[name](W, gram) for name in ("wanda-sp", "rcpu", "flap")}
    scores["once"] = W.square().sum(dim=0) / A.diagonal()
    scores["obs"] = obs(W, gram, units=30, keep=20)
    errors = {}
    for name, score in scores.items():
        units = keep_highest(score, 20)
        result = coec.compensate(W, gram, units, method="least-squares", ridge=0.0)
        errors[name] = result.diagnostics["error_after"]
    assert errors.pop("obs") < 1e-12
    assert min(errors.values()) > 1e-2


def test_a_weight_that_is_not_finite_is_an_error():
    W = problems.weight(5, 12)
    W[2, 3] = torch.nan
    with pytest.raises(NumericalError, match="the weight holds NaN or Inf"):
        removal_order(W, problems.gram("white", 12).xx, 12, 4)


CASES = st.fixed_dictionaries(
    {
        "m": st.integers(1, 12),
        "units": st.integers(1, 14),
        "width": st.integers(1, 3),
        "kind": st.sampled_from(problems.KINDS),
        "seed": st.integers(0, 1000),
        "scale": st.sampled_from([1e-150, 1e-30, 1.0, 1e30, 1e150]),
        "size": st.sampled_from([0.0, 1e-150, 1.0, 1e150]),
        "panel": st.integers(1, 6),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
    }
)


@pytest.mark.unchecked
@holds(1, CASES, st.data())
def test_as_many_go_as_asked(case, data):
    """Distinct units, whatever the numbers are; no number is NaN."""
    d = case["units"] * case["width"]
    W = problems.weight(case["m"], d, case["seed"], case["size"])
    gram = problems.gram(case["kind"], d, seed=case["seed"], scale=case["scale"] ** 0.5)
    if case["dtype"] == torch.float32 and case["scale"] in (1.0, 1e-30, 1e30):
        W, gram = W.float().nan_to_num(0, 0, 0), gram.to(torch.float32)
    keep = data.draw(st.integers(1, case["units"]))
    with recording():
        order = removal_order(W, gram.xx, case["units"], keep, case["panel"])
        scores = obs(W, gram, units=case["units"], keep=keep)
    assert len(order) == len(set(order)) == case["units"] - keep
    assert set(order) <= set(range(case["units"]))
    assert torch.isfinite(scores).all()


class Waits(TorchDispatchMode):
    """Counts the operators whose results the host waits for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waits = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero}
        self.count += function.overloadpacket in waits
        return function(*args, **kwargs or {})


def test_the_host_waits_for_panels_and_not_for_columns():
    W, X = problems.weight(9, 80), problems.inputs("white", 80)
    counts = []
    for keep in (72, 50):  # 8 and 30 columns, one panel
        with Waits() as waits:
            order = removal_order(W, X @ X.T, 80, keep, 64)
        assert len(order) == 80 - keep
        counts.append(waits.count)
    assert counts[0] == counts[1]


def test_ranges_lose_units_in_turn():
    W, X = problems.weight(9, 48), problems.inputs("power law", 48)
    path = [unit for unit, _ in removal_path(W, X @ X.T, 12, 3, ranges=3)]  # units of 4 columns
    turns = [sorted(unit // 4 for unit in path[n : n + 3]) for n in range(0, 9, 3)]
    assert turns == [[0, 1, 2]] * 3
    # The first to go is the cheapest of all, and within a turn none is cheaper of its range.
    assert path[0] == removal_path(W, X @ X.T, 12, 11)[0][0]
    free = [unit for unit, _ in removal_path(W, X @ X.T, 12, 3)]
    assert path != free
    scores = obs(W, problems.gram("power law", 48), units=12, keep=6, ranges=3)
    kept = keep_highest(unit_scores(scores, 12), 6, 3)
    assert sorted(kept.indices // 4) == [0, 0, 1, 1, 2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_finds_the_path_of_a_plain_one():
    W, X = problems.weight(9, 300), problems.inputs("white", 300)
    path = removal_path(W, X @ X.T, 300, 20, 64)
    found = removal_path(W.cuda(), (X @ X.T).cuda(), 300, 20, 64)
    assert [unit for unit, _ in found] == [unit for unit, _ in path]
    assert [cost for _, cost in found] == pytest.approx([cost for _, cost in path])
