"""Parameters are shared out among sites by what their units are worth."""

import itertools

import pytest
import torch
from coec.settings import Pruning

import tiny_models as tm
from coec.models.description import Description
from coec.planning.by_importance import by_importance
from coec.planning.widths import Rounding, Widths, parameters, uniform

MODEL = Description.of(tm.raw_config())
LAYOUT, SHAPES = MODEL.layout, MODEL.shapes
SITES = LAYOUT.sites


def total(widths):
    return sum(widths.of(site) * parameters(site, SHAPES) for site in SITES)


def start(sparsity=0.3, **more):
    return uniform(LAYOUT, Pruning(sparsity=sparsity, **more))


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
    assert one.removed(LAYOUT, SHAPES) == parameters(SITES[0], SHAPES)
    # Rows of q (2 query heads), k and v of 4, columns of o: each times 32 hidden.
    assert parameters(SITES[0], SHAPES) == (8 + 4 + 4 + 8) * 32
    assert parameters(SITES[1], SHAPES) == 3 * 32


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("multiple", [1, 8, None])
def test_no_more_parameters_stay_than_before_and_hardly_fewer(seed, multiple):
    given = start(multiple_of="auto" if multiple is None else multiple)
    widths = by_importance(MODEL, given, falling(seed), Rounding(multiple))
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
    widths = by_importance(MODEL, start(), importances, Rounding(1))
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
    widths = by_importance(MODEL, given, importances, Rounding(1))
    assert widths.everywhere("attention") == (1, 4)
    assert sum(widths.everywhere("mlp")) == 40 - 8  # five groups, and no parameter is left over
    assert total(widths) == total(given)
    dear = {key: worth.clone() for key, worth in importances.items()}
    for site in SITES:
        if site.value is not None and site.block == 0:
            dear[site.key][1:] = 2.1  # at the place that divides, where four channels are left
    four = Widths({(s.block, s.name): given.of(s) - 2 * (s.value is None) for s in SITES})
    widths = by_importance(MODEL, four, dear, Rounding(1))
    assert widths.everywhere("attention") == (1, 4)
    assert total(widths) == total(four)


def test_equal_worths_per_share_give_equal_shares_within_a_kind():
    importances = {s.key: torch.linspace(1, 0, s.units, dtype=torch.float64) for s in SITES}
    widths = by_importance(MODEL, start(0.5), importances, Rounding(1))
    assert set(widths.everywhere("attention")) == {2}
    assert max(widths.everywhere("mlp")) - min(widths.everywhere("mlp")) <= 1


def test_kinds_apart_keep_their_own_parameters_and_the_unnamed_their_widths():
    importances = falling(2)
    del importances["layers.1.mlp"]
    widths = by_importance(MODEL, start(0.5), importances, Rounding(1), frozenset({"attention"}))
    assert sum(widths.everywhere("attention")) == 4
    assert widths.everywhere("mlp") == (20, 20)


def test_a_block_that_is_worth_nothing_keeps_one_unit():
    importances = falling(3)
    for site in LAYOUT.blocks[0].sites:
        importances[site.key] = torch.full((site.units,), -1.0, dtype=torch.float64)
    widths = by_importance(MODEL, start(0.5), importances, Rounding(1))
    # One group costs as much as eight channels: those and one more go where something is worth.
    assert widths.everywhere("attention") == (1, 4)
    assert widths.everywhere("mlp") == (1, 31)
