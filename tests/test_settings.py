"""A setting is one field: everything else that knows of it is made of that."""

import dataclasses
import inspect
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Unpack

import pytest
from coec.settings import Calibration, CoecOptions, Pruning, Reconstruction, RidgeOptions, Runtime
from coec.settings import typed as typed_settings
from coec.settings.options import COMPENSATION_OPTIONS

import coec as package
import tiny_models as tm
from coec import settings
from coec.config.recipe import Recipe, read_settings
from coec.devices import DTYPES
from coec.errors import OptionError
from coec.methods import COMPENSATIONS
from coec.methods.selection import SELECTIONS
from coec.types import SiteResult
from outcomes import one_line, succeeded
from tools import tables

ROOT = Path(package.__file__).resolve().parents[1]
DOCUMENT = Path(__file__).resolve().parents[1] / "docs/SETTINGS.md"

ADDED = {
    "options.py": ("r_p", "extra_turns", "Turns more.", "int = setting(3, least=1)"),
    "parts.py": ("samples", "extra_text", "More text.", 'str = setting("no")'),
}
"""A field that is added before another to an options dataclass, and one to a part of the recipe."""

ASK = """
import inspect, json, sys
from coec.settings import NAMES, OPTIONS
before = "torch" in sys.modules
from coec.cli.prune import prune_command
from coec.config.recipe import Recipe
from tools import tables
recipe = Recipe(preset="paper", extra_turns=5, extra_text="yes")
flags = inspect.signature(prune_command).parameters
print(json.dumps({
    "document": tables.settings(),
    "torch": before,
    "help": [flags[n].annotation.__metadata__[0].help for n in ("extra_turns", "extra_text")],
    "record": recipe.record(),
    "default": Recipe(preset="paper").record(),
}))
"""


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> dict:
    """What a copy of the package, in which two fields were added, says of them."""
    root = tmp_path_factory.mktemp("grown")
    shutil.copytree(ROOT / "coec", root / "coec", ignore=shutil.ignore_patterns("model", "__pyc*"))
    for file, (before, name, said, declared) in ADDED.items():
        path = root / "coec/settings" / file
        text = path.read_text(encoding="utf-8")
        for line, added in ((f"        {before}: ", said), (f"    {before}: int = ", declared)):
            assert text.count(f"\n{line}") == 1
            text = text.replace(
                f"\n{line}", f"\n{line.partition(before)[0]}{name}: {added}\n{line}"
            )
        path.write_text(text, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{DOCUMENT.parents[1]}"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_one_field_is_a_flag_a_row_of_the_document_and_a_key_of_recipes(grown):
    assert grown["help"] == ["Turns more. Default: 3.", "More text. Default: no."]
    assert "| `extra_turns` | whole number | `3` | Turns more. |" in grown["document"]
    assert "| `extra_text` | text | `no` | More text. |" in grown["document"]
    for record, values in ((grown["record"], (5, "yes")), (grown["default"], (3, "no"))):
        assert (record["options"]["extra_turns"], record["extra_text"]) == values
    assert grown["torch"] is False  # settings are known without it


def test_names_are_those_of_the_tables():
    kinds = {setting.name: setting.kind for setting in settings.RECIPE}
    assert tuple(SELECTIONS) == kinds["selection"]
    assert tuple(COMPENSATIONS) == kinds["compensation"]
    assert tuple(DTYPES) == kinds["dtype"] == kinds["forward_dtype"]
    options = {name: method.options for name, method in COMPENSATIONS.items() if method.options}
    assert options == COMPENSATION_OPTIONS


def test_an_option_of_two_methods_is_one_flag():
    ridge = next(one for one in settings.OPTIONS if one.name == "ridge")
    assert ridge.methods == ("least-squares", "ridge-to-slice")
    names = [one.name for one in settings.TABLE]
    assert len(names) == len(set(names))


def test_functions_take_the_settings_by_their_types():
    written = Path(inspect.getfile(typed_settings)).read_text(encoding="utf-8")
    assert tables.typed() == written, "write it anew: python tools/tables.py typed > …/typed.py"
    taken = {"options", "trust_remote_code", *settings.NAMES}
    assert typed_settings.PruningSettings.__annotations__.keys() == taken
    for function in (package.prune, package.plan, package.collect, package.compensate_pruned):
        parameter = inspect.signature(function).parameters["settings"]
        assert parameter.annotation == Unpack[typed_settings.PruningSettings]


def test_the_document_lists_every_setting():
    written = DOCUMENT.read_text(encoding="utf-8")
    assert tables.settings() == written, "write it anew: python tools/tables.py settings"


@pytest.mark.parametrize(
    ("kind", "values", "match"),
    [
        (CoecOptions, {"alpha": 1.5}, r"alpha must be in \[0, 1\], got 1.5"),
        (CoecOptions, {"alpha": math.nan}, r"alpha must be in \[0, 1\]"),
        (CoecOptions, {"alpha": True}, "alpha must be a number, got True"),
        (CoecOptions, {"alpha": -0.1}, r"alpha must be in \[0, 1\]"),
        (CoecOptions, {"kappa": 0.5}, "kappa must be at least 1"),
        (CoecOptions, {"kappa": math.inf}, "kappa must be at least 1 and finite, got inf"),
        (CoecOptions, {"kappa": 10**400}, "kappa must be at least 1 and finite"),
        (CoecOptions, {"lambda_a": -1.0}, "lambda_a must be at least 0"),
        (CoecOptions, {"r_p": 0}, "r_p must be a whole number of at least 1"),
        (CoecOptions, {"rounds": -1}, "rounds must be a whole number of at least 0"),
        (CoecOptions, {"rounds": 2.5}, "rounds must be a whole number of at least 0, got 2.5"),
        (CoecOptions, {"iterations": 0}, "iterations must be a whole number of at least 1"),
        (CoecOptions, {"slices": 0}, "slices must be a whole number of at least 1"),
        (CoecOptions, {"tol": math.nan}, "tol must be at least 0 and finite, got nan"),
        (CoecOptions, {"rescale_ridge": math.inf}, "_ridge must be at least 0 and finite, got inf"),
        (CoecOptions, {"rescale": "best"}, "must be one of gcv, fixed, uniform, got 'best'"),
        (CoecOptions, {"solver": "newton"}, "solver must be one of joint, conjugate, gradient"),
        (CoecOptions, {"solver": ["joint"]}, "solver must be one of"),
        (RidgeOptions, {"ridge": -1.0}, "ridge must be at least 0 and finite"),
        (RidgeOptions, {"ridge": math.nan}, "ridge must be at least 0 and finite"),
        (RidgeOptions, {"ridge": "best"}, "ridge must be a number or auto, got 'best'"),
        (Calibration, {"source": ""}, "calibration must be text without NUL characters, got ''"),
        (Calibration, {"samples": 0}, "samples must be a whole number of at least 1, got 0"),
        (Calibration, {"seq_len": 1}, "seq_len must be a whole number of at least 2, got 1"),
        (Calibration, {"seed": 2**64}, "seed must be below"),
        (Calibration, {"holdout": 1.0}, "holdout is a fraction of the windows"),
        (Calibration, {"samples": None}, "samples must be a whole number"),
        (Pruning, {"sparsity": 30}, "did you mean 0.3"),
        (Pruning, {"selection": "best"}, "unknown selection 'best'; known: rcpu, wanda-sp"),
        (Pruning, {"compensation": None}, "compensation must be text, got None"),
        (Runtime, {"device": ""}, "device must be text"),
        (Runtime, {"trust_remote_code": 1}, "trust_remote_code is True or False, got 1"),
    ],
)
def test_a_bad_value_is_refused_when_the_dataclass_is_made(kind, values, match):
    with pytest.raises(OptionError, match=match):
        kind(**values)


def test_a_recipe_of_parts_is_the_recipe_of_flat_settings():
    parts = Recipe(
        calibration=Calibration(source="text.txt", seed=3),
        pruning=Pruning(sparsity=0.5, options={"alpha": 0.8}),
        reconstruction=Reconstruction(),
        runtime=Runtime(device="cpu"),
    )
    flat = {"calibration": "text.txt", "seed": 3, "sparsity": 0.5, "alpha": 0.8, "device": "cpu"}
    flat = Recipe(preset="paper", **flat)
    assert parts == flat
    assert parts.record() == flat.record()


def test_a_record_lists_what_determines_the_result():
    assert Recipe(device="cpu", trust_remote_code=True).record().keys() == {
        "preset", "sparsity", "attention_sparsity", "mlp_sparsity", "budget_parameters",
        "budget_memory", "context", "drop_blocks",
        "expert_sparsity", "attention_units", "multiple_of", "tensor_parallel", "allocation",
        "non_uniform", "selection", "kept",
        "compensation", "options", "propagate", "reconstruct", "reconstruct_rate",
        "prediction_passes", "token_weights", "kv_groups", "calibration",
        "text_column", "samples", "seq_len", "seed", "holdout", "guard", "bos",
        "dtype", "target", "forward_dtype", "solve_dtype",
    }  # fmt: skip


def test_a_recipe_checks_the_options_of_its_compensation():
    with pytest.raises(OptionError, match=r"alpha must be in \[0, 1\]"):
        Recipe(preset="paper", options={"alpha": 2.0})
    with pytest.raises(OptionError, match="'rcpu' has no option 'alpha'; its options: none"):
        Recipe(compensation="rcpu", options={"alpha": 0.5})
    with pytest.raises(OptionError, match=r"slices = \d+ does not go with alignment"):
        Recipe(preset="paper", slices=2)
    alone = {"slices": 2, "lambda_a": 0.0}
    assert Recipe(preset="paper", **alone).pruning.options == alone


def told(problem, *, what=None):
    """A compensation with a diagnostic of whatever it is given."""
    return SiteResult(problem.weight[:, problem.kept.indices], diagnostics={"what": what})


def no_sum(problem):
    return problem.weight + "1"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"selection": lambda weight: weight}, r"'<lambda>' fails .* called with \(weight, gram\)"),
        (
            {"selection": lambda weight, gram, *, best: weight},
            "'<lambda>' .* units, keep .* 'best'",
        ),
        ({"selection": lambda weight, gram: weight}, r"'<lambda>' must .* \(8,\), got \(6, 8\)"),
        ({"selection": lambda weight, gram: [1.0] * 8}, r"'<lambda>' must .* \(8,\), got a list"),
        ({"compensation": no_sum}, "compensation 'no_sum' fails on a small problem .*operand"),
        ({"compensation": told, "what": {1, 2}}, "'told' has .* that no report holds: .* type set"),
        ({"compensation": told, "what": math.nan}, "'told' has .* no report holds: Out of range"),
    ],
)
def test_functions_are_tried_before_any_work(settings, match):
    with one_line(OptionError, match=match):
        Recipe(**settings)


BESIDE = {
    "selection": "rcpu", "propagate": False, "compensation": "coec",
    "ridge": 0.02, "reconstruct": 0, "reconstruct_rate": 0.5, "token_weights": "equal",
    "kv_groups": "all", "holdout": 0.25, "sparsity": 0.5, "multiple_of": "8",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BESIDE.items())
def test_any_setting_stands_beside_a_preset_wherever_it_is_named(name, value, tmp_path):
    recipe = Recipe(preset="best", **{name: value})
    record = recipe.record()
    assert (record["options"] | record)[name] == value
    if name not in ("reconstruct", "compensation"):  # which make others of the preset idle
        others = settings.PRESETS["best"].settings.items()
        assert {k: v for k, v in others if k not in (name, "allocation")}.items() <= (
            record["options"] | {k: v for k, v in record.items() if k != "options"}
        ).items()
    text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
    (tmp_path / "recipe.toml").write_text(f'preset = "best"\n{name} = {text}\n')
    assert Recipe(**read_settings(tmp_path / "recipe.toml")) == recipe


@pytest.mark.parametrize("value", ["auto", 0.5, 2])
def test_a_number_that_may_be_left_to_the_data_is_either_wherever_it_is_given(value, run, tmp_path):
    (tmp_path / "recipe.toml").write_text(f"preset = 'fast'\nridge = {value!r}\n")
    recipe = Recipe(**read_settings(tmp_path / "recipe.toml"))
    assert recipe.pruning.options == {"ridge": value}
    model = tm.save(tm.tiny("llama"), tmp_path / "model")
    succeeded(run("prune", model, "--dry-run", "--preset", "fast", "--ridge", value))


def test_another_word_in_its_place_is_refused(run):
    status, _, err = run("prune", "model", "--dry-run", "--ridge", "best")
    assert status == 2
    assert "'best' is not a number or auto" in err


def test_an_option_of_a_users_method_may_be_called_alike():
    def drawn(problem, *, ridge="auto"):
        return SiteResult(problem.weight[:, problem.kept.indices])

    recipe = Recipe(preset="paper", compensation=drawn, ridge="auto")
    assert recipe.pruning.options == {"ridge": "auto"}


@pytest.mark.parametrize("preset", ["fast", "best"])
def test_widths_by_block_follow_the_error_unless_something_else_is_said(preset):
    assert Recipe(preset=preset).pruning.allocation == "uniform"
    assert Recipe(preset=preset, non_uniform=True).pruning.allocation == "error"
    chosen = Recipe(preset=preset, non_uniform=True, allocation="adaptive")
    assert chosen.pruning.allocation == "adaptive"


def test_the_default_preset_is_one_line(monkeypatch):
    monkeypatch.setattr("coec.settings.presets.DEFAULT_PRESET", "fast")
    assert Recipe().record() == Recipe(preset="fast").record()
    assert Recipe(selection="flap").pruning.compensation == "ridge-to-slice"


def test_the_default_is_balanced_and_help_says_both_defaults(run):
    assert Recipe() == Recipe(preset="balanced")
    passes = settings.PRESETS["balanced"].settings["reconstruct"]
    assert Recipe().reconstruction.reconstruct == passes
    _, out, _ = run("prune", "--help-all")
    shown = " ".join(out.replace("│", " ").split())
    assert "given beside it wins. Default: balanced." in shown
    assert "Score that picks the units. One of" in shown
    assert "Default: obs; rcpu in paper." in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rounds": 5}, "rounds is an option of compensation coec, and preset balanced takes "
         "ridge-to-slice: add preset=paper or compensation=coec"),
        ({"preset": "fast", "options": {"rounds": 5}}, "preset fast takes ridge-to-slice: add "
         "compensation=coec"),
        ({"preset": "paper", "ridge": 1.0}, "ridge is an option of compensation least-squares and "
         "ridge-to-slice, and preset paper takes coec: add compensation=ridge-to-slice"),
    ],
)  # fmt: skip
def test_an_option_of_another_compensation_is_answered_with_what_to_add(given, said, run):
    with pytest.raises(OptionError) as error:
        Recipe(**given)
    assert str(error.value).endswith(said)
    assert Recipe(**given | {"compensation": said.rpartition("compensation=")[2]})
    if "rounds" in given:
        _, _, err = run("prune", "model", "--dry-run", "--rounds", 5)
        assert "add --preset paper or --compensation coec" in err


def test_what_has_no_windows_to_validate_or_to_choose_by_is_left_out():
    assert Recipe(samples=1).calibration.holdout == 0
    assert Recipe(samples=2).calibration.holdout == 0.125
    assert Recipe(preset="best", holdout=0).reconstruction.kv_groups == "uniform"


@pytest.mark.parametrize("beside", [{}, {"sparsity": 0.5}, {"preset": "best"}, {"options": {}}])
def test_a_recipe_takes_settings_by_name_or_all_its_parts(beside):
    with pytest.raises(OptionError, match="by name .*, or all of its parts and nothing besides"):
        Recipe(runtime=Runtime(device="cpu"), **beside)
    with pytest.raises(OptionError, match="unknown setting 'pruning'"):
        Recipe(pruning=0.5)
    recipe = Recipe(preset="best", alpha=0.5, compensation="coec")
    assert dataclasses.replace(recipe, runtime=Runtime(device="cpu")).pruning == recipe.pruning
