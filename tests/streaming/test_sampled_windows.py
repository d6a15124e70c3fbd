"""Windows that the model adds to those of a text."""

import pytest
import torch

import coec
import tiny_models as tm
from coec.calibration.windows import Windows, hold_out
from coec.errors import CalibrationError, OptionError
from coec.models.dense import Dense
from coec.planning import ComputeConfig, Forecast
from coec.settings import Calibration, Runtime
from coec.streaming.passes import DensePass
from coec.streaming.windows import window_maker

CPU = (torch.device("cpu"), torch.float64, None)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return Dense.open(tm.save(tm.tiny("llama"), tmp_path_factory.mktemp("dense") / "model"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tm.token_file(tmp_path_factory.mktemp("text") / "tokens.npy")


def made(dense, source, **settings):
    calibration = Calibration(source=source, samples=6, seq_len=32, **settings)
    return window_maker(dense, calibration, Runtime(device="cpu"), None)(*CPU)


@pytest.mark.parametrize(("share", "added"), [(0.0, 0), (0.5, 3), (1.0, 6), (2.0, 12)])
def test_they_follow_the_windows_of_the_text(dense, tokens, share, added):
    plain, more = made(dense, tokens), made(dense, tokens, self_samples=share)
    assert more.sampled == more.record()["sampled"] == added
    assert torch.equal(more.ids[:6], plain.ids)
    assert more.ids.shape == (6 + added, 32)
    assert len(more.ids.unique(dim=0)) == 6 + added
    assert (more.source, more.text_sha256) == (plain.source, plain.text_sha256)
    assert (more.sha256 == plain.sha256) == (added == 0)


def test_a_text_that_is_the_models_own_gets_others(dense, monkeypatch):
    monkeypatch.setattr("coec.streaming.windows.load_tokenizer", lambda *given, **more: None)
    windows = made(dense, "self", self_samples=1.0)
    assert len(windows.ids.unique(dim=0)) == 12


def test_the_seed_draws_them(dense, tokens):
    draws = [
        made(dense, tokens, self_samples=1.0, seed=seed).ids[6:] for seed in (0, 0, 1, 2**64 - 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert draws[3].shape == (6, 32)


def test_none_of_them_is_held_out():
    text = Windows(torch.arange(8)[:, None].expand(8, 4), "", 0, "")
    windows = text.and_sampled(torch.full((16, 4), 99))
    for seed in range(20):
        fit, held = hold_out(windows, 0.25, seed)
        same_fit, same_held = hold_out(text, 0.25, seed)
        assert torch.equal(held, same_held)
        assert torch.equal(fit[:6], same_fit)
        assert (fit[6:] == 99).all()
        assert len(fit) == 22


def test_a_run_keeps_them(dense, tokens, tmp_path, monkeypatch):
    """What a model writes is not made twice, also where the rest of the windows is a text."""
    settings = {
        "preset": "paper", "calibration": tokens, "samples": 6, "seq_len": 32, "self_samples": 1.0,
    }  # fmt: skip
    coec.prune(dense.folder, tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(DensePass, "blocks", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            coec.prune(dense.folder, tmp_path / "out", **settings)
    monkeypatch.setattr(DensePass, "draw", lambda *given: 1 / 0)
    report = coec.prune(dense.folder, tmp_path / "out", **settings)
    assert report.calibration["windows"] == 12
    assert report.calibration["sampled"] == 6
    names = ("model.safetensors", "README.md")
    assert all(
        (tmp_path / "out" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names
    )
    assert "6 of them, from the dense model itself" in (tmp_path / "out" / "README.md").read_text()


def test_a_device_without_room_for_the_model_is_said(dense, tokens, monkeypatch):
    def full(*given, **how):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Dense, "network", full)
    with pytest.raises(CalibrationError, match=r"cpu has no room for all of it.*self_samples=0"):
        made(dense, tokens, self_samples=1.0)


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf"), 1000.0])
def test_no_share_is_refused(share):
    with pytest.raises(OptionError, match="self_samples is how many windows the model adds|finite"):
        Calibration(self_samples=share)


def test_plans_count_them(dense, tokens):
    settings = {"preset": "paper", "calibration": tokens, "samples": 6, "seq_len": 32}
    few, many = (coec.plan(dense.folder, **settings, self_samples=n) for n in (0.0, 1.0))
    one, other = (
        Forecast.of(plan, ComputeConfig.of(plan, torch.device("cpu"))) for plan in (few, many)
    )
    before, after = (
        next(phase for phase in forecast.phases if phase.name == "calibrating")
        for forecast in (one, other)
    )
    assert after.operations == 2 * before.operations
    assert after.host["hidden states"] == 2 * before.host["hidden states"]
    assert "whole model" in {purpose for phase in other.phases for purpose in phase.host}
