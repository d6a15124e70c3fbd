"""Settings as models: what is refused, in one line, and what help says of a field."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import NonNegativeFloat, model_validator

from coec.config import Settings, described, setting
from coec.errors import OptionError

PRESETS = {"paper": {"samples": 64}, "fast": {"ridge": "auto"}}


class Toy(Settings):
    preset: Literal["paper", "fast"] = setting("fast", heading="How")
    """Set of defaults."""
    sparsity: float = setting(0.3, gt=0, lt=1, heading="What")
    """Fraction of units
    that are removed."""
    share: float | None = setting(None, ge=0, otherwise="sparsity")
    """Share of `paper`."""
    samples: int = setting(128, ge=1)
    """Windows."""
    seed: int = setting(0, ge=0)
    """Seed."""
    ridge: NonNegativeFloat | Literal["auto"] = setting(0.01)
    """Ridge."""
    train: bool = setting(True)
    """Train."""
    score: Literal["obs", "flap"] | Callable[..., Any] = setting("obs")
    """Score."""
    text: Any = setting("wikitext2")
    """Text."""
    device: str = setting("auto")
    """Device."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: dict[str, Any]) -> dict[str, Any]:
        return PRESETS.get(values.get("preset", "fast"), {}) | values


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"sparsity": 1.5}, "sparsity"), ({"sparsity": "0.3"}, "sparsity"),
        ({"sparsity": True}, "sparsity"), ({"share": math.nan}, "share"),
        ({"share": 10**400}, "share"), ({"share": -0.1}, "share"), ({"samples": 0}, "samples"),
        ({"samples": 2.5}, "samples"), ({"samples": None}, "samples"), ({"seed": 2**64}, "seed"),
        ({"ridge": "best"}, "ridge"), ({"train": 1}, "train"), ({"score": "best"}, "score"),
        ({"device": ""}, "device"), ({"device": Path("cpu")}, "device"),
        ({"preset": "balanced"}, "preset"), ({"sparsty": 0.3}, "did you mean 'sparsity'"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_in_one_line_that_names_the_setting(values, name):
    with pytest.raises(OptionError, match=name) as error:
        Toy(**values)
    assert len(str(error.value).splitlines()) == 1


def test_a_message_says_what_must_hold_and_what_was_got():
    with pytest.raises(OptionError) as error:
        Toy(ridge="best", preset="balanced")
    assert str(error.value) == "preset must be 'paper' or 'fast', got 'balanced'"
    with pytest.raises(OptionError) as error:
        Toy(ridge="best")
    assert str(error.value) == "ridge must be a valid number or 'auto', got 'best'"


@pytest.mark.parametrize("kind", [np.float32, np.array, torch.tensor])
def test_numbers_of_numpy_and_torch_become_pythons_own(kind):
    toy = Toy(sparsity=kind(0.5), samples=np.int64(3), share=0)
    assert (type(toy.sparsity), type(toy.samples), toy.sparsity) == (float, int, 0.5)


def test_a_preset_fills_in_defaults_and_what_was_given_is_known():
    toy = Toy(preset="paper", sparsity=0.5)
    assert (toy.samples, toy.sparsity) == (64, 0.5)
    assert toy.model_fields_set == {"preset", "sparsity"}
    assert toy == Toy(preset="paper", sparsity=0.5, samples=64)
    copy = toy.model_copy(update={"samples": 8})
    assert (copy.samples, copy.sparsity, toy.samples) == (8, 0.5, 64)
    assert Toy().ridge == "auto"
    with pytest.raises(Exception, match="frozen"):
        toy.samples = 3


def test_a_record_is_ready_for_json():
    def own(weight, gram):
        return weight

    record = Toy(score=own, text=Path("a.txt"), share=None).record()
    assert record | {"score": "own", "text": "a.txt", "share": None} == record
    assert json.loads(json.dumps(record)) == record
    assert Toy(text=torch.arange(3)).record()["text"] == "Tensor"


def test_a_field_describes_itself():
    rows = {row.name: row for row in described(Toy)}
    assert list(rows) == list(Toy.model_fields)
    assert rows["sparsity"].text == "Fraction of units that are removed. Default: 0.3."
    assert rows["share"].text == "Share of `paper`. Default: sparsity."
    assert rows["score"].text == "Score. One of obs, flap. Default: obs."
    assert rows["train"].default == "on"
    assert (rows["preset"].heading, rows["device"].heading) == ("How", "What")
