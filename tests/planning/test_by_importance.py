"""Parameters are shared out among sites by what their units are worth."""

import itertools

import pytest
import torch

import problems
import tiny_models as tm
from coec.methods.elimination import DAMPING, RIDGE, removal_path
from coec.models.description import Description
from coec.planning.by_importance import by_importance, error_saved
from coec.planning.widths import Costs, Rounding, Shares, Widths, parameters, uniform
from coec.types import Gram

MODEL = Description.of(tm.raw_config())
LAYOUT, SHAPES, COSTS = MODEL.layout, MODEL.shapes, Costs(MODEL)
SITES = LAYOUT.sites


def total(widths):
    return sum(widths.of(site) * parameters(site, SHAPES) for site in SITES)


def start(sparsity=0.3, multiple=1):
    return uniform(LAYOUT, Shares(sparsity, sparsity, 0.0, Rounding(multiple)))


def falling(seed=0):
    """What units are worth, at random; the best first, and the first of a site beyond price."""
    generator = torch.Generator().manual_seed(seed)
    importances = {}
    for site in SITES:
        values = torch.rand(site.units, generator=generator, dtype=torch.float64)
        importances[site.key] = values.sort(descending=True).values
        importances[site.key][0] = torch.inf
    return importances


def test_units_cost_what_pruning_them_saves():
    one = Widths({(s.block, s.name): s.units - (s is SITES[0]) for s in SITES})
    assert one.removed(COSTS) == parameters(SITES[0], SHAPES)
    # Rows of q (2 query heads), k and v of 4, columns of o: each times 32 hidden.
    assert parameters(SITES[0], SHAPES) == (8 + 4 + 4 + 8) * 32
    assert parameters(SITES[1], SHAPES) == 3 * 32


def test_a_unit_of_attention_costs_the_keys_and_values_of_its_tokens_too():
    with_cache, heads = Costs(MODEL, context=10), Costs(MODEL.counted_in("heads"), context=10)
    group = Widths({(s.block, s.name): s.units - (s is SITES[0]) for s in SITES})
    assert group.removed(with_cache) == group.removed(COSTS) + 10 * 2 * 4
    assert with_cache.whole == COSTS.whole + 10 * MODEL.cached()
    assert MODEL.cached() == sum(2 * 4 * s.units for s in SITES if s.value)
    assert [with_cache.unit(s) - COSTS.unit(s) for s in SITES[:2]] == [80, 0]
    head = heads.model.layout.sites[0]
    assert heads.unit(head) == parameters(head, SHAPES)  # its group stays
    assert with_cache.block(LAYOUT.blocks[0]) - COSTS.block(LAYOUT.blocks[0]) == 80 * SITES[0].units


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("multiple", [1, 8, None])
def test_no_more_parameters_stay_than_before_and_hardly_fewer(seed, multiple):
    given = start(multiple=multiple)
    widths = by_importance(COSTS, given, falling(seed), Rounding(multiple))
    left = total(given) - total(widths)
    assert 0 <= left < (multiple or 1) * parameters(SITES[1], SHAPES)
    assert all(1 <= widths.of(site) <= site.units for site in SITES)
    if multiple:
        assert all(
            widths.of(s) % multiple == 0 or widths.of(s) == s.units for s in SITES if not s.value
        )


def test_no_exchange_of_two_units_would_be_worth_more():
    """One place in the ranking divides what stays from what goes, but for what just did not fit."""
    importances = falling(1)
    widths = by_importance(COSTS, start(), importances, Rounding(1))
    stay = {site.key: importances[site.key][widths.of(site) - 1] for site in SITES}
    go = {s.key: importances[s.key][widths.of(s)] for s in SITES if widths.removes_from(s)}
    spare = total(start()) - total(widths)
    for one, other in itertools.permutations(SITES, 2):
        fits = parameters(other, SHAPES) <= parameters(one, SHAPES) + spare
        if other.key in go and fits:
            assert stay[one.key] >= go[other.key]


def test_what_one_group_is_too_dear_for_goes_to_channels():
    """The next in the ranking is a group that does not fit; the channels behind it do."""
    given = start(0.5)  # two groups and 20 channels in each block
    importances = {}
    for site in SITES:
        if site.value is None:
            importances[site.key] = torch.linspace(4, 1, site.units, dtype=torch.float64)
        else:
            last = 3.9 if site.block else 3.0  # behind 2 and 14 channels of each block
            importances[site.key] = torch.tensor([9, last, last, last], dtype=torch.float64)
    widths = by_importance(COSTS, given, importances, Rounding(1))
    assert widths.everywhere("attention") == (1, 4)
    assert sum(widths.everywhere("mlp")) == 40 - 8  # five groups, and no parameter is left over
    assert total(widths) == total(given)
    dear = {key: worth.clone() for key, worth in importances.items()}
    for site in SITES:
        if site.value is not None and site.block == 0:
            dear[site.key][1:] = 2.1  # at the place that divides, where four channels are left
    four = Widths({(s.block, s.name): given.of(s) - 2 * (s.value is None) for s in SITES})
    widths = by_importance(COSTS, four, dear, Rounding(1))
    assert widths.everywhere("attention") == (1, 4)
    assert total(widths) == total(four)


def test_equal_worths_per_share_give_equal_shares_within_a_kind():
    importances = {s.key: torch.linspace(1, 0, s.units, dtype=torch.float64) for s in SITES}
    widths = by_importance(COSTS, start(0.5), importances, Rounding(1))
    assert set(widths.everywhere("attention")) == {2}
    assert max(widths.everywhere("mlp")) - min(widths.everywhere("mlp")) <= 1


def test_kinds_apart_keep_their_own_parameters_and_the_unnamed_their_widths():
    importances = falling(2)
    del importances["layers.1.mlp"]
    widths = by_importance(COSTS, start(0.5), importances, Rounding(1), frozenset({"attention"}))
    assert sum(widths.everywhere("attention")) == 4
    assert widths.everywhere("mlp") == (20, 20)


def test_a_block_that_is_worth_nothing_keeps_one_unit():
    importances = falling(3)
    for site in LAYOUT.blocks[0].sites:
        importances[site.key] = torch.full((site.units,), -1.0, dtype=torch.float64)
    widths = by_importance(COSTS, start(0.5), importances, Rounding(1))
    # One group costs as much as eight channels: those and one more go where something is worth.
    assert widths.everywhere("attention") == (1, 4)
    assert widths.everywhere("mlp") == (1, 31)


def saved(W, G, units, keep):
    return error_saved([cost for _, cost in removal_path(W, G.xx, units, 1)], keep)


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
