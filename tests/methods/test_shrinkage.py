"""How far a compensation is followed: the minimum of a parabola."""

from dataclasses import replace

import pytest
import torch

import coec
import problems
from coec.methods import relative_errors
from coec.methods.shrinkage import best_share, drawn_back
from coec.types import Gram, KeptSet, SiteResult

D, K = 20, 14


@pytest.fixture
def case():
    """A weight, the columns that stay, and statistics of few tokens and of others."""
    W, kept = problems.weight(8, D), KeptSet(problems.kept(D, K), D)
    return W, kept, problems.gram("white", D, tokens=24), problems.gram("white", D, 90, seed=1)


def shifted(tokens, seed):
    """Statistics of inputs around 0.2."""
    X = problems.inputs("white", D, tokens, seed) + 0.2
    return Gram(X @ X.T, X.sum(dim=1), tokens)


def error(W, kept, held, result):
    return relative_errors(W, held, kept, result)[1]


@pytest.mark.parametrize(("method", "kind"), [("least-squares", "white"), ("bias", "shifted")])
def test_no_other_share_has_a_lower_validation_error(case, method, kind):
    W, kept, gram, held = case
    if kind == "shifted":  # without a mean a bias says nothing about other tokens
        gram, held = (shifted(24, 0), shifted(90, 1))
    result = coec.compensate(W, gram, kept, method=method)
    share = best_share(W, kept, result, held)
    assert 0 < share.value < 1
    best = error(W, kept, held, drawn_back(W, kept, result, share.value))
    assert share.after == pytest.approx(best, rel=1e-10)
    for other in (0.0, share.value - 1e-3, share.value + 1e-3, 1.0):
        assert error(W, kept, held, drawn_back(W, kept, result, other)) > best


def test_it_is_the_one_of_the_normal_equation(case):
    """`⟨W₀ G_K − W_K G_KK, D⟩ / ⟨D, D G_KK⟩`, D what the compensation adds to the slice."""
    W, kept, gram, held = case
    result = coec.compensate(W, gram, kept, method="least-squares")
    K = kept.indices
    D, G = result.weight - W[:, K], held.xx
    expected = ((W @ G[:, K] - W[:, K] @ G[K][:, K]) * D).sum() / (D @ G[K][:, K] * D).sum()
    assert best_share(W, kept, result, held).value == pytest.approx(float(expected), rel=1e-10)


def test_a_compensation_of_these_very_tokens_is_followed_to_its_end(case):
    W, kept, gram, _ = case
    result = coec.compensate(W, gram, kept, method="least-squares", ridge=0.0)
    assert best_share(W, kept, result, gram).value == pytest.approx(1, abs=1e-9)


def test_one_in_the_wrong_direction_is_not_followed_at_all(case):
    W, kept, gram, held = case
    result = coec.compensate(W, gram, kept, method="least-squares")
    slice_ = W[:, kept.indices]
    wrong = replace(result, weight=slice_ - (result.weight - slice_))
    share = best_share(W, kept, wrong, held)
    assert (share.value, share.after) == (0, share.before)
    assert torch.equal(drawn_back(W, kept, wrong, 0.0).weight, slice_)


def test_the_slice_itself_is_followed(case):
    W, kept, _, held = case
    result = SiteResult(W[:, kept.indices])
    assert best_share(W, kept, result, held).value == 1


def test_what_the_outputs_should_be_is_told_apart_from_the_weight(case):
    """Of a target that the compensation meets on the validation tokens, all is followed."""
    W, kept, _, held = case
    result = SiteResult(W[:, kept.indices] + 1)
    target = torch.zeros_like(W)
    target[:, kept.indices] = result.weight
    assert best_share(W, kept, result, held, target).value == pytest.approx(1, abs=1e-9)
    assert best_share(W, kept, result, held).value < 1
