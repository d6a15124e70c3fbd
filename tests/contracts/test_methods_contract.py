"""Every listed score and compensation keeps the same promises."""

import inspect
import json

import pytest
import torch

import coec
import problems
from coec.config import described
from coec.methods import COMPENSATIONS
from coec.methods.selection import SELECTIONS, column_scores
from coec.types import Gram

D, M, K = 9, 6, 6


def case(dtype=torch.float64, kind="power law"):
    gram = problems.gram(kind, D)
    gram = Gram(gram.xx.to(dtype), gram.x.to(dtype), gram.tokens)
    return problems.weight(M, D).to(dtype), gram, problems.kept(D, K)


def scored(name, W, gram):
    return column_scores(SELECTIONS[name], W, gram, units=D, keep=K, seed=0)


def compensated(W, gram, kept, name):
    return coec.compensate(W, gram, kept, method=name)


FUNCTIONS = [*SELECTIONS.values(), *(method.function for method in COMPENSATIONS.values())]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_says_where_it_comes_from(function):
    assert "Source: " in inspect.getdoc(function)


@pytest.mark.parametrize("method", COMPENSATIONS.values())
def test_it_says_what_its_options_mean(method):
    assert all(option.help.endswith(".") for option in described(method.settings))


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_score_is_one_finite_number_per_column(name, dtype):
    W, gram, _ = case(dtype)
    before = W.clone(), gram.xx.clone()
    scores = scored(name, W, gram)
    assert scores.shape == (D,)
    assert scores.dtype == dtype
    assert torch.isfinite(scores).all()
    assert bool((scores >= 0).all())
    assert torch.equal(W, before[0])
    assert torch.equal(gram.xx, before[1])


@pytest.mark.parametrize("name", sorted(set(SELECTIONS) - {"random"}))
def test_a_score_follows_its_column(name):
    W, gram, _ = case()
    order = torch.randperm(D)
    moved = Gram(gram.xx[order][:, order], gram.x[order], gram.tokens)
    torch.testing.assert_close(scored(name, W[:, order], moved), scored(name, W, gram)[order])


@pytest.mark.parametrize("name", COMPENSATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["power law", "rank deficient", "dead channels", "zero"])
def test_a_compensation_keeps_shape_dtype_and_inputs(name, dtype, kind):
    W, gram, kept = case(dtype, kind)
    before = W.clone(), gram.xx.clone(), kept.clone()
    result = compensated(W, gram, kept, name)
    again = compensated(W, gram, kept, name)
    assert result.weight.shape == (M, K)
    assert result.weight.dtype == dtype
    assert torch.isfinite(result.weight).all()
    assert result.bias is None or result.bias.shape == (M,)
    assert torch.equal(result.weight, again.weight)
    for now, then in zip((W, gram.xx, kept), before):
        assert torch.equal(now, then)
    json.dumps(result.diagnostics)


@pytest.mark.parametrize("name", COMPENSATIONS)
def test_keeping_everything_is_the_weight_itself(name):
    W, gram, _ = case()
    result = compensated(W, gram, torch.arange(D), name)
    assert torch.equal(result.weight, W)
    assert result.bias is None


@pytest.mark.parametrize("name", COMPENSATIONS)
def test_float32_is_close_to_float64(name):
    wide = compensated(*case(), name)
    narrow = compensated(*case(torch.float32), name)
    assert narrow.diagnostics["error_after"] == pytest.approx(
        wide.diagnostics["error_after"], rel=1e-3, abs=1e-5
    )


@pytest.mark.parametrize("name", COMPENSATIONS)
def test_turning_the_outputs_turns_the_answer(name):
    """All of them depend on the outputs through inner products alone."""
    W, gram, kept = case()
    Q = problems.orthonormal(M, M)
    plain = compensated(W, gram, kept, name)
    turned = compensated(Q @ W, gram, kept, name)
    torch.testing.assert_close(turned.weight, Q @ plain.weight, rtol=0, atol=2e-4)
    assert turned.diagnostics["error_after"] == pytest.approx(
        plain.diagnostics["error_after"], rel=1e-4
    )


@pytest.mark.parametrize("name", COMPENSATIONS)
@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_the_units_of_the_inputs_do_not_matter(name, factor):
    W, gram, kept = case()
    scaled = Gram(gram.xx * factor, gram.x * factor**0.5, gram.tokens)
    plain = compensated(W, gram, kept, name)
    other = compensated(W, scaled, kept, name)
    torch.testing.assert_close(other.weight, plain.weight, rtol=0, atol=1e-6)
