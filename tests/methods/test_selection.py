import numpy as np
import pytest
import torch

import problems
from coec.errors import NumericalError, OptionError
from coec.methods.selection import SELECTIONS, column_scores, keep_highest, kept_count
from coec.types import KeptSet


def test_scores_are_those_of_numpy_on_the_inputs():
    X, W = problems.inputs("white", 6), problems.weight(4, 6)
    X[2] += 5  # a mean, so that variance and second moment differ
    gram = problems.Gram(X @ X.T, X.sum(dim=1), X.shape[1])
    w, x = np.linalg.norm(W.numpy(), axis=0), np.linalg.norm(X.numpy(), axis=1)
    variance = np.var(X.numpy(), axis=1, ddof=1)
    expected = {"rcpu": w * x * variance, "wanda-sp": w * x, "flap": w**2 * variance}
    for name, values in (expected | {"magnitude": w}).items():
        np.testing.assert_allclose(SELECTIONS[name](W, gram).numpy(), values, rtol=1e-12)


@pytest.mark.parametrize(
    ("units", "sparsity", "kept"),
    [
        (10, 0.3, 7),
        (10, 0.7, 3),  # math.ceil((1 - 0.7) * 10) is 4
        (4, 0.3, 3),
        (18944, 0.3, 13261),
        (28672, 0.3, 20071),
        (10, 0.1, 9),
        (10, 0.35, 7),
        (3, 1e-9, 3),
        (1, 0.99, 1),
        (5, 0.999999, 1),
        (1000, 0.001, 999),
    ],
)
def test_how_many_units_stay(units, sparsity, kept):
    assert kept_count(units, sparsity) == kept


def test_the_highest_stay_and_ties_go_to_the_lower_index():
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert keep_highest(scores, 3).indices.tolist() == [1, 2, 3]
    assert keep_highest(torch.zeros(5), 2).indices.tolist() == [0, 1]
    scores = torch.tensor([9.0, 8.0, 7.0, 1.0, 3.0, 2.0])
    assert keep_highest(scores, 4, 2).indices.tolist() == [0, 1, 4, 5]  # two of each half
    assert keep_highest(scores, 3, 3).indices.tolist() == [0, 2, 4]
    assert keep_highest(scores, 6).everything
    with pytest.raises(NumericalError, match="score is NaN"):
        keep_highest(torch.tensor([1.0, float("nan")]), 1)


def test_a_kept_set_is_sorted_distinct_and_in_range():
    for bad, match in (
        ([], "non-empty"),
        ([2, 1], "sorted and distinct"),
        ([1, 1], "sorted and distinct"),
        ([0, 5], r"must lie in 0\.\.4"),
        ([-1, 2], r"must lie in 0\.\.4"),
    ):
        with pytest.raises(OptionError, match=match):
            KeptSet(torch.tensor(bad, dtype=torch.int64), 5)


def test_a_score_is_given_what_it_declares():
    W, gram = problems.weight(4, 6), problems.gram("white", 6)
    given = []

    def both(weight, gram, *, keep, units):
        given.append((units, keep))
        return weight[0]

    def seeded(weight, gram, *, seed):
        given.append(seed)
        return weight[0]

    for score in (both, seeded, lambda weight, gram: weight[0]):
        scores = column_scores(score, W, gram, units=3, keep=2, seed=7)
        assert torch.equal(scores, W[0])
    assert given == [(3, 2), 7]
