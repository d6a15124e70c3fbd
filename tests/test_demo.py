"""The demo does what it says, on less text and in a few steps."""

import pytest
import torch

import tiny_models as tm
from coec.demo import __main__ as demo


@pytest.mark.slow
def test_the_demo_compares_compensations_and_leaves_checkpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "WINDOWS", 8)
    monkeypatch.setattr(demo, "SEQ_LEN", 128)
    demo.run(tmp_path / "out")
    shown = capsys.readouterr().out
    for method in (*demo.METHODS, *demo.PRESETS, "(dense)", "sampled from the dense model"):
        assert method in shown
    kept = {
        (tmp_path / "out" / name / "coec/kept.safetensors").read_bytes() for name in demo.METHODS
    }
    assert len(kept) == 1
    model = tm.load(tmp_path / "out/coec")
    assert model.dtype == torch.bfloat16
    assert model.config.intermediate_size == 404
