"""Notes of a plan: what the number of calibration tokens means."""

import math

import pytest
from coec.methods.shrinkage import FEW, PLENTY

import coec
import tiny_models as tm
from coec.models.description import Description

LENGTH = 32


def text_notes(samples, **settings):
    settings = {"preset": "paper", "seq_len": LENGTH, **settings}
    notes = coec.plan(Description.of(tm.raw_config("llama")), samples=samples, **settings).notes
    return [note for note in notes if "tokens" in note]


@pytest.mark.parametrize(
    ("each", "said"),
    [(FEW - 1, "are shrunk"), (FEW, "more text lowers"), (PLENTY - 1, "more text"), (PLENTY, "")],
)
def test_a_plan_says_what_more_text_would_do(each, said):
    widest = max(site.columns for site in Description.of(tm.raw_config("llama")).layout.sites)
    samples = math.ceil(each * widest / LENGTH)
    if not said:
        assert text_notes(samples) == []
        return
    [note] = text_notes(samples, guard=True)
    assert said in note
    if each >= FEW:
        named = int(note.split("; ")[1].split()[0])
        assert text_notes(named) == []
        assert text_notes(named - 1) != []
    assert text_notes(samples, compensation="none") == []
