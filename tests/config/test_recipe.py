"""The recipe: presets, options, budgets, settings without effect, functions of the user's own."""

import json
import math
import pickle

import numpy as np
import pytest
import torch

import tiny_models as tm
from coec.config import described
from coec.config.recipe import OPTIONS_OF, PRESETS, Recipe, memory_size, parameter_count
from coec.devices import DTYPES
from coec.errors import CalibrationError, OptionError
from coec.methods.method import COMPENSATIONS
from coec.methods.selection import SELECTIONS
from coec.models.description import Description
from coec.planning.plan import Plan
from coec.text.tokens import source_of
from coec.types import SiteResult
from outcomes import one_line


def test_names_are_those_of_the_tables():
    names = {row.name: row.names for row in described(Recipe)}
    assert names["selection"] == tuple(SELECTIONS)
    assert names["compensation"] == tuple(COMPENSATIONS)
    assert names["dtype"] == names["forward_dtype"] == tuple(DTYPES)
    assert names["preset"] == tuple(PRESETS)
    options = {name: method.options for name, method in COMPENSATIONS.items() if method.options}
    assert options == OPTIONS_OF


def test_the_default_preset_is_balanced():
    assert Recipe() == Recipe(preset="balanced")
    assert Recipe().model_fields_set == set()
    assert Recipe().reconstruct == PRESETS["balanced"][1]["reconstruct"]
    assert Recipe(selection="flap").compensation == "ridge-to-slice"


GIVEN = {
    "selection": "rcpu", "propagate": False, "compensation": "coec", "ridge": 0.02,
    "reconstruct": 0, "holdout": 0.25, "sparsity": 0.5, "multiple_of": "8", "bos": "off",
    "attention_sparsity": 0.2,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), GIVEN.items())
def test_any_setting_wins_over_a_preset_and_the_others_stay(name, value):
    recipe = Recipe(preset="balanced", **{name: value})
    record = recipe.record()
    settings = record | record["options"]
    assert settings[name] == value
    assert recipe.model_fields_set == {"preset", name}
    idle = {"ridge"} if name == "compensation" else set()
    expected = {k: v for k, v in PRESETS["balanced"][1].items() if k not in {name, *idle}}
    assert expected.items() <= settings.items()


@pytest.mark.parametrize(
    ("settings", "sparsity"),
    [
        ({}, 0), ({"sparsity": 0.5}, 0), ({"attention_sparsity": 0.2}, 0.2),
        ({"attention_units": "heads"}, None), ({"by_block": True}, None),
        ({"preset": "paper"}, None),
        ({"by_block": True, "target": "vllm"}, 0),
    ],
)  # fmt: skip
def test_attention_stays_whole_unless_it_is_asked_for(settings, sparsity):
    assert Recipe(**settings).attention_sparsity == sparsity


def test_defaults_without_effect_are_left_out():
    assert Recipe(samples=1).holdout == 0
    assert Recipe(samples=2).holdout == 0.125
    assert Recipe(reconstruct=0, propagate=False).holdout == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"sparsity": 1}, {"sparsity": -0.1}, {"sparsity": 1.5}, {"sparsity": 30},
        {"sparsity": "much"}, {"sparsity": math.nan}, {"sparsity": 10**400},
        {"attention_sparsity": -0.1}, {"attention_sparsity": 1.0},
        {"multiple_of": 0}, {"multiple_of": "-8"}, {"multiple_of": "often"}, {"multiple_of": 2.5},
        {"multiple_of": True}, {"samples": 0}, {"samples": None}, {"samples": np.bool_(True)},
        {"samples": 10**400}, {"seq_len": 1}, {"seed": 2**64}, {"seed": -1}, {"seed": 1.5},
        {"holdout": 1.0}, {"holdout": math.nan}, {"selection": "best"}, {"compensation": None},
        {"compensation": "magic"}, {"device": ""}, {"device": []}, {"trust_remote_code": 1},
        {"dtype": "int8"}, {"text_column": ""}, {"preset": "best"}, {"target": "ollama"},
        {"tensor_parallel": 0}, {"drop_blocks": -1}, {"budget": "much"}, {"budget": 0},
        {"budget": 1.5}, {"budget": True}, {"budget_active": "16GB"}, {"budget_active": 0},
        {"budget": math.inf}, {"budget": 10**400}, {"budget": math.nan},
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_when_the_recipe_is_made(settings):
    [name] = settings
    with one_line(OptionError, match=rf"^{name} must"):
        Recipe(**settings)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 1.5}, {"alpha": math.nan}, {"alpha": True}, {"alpha": "high"}, {"alpha": -0.1},
        {"kappa": 0.5}, {"kappa": math.inf}, {"lambda_a": -1.0}, {"r_p": 0}, {"r_p": 2.5},
        {"r_p": np.array(2.5)}, {"rescale": "best"}, {"solver": "newton"}, {"solver": ["joint"]},
        {"rotation": "bleft"}, {"ridge": -1.0}, {"ridge": math.nan}, {"ridge": "best"},
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_when_the_recipe_is_made(options):
    [name] = options
    with one_line(OptionError, match=rf"^{name} must"):
        Recipe(preset="fast" if name == "ridge" else "paper", **options)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"alhpa": 0.5}, "'alhpa'"),
        ({"sparsty": 0.5}, "did you mean 'sparsity'"),
        ({"pruning": 0.5}, "'pruning'"),
        ({"best": True}, "'best'"),
    ],
)
def test_an_unknown_setting_is_refused(settings, name):
    with one_line(OptionError, match=name):
        Recipe(**settings)


@pytest.mark.parametrize(
    ("settings", "instead"),
    [
        ({"kappa": 5}, "coec"), ({"preset": "paper", "ridge": 1.0}, "ridge-to-slice"),
        ({"preset": "fast", "kappa": 5}, "coec"), ({"compensation": "rcpu", "alpha": 0.5}, "coec"),
    ],
)  # fmt: skip
def test_an_option_of_another_compensation_names_it(settings, instead):
    with one_line(OptionError, match=f"compensation={instead}"):
        Recipe(**settings)
    assert Recipe(**settings | {"compensation": instead}).options


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"context": 1000}, "context"), ({"context": 1000, "budget": 0.8}, "context"),
        ({"budget": 0.8, "sparsity": 0.5}, "sparsity"),
        ({"budget_active": 0.8, "sparsity": 0.5}, "sparsity"),
        ({"budget_active": 0.8, "budget": 0.8}, "budget and budget_active"),
        ({"preset": "paper", "holdout": 0.2}, "holdout"),
        ({"preset": "paper", "drop_blocks": 1}, "drop_blocks"),
        ({"preset": "paper", "alpha": 0.0, "kappa": 5.0}, "kappa"),
        ({"preset": "paper", "lambda_a": 0.0, "r_p": 3}, "r_p"),
        ({"preset": "paper", "rotation": "left", "solver": "gradient"}, "solver"),
        ({"attention_units": "heads", "attention_sparsity": 0}, "attention_units"),
        ({"attention_units": "groups", "attention_sparsity": 0}, "attention_units = groups"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(settings, name):
    with one_line(OptionError, match=f"^{name} "):
        Recipe(**settings)


@pytest.mark.parametrize(
    ("budget", "memory", "count"),
    [
        ("0.8", 0, 0.8), (0.8, 0, 0.8), (5_600_000_000, 0, 5.6e9), ("5600000000", 0, 5.6e9),
        ("16GB", 16 * 10**9, 0), ("14.5 GiB", 14.5 * 2**30, 0), ("15000mb", 15 * 10**9, 0),
    ],
)  # fmt: skip
def test_a_budget_is_a_share_a_number_or_a_memory(budget, memory, count):
    recipe = Recipe(budget=budget)
    assert memory_size(recipe.budget) == memory
    assert parameter_count(recipe.budget) == count


@pytest.mark.parametrize("value", ["auto", 0.5, 2])
def test_a_ridge_is_a_number_or_left_to_the_data(value):
    assert Recipe(preset="fast", ridge=value).options == {"ridge": value}


def test_numbers_of_numpy_and_torch_are_pythons_own():
    recipe = Recipe(
        preset="paper", sparsity=np.float32(0.5), samples=np.int64(24), seq_len=np.array(32),
        seed=np.uint8(3), alpha=torch.tensor(0.5, dtype=torch.float64),
    )  # fmt: skip
    assert recipe == Recipe(preset="paper", sparsity=0.5, samples=24, seq_len=32, seed=3, alpha=0.5)
    json.dumps(recipe.record())


def test_what_was_given_survives_copies():
    recipe = Recipe(preset="fast", samples=8, ridge=0.2)
    copy = pickle.loads(pickle.dumps(recipe))
    assert copy == recipe
    assert copy.model_fields_set == recipe.model_fields_set


@pytest.mark.parametrize("text", [np.ones((2, 2), bool), torch.rand(4, 32), iter(["one"])])
def test_what_is_no_text_is_refused(text):
    with one_line(CalibrationError):
        source_of(text, "text")


def sliced(problem, *, ridge="auto"):
    return SiteResult(problem.weight[:, problem.kept.indices])


def test_an_option_of_a_users_method_may_be_called_as_one_of_ours():
    recipe = Recipe(preset="paper", compensation=sliced, options={"ridge": "auto"})
    assert recipe.options == {"ridge": "auto"}
    assert recipe.own_functions == ["compensation"]
    assert recipe.record()["compensation"] == "sliced"


def told(problem, *, what=None):
    """A compensation with a diagnostic of whatever it is given."""
    return SiteResult(problem.weight[:, problem.kept.indices], diagnostics={"what": what})


def no_sum(problem):
    return problem.weight + "1"


@pytest.mark.parametrize(
    "settings",
    [
        {"selection": lambda weight: weight},
        {"selection": lambda weight, gram, *, best: weight},
        {"selection": lambda weight, gram: weight},
        {"selection": lambda weight, gram: [1.0] * 8},
        {"compensation": no_sum},
        {"compensation": told, "what": {1, 2}},
        {"compensation": told, "what": math.nan},
    ],
)
def test_functions_are_tried_before_any_work(settings):
    with one_line(OptionError, match="selection|no_sum|told|compensation"):
        Plan.of(Description.of(tm.raw_config("llama")), Recipe(**settings))
