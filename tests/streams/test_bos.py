"""Windows that begin with the tokenizer's start where the dense model predicts better behind it."""

import pytest
import torch
from torch.nn import functional as F

import coec
import tiny_models as tm
from coec import pruning
from coec.config.recipe import Recipe
from coec.errors import CalibrationError, NumericalError
from coec.models.dense import Dense
from coec.planning.plan import Plan
from coec.streams import windows as module
from coec.streams.windows import CalibrationText, start_entropies
from coec.text.tokens import Stream
from coec.text.windows import all_windows, sample_windows
from outcomes import one_line

CPU = torch.device("cpu")
START = torch.tensor([0])


def opened(folder, *, begins=True, model=None):
    tm.save(model or tm.tiny("llama"), folder)
    return Dense.open(tm.begin_texts(folder) if begins else folder)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return opened(tmp_path_factory.mktemp("dense") / "model")


def planned(dense, **settings):
    settings = {"preset": "paper", "forward_dtype": "float64", "device": "cpu"} | settings
    return Plan.of(dense, Recipe(**settings))


def made(dense, calibration, bos, samples=6, seq_len=32, **settings):
    plan = planned(
        dense, calibration=calibration, bos=bos, samples=samples, seq_len=seq_len, **settings
    )
    text = CalibrationText.read(dense, plan.recipe, None)
    return text.windows(plan, lambda name, make: make(), None)


def decided(monkeypatch, behind, without):
    monkeypatch.setattr(module, "start_entropies", lambda *given: (behind, without))


def test_every_window_begins_with_the_start_and_goes_on_with_text():
    stream = Stream(torch.cat([START, torch.arange(1, 41)]), "s", "d", start=START)
    windows = all_windows(stream, seq_len=9, bos=True)
    assert torch.equal(windows.ids[:, :1], START.expand(5, 1))
    assert torch.equal(windows.ids[:, 1:], torch.arange(1, 41).reshape(5, 8))
    assert windows.bos
    drawn = sample_windows(stream, samples=3, seq_len=9, seed=0, bos=True)
    assert all(row in windows.ids.tolist() for row in drawn.ids.tolist())
    plain = all_windows(stream, seq_len=9)
    assert torch.equal(plain.ids, stream.ids[:36].reshape(4, 9))
    assert not plain.bos


def test_a_window_has_room_for_text_behind_a_start():
    start = torch.tensor([0, 1, 2])
    stream = Stream(torch.arange(40), "s", "d", start=start)
    assert torch.equal(all_windows(stream, seq_len=4, bos=True).ids[1], torch.tensor([0, 1, 2, 4]))
    with pytest.raises(CalibrationError, match=r"hold nothing but the 3 .* take longer ones"):
        all_windows(stream, seq_len=3, bos=True)


def test_off_is_the_text_alone(dense, text, tmp_path):
    windows = made(dense, text, "off")
    plain = made(opened(tmp_path / "plain", begins=False), text, "off")
    assert (windows.fit == 0).sum() <= 1
    assert not windows.record["bos"]
    assert windows.record["bos_cross_entropy"] is None
    assert made(dense, text, "on").record["bos"]
    assert windows.fit.shape == plain.fit.shape


def test_nothing_is_measured_where_the_tokenizer_adds_nothing(tokens, tmp_path, text, monkeypatch):
    dense = opened(tmp_path / "plain", begins=False)
    monkeypatch.setattr(module, "start_entropies", lambda *given: 1 / 0)
    windows = [made(dense, text, bos).record for bos in ("off", "auto")]
    assert windows[0] == windows[1]
    assert made(opened(tmp_path / "begun"), tokens, "auto").record["bos"] is False
    short = made(opened(tmp_path / "short"), text, "auto", seq_len=3)
    assert short.record["bos_cross_entropy"] is None
    for source, model in ((text, dense), (tokens, opened(tmp_path / "again"))):
        with one_line(CalibrationError, match="bos=on has no effect"):
            made(model, source, "on")


def oracle(dense, rows, start):
    """Both cross-entropies by the whole network, one row after the other."""
    network = dense.network(CPU, torch.float64)
    behind, without = [], []
    with torch.no_grad():
        for row in rows:
            tokens = row[start:]
            for losses, first in ((behind, 0), (without, start)):
                logits = network(input_ids=row[None, first:]).logits[0, :-1]
                predicted = F.cross_entropy(logits, row[first + 1 :], reduction="none")
                losses.append(predicted[-(len(tokens) - 1) :])
    return float(torch.cat(behind).mean()), float(torch.cat(without).mean())


@pytest.mark.parametrize("variant", ["llama", "gemma2", "qwen2", "mixtral"])
def test_both_are_measured_on_the_same_tokens(variant, tmp_path):
    dense = Dense.open(tm.save(tm.tiny(variant), tmp_path / "model"))
    rows = torch.randint(2, tm.VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(2))
    rows[:, :2] = torch.tensor([0, 1])
    measured = start_entropies(dense, rows, 2, planned(dense), None)
    # The last text tokens that stand for the start's places in the other run are left out.
    expected = oracle(dense, rows[:, :22], 2)
    assert measured == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("seed", "better"), [(4, True), (5, False)])
def test_the_better_is_taken(seed, better, text, tmp_path):
    """Models that attend to a start of their own predict better behind it, or worse."""
    model, generator = tm.tiny("llama"), torch.Generator().manual_seed(seed)
    weight = model.model.embed_tokens.weight
    weight.data[0] = 5 * torch.randn(tm.HIDDEN, generator=generator).to(weight)
    dense = opened(tmp_path / "model", model=model)
    record = made(dense, text, "auto").record
    entropies = record["bos_cross_entropy"]
    assert record["bos"] is (entropies["on"] < entropies["off"]) is better
    expected = made(dense, text, "on" if better else "off")
    assert record["windows_sha256"] == expected.record["windows_sha256"]


def test_few_tokens_are_run(dense, monkeypatch):
    seen = []
    monkeypatch.setattr(module.Layers, "embed", lambda self, ids, _: seen.append(ids[0]) or 1 / 0)
    for rows, shape in (((40, 2048), (8, 512)), ((40, 64), (64, 63)), ((2, 32), (4, 31))):
        with pytest.raises(ZeroDivisionError):
            start_entropies(dense, torch.zeros(rows).long(), 1, planned(dense), None)
        assert tuple(seen[-1].shape) == shape


def test_predictions_that_are_not_finite_choose_nothing(dense, text, monkeypatch):
    decided(monkeypatch, float("nan"), 3.0)
    with pytest.raises(NumericalError, match="set bos=on or bos=off"):
        made(dense, text, "auto")


def test_a_mixture_begins_with_it_in_every_part(dense, text, tokens, tmp_path, monkeypatch):
    other = tm.text_file(tmp_path / "other.txt", 2000)
    decided(monkeypatch, 1.0, 2.0)
    windows = made(dense, f"{text}=2,{other}", "auto")
    assert (windows.fit[:6, 0] == 0).all()
    assert (windows.fit[:6, 1:] > 1).all()
    assert windows.record["bos"] is True
    # Token ids are taken as they are.
    mixed = made(dense, f"{text},{tokens}", "auto")
    assert (mixed.fit[:, 0] == 0).sum() == 3
    assert mixed.record["bos_cross_entropy"] == {"on": 1.0, "off": 2.0}


def test_a_run_measures_once_and_goes_on_with_what_it_chose(dense, text, tmp_path, monkeypatch):
    settings = {"preset": "paper", "calibration": text, "samples": 6, "seq_len": 32, "bos": "auto"}
    with monkeypatch.context() as patch:
        decided(patch, 2.0, 3.0)
        whole = coec.prune(dense.folder, tmp_path / "whole", **settings)
        patch.setattr(pruning, "solve", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            coec.prune(dense.folder, tmp_path / "out", **settings)
    monkeypatch.setattr(module, "start_entropies", lambda *given: 1 / 0)
    report = coec.prune(dense.folder, tmp_path / "out", **settings)
    assert report.calibration == whole.calibration
    assert report.calibration["bos"] is True
    assert report.calibration["bos_cross_entropy"] == {"on": 2.0, "off": 3.0}
    [note] = [note for note in report.plan["notes"] if "start" in note]
    assert "begins with the tokenizer's start" in note
    assert "2.000 nats" in note
    assert tm.same_weights(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
def test_a_model_trained_without_it_inside_a_text_is_given_none(shared, tmp_path):
    """stories260K saw its start token before stories only, and windows begin anywhere."""
    dense = Dense.open(tm.readable(shared / "models/stories260K", tmp_path / "model"))
    text = shared / "data/tinystories/train.txt"
    record = made(dense, text, "auto", samples=16, seq_len=256, forward_dtype="float32").record
    assert record["bos"] is False
    assert record["bos_cross_entropy"]["on"] > record["bos_cross_entropy"]["off"] + 0.05
