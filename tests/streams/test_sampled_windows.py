"""Windows that the dense model writes."""

import pytest
import torch
from coec.settings import Calibration, Runtime
from coec.streaming.passes import DensePass

import coec
import tiny_models as tm
from coec.errors import CalibrationError
from coec.models.dense import Dense
from coec.streams.windows import window_maker
from outcomes import raising

CPU = (torch.device("cpu"), torch.float64, None)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return Dense.open(tm.save(tm.tiny("llama"), tmp_path_factory.mktemp("dense") / "model"))


def made(dense, **settings):
    calibration = Calibration(source="self", samples=6, seq_len=32, **settings)
    return window_maker(dense, calibration, Runtime(device="cpu"), None)(*CPU)


def test_a_run_keeps_them(dense, tmp_path, monkeypatch):
    """What a model writes is not made twice."""
    settings = {"preset": "paper", "calibration": "self", "samples": 6, "seq_len": 32}
    coec.prune(dense.folder, tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(DensePass, "blocks", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            coec.prune(dense.folder, tmp_path / "out", **settings)
    monkeypatch.setattr(DensePass, "draw", lambda *given: 1 / 0)
    report = coec.prune(dense.folder, tmp_path / "out", **settings)
    assert report.calibration["windows"] == 6
    for name in ("model.safetensors", "README.md"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_device_without_room_for_the_model_is_said(dense, monkeypatch):
    monkeypatch.setattr(Dense, "network", raising(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(CalibrationError, match=r"no room for all of it: calibrate on a text, not"):
        made(dense)
