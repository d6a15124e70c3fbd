"""The demo does what it says, on less text and in a few steps."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import coec
import tiny_models as tm
from coec.demo import __main__ as demo
from coec.demo.plot import picture
from coec.errors import OptionError

PERPLEXITIES = dict(
    zip((*demo.METHODS, "best"), (33.3, 33.2, 29.2, 31.8, 29.21, 27.5), strict=True)
)


def test_the_picture_has_every_compensation_twice_sorted_and_none_behind_another():
    """Compensations that are nearly as good as one another lie side by side, not on one line."""
    scores = {
        method: SimpleNamespace(perplexity=value, baseline_perplexity=23.9)
        for method, value in PERPLEXITIES.items()
    }
    sites = [{"site": "mlp", "error_after": 0.2}, {"site": "attention", "error_after": 0.3}]
    reports = {method: SimpleNamespace(sites=sites * 3) for method in demo.METHODS}
    training = {"errors": [0.5, 0.45, 0.46], "taken": 1}  # in the row of a block's last site
    trained = [
        {**site, "reconstruction": training} if site["site"] == "attention" else site
        for site in sites * 3
    ]
    reports["best"] = SimpleNamespace(sites=trained, measured_on="validation")
    left, right, last = picture(reports, scores).axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == ["dense", "best", "least-squares", "coec", "rcpu", "bias", "none"]
    lengths = [bar.get_width() for bar in left.patches]
    assert lengths == sorted(lengths)
    assert [text.get_text() for text in right.get_legend().get_texts()] == [
        n for n in names[:0:-1] if n != "best"
    ]
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in right.patches)
    assert len(spans) == 5 * 3
    assert all(end < start for (_, end), (start, _) in pairwise(spans))
    legend = [text.get_text() for text in last.get_legend().get_texts()]
    assert legend == ["compensated", "and trained"]
    assert [bar.get_height() for bar in last.patches] == [0.5] * 3 + [0.45] * 3
    assert [text.get_text() for text in last.texts] == ["−10%"] * 3
    assert "validation" in last.get_ylabel()
    training |= {"errors": [0.3, 0.1], "taken": 1}
    reports["best"].measured_on = "fitted"
    alone = picture(reports, scores).axes[2]
    assert [bar.get_height() for bar in alone.patches] == pytest.approx([0.3] * 3 + [0.1] * 3)
    assert "fitted windows" in alone.get_ylabel()


def hasty(model, out, **settings):
    return coec.prune(model, out, **settings)


def test_the_demo_asks_for_what_draws_before_it_works(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match="pip install 'coec\\[demo\\]'"):
        demo.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_demo_compares_compensations_and_leaves_a_checkpoint_and_a_plot(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(demo, "WINDOWS", 8)
    monkeypatch.setattr(demo, "SEQ_LEN", 128)
    monkeypatch.setattr(demo, "prune", hasty)
    demo.run(tmp_path / "out")
    shown = capsys.readouterr().out
    for method in (*demo.METHODS, "best"):
        assert method in shown
    assert "sampled from the dense model" in shown
    assert (tmp_path / "out/demo.png").read_bytes().startswith(b"\x89PNG")
    model = tm.load(tmp_path / "out/coec")
    assert model.dtype == torch.bfloat16
    assert model.config.intermediate_size == 404
