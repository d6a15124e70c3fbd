"""Shared n-grams against sets of tuples."""

import numpy as np
import pytest
import torch

from coec.calibration.tokens import Stream
from coec.calibration.windows import Overlap, _hashes, all_windows, overlap, passage_length
from coec.errors import OptionError


def brute_force(calibration, evaluation, n):
    def grams(row):
        return [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]

    seen = {gram for row in calibration.tolist() for gram in grams(row)}
    hits = [[gram in seen for gram in grams(row)] for row in evaluation.tolist()]
    share = sum(map(sum, hits)) / sum(map(len, hits))
    return Overlap(n, len(hits), sum(map(any, hits)), share)


@pytest.mark.parametrize("n", [1, 3, 4, 5])
def test_it_is_what_sets_of_tuples_say(n):
    generator = torch.Generator().manual_seed(n)
    calibration = torch.randint(0, 4, (9, 11), generator=generator)
    evaluation = torch.randint(0, 4, (13, 7), generator=generator)
    expected = brute_force(calibration, evaluation, n)
    result = overlap(calibration, evaluation, n)
    assert (result.n, result.windows, result.shared) == (n, 13, expected.shared)
    assert result.share == pytest.approx(expected.share, abs=0)
    assert n == 1 or 0 < expected.share < 1


def test_a_text_shares_all_of_itself_and_nothing_with_others():
    ids = torch.arange(200).reshape(4, 50)
    assert overlap(ids, ids) == Overlap(13, 4, 4, 1.0)
    assert overlap(ids, ids + 200) == Overlap(13, 4, 0, 0.0)
    assert overlap(ids, ids).flagged
    assert not overlap(ids, ids + 200).flagged


def test_the_order_of_tokens_counts():
    ids = torch.arange(26).reshape(1, 26)
    assert overlap(ids, ids.flip(1)).share == 0


def test_no_n_gram_crosses_a_border_between_windows():
    calibration = torch.arange(20).reshape(2, 10)
    across = torch.arange(5, 15).reshape(1, 10)
    assert overlap(calibration, across, 6).shared == 0
    assert overlap(calibration, across, 5) == Overlap(5, 1, 1, 2 / 6)


def test_windows_and_their_ids_are_the_same_to_it():
    stream = Stream(torch.arange(100), "source", "digest")
    windows = all_windows(stream, seq_len=20, vocabulary=100)
    assert overlap(windows, windows.ids[:1]) == overlap(windows.ids, windows.ids[:1])


@pytest.mark.parametrize("n", [0, 9])
def test_an_n_gram_fits_in_a_window(n):
    with pytest.raises(OptionError, match=f"n must be between 1 and 8, .*; got {n}"):
        overlap(torch.zeros(2, 20, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64), n)
    with pytest.raises(OptionError, match="at least one window"):
        overlap(torch.zeros(0, 20, dtype=torch.int64), torch.zeros(2, 20, dtype=torch.int64))


def test_the_hashes_of_many_n_grams_are_distinct():
    ids = torch.cartesian_prod(*[torch.arange(40)] * 3)
    assert len(np.unique(_hashes(ids, 3))) == 40**3


def test_an_honest_split_is_not_flagged_and_a_leak_is(shared):
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(shared / "models/wt2-llama")

    def windows(name, length=256):
        text = (shared / "data/wikitext-2" / name).read_text(encoding="utf-8")[:600_000]
        ids = torch.tensor(encode(text, verbose=False)["input_ids"])
        return ids[: len(ids) // length * length].reshape(-1, length)

    train, test = windows("train.tokens.txt"), windows("test.raw.txt")
    assert 0 < overlap(train, test).share < 0.01
    assert not overlap(train, test).flagged
    leaked = torch.cat([test[:90], train[:10]])
    assert overlap(train[:100], leaked).flagged


@pytest.mark.parametrize(
    ("vocabulary", "n"), [(152_064, 13), (32_000, 13), (2048, 18), (512, 22), (105, 29)]
)
def test_small_vocabularies_need_longer_n_grams(vocabulary, n):
    assert passage_length(vocabulary) == n
