import pytest
import torch

import coec
import problems
from coec import types
from coec.errors import NumericalError, OptionError
from coec.events import record, recording
from coec.types import Gram, GramSum
from tolerances import EXACT


def test_statistics_add_up_over_batches_and_workers():
    X = problems.inputs("white", 5, tokens=30)
    first, second, whole = GramSum(5), GramSum(5), GramSum(5)
    whole.update(X.T.reshape(3, 10, 5))
    first.update(X.T[:12])
    first.update(X.T[12:20])
    second.update(X.T[20:])
    total = first.gram() + second.gram()
    assert total.tokens == whole.tokens == 30
    torch.testing.assert_close(total.xx, X @ X.T, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(total.xx, whole.gram().xx, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(total.mean, X.mean(dim=1))
    torch.testing.assert_close(total.variance, X.var(dim=1))
    torch.testing.assert_close(total.energy, X.square().sum(dim=1))


def test_sums_of_bfloat16_inputs_are_exact_products_in_float64():
    """Many equal tokens: a float32 sum would lose the small ones."""
    x = torch.full((2000, 2), 1.0, dtype=torch.bfloat16)
    sums = GramSum(2)
    for _ in range(20):
        sums.update(x * 300)
    assert sums.xx.dtype == torch.float64
    assert float(sums.xx[0, 1]) == 20 * 2000 * 300.0**2


@pytest.mark.parametrize("tile", [1, 3, 7, 1024])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_gram_is_symmetric_and_of_all_tiles(tile, weighted, monkeypatch):
    """Tiles below the diagonal are not computed."""
    monkeypatch.setattr(types, "_TILE", tile)
    monkeypatch.setattr(types, "_MIRRORED", tile)
    X = torch.randn(100, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.rand(100, dtype=torch.float64) if weighted else torch.ones(100)
    sums = GramSum(7)
    for rows in range(0, 100, 50):
        part = slice(rows, rows + 50)
        sums.update(X[part], w[part] if weighted else None)
    G = sums.gram().xx
    assert torch.equal(G, G.T)
    torch.testing.assert_close(G, (X * w[:, None] / w.mean()).T @ X, rtol=EXACT, atol=EXACT)


def test_a_gram_needs_a_token():
    for tokens in (0, -1):
        with pytest.raises(OptionError, match=f"at least one token, got {tokens}"):
            Gram(torch.eye(3), torch.zeros(3), tokens)


def test_sums_of_no_token_are_zero_and_add_nothing():
    """Of an expert that no token was routed to, in one calibration or in two."""
    none = GramSum(4).gram()
    assert (none.tokens, float(none.mean.sum()), float(none.variance.sum())) == (0, 0.0, 0.0)
    some = problems.gram("white", 4)
    some = Gram(some.xx, some.x, some.tokens, some.energy - some.x.square() / some.tokens)
    for one in (none + some, some + none):
        assert one.tokens == some.tokens
        assert torch.equal(one.xx, some.xx)
        torch.testing.assert_close(one.centred, some.centred)
    assert torch.equal((none + none).centred, torch.zeros(4, dtype=torch.float64))


def test_statistics_that_are_not_finite_name_channel_and_cure():
    gram = problems.gram("white", 4)
    gram.xx[2, 2] = float("inf")
    with pytest.raises(
        NumericalError, match=r"in 1 of 4 channels \(first: 2\).*forward_dtype=NAME"
    ):
        gram.check_finite()


def test_one_token_has_no_variance():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert Gram(torch.outer(x, x), x, 1).variance.tolist() == [0, 0]


def test_an_event_nobody_records_is_a_warning():
    with pytest.warns(RuntimeWarning, match="something fell back"):
        record("something fell back")
    with recording() as events:
        record("a")
        record("a")
        record("b")
    assert events == ["a", "b"]


def test_the_package_offers_what_it_lists():
    assert all(hasattr(coec, name) for name in coec.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        coec.nonsense  # noqa: B018


def test_weights_count_tokens_as_often():
    """But for the scale: sums of weighted tokens are as if the weights' mean were 1."""
    rows = torch.randn(3, 4, 5, dtype=torch.float64)
    weights = torch.tensor([1, 2, 3]).repeat(4).reshape(3, 4)
    weighted, repeated = GramSum(5), GramSum(5)
    for row, weight in zip(rows, weights, strict=True):
        weighted.update(row, weight.double())
        repeated.update(row.repeat_interleave(weight, dim=0))
    one, other = weighted.gram(), repeated.gram()
    assert (one.tokens, other.tokens) == (12, 24)
    for name in ("xx", "x", "centred"):
        torch.testing.assert_close(2 * getattr(one, name), getattr(other, name))
    torch.testing.assert_close(one.mean, other.mean)


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_parts_are_those_of_one_run_to_the_bit(weighted):
    """Parts of one batch, added in their order: the very additions of one sum."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(n, 5, generator=generator) for n in (7, 4, 9)]
    weights = [torch.rand(len(b), generator=generator) if weighted else None for b in batches]
    whole, total = GramSum(5), GramSum(5)
    for batch, w in zip(batches, weights, strict=True):
        part = GramSum(5)
        part.update(batch, w)
        before = part.xx.clone()
        whole.update(batch, w)
        for sums in (part, whole):
            sums.add_outputs(batch.norm(dim=1))
        total.merge(part)
        total.merge(GramSum(5))  # an expert that no token was routed to
        assert torch.equal(part.xx, before)
    assert (total.tokens, total.weight, total.precision) == (20, whole.weight, whole.precision)
    one, other = whole.gram(), total.gram()
    for name in ("xx", "x", "centred"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    norms = torch.cat(batches).double().norm(dim=1).sum()
    assert one.output_norms == other.output_norms == pytest.approx(float(norms), rel=1e-6)
    assert (one + other).output_norms == 2 * one.output_norms
    unmeasured = Gram(one.xx, one.x, one.tokens)
    assert (one + unmeasured).output_norms is (unmeasured + one).output_norms is None


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [7, 2500])
def test_the_energy_of_top_tokens_is_that_of_a_thousandth_of_them(n, weighted):
    """And of one token at least; the same for parts, for sums of Grams, and on another device."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, 5, generator=generator) * torch.rand(n, 1, generator=generator).exp()
    weights = torch.rand(n, generator=generator) if weighted else torch.ones(n)
    whole, merged, grams = GramSum(5), GramSum(5), []
    whole.update(rows, weights)
    for batch, w in zip(rows.split(n // 3), weights.split(n // 3), strict=True):
        alone, part = GramSum(5), GramSum(5)
        alone.update(batch, w / w.mean())  # of mean 1 in every Gram
        grams.append(alone.gram())
        part.update(batch, w)
        merged.merge(part.to("cpu"))
    energies = weights.double() * rows.double().square().sum(dim=1)
    expected = float(energies.sort().values[-max(1, n // 1000) :].sum() / energies.sum())
    gram = whole.gram()
    assert gram.top_token_energy == pytest.approx(expected, rel=1e-6)
    total = merged.gram()
    assert torch.equal(total.largest, gram.largest)
    assert total.top_token_energy == pytest.approx(expected, rel=1e-6)
    assert gram.to(torch.float32).top_token_energy == pytest.approx(expected, rel=1e-6)
    if not weighted:
        total = sum(grams[1:], grams[0])
        assert total.top_token_energy == pytest.approx(expected, rel=1e-6)


def test_the_energy_of_top_tokens_is_unknown_without_any_and_for_sums_without_it():
    assert GramSum(5).gram().top_token_energy is None
    sums = GramSum(2)
    sums.update(torch.ones(3, 2))
    gram = sums.gram()
    unmeasured = Gram(gram.xx, gram.x, gram.tokens)
    assert (gram + unmeasured).top_token_energy is unmeasured.top_token_energy is None


def test_no_more_energies_are_kept_than_are_asked_for(monkeypatch):
    monkeypatch.setattr(types, "LARGEST", 2)
    sums = GramSum(1)
    for energy in (1.0, 9.0, 4.0):
        sums.update(torch.tensor([[energy]]).sqrt())
    assert sums.largest.tolist() == [9.0, 4.0]
    assert (sums.gram() + sums.gram()).largest.tolist() == [9.0, 9.0]
