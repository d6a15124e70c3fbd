"""The model card: the recipe on it makes the model again, and nothing on it is of this machine."""

import json
import shlex
import shutil

import pytest
import torch
import yaml

import coec
import tiny_models as tm
from coec.checkpoint.card import changed
from coec.config.recipe import Recipe
from coec.planning.kept import IDLE
from outcomes import succeeded

DENSE_CARD = """---
license: other
license_name: llama3
license_link: LICENSE
language: [en, de]
tags: [a]
---
# A model
"""
FEW = {"samples": 6, "seq_len": 32, "calibration": "text.txt"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a dense model, its card and a text."""
    here = tmp_path_factory.mktemp("place")
    dense = tm.save(tm.tiny("llama", torch.float32), here / "dense")
    (dense / "README.md").write_text(DENSE_CARD)
    tm.text_file(here / "text.txt")
    return here


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def card_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def front_matter(folder):
    return yaml.safe_load(card_of(folder).split("---")[1])


def command_of(folder):
    """The arguments of the command on the card."""
    block = card_of(folder).partition("```sh\n")[2].partition("```")[0]
    words = shlex.split(block.replace("\\\n", " "))
    assert words[:4] == ["coec", "prune", "dense", "OUT"]
    return words[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"alpha": 0.5, "sparsity": 0.5, "preset": "paper"},
        {"preset": "fast", "ridge": 0.02, "multiple_of": 8},
        {"preset": "balanced", "reconstruct": 1, "dtype": "bfloat16"},
        {
            "preset": "balanced",
            "compensation": "none",
            "attention_units": "heads",
            "reconstruct": 1,
        },
        {"reconstruct": 0, "propagate": False},
        {"preset": "fast", "dtype": "float32", "budget": "120kB", "context": 16},
        {
            "preset": "fast",
            "compensation": "none",
            "kept": {"layers.1.mlp": list(range(7)), "layers.0.mlp": [1]},
        },
    ],
    ids=["paper", "fast", "balanced", "balanced changed", "fits off", "memory", "kept"],
)
def test_the_command_on_the_card_makes_the_model_again(settings, here, tmp_path, run):
    if "kept" in settings:
        settings |= {"by_block": True, "attention_sparsity": 0.0}
    out, again = tmp_path / "out", tmp_path / "again"
    coec.prune("dense", out, **FEW, **settings)
    said = command_of(out)
    said[2] = str(again)
    succeeded(run(*(str(out) if word == "THIS_FOLDER" else word for word in said)))
    assert (out / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    recipes = [json.loads((one / "coec.json").read_text())["recipe"] for one in (out, again)]
    # The folder names the units of every site: shares would have no effect.
    idle = dict.fromkeys(("kept", *(IDLE if "kept" in settings else ())))
    assert recipes[0] | idle == recipes[1] | idle


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_units": "groups"},
        {"by_block": True, "target": "vllm"},
        {"by_block": True, "target": "vllm", "attention_units": "groups"},
    ],
    ids=["groups", "vllm", "groups for vllm"],
)
def test_changed_settings_make_the_recipe_again(settings):
    record = Recipe(**settings).record()
    again = changed(record)
    assert Recipe(**again).record() == record
    assert again == settings


def test_the_card_says_preset_and_reconstruction(here, tmp_path):
    coec.prune("dense", tmp_path / "out", **FEW, preset="balanced", reconstruct=1)
    card = card_of(tmp_path / "out")
    assert "- preset: balanced" in card
    assert "--reconstruct 1" in card
    assert "| validation windows of the calibration, of 32 tokens |" in card


def test_no_path_of_this_machine_is_written(here, tmp_path):
    out = tmp_path / "out"
    kept = tmp_path / "first"
    coec.prune(here / "dense", kept, **FEW | {"calibration": here / "text.txt"},
               preset="fast", compensation="none")  # fmt: skip
    coec.prune(str(here / "dense"), out, **FEW | {"calibration": str(here / "text.txt")},
               kept=kept, preset="fast", compensation="none")  # fmt: skip
    for name in ("coec.json", "README.md", "config.json"):
        for folder in (here, tmp_path):
            assert str(folder) not in (out / name).read_text()
    record = json.loads((out / "coec.json").read_text())
    assert (record["model"], record["calibration"]["source"]) == ("dense", "text.txt")
    assert record["plan"]["kept"]["source"] == "first"


def test_the_front_matter_is_what_the_dense_card_says(here, tmp_path):
    coec.prune("dense", tmp_path / "out", **FEW, preset="fast")
    found = front_matter(tmp_path / "out")
    assert found["base_model"] == "dense"
    assert (found["license"], found["license_name"], found["license_link"]) == (
        "other", "llama3", "LICENSE")  # fmt: skip
    assert found["language"] == ["en", "de"]
    assert found["tags"] == ["coec", "pruned"]


@pytest.mark.parametrize(
    "card", [None, "no front matter", "---\nlicense: [\n---\n", "---\n- 1\n---"]
)
def test_a_dense_card_without_facts_gives_none(card, here, tmp_path):
    dense = shutil.copytree(here / "dense", tmp_path / "dense")
    (dense / "README.md").unlink()
    if card is not None:
        (dense / "README.md").write_text(card)
    report = coec.prune(dense, tmp_path / "out", **FEW, preset="fast")
    assert front_matter(tmp_path / "out").keys() == {
        "library_name", "pipeline_tag", "tags", "base_model"}  # fmt: skip
    damaged = card is not None and card.startswith("---")
    assert any("README.md" in note for note in report.plan["notes"]) == damaged


def test_functions_and_tensors_have_no_command(here, tmp_path):
    ids = torch.randint(2, tm.VOCABULARY, (400,))
    coec.prune("dense", tmp_path / "out", calibration=ids, samples=4, seq_len=32,
               selection=lambda weight, gram: weight.norm(dim=0),
               compensation="none", preset="paper")  # fmt: skip
    card = card_of(tmp_path / "out")
    assert "```sh" not in card
    assert "No command makes it again: selection and calibration were given from Python." in card
