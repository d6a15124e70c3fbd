"""Resolving a recipe: what a preset brings yields to the model, what the user gave does not."""

import pickle
from dataclasses import replace

import pytest

import coec
import tiny_models as tm
from coec.errors import OptionError
from coec.models.description import Description
from coec.planning.recipe import Recipe
from coec.planning.resolve import resolve, with_statistics
from coec.settings import PRESETS


def described(family):
    return Description.of(tm.raw_config(family))


def statistics_of(tmp_path, **settings):
    dense = tm.save(tm.tiny("llama"), tmp_path / "dense")
    tokens = tm.token_file(tmp_path / "tokens.npy")
    settings = {"calibration": tokens, "samples": 4, "seq_len": 32, **settings}
    return Description.read(dense), coec.collect(dense, tmp_path / "sums", **settings), settings


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("preset", ["paper", "fast", "balanced"])
def test_a_resolved_recipe_stays_as_it_is(preset, family):
    model = described(family)
    once = resolve(Recipe(preset=preset, samples=200), model)
    assert resolve(once, model) == once
    assert PRESETS[preset].settings.get("propagate", False) == (
        once.reconstruction.propagate or bool(once.reconstruction.left_out)
    )


@pytest.mark.parametrize(
    ("preset", "setting", "left"),
    [("fast", {}, False), ("fast", {"propagate": True}, True), ("balanced", {"reconstruct": 4}, 4)],
)
def test_a_setting_that_was_given_is_not_left_out(preset, setting, left, tmp_path):
    model, sums, _ = statistics_of(tmp_path)
    recipe = Recipe(preset=preset, **setting)
    if left:
        with pytest.raises(OptionError, match=f"^{next(iter(setting))} runs the pruned model"):
            with_statistics(recipe, model, sums)
    else:
        assert with_statistics(recipe, model, sums).reconstruction.sequential is None


def test_statistics_must_agree_with_what_was_given_and_bring_the_rest(tmp_path):
    model, sums, settings = statistics_of(tmp_path, seed=3)
    adopted = with_statistics(Recipe(preset="paper", samples=4), model, sums).calibration
    assert (adopted.samples, adopted.seq_len, adopted.seed) == (4, 32, 3)
    whole = Recipe(preset="paper", **settings)
    assert with_statistics(whole, model, sums).calibration.seed == 3
    with pytest.raises(OptionError, match="collected with seed = 3, not 4"):
        with_statistics(Recipe(preset="paper", seed=4), model, sums)


def test_what_was_given_survives_copies():
    recipe = Recipe(preset="fast", samples=8, ridge=0.2)
    assert recipe.given == {"preset", "samples", "ridge"}
    for copy in (replace(recipe, runtime=recipe.runtime), pickle.loads(pickle.dumps(recipe))):
        assert copy == recipe
        assert copy.given == recipe.given


def test_float16_leaves_out_the_training_that_a_preset_brings():
    model = described("llama")
    recipe = resolve(Recipe(forward_dtype="float16", samples=200), model)
    assert not recipe.reconstruction.reconstruct
    assert "float16" in recipe.reconstruction.left_out
    given = Recipe(forward_dtype="float16", samples=200, reconstruct=2)
    assert resolve(given, model).reconstruction.reconstruct == 2  # refused where the run is made
