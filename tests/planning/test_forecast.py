"""What a run will take: phases, memory, disk, and whether it fits."""

import json
from dataclasses import replace

import pytest
import torch
from coec.planning.run import check_room, close_fits, within
from coec.reconstruction import block_training
from coec.streaming.two_streams import shards

import coec
import tiny_models as tm
from benchmarks.scale import MODELS
from coec.checkpoint.checkpoint import space_needed
from coec.checkpoint.folder import check_space
from coec.config.recipe import Recipe
from coec.devices import FreeMemory
from coec.errors import OptionError
from coec.models.description import Description
from coec.planning import ComputeConfig, Forecast, Plan
from coec.planning.memory import disk, needed_beside, purposes_of
from coec.streams.layers import tokens_per_batch
from coec.text.windows import validation_count
from paper_models import LLAMA_8B

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LARGE = MODELS["Llama-3-70B"]
SMALL = {"preset": "paper", "samples": 16, "seq_len": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A configuration alone."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(tm.raw_config("llama")))
    return path


def planned(folder, device=CPU, **settings):
    plan = coec.plan(folder, **{"solve_dtype": "float64", **SMALL, **settings})
    return plan, ComputeConfig.of(plan, device)


def names(folder, **settings):
    plan, how = planned(folder, **settings)
    return [phase.name for phase in Forecast.of(plan, how).phases]


def test_phases_are_those_of_the_run(folder, tmp_path):
    assert names(folder) == [
        "checking", "calibrating", "solving attention", "solving mlp", "writing",
    ]  # fmt: skip
    best = names(folder, preset="balanced", calibration="self", prediction_passes=1)
    assert best[:2] == ["checking", "sampling text"]
    assert names(folder, preset="balanced")[1] == "measuring bos"
    for text in ({"calibration": "self"}, {"bos": "off"}):
        assert "measuring bos" not in names(folder, preset="balanced", **text)
    assert best[2:-1] == [
        "passes", "solving attention", "solving mlp", "training blocks", "training on predictions",
        "predicting",
    ]  # fmt: skip
    assert "allocating" in names(folder, allocation="adaptive", by_block=True)
    deep = {"preset": "fast", "bos": "off", "drop_blocks": 1, "by_block": True}
    raw = tm.raw_config("llama", num_hidden_layers=4)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert names(tmp_path, **deep)[1:4] == ["choosing blocks", "allocating", "passes"]


def memory(forecast):
    return {phase.name: phase for phase in forecast.phases}


def test_every_phase_holds_memory(folder):
    for settings in ({}, {"preset": "balanced"}, {"allocation": "error", "by_block": True}):
        plan, how = planned(folder, **settings)
        forecast = Forecast.of(plan, how)
        assert all(phase.host for phase in forecast.phases)
        assert forecast.peak == (0, max(sum(phase.host.values()) for phase in forecast.phases))
        record = json.loads(json.dumps(forecast.record()))
        assert set(record["memory_bytes"]["phases"]) == set(memory(forecast))


def test_a_gpu_holds_what_is_computed_and_the_host_what_waits(folder):
    plan, how = planned(folder, CUDA)
    held = memory(Forecast.of(plan, how))
    assert set(held["calibrating"].host) == {"program", "text", "hidden states"}
    assert {"forward pass", "statistics"} <= set(held["calibrating"].device)
    assert "solver" in held["solving mlp"].device
    assert set(held["writing"].device) == set()


def operations(folder, **settings):
    forecast = Forecast.of(*planned(folder, **settings))
    found = {phase.name: phase.operations for phase in forecast.phases}
    assert forecast.operations == pytest.approx(sum(found.values()))
    return found


def test_twice_the_text_is_twice_the_dense_pass(folder):
    one, other = (operations(folder, samples=samples) for samples in (16, 32))
    assert other["calibrating"] == pytest.approx(2 * one["calibrating"])
    assert other["solving mlp"] == one["solving mlp"]


def test_operations_of_the_dense_pass_are_those_of_its_weights(folder):
    """Twice the weights per token, attention maps, and the statistics."""
    plan, _ = planned(folder)
    tokens = 16 * 32
    weights = sum(
        shape.numel()
        for name, shape in plan.model.shapes.items()
        if "layers" in name and len(shape) == 2
    )
    grams = sum(site.columns**2 for site in plan.model.layout.sites)
    attention = plan.dense.kv_heads * plan.dense.group * plan.dense.head_dim
    maps = 4 * 32 * attention * plan.dense.layers
    expected = 2 * tokens * (weights + grams) + maps * tokens
    assert operations(folder)["calibrating"] == pytest.approx(expected)


def test_a_solve_is_counted_by_hand(folder):
    """Of two blocks; an elimination and a descent come on top."""
    m, d, k = 32, 40, 28
    closed = 2 * (14 * m * d**2 + 6 * m * k**2 + k**3)
    found = {
        compensation: operations(folder, compensation=compensation, selection="wanda-sp")
        for compensation in ("ridge-to-slice", "coec")
    }
    assert found["ridge-to-slice"]["solving mlp"] == closed
    assert found["coec"]["solving mlp"] > 2 * closed
    chosen = operations(folder, compensation="ridge-to-slice", selection="obs")
    assert chosen["solving mlp"] == closed + 2 * (m * d**2 + 2 * d**3)


def test_more_passes_are_more_of_the_training_alone(folder):
    one, other = (
        operations(
            folder, preset="balanced", kv_groups="all", reconstruct=passes, prediction_passes=passes
        )
        for passes in (1, 3)
    )
    for phase in ("training blocks", "training on predictions"):
        assert other[phase] == pytest.approx(3 * one[phase])
    assert other["passes"] == one["passes"]


def test_a_step_of_training_holds_as_much_whatever_the_windows(folder, monkeypatch):
    """It has about as many tokens of long windows as of short ones."""

    def fit(length, samples):
        plan, how = planned(folder, preset="balanced", seq_len=length, samples=samples)
        return memory(Forecast.of(plan, how))["training blocks"].host["fit"]

    before = fit(16, 64)
    assert before == fit(64, 64) == fit(16, 128)
    monkeypatch.setattr(block_training, "STEP_TOKENS", 2 * block_training.STEP_TOKENS)
    assert fit(16, 64) > before


def test_without_propagation_as_many_states_wait_and_more_sums(folder):
    """Sums of a part of the windows beside those before it."""
    waiting, summed = set(), []
    for propagate in (True, False):
        plan, how = planned(folder, reconstruct=1, propagate=propagate)
        passes = memory(Forecast.of(plan, how))["passes"].host
        waiting.add(passes["hidden states"])
        summed.append(passes["statistics"])
    assert waiting == {3 * plan.tokens * plan.dense.hidden * how.forward.itemsize}
    assert 1.5 * summed[0] < summed[1] < 2 * summed[0]


def test_the_disk_holds_the_model_about_once(folder, tmp_path):
    plan, how = planned(folder)
    output, partial = disk(plan, how.written)
    assert output == pytest.approx(plan.parameters_after * how.written.itemsize, rel=0.02)
    assert space_needed(tmp_path / "out", plan, how.written) == output + partial
    with pytest.raises(coec.CoecError, match="choose a folder on another disk"):
        check_space(tmp_path / "out", 2**60)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"solve_dtype": "float64"}, "set solve_dtype = float32, or device = cpu"),
        ({"solve_dtype": "float32"}, "set device = cpu"),
    ],
)
def test_a_solve_that_cannot_fit_is_refused_and_told_what_helps(settings, advice):
    """On a device with room for everything else, to the measured error of an estimate."""
    model = Description.of(LARGE)
    plan = Plan.of(model, Recipe(**settings))
    how = ComputeConfig.of(plan, CUDA)
    needed = {p.name: needed_beside(p.device) for p in Forecast.of(plan, how).phases}
    assert max(needed, key=lambda phase: needed[phase]) == "solving mlp"
    check_room(plan, how, FreeMemory(int(needed["solving mlp"] / 1.19), None))
    with pytest.raises(
        OptionError,
        match=rf"^about .* GB of memory are needed \(solving mlp\), and the device .*: {advice}$",
    ):
        check_room(plan, how, FreeMemory(int(needed["solving mlp"] / 1.21), None))


def test_hidden_states_that_do_not_fit_ask_for_fewer_samples(folder):
    plan, how = planned(folder, samples=10**6)
    with pytest.raises(OptionError, match="take fewer samples than 1000000, or a seq_len below 32"):
        check_room(plan, how, FreeMemory(None, 2**30))


def test_a_close_fit_is_said_and_not_refused(folder):
    plan, how = planned(folder)
    held = memory(Forecast.of(plan, how)).values()
    fullest = max(sum(phase.host.values()) - phase.host["program"] for phase in held)
    room = FreeMemory(None, fullest)
    check_room(plan, how, room)
    [line] = close_fits(plan, how, room)
    assert line.startswith("memory is close: ")
    assert close_fits(plan, how, FreeMemory(None, 10 * fullest)) == ()
    assert close_fits(plan, how, FreeMemory(None, None)) == ()


def test_a_real_run_is_refused_before_any_work(dense, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(FreeMemory, "of", lambda device: FreeMemory(None, 1))
    with pytest.raises(OptionError, match="this machine has 0.0 GB free"):
        coec.prune(dense, tmp_path / "out", calibration=tokens, **SMALL)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("free", "at_once", "said"),
    [
        (24e9, 16, None),  # a card's
        (48e9, 64, None),
        (12e9, 1, "^about 16.* GB .*sampling text.*on a text, not on self, or set device = cpu$"),
    ],
)
def test_so_many_windows_are_sampled_as_a_card_has_room_for(free, at_once, said):
    recipe = Recipe(preset="balanced", calibration="self", solve_dtype="float64")
    plan = Plan.of(Description.of(LLAMA_8B), recipe)
    card = FreeMemory(int(free), None)
    how = within(plan, ComputeConfig.of(plan, CUDA), card)
    assert how.at_once == at_once
    if said is None:
        check_room(plan, how, card)
    else:
        with pytest.raises(OptionError, match=said):
            check_room(plan, how, card)


def test_states_without_a_block_wait_on_the_host(tmp_path):
    raw = tm.raw_config("llama", num_hidden_layers=4)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan, how = planned(tmp_path, CUDA, preset="fast", drop_blocks=1)
    choosing = {phase.name: phase for phase in Forecast.of(plan, how).phases}["choosing blocks"]
    assert "states without a block" in choosing.host
    assert "states without a block" not in choosing.device


@pytest.mark.parametrize("text", [{"samples": 100, "seq_len": 512}, {"samples": 40}])
def test_pinned_pages_are_those_of_the_batches_that_wait(text):
    """Torch takes pinned memory in powers of two."""
    plan = Plan.of(
        Description.of(LLAMA_8B),
        Recipe(preset="balanced", calibration="self", solve_dtype="float64", **text),
    )
    states = purposes_of(plan, ComputeConfig.of(plan, CUDA))["hidden states"]
    calibration = plan.recipe.calibration
    ids = torch.zeros(calibration.samples, plan.seq_len)
    held = validation_count(calibration.samples, calibration.validation)
    [shard] = shards(ids[held:], ids[:held], tokens=tokens_per_batch(CUDA, plan.dense.hidden))
    waiting = [
        1 << (2 * plan.dense.hidden * batch.ids.numel() - 1).bit_length()
        for by_part in shard.values() for batches in by_part for batch in batches
    ]  # fmt: skip
    assert states == pytest.approx(3 * sum(waiting), rel=0.1)


def test_states_wait_on_a_gpu_that_has_room_for_them(folder):
    plan, how = planned(folder, CUDA, preset="fast", samples=512)
    free = FreeMemory(device=10**12, host=10**12)
    there = within(plan, how, free)
    assert there.states_on_device
    phases = {phase.name: phase for phase in Forecast.of(plan, there).phases}
    assert "hidden states" in phases["passes"].device
    assert "hidden states" not in phases["passes"].host
    needed = max(needed_beside(phase.device) for phase in phases.values())
    assert not within(plan, how, replace(free, device=needed)).states_on_device
    elsewhere = [
        (planned(folder, CPU, preset="fast", samples=512), FreeMemory(None, 10**12)),
        (planned(folder, CUDA), free),  # one stream, whose states pass once
        (planned(folder, CUDA, preset="fast", samples=512, executor="ray"), free),
    ]
    assert not any(within(*pair, room).states_on_device for pair, room in elsewhere)
