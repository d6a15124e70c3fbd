"""What units are worth beside those of other sites."""

import pytest
import torch

import problems
from coec.methods.elimination import DAMPING, RIDGE, removal_path
from coec.planning.by_importance import error_saved, standardised
from coec.types import Gram


def saved(W, G, units, keep):
    return error_saved([cost for _, cost in removal_path(W, G.xx, units, 1)], keep)


@pytest.mark.parametrize("units", [12, 4])
def test_scores_are_standardised_as_flap_does(units):
    W, G = problems.weight(5, 12), problems.gram("power law", 12)
    found = standardised(W, G, units)
    scores = (W.square().sum(dim=0) * G.variance).reshape(units, -1).sum(dim=1)
    expected = (scores - scores.mean()) / scores.std()
    torch.testing.assert_close(found, expected.sort(descending=True).values)
    torch.testing.assert_close(standardised(3 * W, G, units), found)


def test_scores_that_do_not_differ_are_worth_nothing():
    same = Gram(torch.eye(4).double(), torch.zeros(4).double(), 5)
    assert standardised(torch.ones(3, 4).double(), same, 4).tolist() == [0.0] * 4
    assert standardised(torch.ones(3, 4).double(), same, 1).tolist() == [0.0]


def test_independent_channels_are_worth_their_energy():
    """Nothing can be refitted: a channel's worth is ‖W_j‖² E[x_j²], over that of those that go."""
    energies = torch.tensor([4.0, 1.0, 9.0, 2.0], dtype=torch.float64)
    G = Gram(torch.diag(10 * energies), torch.zeros(4).double(), 10)
    found = saved(torch.eye(4).double(), G, 4, 2)
    assert found[0] == torch.inf
    expected = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64) / 3
    torch.testing.assert_close(found[1:], expected, rtol=1e-2, atol=0)  # but for the ridge


@pytest.mark.parametrize("units", [12, 4])
def test_neither_units_of_measure_nor_tokens_matter(units):
    W, G = problems.weight(5, 12), problems.gram("power law", 12)
    found = saved(W, G, units, 1)
    twice = Gram(2 * G.xx, 2 * G.x, 2 * G.tokens)
    torch.testing.assert_close(saved(7 * W, twice, units, 1), found)
    assert torch.isfinite(found[1:]).all()
    assert (found[1:-1] >= found[2:]).all()
    assert float(found[1:].sum()) == pytest.approx(1)


def test_a_copy_is_worth_what_shrunk_correlations_leave():
    """A sixth of an independent channel: `((1 + δ)² − 1) / (1 + δ)` of its energy for `1 + δ`."""
    X = torch.eye(6, dtype=torch.float64)
    X = torch.cat([X, X[:1]])
    found = saved(torch.ones(1, 7).double(), Gram(X @ X.T, X.sum(dim=1), X.shape[1]), 7, 4)
    own = 1 + DAMPING + RIDGE
    assert float(found[-1] / found[-2]) == pytest.approx((own**2 - 1) / own**2, rel=1e-9)


def test_a_consumer_of_zeros_and_a_single_unit():
    assert saved(torch.zeros(3, 4).double(), problems.gram("power law", 4), 4, 2).tolist() == [
        torch.inf,
        0,
        0,
        0,
    ]
    assert saved(problems.weight(3, 4), problems.gram("power law", 4), 1, 1).tolist() == [torch.inf]


def test_what_costs_anything_beyond_what_costs_nothing_is_never_to_go():
    """Two columns without weight: removing them costs nothing, and everything else is over that."""
    weight = torch.tensor([[0.0, 2.0, 0.0, 1.0]], dtype=torch.float64)
    G = Gram(torch.eye(4).double(), torch.zeros(4).double(), 10)
    assert saved(weight, G, 4, 2).tolist() == [torch.inf, torch.inf, 0.0, 0.0]
    assert saved(weight, G, 4, 4).tolist() == [torch.inf, torch.inf, 0.0, 0.0]
    assert saved(weight, G, 4, 1)[1:].tolist() == pytest.approx([1.0, 0.0, 0.0])


def test_the_path_is_replaced_by_its_convex_hull():
    """Sums of 3, 4, 6, 11, 15 and 21: from below they are bounded by slopes of 2, 4.5 and 6."""
    found = error_saved([3.0, 1.0, 2.0, 5.0, 4.0, 6.0], 1)
    assert (found * 21).tolist() == pytest.approx([torch.inf, 6.0, 4.5, 4.5, 2.0, 2.0, 2.0])
