"""What a run takes: memory at its fullest moment, disk, operations, and whether it fits."""

import pytest
import torch

import coec
import tiny_models as tm
from coec.checkpoint.folder import check_space
from coec.config.recipe import Recipe
from coec.devices import FreeMemory
from coec.errors import OptionError, OutputError
from coec.methods.block_training import step_tokens
from coec.models.description import Description
from coec.planning import plan as planning
from coec.planning.memory import OVER, disk, memory, operations, placed, weights_met
from coec.planning.plan import Plan
from paper_models import LLAMA_70B

CUDA = torch.device("cuda")
SMALL = {"preset": "paper", "samples": 16, "seq_len": 32}


@pytest.fixture
def on_gpu(monkeypatch):
    """Plan for a GPU, named and never used."""
    monkeypatch.setattr(planning, "choose_device", lambda device: CUDA)
    monkeypatch.setattr(planning, "choose_solve_dtype", lambda device: torch.float64)


def planned(config=None, **settings):
    model = Description.of(config or tm.raw_config("llama"))
    return Plan.of(model, Recipe(**{"device": "cpu", **SMALL, **settings}))


def held(plan):
    return {estimate.moment: estimate for estimate in memory(plan)}


def test_moments_are_those_of_the_run():
    assert set(held(planned())) == {"reading text", "sampling text", "passes", "solving", "writing"}
    assert {"training", "predicting"} <= set(held(planned(preset="balanced")))
    assert "allocating" in held(planned(preset="fast", by_block=True))
    deep = tm.raw_config("llama", num_hidden_layers=4)
    assert "choosing blocks" in held(planned(deep, preset="fast", drop_blocks=1))
    assert held(planned(calibration="self"))["sampling text"].host["whole model"]


def test_a_cpu_holds_known_sums():
    plan = planned()
    passes = held(plan)["passes"]
    assert passes.device == {}
    # One model's states in float32; sums of the widest block in float64, twice, and of a part
    assert passes.host["hidden states"] == 16 * 32 * 32 * 4
    assert passes.host["statistics"] == 2 * 8 * (32**2 + 40**2) + 8 * 40**2
    assert held(planned(preset="fast"))["passes"].host["hidden states"] == 3 * 16 * 32 * 32 * 4


def test_a_step_of_training_holds_as_much_for_any_windows():
    """It has about as many tokens of long windows as of short ones."""
    sizes = {
        held(planned(preset="balanced", seq_len=length, samples=samples))["training"].host[
            "training"
        ]
        for length, samples in ((16, 64), (64, 64), (16, 128))
    }
    assert len(sizes) == 1
    assert step_tokens(16) == step_tokens(64)


def test_a_gpu_holds_states_only_if_they_fit(on_gpu):
    plan = planned(preset="fast", samples=512)
    room = FreeMemory(device=10**12, host=10**12)
    there = placed(plan, room)
    assert there.home == CUDA
    assert "hidden states" in held(there)["passes"].device
    fullest = max(estimate.needed[0] for estimate in memory(there))
    elsewhere = placed(plan, FreeMemory(device=fullest, host=10**12))
    assert elsewhere.home.type == "cpu"
    assert "hidden states" in held(elsewhere)["passes"].host
    assert {"forward pass", "statistics", "copies"} <= set(held(elsewhere)["passes"].device)
    assert placed(planned(), room).home.type == "cpu"  # one stream, whose states pass once


@pytest.mark.parametrize("on", ["device", "host"])
def test_a_plan_that_cannot_fit_is_refused(on, on_gpu):
    """From the measured error of an estimate on."""
    plan = planned(LLAMA_70B, samples=128, seq_len=2048)
    waiting = placed(plan, FreeMemory(10**13, 10**13))
    needed = max(estimate.needed[on == "host"] for estimate in memory(waiting))

    def room(size):
        return FreeMemory(**{"device": 10**13, "host": 10**13, on: int(size)})

    assert placed(plan, room(1.01 * needed / OVER)).home.type == "cpu"
    with pytest.raises(OptionError, match="samples"):
        placed(plan, room(0.99 * needed / OVER))


def test_a_run_without_memory_is_refused_before_any_work(dense, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(FreeMemory, "of", lambda device: FreeMemory(None, 1))
    with pytest.raises(OptionError, match="memory"):
        coec.prune(dense, tmp_path / "out", calibration=tokens, **SMALL)
    assert not list(tmp_path.iterdir())


def test_the_disk_holds_the_model_about_once(tmp_path):
    plan = planned()
    output, _ = disk(plan)
    assert output == pytest.approx(plan.parameters_after * plan.written.itemsize, rel=0.02)
    with pytest.raises(OutputError):
        check_space(tmp_path / "out", 2**60)


def test_operations_are_those_of_weights_statistics_and_solves():
    plan = planned(compensation="ridge-to-slice", selection="wanda-sp")
    layout, shapes, tokens = plan.model.layout, plan.model.shapes, 16 * 32
    weights = sum(s.numel() for name, s in shapes.items() if "layers" in name and len(s) == 2)
    assert weights_met(plan.model, shapes) == weights
    grams = sum(site.columns**2 for site in layout.sites)
    passes = (2 * (weights + grams) + 4 * 32 * 32) * tokens
    solves = sum(
        14 * 32 * d**2 + 6 * 32 * k**2 + k**3
        for site in layout.sites
        for d, k in [(site.columns, plan.widths.of(site) * site.columns_per_unit)]
    )
    assert operations(plan) == pytest.approx(passes + solves)


@pytest.mark.parametrize("settings", [{}, {"preset": "balanced"}, {"by_block": True}])
def test_more_text_and_more_training_are_more_operations(settings):
    one, two, four = (operations(planned(samples=n, **settings)) for n in (512, 1024, 2048))
    assert four - two == pytest.approx(2 * (two - one))
    assert operations(planned(preset="balanced", reconstruct=8)) > operations(
        planned(preset="balanced")
    )


def test_the_program_is_never_what_takes_most(dense, tokens, run):
    how = ["--samples", 1, "--seq-len", 8, "--calibration", tokens, "--preset", "paper"]
    status, shown, _ = run("prune", dense, "--dry-run", *how)
    assert status == 0
    assert "program" not in next(line for line in shown.splitlines() if "memory of" in line)


@pytest.mark.parametrize(
    ("given", "named"),
    [({}, False), ({"attention_sparsity": 0.0}, True)],
)
def test_only_flags_that_were_given_are_to_be_left_out(given, named):
    with pytest.raises(OptionError, match="tensor_parallel = 3") as refused:
        planned(preset="fast", tensor_parallel=3, **given)
    assert str(refused.value).endswith("or leave out attention_sparsity") == named
    assert "kept" not in str(refused.value)
