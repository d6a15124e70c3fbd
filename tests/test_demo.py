"""The demo does what it says, on less text."""

import torch

import tiny_models as tm
from coec.demo import __main__ as demo


def test_the_demo_compares_repairs_and_leaves_a_checkpoint_and_a_plot(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(demo, "WINDOWS", 8)
    monkeypatch.setattr(demo, "SEQ_LEN", 128)
    demo.run(tmp_path / "out")
    shown = capsys.readouterr().out
    for method in demo.METHODS:
        assert method in shown
    assert "sampled from the dense model" in shown
    assert (tmp_path / "out/demo.png").read_bytes().startswith(b"\x89PNG")
    model = tm.load(tmp_path / "out/coec")
    assert model.dtype == torch.bfloat16
    assert model.config.intermediate_size == 404
