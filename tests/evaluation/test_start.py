"""Evaluation windows that begin with the tokenizer's start where the model needs it."""

import pytest
import torch
from torch.nn import functional as F

import coec
import coec.evaluation as module
import tiny_models as tm
from coec.config.evaluation import TextEvaluation
from coec.errors import OptionError
from coec.models.dense import Dense

SEQ_LEN = 16


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "model"
    tm.save(tm.tiny("llama"), folder)
    return tm.begin_texts(folder)


def read(model, text):
    return module._read(Dense.open(model), text, TextEvaluation(), SEQ_LEN, False, None)


def measured(model, text, **settings):
    return coec.perplexity(model, text, seq_len=SEQ_LEN, dtype="float64", **settings)


def test_on_and_off_are_perplexities_behind_the_start_and_without(dense, text):
    ids = read(dense, text).ids
    network = tm.load(dense).double()
    for bos, width in (("on", SEQ_LEN - 1), ("off", SEQ_LEN)):
        result = measured(dense, text, bos=bos, max_windows=3)
        assert result.bos == (bos == "on")
        begin = 1 if bos == "on" else 0  # the text itself begins with the start
        rows = ids[begin : begin + 3 * width].view(3, width)
        rows = torch.cat([ids[:1].expand(3, 1), rows], dim=1) if bos == "on" else rows
        with torch.no_grad():
            logits = network(input_ids=rows).logits[:, :-1]
        entropy = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        assert result.perplexity == pytest.approx(float(entropy.exp()), rel=1e-9)


@pytest.mark.parametrize("needed", [True, False])
def test_auto_takes_the_start_where_the_gain_is_more_than_is_asked(
    needed, dense, text, monkeypatch
):
    """The gain is that of the same tokens, counted here in another way."""
    network = tm.load(dense).double()
    rules = TextEvaluation(max_windows=4)
    behind = module._cut(read(dense, text), rules, SEQ_LEN, bos=True).ids
    with torch.no_grad():
        on, off = (network(input_ids=ids).logits for ids in (behind, behind[:, 1:]))
    targets = behind[:, 2:].flatten()
    gain = float(
        F.cross_entropy(off[:, :-1].flatten(0, 1), targets)
        - F.cross_entropy(on[:, 1:-1].flatten(0, 1), targets)
    )
    monkeypatch.setattr(module, "_NEEDED", gain - 1e-9 if needed else gain + 1e-9)
    result = measured(dense, text)
    assert result.bos == needed
    same = measured(dense, text, bos="on" if needed else "off")
    assert result.perplexity == same.perplexity


def test_the_baseline_decides_for_both(dense, text, tmp_path, monkeypatch):
    changed = tm.tiny("llama")
    changed.get_input_embeddings().weight.data *= 2
    other = tm.begin_texts(tm.save(changed, tmp_path / "other"))
    asked = []

    def needs(network, ids, start):
        asked.append(network.get_input_embeddings().weight.double().sum().item())
        return True

    monkeypatch.setattr(module, "_needs_start", needs)
    result = measured(other, text, baseline=dense)
    expected = tm.load(dense).get_input_embeddings().weight.double().sum().item()
    assert asked == [pytest.approx(expected)]
    assert result.bos
    assert result.baseline_perplexity == measured(dense, text).perplexity


def test_a_tokenizer_without_a_start_has_none_to_put(text, tmp_path):
    plain = tm.save(tm.tiny("llama"), tmp_path / "plain")
    assert not measured(plain, text).bos
    with pytest.raises(OptionError, match="bos"):
        measured(plain, text, bos="on")
