"""The benchmark of ranks inside heads: the truncation is the best, what goes is what is counted."""

import pytest
import torch

import coec
from benchmarks import head_rank
from benchmarks.head_rank import Study, attention_parameters, dropping, groups, site_of
from benchmarks.heads import bases, first_of_every, fit, reduced
from coec.calibration.windows import Windows
from coec.models.dense import Dense
from coec.streaming.dense_stream import DenseStream
from problems import gram, weight
from tiny_models import VOCABULARY, save, tiny

HEAD_DIM, GROUPS, HEADS = 4, 4, 2


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two random blocks of four groups."""
    dense = Dense.open(save(tiny(), tmp_path_factory.mktemp("head_rank") / "dense"))
    torch.manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (8, 24))
    stream = DenseStream(dense, ids, device=torch.device("cpu"), dtype=torch.float64)
    return Study(dense, tuple(stream.blocks()), Windows(ids[:2], "random", ids.numel(), ""))


def test_nothing_of_its_rank_loses_less_of_a_single_head():
    W, G = weight(7, 5), gram("power law", 5).xx
    (T,) = bases(W, G, groups=1, head_dim=5)
    mu, E = torch.linalg.eigh(G)
    sigma = torch.linalg.svdvals(W @ (E * mu.sqrt()))
    for rank in range(6):
        lost = W @ (torch.eye(5) - torch.linalg.inv(T)[:, :rank] @ T[:rank].double())
        assert torch.trace(lost @ G @ lost.T) == pytest.approx(float(sigma[rank:].square().sum()))


@pytest.mark.parametrize("fitted", [False, True])
def test_a_reduced_block_computes_the_projected_product_and_lacks_what_is_counted(study, fitted):
    block, rank = study.blocks[1], 1
    site = site_of(block, "attention")
    W, V = block.tensors[site.weight], block.tensors[site.value.tensor]
    made = reduced(block.tensors, site, block.grams["attention"], rank, "none", fitted=fitted)
    T = bases(W, block.grams["attention"].xx, GROUPS, HEAD_DIM)
    T = fit(T, W, block.grams["attention"].xx, rank) if fitted else T
    for head in range(GROUPS * HEADS):
        own, group = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM), head // HEADS
        rows = slice(group * HEAD_DIM, (group + 1) * HEAD_DIM)
        P = torch.linalg.inv(T[group])[:, :rank] @ T[group][:rank]
        product = made[site.weight][:, own] @ made[site.value.tensor][rows]
        torch.testing.assert_close(product, W[:, own] @ P @ V[rows])
    gone = sum(int((tensor == 0).sum()) for tensor in made.values())
    assert gone == (1 - rank / HEAD_DIM) / 2 * attention_parameters(study)


def test_at_full_rank_nothing_changes(study):
    made = head_rank.ranked(study, HEAD_DIM, "ridge")
    assert len(made) == 2 * len(study.blocks)
    assert study.perplexity(made) == pytest.approx(study.perplexity({}), rel=1e-4)
    assert study.perplexity(head_rank.ranked(study, 1, "ridge")) != pytest.approx(
        study.perplexity({}), rel=1e-2
    )


def test_a_fitted_basis_leaves_less_error():
    W, statistics = weight(12, 24), gram("power law", 24)
    T = bases(W, statistics.xx, groups=3, head_dim=4)
    errors = []
    for turned in (T, fit(T, W, statistics.xx, 2)):
        there = torch.block_diag(*turned.repeat_interleave(2, dim=0))
        G = coec.Gram(there @ statistics.xx @ there.T, there @ statistics.x, statistics.tokens)
        made = coec.compensate(
            W @ torch.linalg.inv(there), G, first_of_every(4, 6, 2), method="ridge-to-slice"
        )
        errors.append(made.diagnostics["error_after"])
    assert errors[1] < 0.9 * errors[0]


def test_no_block_loses_a_second_group_before_all_have_lost_one(study):
    def lost(count):
        made = groups(study, count, "obs, ridge")
        zero = [(made[site_of(b, "attention").weight] == 0).all(dim=0).sum() for b in study.blocks]
        return [int(columns) // (HEADS * HEAD_DIM) for columns in zero]

    errors = [head_rank.cut(b, "attention", GROUPS - 1, "obs, ridge")[1] for b in study.blocks]
    cheaper = errors.index(min(errors))
    assert lost(0) == [0, 0]
    assert lost(1)[cheaper] == 1
    assert sum(lost(1)) == 1
    assert lost(2) == [1, 1]
    assert sorted(lost(3)) == [1, 2]


def test_between_counts_logarithms_are_interpolated(study, monkeypatch):
    monkeypatch.setattr(head_rank, "dropped", lambda study, count, *_: 2.0**count)
    assert dropping(study, 1 / 4, 40, "obs, ridge") == pytest.approx(4)
    assert dropping(study, 5 / 16, 40, "obs, ridge") == pytest.approx(2**2.5)
