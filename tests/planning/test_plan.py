"""Notes of a plan, and what a plan leaves out of a recipe."""

import math

import pytest

import coec
import tiny_models as tm
from coec.errors import OptionError
from coec.models.description import Description
from coec.planning.checks import PLENTY

LENGTH = 32


def planned(family="llama", **settings):
    model = Description.of(tm.raw_config(family))
    return coec.plan(model, **{"preset": "paper", "seq_len": LENGTH, **settings})


def text_notes(samples, **settings):
    return [note for note in planned(samples=samples, **settings).notes if "tokens" in note]


def test_a_plan_says_how_much_text_would_do():
    widest = max(site.columns for site in Description.of(tm.raw_config()).layout.sites)
    assert text_notes(math.ceil(PLENTY * widest / LENGTH)) == []
    [note] = text_notes(8)
    named = int(note.split("; ")[1].split()[0])
    assert text_notes(named) == []
    assert text_notes(named - 1) != []
    assert text_notes(8, compensation="none") == []


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_what_a_preset_propagates_yields_to_blocks_that_add_norms(preset, family):
    plan = planned(family, preset=preset, samples=200)
    assert plan.propagates == (family == "llama")
    assert any("add" in note for note in plan.notes) == (family == "gemma2")


def test_training_is_not_in_float16():
    with pytest.raises(OptionError, match="forward_dtype"):
        planned(forward_dtype="float16", reconstruct=2)
