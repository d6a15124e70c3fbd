"""Resolving a recipe: what a preset brings yields to the model, what the user gave does not."""

import pickle
from dataclasses import replace

import pytest
from coec.planning.resolve import resolve
from coec.settings import PRESETS

import tiny_models as tm
from coec.config.recipe import Recipe
from coec.models.description import Description


def described(family):
    return Description.of(tm.raw_config(family))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("preset", ["paper", "fast", "balanced"])
def test_a_resolved_recipe_stays_as_it_is(preset, family):
    model = described(family)
    once = resolve(Recipe(preset=preset, samples=200), model)
    assert resolve(once, model) == once
    assert PRESETS[preset].settings.get("propagate", False) == (
        once.reconstruction.propagate or bool(once.reconstruction.left_out)
    )


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
