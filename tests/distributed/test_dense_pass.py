"""Shares of the windows: what workers in a row sum is what one process sums, to the bit."""

import pytest
import torch

import tiny_models as tm
from coec.distributed.dense_pass import shares, statistics_bytes
from coec.distributed.workers import SummingStream
from coec.models.dense import Dense
from coec.settings import Calibration
from coec.streaming import layers as module
from coec.streaming.dense_stream import DenseStream, Sums

CPU = torch.device("cpu")
IDS = torch.randint(2, tm.VOCABULARY, (9, 32), generator=torch.Generator().manual_seed(3))
HELD = torch.randint(2, tm.VOCABULARY, (3, 32), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module", params=["mistral sliding", "mixtral"])
def dense(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    return Dense.open(tm.save(tm.tiny(request.param), root / "model", tokenizer=False))


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(module, "TOKENS_PER_BATCH", 64)  # two windows each: 5 batches, and 2


def row(dense, count):
    return [
        SummingStream(dense, windows, torch.float32, CPU)
        for windows in shares(IDS, HELD, count, 64)
    ]


def through(workers, index, oldest=0):
    sums = Sums()
    for worker in workers:
        sums = worker.add(index, oldest, sums)
    return sums.grams()


def assert_same(found, block):
    for grams, expected in zip(found, (block.grams, block.holdout), strict=True):
        assert grams.keys() == expected.keys()
        for name, gram in expected.items():
            for part in ("xx", "x", "centred", "largest"):
                assert torch.equal(getattr(grams[name], part), getattr(gram, part))
            assert grams[name].tokens == gram.tokens
            assert grams[name].output_norms == gram.output_norms
            assert (gram.output_norms > 0) == (name.startswith("expert") and gram.tokens > 0)


@pytest.fixture(scope="module")
def whole(dense):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOKENS_PER_BATCH", 64)
        stream = DenseStream(dense, IDS, holdout=HELD, device=CPU, dtype=torch.float32)
        return list(stream.blocks())


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_any_number_of_workers_gives_the_bits_of_one_process(count, dense, whole):
    workers = row(dense, count)
    assert len(workers) == min(count, 5)  # no more than there are batches
    for block in whole:
        assert_same(through(workers, block.index), block)


def test_a_worker_that_begins_anew_or_is_asked_again_gives_the_same_bits(dense, whole):
    workers = row(dense, 2)
    workers[0].add(0, 0, Sums())  # one is ahead of the other
    assert_same(through(workers, 1), whole[1])
    assert_same(through(workers, 0), whole[0])  # back again
    workers[1] = row(dense, 2)[1]  # lost, and begun anew: it runs its windows through block 0
    assert_same(through(workers, 1), whole[1])


def test_states_before_the_oldest_block_are_forgotten_and_made_again(dense, whole):
    [worker] = row(dense, 1)
    worker.add(0, 0, Sums())
    worker.add(1, 1, Sums())
    assert min(worker._before) == 1
    assert_same(through([worker], 0), whole[0])


def test_shares_are_whole_batches_in_their_order():
    found = shares(IDS, HELD, 2, 64)
    assert [len(fit) for fit, _ in found] == [4, 5]
    assert torch.equal(torch.cat([fit for fit, _ in found]), IDS)
    assert torch.equal(torch.cat([held for _, held in found]), HELD)
    alone = shares(IDS, HELD[:1], 3, 64)
    assert [None if held is None else len(held) for _, held in alone] == [None, None, 1]


def test_the_bytes_of_a_block_are_those_of_its_sums(dense):
    sums = DenseStream(dense, IDS, holdout=HELD, device=CPU, dtype=torch.float32)
    sums.begin()
    block, found = dense.layout.blocks[0], Sums()
    sums.advance(block, dense.tensors(block), found)
    parts = [s for half in (found.fit, found.validation) for s in half.values()]
    size = sum(t.numel() * 8 for s in parts for t in (s.xx, s.x, s.centred))
    assert statistics_bytes(dense, Calibration(holdout=0.25)) == size
    assert statistics_bytes(dense, Calibration()) * 2 == size
