"""Perplexity and divergence against the obvious loop."""

import hashlib
import json
import math
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import coec
import coec.evaluation as module
import tiny_models as tm
from coec import devices
from coec.errors import CalibrationError, ModelError, NumericalError, OptionError
from outcomes import one_line


@pytest.fixture(scope="module")
def other(dense, tmp_path_factory):
    """The folder of a model that predicts a little less surely."""
    folder = shutil.copytree(dense, tmp_path_factory.mktemp("other") / "other")
    return tm.edit_weights(folder, lambda weights: weights["lm_head.weight"].mul_(0.9))


IDS = torch.randint(2, tm.VOCABULARY, (70,), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def naive(dense, other, length):
    """Cross-entropies and the divergence, one prediction at a time."""
    dense, other = (tm.load(folder) for folder in (dense, other))
    ce, base_ce, kl, same = [], [], [], []
    for first in range(0, len(IDS) - length + 1, length):
        window = IDS[first : first + length]
        p = F.log_softmax(tm.logits(other, window[None])[0].double(), -1)
        q = F.log_softmax(tm.logits(dense, window[None])[0].double(), -1)
        for position in range(length - 1):
            ce.append(-p[position, window[position + 1]])
            base_ce.append(-q[position, window[position + 1]])
            kl.append((q[position].exp() * (q[position] - p[position])).sum())
            same.append((p[position].argmax() == q[position].argmax()).double())
    means = (float(torch.stack(values).mean()) for values in (ce, base_ce, kl, same))
    return *means, len(ce)


@pytest.mark.parametrize(("batch", "tokens"), [(2**26, 1000), (2**26, 7), (1, 7)])
def test_perplexity_is_that_of_the_naive_loop(dense, other, batch, tokens, monkeypatch):
    vocabulary = tm.load(dense).config.vocab_size
    monkeypatch.setattr(module, "_LOGITS_PER_BATCH", batch)
    monkeypatch.setattr(devices, "LOGITS_PER_PASS", tokens * vocabulary)
    result = coec.perplexity(other, IDS, seq_len=16, baseline=dense)
    ce, base_ce, kl, same, count = naive(dense, other, 16)
    assert (result.windows, result.tokens, result.seq_len) == (4, count, 16)  # 6 tokens dropped
    assert result.perplexity == pytest.approx(math.exp(ce), rel=1e-5)
    assert result.baseline_perplexity == pytest.approx(math.exp(base_ce), rel=1e-5)
    assert result.ratio == pytest.approx(math.exp(ce - base_ce), rel=1e-5)
    assert result.kl == pytest.approx(kl, rel=1e-3)
    assert result.agreement == same
    assert result.parameters == sum(p.numel() for p in tm.load(other).parameters())


def test_a_model_is_as_good_as_itself(dense):
    result = coec.perplexity(dense, IDS, seq_len=16, baseline=dense)
    assert result.kl == 0
    assert result.ratio == result.agreement == 1


def test_distinct_3_grams_are_those_of_a_greedy_loop(dense, other):
    """By the obvious loop; a head that knows one token repeats it."""
    result = coec.perplexity(other, IDS, seq_len=16, baseline=dense)
    model = tm.load(other)
    shares = []
    for first in range(0, 64, 16):
        ids = IDS[first : first + 16].tolist()
        while len(ids) < tm.POSITIONS:
            logits = tm.logits(model, torch.tensor([ids]))[0, -1]
            logits[model.config.eos_token_id] = -torch.inf
            ids.append(int(logits.argmax()))
        grams = list(zip(ids[16:], ids[17:], ids[18:], strict=False))
        shares.append(len(set(grams)) / len(grams))
    assert result.distinct == pytest.approx(sum(shares) / len(shares))
    assert 0 < result.baseline_distinct <= 1


def test_a_model_that_repeats_itself_has_few_distinct_3_grams(dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "stuck")

    def stick(weights):
        weights["lm_head.weight"].zero_()
        weights["model.norm.weight"].zero_()

    tm.edit_weights(folder, stick)
    assert coec.perplexity(folder, IDS, seq_len=16).distinct == pytest.approx(1 / 46)


def test_windows_are_as_long_as_the_model_allows_unless_told(dense):
    assert coec.perplexity(dense, IDS).seq_len == tm.POSITIONS


@pytest.mark.parametrize(
    ("text", "settings", "error", "match"),
    [
        (IDS, {"seq_len": 65}, OptionError, "seq_len=65 is beyond the model's 64 positions"),
        *((IDS, {"seq_len": length}, OptionError,
           "seq_len must") for length in (1, 0, -3)),
        (IDS, {"max_windows": 0}, OptionError, "max_windows must"),
        (IDS, {"dtype": "int8"}, OptionError, "dtype must"),
        (IDS, {"bos": "yes"}, OptionError, "bos must"),
        (IDS, {"via": "vllm"}, OptionError, "via must"),
        ("self", {}, OptionError, "give baseline=DENSE"),
        ("self", {"samples": 0}, OptionError, "samples must"),
        *(("self", {"seed": seed}, OptionError, "seed must") for seed in (-1, 2**64, np.int64(-1))),
        (IDS[:20], {"seq_len": 32}, CalibrationError, "has 20 tokens, less than one window of 32"),
        (torch.rand(40), {}, CalibrationError, "token ids are whole numbers"),
        (IDS.numpy() > 9, {"seq_len": 16}, CalibrationError, "whole numbers, got bool"),
    ],
)  # fmt: skip
def test_settings_and_texts_that_cannot_be(text, settings, error, match, dense):
    with pytest.raises(error, match=match):
        coec.perplexity(dense, text, **settings)


def test_text_named_by_a_path_or_a_name_is_tokenised_and_its_digest_kept(dense, tmp_path):
    name = tm.text_file(tmp_path / "text.txt", 200)
    path = tmp_path / "text.txt"
    by_name, by_path = (coec.perplexity(dense, p, seq_len=32) for p in (name, path))
    assert by_name.windows == 6
    assert by_name.text_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (by_path.perplexity, by_path.text) == (by_name.perplexity, name)


def test_a_baseline_of_another_vocabulary_is_an_error(dense, tmp_path):
    other = tm.save(tm.tiny("llama", torch.float32, vocab_size=310), tmp_path / "other")
    with pytest.raises(ModelError, match=r"different vocabularies \(300 and 310\)"):
        coec.perplexity(dense, IDS, baseline=other)


def test_a_model_whose_logits_overflow_is_an_error(dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "model")
    tm.edit_weights(folder, lambda weights: weights["lm_head.weight"].fill_(3e38))
    with pytest.raises(NumericalError, match="cross-entropy is not finite"):
        coec.perplexity(folder, IDS, seq_len=16)


def test_a_perplexity_that_overflows_is_an_error_in_model_and_baseline(dense, tmp_path):
    """A cross-entropy of 1e5 nats is a number; its exponential is none, and no JSON."""
    wild = shutil.copytree(dense, tmp_path / "wild")
    tm.edit_weights(wild, lambda weights: weights["lm_head.weight"].mul_(1e7))
    with pytest.raises(NumericalError, match=r"the model's perplexity is not finite: e\^"):
        coec.perplexity(wild, IDS, seq_len=16)
    with pytest.raises(NumericalError, match="the baseline's perplexity is not finite"):
        coec.perplexity(dense, IDS, seq_len=16, baseline=wild)


def test_a_trained_model_reads_stories_better_than_noise(shared, tmp_path):
    folder = tm.readable(shared / "models/stories260K", tmp_path / "model")
    text = (shared / "data/tinystories/test.txt").read_text(encoding="utf-8")[:20000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    result = coec.perplexity(folder, str(tmp_path / "text.txt"), seq_len=256)
    assert 3 < result.perplexity < 7
    assert result.special_tokens == 1


def test_a_limit_on_windows_takes_the_first(dense):
    limited = coec.perplexity(dense, IDS, seq_len=16, max_windows=2)
    cut = coec.perplexity(dense, IDS[:32], seq_len=16)
    assert cut.perplexity == limited.perplexity
    assert (limited.windows, limited.tokens) == (2, 30)
    assert limited.perplexity != coec.perplexity(dense, IDS, seq_len=16).perplexity


def test_two_tensors_are_not_the_same_text(dense, tmp_path):
    coec.prune(dense, tmp_path / "out", calibration=IDS, samples=4, seq_len=16,
               compensation="none", preset="paper")  # fmt: skip
    assert coec.perplexity(tmp_path / "out", IDS, seq_len=16).same_text_as_calibration is False


def test_a_baseline_with_another_tokenizer_is_refused(dense, other, tmp_path):
    """The vocabulary has the same size, and every token another meaning."""
    unrelated = shutil.copytree(other, tmp_path / "unrelated")
    path = unrelated / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    ids = list(vocabulary.values())
    content["model"]["vocab"] = dict(zip(vocabulary, [*ids[:2], *reversed(ids[2:])]))
    path.write_text(json.dumps(content))
    with one_line(ModelError, match="have different tokenizers: the baseline must be"):
        coec.perplexity(other, IDS, seq_len=16, baseline=unrelated)
    path.write_text((dense / "tokenizer.json").read_text() + "\n")  # the same in other bytes
    assert coec.perplexity(other, IDS, seq_len=16, baseline=unrelated).kl == 0
    path.unlink()
    assert coec.perplexity(other, IDS, seq_len=16, baseline=unrelated).kl == 0


def test_numbers_and_ids_may_be_of_numpy(dense):
    settings = {"seq_len": np.int64(16), "max_windows": np.array(2)}
    result = coec.perplexity(dense, IDS.numpy(), **settings)
    plain = coec.perplexity(dense, IDS, seq_len=16, max_windows=2)
    assert (result.windows, result.perplexity) == (2, plain.perplexity)
