"""Ranks within a number of parameters."""

import itertools

import pytest
import torch

from coec.allocation.ranks import largest_rank, ranks_by_cost, stored, uniform_ranks

SHAPES = {"a": torch.Size((4, 6)), "b": torch.Size((5, 5)), "c": torch.Size((3, 9))}
WHOLE = sum(shape.numel() for shape in SHAPES.values())


def size(ranks):
    return sum(stored(SHAPES[name], rank) for name, rank in ranks.items())


def every():
    ranges = (range(1, min(shape) + 1) for shape in SHAPES.values())
    return [dict(zip(SHAPES, ranks, strict=True)) for ranks in itertools.product(*ranges)]


def test_a_full_rank_stores_the_matrix_itself():
    for shape in SHAPES.values():
        assert stored(shape, min(shape)) == shape.numel()
        sizes = [stored(shape, rank) for rank in range(1, min(shape) + 1)]
        assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999, 1.0])
def test_the_largest_rank_of_a_share(share):
    for shape in SHAPES.values():
        fitting = [r for r in range(1, min(shape) + 1) if stored(shape, r) <= share * shape.numel()]
        assert largest_rank(shape, share) == max(fitting, default=1)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_uniform_ranks_keep_the_same_share_and_fill_the_budget(share):
    budget = int(share * WHOLE)
    ranks = uniform_ranks(SHAPES, budget)
    assert size(ranks) <= budget
    for name, shape in SHAPES.items():
        assert ranks[name] - largest_rank(shape, budget / WHOLE) in (0, 1)
        if ranks[name] < min(shape):  # no further row of any matrix fits
            assert size(ranks | {name: ranks[name] + 1}) > budget
    assert uniform_ranks(SHAPES, WHOLE) == {n: min(shape) for n, shape in SHAPES.items()}


def test_ranks_cost_least_within_the_budget():
    costs = {
        name: scale * torch.linspace(1, 0, min(shape)) ** 2
        for (name, shape), scale in zip(SHAPES.items(), (1.0, 5.0, 0.2), strict=True)
    }

    def cost(ranks):
        return sum(float(costs[name][rank - 1]) for name, rank in ranks.items())

    for price in (0.01, 0.03, 0.1, 0.3):
        least = min(every(), key=lambda ranks: cost(ranks) + price * size(ranks))
        ranks = ranks_by_cost(SHAPES, size(least), costs)
        assert size(ranks) <= size(least)
        assert cost(ranks) == pytest.approx(cost(least))
