"""The Fisher information behind every block, against autograd through the whole model."""

import pytest
import torch

import tiny_models as tm
from coec.errors import NumericalError
from coec.models.dense import Dense
from coec.streaming import fisher
from coec.streaming.fisher import FisherStream, root

CPU = torch.device("cpu")
SEED = 3


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tm.save(tm.tiny(), tmp_path_factory.mktemp("model") / "dense")


def stream(folder, ids, *, weighted, tokens=4096):
    dense = Dense.open(folder)
    return FisherStream(dense, ids, tokens, device=CPU, dtype=torch.float64, weighted=weighted)


def by_autograd(folder, ids, *, weighted):
    """Behind every block of the model of transformers, the same tokens drawn."""
    model = tm.load(folder).double()
    states = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, out: states.append(out))
    logits = model(input_ids=ids).logits
    p = logits.detach().softmax(-1).flatten(0, 1)
    drawn = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(SEED))
    score = logits.log_softmax(-1).flatten(0, 1).gather(-1, drawn).sum()
    found = []
    for state, g in zip(states, torch.autograd.grad(score, states), strict=True):
        square = state.detach().square().mean(-1)
        weight = square.clamp_min(1e-3 * square.median()) if weighted else torch.ones_like(square)
        total = torch.einsum("nt,nti,ntj->ij", weight, g, g)
        found.append(total / total.diagonal().mean())
    return found


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_that_of_autograd_through_the_whole_model(dense, weighted):
    ids = torch.randint(tm.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
    expected = by_autograd(dense, ids, weighted=weighted)
    found = list(stream(dense, ids, weighted=weighted).information(SEED))
    assert [block.index for block, _ in found] == [*reversed(range(len(expected)))]
    for (_, one), other in zip(found, reversed(expected), strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)


def test_no_more_windows_are_run_than_it_takes(dense):
    ids = torch.randint(tm.VOCABULARY, (9, 12), generator=torch.Generator().manual_seed(0))
    some = [m for _, m in stream(dense, ids, weighted=True, tokens=30).information(SEED)]
    two = [m for _, m in stream(dense, ids[:2], weighted=True).information(SEED)]
    assert all(torch.equal(a, b) for a, b in zip(some, two, strict=True))


def test_predictions_that_are_not_finite_are_refused(dense, monkeypatch):
    monkeypatch.setattr(
        fisher.Head, "drawn_gradient", lambda self, state, generator: state * float("nan")
    )
    ids = torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(NumericalError, match="set fisher = 0"):
        list(stream(dense, ids, weighted=True).information(SEED))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_the_root_is_that_of_the_mixed_metric(share):
    a = torch.randn(6, 2, dtype=torch.float64)  # of rank 2
    M = a @ a.T
    S = root(M, share)
    identity = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(S.T @ S, share * M + (1 - share) * identity)
