"""Whole blocks left out: which, what is written, what it computes, what is refused."""

import itertools
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec import pruning, solve
from coec.config.recipe import Recipe
from coec.errors import NumericalError, OptionError
from coec.models.architectures import ARCHITECTURES
from coec.models.dense import Dense
from coec.models.formats import renumbered, without_blocks
from coec.planning.plan import Plan
from coec.streams.head import Head
from coec.streams.importances import choose_blocks
from coec.types import KeptSet
from outcomes import WORK, raising
from prunings import interrupt

pytestmark = pytest.mark.unchecked  # whole models

DEPTH = {"samples": 24, "seq_len": 32, "forward_dtype": "float64", "dtype": "float64"}
ALONE = {"sparsity": 1e-6, "attention_sparsity": 0}
"""A share that takes no channel."""


def deep(variant, folder, layers=5):
    """A random model of several blocks; kinds of layers repeat."""
    raw = tm.raw_config(variant)
    changes = {"num_hidden_layers": layers}
    for key, value in raw.items():
        if isinstance(value, list) and len(value) == raw["num_hidden_layers"]:
            changes[key] = (value * layers)[:layers]
    return tm.save(tm.tiny(variant, **changes), folder)


def shortened(model, dropped):
    """The dense model with these layers taken out, as they were built."""
    loaded = tm.load(model)
    layers = [layer for n, layer in enumerate(loaded.model.layers) if n not in dropped]
    loaded.model.layers = torch.nn.ModuleList(layers)
    for attribute in ("layer_types", "num_hidden_layers"):  # what the model looks up by number
        whole = getattr(loaded.config, attribute, None)
        if isinstance(whole, list):
            setattr(loaded.config, attribute, [k for n, k in enumerate(whole) if n not in dropped])
        elif whole is not None:
            setattr(loaded.config, attribute, len(layers))
    return loaded


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_every_family_without_two_blocks(variant, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(solve, "RATE", 1e-30)
    model = deep(variant, tmp_path / "dense")
    adds = not ARCHITECTURES[tm.VARIANTS[variant]["model_type"]].adds
    settings = {**DEPTH, **ALONE, "calibration": tokens, "drop_blocks": 2}
    settings |= {"preset": "fast", "compensation": "none"} if adds else {
        "preset": "balanced", "reconstruct": 1, "propagate": False, "compensation": "none",
    }  # fmt: skip
    report = coec.prune(model, tmp_path / "out", **settings)
    dropped = report.plan["dropped_blocks"]
    assert len(dropped) == 2
    assert 0 < dropped[0] < dropped[1] < 4
    expected = shortened(model, dropped)
    loaded = tm.load(tmp_path / "out")
    assert loaded.config.num_hidden_layers == 3
    if adds:
        compensated = report.sites
        assert {row["block"] for row in compensated} == {0, 1, 2, 3, 4} - set(dropped)
    torch.testing.assert_close(tm.logits(loaded), tm.logits(expected), rtol=0, atol=1e-8)
    assert report.plan["parameters"]["after"] == Dense.open(tmp_path / "out").parameters


def test_the_block_that_is_missed_least_goes_first(tokens, tmp_path):
    model = deep("llama", tmp_path / "dense")
    weights = load_file(model / "model.safetensors")
    for name, tensor in weights.items():  # block 2 adds next to nothing, block 3 a little
        for block, factor in ((2, 1e-4), (3, 1e-2)):
            if f"layers.{block}." in name and ("o_proj" in name or "down_proj" in name):
                tensor *= factor
    tm.edit_weights(model, lambda _: weights)
    dense = Dense.open(model)

    def recipe(count):
        return Recipe(drop_blocks=count, forward_dtype="float64", device="cpu")

    ids = torch.randint(2, tm.VOCABULARY, (8, 32))
    found = {
        count: choose_blocks(Plan.of(dense, recipe(count)), dense, ids, None)[0]["blocks"].tolist()
        for count in (1, 2, 3)
    }
    assert found == {1: [2], 2: [2, 3], 3: [1, 2, 3]}


@pytest.mark.parametrize("broken", [{0}, {1}, {0, 1, 2}])
def test_predictions_that_are_not_finite_drop_no_block(broken, tokens, tmp_path, monkeypatch):
    dense, calls = Dense.open(deep("llama", tmp_path / "dense")), itertools.count()
    predicted = Head.predicted

    def noted(self, *states):
        found = predicted(self, *states)
        if next(calls) in broken:
            found.update(torch.full((1, 3), torch.nan), torch.zeros(1).long(), torch.zeros(1, 3))
        return found

    monkeypatch.setattr(Head, "predicted", noted)
    ids = torch.randint(2, tm.VOCABULARY, (8, 32))
    plan = Plan.of(dense, Recipe(drop_blocks=1, forward_dtype="float64", device="cpu"))
    if len(broken) == 3:
        with pytest.raises(NumericalError, match="drop_blocks"):
            choose_blocks(plan, dense, ids, None)
        return
    (block,) = choose_blocks(plan, dense, ids, None)[0]["blocks"].tolist()
    assert block - 1 not in broken


@pytest.mark.parametrize("preset", ["fast", "balanced"])
@pytest.mark.slow
def test_later_blocks_compensate_the_loss(preset, tokens, tmp_path):
    model = deep("mistral", tmp_path / "dense")
    short = {} if preset == "fast" else {"reconstruct": 2}
    settings = {"calibration": tokens, "samples": 24, "seq_len": 32, "drop_blocks": 1} | ALONE
    coec.prune(model, tmp_path / "out", preset=preset, **settings, **short)
    bare = {"preset": "fast", "compensation": "none"}
    coec.prune(model, tmp_path / "bare", **settings, **bare)
    compensated, plain = (
        coec.perplexity(tmp_path / name, tokens, baseline=model, seq_len=32).kl
        for name in ("out", "bare")
    )
    assert compensated < plain
    by_name = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert by_name.config.num_hidden_layers == 4


def test_depth_and_width_under_one_budget(tokens, tmp_path):
    model = deep("llama", tmp_path / "dense")
    settings = {"calibration": tokens, "samples": 24, "seq_len": 32, "preset": "fast"}
    report = coec.prune(
        model, tmp_path / "out", **settings, drop_blocks=1, budget=0.6, multiple_of=1
    )
    counts = report.plan["parameters"]
    assert 0.55 < counts["after"] / counts["before"] <= 0.6
    assert counts["after"] == Dense.open(tmp_path / "out").parameters


def test_depth_and_widths_by_block_under_one_budget(tokens, tmp_path):
    model = deep("llama", tmp_path / "dense")
    settings = {**DEPTH, "calibration": tokens, "preset": "fast", "compensation": "none"}
    settings |= {"drop_blocks": 1, "budget": 0.6, "multiple_of": 1}
    report = coec.prune(model, tmp_path / "out", **settings, by_block=True)
    widths, counts = report.plan["widths"]["mlp"]["after"], report.plan["parameters"]
    assert len(widths) == 4
    assert len(set(widths)) > 1
    assert 0.55 < counts["after"] / counts["before"] <= 0.6
    assert counts["after"] == Dense.open(tmp_path / "out").parameters
    # What is left computes what the dense model does with the rest of its units masked.
    [dropped] = report.plan["dropped_blocks"]
    expected, kept = shortened(model, [dropped]), load_file(tmp_path / "out/coec/kept.safetensors")
    with torch.no_grad():
        for site in Dense.open(model).layout.sites:
            if site.block != dropped:
                layer = expected.model.layers[site.block - (site.block > dropped)]
                consumer = layer.get_parameter(site.weight.split(".", 3)[3])
                gone = site.kept_columns(KeptSet(kept[site.key], site.units)).dropped()
                consumer[:, gone] = 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True
    ).eval()
    torch.testing.assert_close(tm.logits(loaded), tm.logits(expected), rtol=0, atol=1e-8)


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe mixed"])
def test_a_budget_holds_whatever_blocks_go(variant, tokens, tmp_path):
    """Those without experts are much smaller, and which go is known late."""
    model = deep(variant, tmp_path / "dense", layers=6)
    raw = json.loads((model / "config.json").read_text())
    if "mlp_only_layers" in raw:
        shutil.rmtree(model)
        changes = {"num_hidden_layers": 6, "mlp_only_layers": [0, 1, 2, 3]}
        model = tm.save(tm.tiny(variant, **changes), model)
    settings = {**DEPTH, "calibration": tokens, "preset": "balanced", "reconstruct": 1}
    settings |= {"propagate": False, "compensation": "none"}
    settings |= {"multiple_of": 1}
    report = coec.prune(model, tmp_path / "out", **settings, drop_blocks=2, budget=0.6)
    share = Dense.open(tmp_path / "out").parameters / Dense.open(model).parameters
    assert 0.5 < share <= 0.6
    assert report.plan["parameters"]["after"] == Dense.open(tmp_path / "out").parameters


@pytest.mark.parametrize(
    ("variant", "verdict"), [("llama", "yes"), ("smollm3", "not known"), ("gemma2", "not known")]
)
def test_layers_of_several_kinds_may_be_counted_by_others(variant, verdict, tmp_path):
    model = deep(variant, tmp_path / "dense", layers=6)
    settings = {"preset": "balanced", "attention_sparsity": 0, "drop_blocks": 1}
    plan = coec.plan(model, **settings)
    assert plan.output.loads_in["llama.cpp"].startswith(verdict)
    assert plan.output.loads_in["transformers"] == "yes"
    assert plan.record()["dropped_blocks"] is None  # not chosen yet
    if verdict != "yes":
        with pytest.raises(OptionError, match="so that llama.cpp loads it"):
            coec.plan(model, **settings, target="llama.cpp")


def test_the_only_block_of_experts_may_go(tmp_path):
    changes = {"num_hidden_layers": 3, "mlp_only_layers": [0, 2]}
    model = tm.save(tm.tiny("qwen3_moe", **changes), tmp_path / "dense")
    record = coec.plan(model, drop_blocks=1).record()
    assert record["removed"].keys() == {"attention", "mlp", "parameters"}


def test_a_killed_run_goes_on_without_the_same_blocks(tokens, tmp_path, monkeypatch):
    model = deep("llama", tmp_path / "dense")
    settings = {"calibration": tokens, "samples": 24, "seq_len": 32, "preset": "fast"}
    settings |= {"drop_blocks": 2}
    coec.prune(model, tmp_path / "whole", **settings)
    interrupt(monkeypatch, coec.prune, model, tmp_path / "out", **settings)
    monkeypatch.setattr(pruning, "choose_blocks", raising(WORK))  # is not asked again
    coec.prune(model, tmp_path / "out", **settings)
    assert tm.same_weights(tmp_path / "out", tmp_path / "whole")


def test_names_and_lists_follow():
    assert renumbered("model.layers.5.mlp.up_proj.weight", (1, 3)) == (
        "model.layers.3.mlp.up_proj.weight"
    )
    assert renumbered("model.layers.3.mlp.up_proj.weight", (1, 3)) is None
    assert renumbered("model.norm.weight", (1, 3)) == "model.norm.weight"
    raw = tm.raw_config("gemma3", num_hidden_layers=12)
    raw.pop("layer_types", None)
    kinds = without_blocks(raw, (0, 5))["layer_types"]
    assert len(kinds) == 10
    assert kinds.index("full_attention") == 9  # the second: the first was block 5


@pytest.mark.parametrize(
    ("changes", "dropped", "expected"),
    [
        ({"first_k_dense_replace": 3}, (1, 5), {"first_k_dense_replace": 2}),
        ({"mlp_only_layers": [0, 3, 6]}, (2, 3), {"mlp_only_layers": [0, 4]}),
        ({"mlp_only_layers": [], "decoder_sparse_step": 1}, (2, 3), {"mlp_only_layers": []}),
        (
            {"mlp_only_layers": [1], "decoder_sparse_step": 2},  # experts in 3, 5 and 7
            (2, 5),
            {"mlp_only_layers": [0, 1, 3, 4], "decoder_sparse_step": 1},
        ),
        ({"no_rope_layers": [1, 0, 0, 1] * 2}, (1, 2), {"no_rope_layers": [1, 1, 1, 0, 0, 1]}),
    ],
)  # fmt: skip
def test_blocks_stay_what_they_were(changes, dropped, expected):
    raw = {"model_type": "qwen3_moe", "num_hidden_layers": 8} | changes
    short = without_blocks(raw, dropped)
    assert short["num_hidden_layers"] == 6
    assert {key: short[key] for key in expected} == expected


def test_positions_that_a_class_leaves_out_by_number_stay(tokens):
    raw = tm.raw_config("smollm3", num_hidden_layers=8, no_rope_layer_interval=4)
    for key in ("layer_types", "no_rope_layers"):
        raw.pop(key, None)
    assert without_blocks(raw, (1, 2))["no_rope_layers"] == [1, 0, 1, 1, 1, 0]


REFUSED = {
    "too many": ({"drop_blocks": 4}, "drop"),
    "paper": ({"drop_blocks": 1, "preset": "paper"}, "reconstruct"),
    "budget": ({"drop_blocks": 3, "budget": 0.9}, "drop_blocks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name, tokens, tmp_path):
    changes, match = REFUSED[name]
    model = deep("llama", tmp_path / "dense")
    with pytest.raises(OptionError, match=match):
        coec.prune(model, tmp_path / "out", **{"calibration": tokens, "preset": "fast"} | changes)


def test_a_family_whose_blocks_do_not_propagate_is_told_to_train(tokens, tmp_path):
    model = deep("exaone4", tmp_path / "dense")
    settings = {"calibration": tokens, "samples": 24, "seq_len": 32, "drop_blocks": 1}
    with pytest.raises(OptionError, match="reconstruct"):
        coec.plan(model, preset="fast", **settings)


@pytest.mark.slow
def test_a_model_of_fewer_blocks_is_trained_and_exported(tokens, tmp_path):
    model = deep("llama", tmp_path / "dense")
    settings = {"calibration": tokens, "samples": 24, "seq_len": 32, "preset": "fast"}
    coec.prune(model, tmp_path / "out", **settings, drop_blocks=2)
    coec.recover(
        model, tmp_path / "out", tmp_path / "trained", text=tokens, tokens=2048, seq_len=32,
        learning_rate=3e-3, batch_size=8,
    )  # fmt: skip
    assert Dense.open(tmp_path / "trained").shape.layers == 3
    coec.export(tmp_path / "out", tmp_path / "out.gguf", dtype="f32", no_tokenizer=True)
    assert (tmp_path / "out.gguf").stat().st_size > 4 * Dense.open(tmp_path / "out").parameters
