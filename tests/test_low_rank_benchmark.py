"""The benchmark of low rank: counts, truncations and ranks are what they are said to be."""

import pytest
import torch

from benchmarks.factors import Streams, Variant
from benchmarks.low_rank import costs, stored
from coec.models.dense import Dense
from problems import weight
from tiny_models import VOCABULARY, save, tiny

RANK = 3


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Two random blocks."""
    return Dense.open(save(tiny(), tmp_path_factory.mktemp("low_rank") / "dense"))


@pytest.fixture(scope="module")
def windows():
    """Windows of random tokens."""
    torch.manual_seed(0)
    return torch.randint(2, VOCABULARY, (24, 16))


def solved(dense, windows, ranks, variant, *, replace=True):
    streams = Streams(dense, windows[:16], windows[16:], variant)
    for block in dense.layout.blocks:
        streams.solve(block, ranks, replace=replace)
    return streams


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6)], ids=str)
def test_rows_and_combinations_of_them_are_all_that_is_stored(shape):
    for rank in range(1, min(shape) + 1):
        W = weight(shape[0], rank) @ weight(rank, shape[1])
        pivots = W[:rank]
        combinations = W[rank:] @ torch.linalg.pinv(pivots)
        torch.testing.assert_close(combinations @ pivots, W[rank:])
        assert stored(torch.Size(shape), rank) == pivots.numel() + combinations.numel()


def test_at_full_rank_nothing_changes(dense, windows):
    ranks = {name: min(shape) for name, shape in dense.matrices.items()}
    for name, product in solved(dense, windows, ranks, Variant(hidden=True)).products().items():
        torch.testing.assert_close(product, dense.tensor(name).float(), rtol=1e-3, atol=1e-4)


def test_a_fit_lowers_the_error_of_the_hidden_states(dense, windows):
    ranks = dict.fromkeys(dense.matrices, RANK)
    windows = torch.cat([windows, windows.flip(1), windows.roll(1, 0).roll(5, 1)])
    errors = []
    for variant in (Variant(hidden=True), Variant(hidden=True, steps=3)):
        streams = Streams(dense, windows[16:], windows[:16], variant)
        streams.solve(
            dense.layout.blocks[0], ranks, replace=True
        )  # the last is fitted to predictions instead
        pairs = zip(streams._small, streams._dense, strict=True)
        errors.append(sum(float((low - wide).square().sum()) for low, wide in pairs))
        assert all(len(pair[0].weight) == RANK for pair in streams.layers.values())
    assert errors[1] < 0.99 * errors[0]


def test_costs_fall_with_the_rank_and_end_at_nothing(dense, windows):
    ranks = {name: min(shape) for name, shape in dense.matrices.items()}
    survey = solved(dense, windows, ranks, Variant(hidden=True), replace=False)
    for name, curve in costs(dense, windows[:4], survey).items():
        assert len(curve) == ranks[name]
        assert (curve.diff() <= 0).all()
        assert curve[-1] == 0
        assert curve[0] > 0
