"""The pruned model beside the dense one: what is trained, chosen, refused, and written."""

import json
import math
from collections import Counter
from types import SimpleNamespace
from weakref import WeakSet

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

import coec
import tiny_models as tm
from coec.distributed.workers import to_cpu
from coec.errors import CalibrationError, OptionError, UnfinishedError
from coec.models.dense import Dense
from coec.pipeline import reconstruct as reconstruction
from coec.pipeline import trials
from coec.pipeline import write as writing
from coec.solve import SINKS
from coec.planning import run as planned_run
from coec.planning.plan import Plan, tried_blocks
from coec.config.recipe import Recipe
from coec.reconstruction import block_training
from coec.methods.block_training import TrainedBlock
from coec.streaming import layers as layers_module
from coec.streams.layers import Layers
from coec.streaming.two_streams import ConsumerStatistics
from coec.types import Gram, GramSum
from prunings import prunes

SETTINGS = {"preset": "paper", "samples": 24, "seq_len": 32, "forward_dtype": "float64"}
QUICK = {"reconstruct": 1, "prediction_passes": 1}
LONGER = {"reconstruct": 8, "reconstruct_rate": 0.01}
"""Enough passes and rate for a difference to show on these models."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tm.save(tm.tiny("llama"), tmp_path_factory.mktemp("dense") / "model")


pruned = prunes(**SETTINGS)


@pytest.fixture(scope="module")
def best(dense, tokens, tmp_path_factory):
    """A folder of runs by `best`, by the rule for KV groups, and their reports."""
    root = tmp_path_factory.mktemp("best")
    settings = SETTINGS | {"preset": "balanced", "calibration": tokens} | QUICK
    return root, {
        kind: coec.prune(dense, root / kind, kv_groups=kind, **settings)
        for kind in ("uniform", "all", "held-out")
    }


@pytest.mark.parametrize(
    ("settings", "attention", "mlp"),
    [
        ({"preset": "paper"}, 1, 1),
        # Dense, dense weights on the pruned model's inputs, pruned
        ({"preset": "fast"}, 3, 3),
        # A sixth of the windows validates: the pass that measures, and four that train, leave it
        # out, and it alone runs at the start and behind every pass. What is trained runs again.
        ({"preset": "balanced", "prediction_passes": 0, "holdout": 4 / 24},
         4 + (1 + 4) * 20 / 24 - 1 + 5 * 4 / 24, 3 + (1 + 4) * 20 / 24 - 1 + 5 * 4 / 24),
    ],
)  # fmt: skip
def test_windows_go_through_every_block_so_often(settings, attention, mlp, dense, tokens, tmp_path):
    """docs/lab/PERFORMANCE.md has these numbers."""
    passed = Counter()

    def count(module, args, out):
        for kind in ("Attention", "MLP"):  # the pruned model's type may be another than llama
            if type(module).__name__.endswith(kind):
                passed[kind] += len(out[0] if isinstance(out, tuple) else out)

    hook = register_module_forward_hook(count)
    try:
        coec.prune(dense, tmp_path / "out", calibration=tokens, **SETTINGS | settings)
    finally:
        hook.remove()
    once = SETTINGS["samples"] * Dense.open(dense).shape.layers
    got = passed["Attention"] / once, passed["MLP"] / once
    assert got == pytest.approx((attention, mlp))


class Waits(TorchDispatchMode):
    """Counts reads of single numbers from tensors, for which a device has to end its work."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator in (
            torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default,
            torch.ops.aten.nonzero.default,
        )  # fmt: skip
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("settings", [{"preset": "fast"}, {"preset": "balanced", "holdout": 0.25}])
def test_a_block_waits_for_its_device_no_more_often_for_more_windows(
    settings, dense, tmp_path, monkeypatch
):
    """docs/lab/PERFORMANCE.md has these numbers, of the first of two blocks."""
    solve, waits = reconstruction.BlockReconstruction.solve, []

    def counted(self, block):
        with Waits() as counter:
            result = solve(self, block)
        waits.append(counter.count)
        return result

    monkeypatch.setattr(reconstruction.BlockReconstruction, "solve", counted)
    monkeypatch.setattr(layers_module, "TOKENS_PER_BATCH", 64)  # two windows
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 64, 96 * 32))
    for samples in (24, 96):
        coec.prune(dense, tmp_path / f"{samples}", calibration=tokens,
                   **SETTINGS | settings | {"samples": samples})  # fmt: skip
    few, _, many, _ = waits
    # Some are of windows in batches of another size, and of Grams of so many tokens; a batch of two
    # windows has none, and there are 36 more of them.
    assert many - few < 16


@pytest.mark.parametrize("settings", [
    {"preset": "fast"}, {"preset": "balanced", "holdout": 0.25},
    {"preset": "balanced", "propagate": False},
])  # fmt: skip
def test_three_sets_of_hidden_states_are_in_memory(settings, dense, tmp_path, monkeypatch):
    """On a GPU, where they wait beside the work, the plan counts as many."""
    call, states, most = Layers.call, WeakSet(), 0

    def counted(self, *args):
        nonlocal most
        behind = call(self, *args)
        states.add(behind)
        most = max(most, len(states))
        return behind

    monkeypatch.setattr(Layers, "call", counted)
    monkeypatch.setattr(layers_module, "TOKENS_PER_BATCH", 64)  # two windows
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 64, 96 * 32))
    coec.prune(dense, tmp_path / "out", calibration=tokens, **SETTINGS | settings | {"samples": 96})
    batches = 48
    assert 2 * batches < most <= 3 * batches + 2


@pytest.mark.parametrize(("propagate", "sums"), [(True, 2), (False, 6)])
def test_the_sums_of_a_part_are_gone_before_the_next(propagate, sums, pruned, monkeypatch):
    """Beside the total of one site where errors propagate, else of both, and of both kinds of
    windows."""
    init, alive, most = GramSum.__init__, WeakSet(), 0

    def counted(self, d, *args):
        nonlocal most
        init(self, d, *args)
        if d:  # and no batch
            alive.add(self)
            most = max(most, len(alive))

    monkeypatch.setattr(GramSum, "__init__", counted)
    pruned(preset="balanced", propagate=propagate, reconstruct=1, prediction_passes=0)
    assert most == sums


def hidden(model, ids):
    """The hidden states behind every layer."""
    with torch.no_grad():
        return model(input_ids=ids, output_hidden_states=True).hidden_states


def windows(tokens):
    return torch.from_numpy(np.load(tokens)).long()


def far(dense, out, tokens):
    """How far the pruned model's last hidden states are from the dense model's."""
    mine, theirs = (hidden(tm.load(folder), windows(tokens))[-2] for folder in (out, dense))
    return float((mine - theirs).square().sum() / theirs.square().sum())


@pytest.mark.slow
def test_every_part_brings_the_hidden_states_closer(dense, pruned, tokens, tmp_path):
    """Compensation, then targets with the carried error, then all weights of a block trained."""
    steps = {
        "none": {"compensation": "none"},
        "compensated": {"compensation": "ridge-to-slice"},
        "propagated": {"compensation": "ridge-to-slice", "propagate": True},
        "trained": {"compensation": "ridge-to-slice", **LONGER},
        "both": {"compensation": "ridge-to-slice", "propagate": True, **LONGER},
    }
    found = {}
    for name, settings in steps.items():
        pruned(name, **settings)
        found[name] = far(dense, tmp_path / name, tokens)
    assert found["none"] > found["compensated"] > found["propagated"] > found["both"], found
    assert found["compensated"] > found["trained"], found


def test_nothing_carried_leaves_dense_statistics(pruned, tmp_path):
    """In the first block both streams are one, and so are targets, kept units and weights."""
    pruned("one", compensation="ridge-to-slice")
    pruned("other", compensation="ridge-to-slice", propagate=True)
    mine, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "other"))
    name = "model.layers.0.self_attn.o_proj.weight"
    torch.testing.assert_close(mine[name], theirs[name], rtol=1e-6, atol=1e-8)
    later = "model.layers.1.mlp.down_proj.weight"
    assert not torch.allclose(mine[later], theirs[later], rtol=1e-3)


def test_without_propagation_closed_forms_are_those_of_the_dense_pass(pruned, tmp_path):
    """Training that moves nothing is asked for: sites are solved from dense inputs, as ever."""
    pruned("one", compensation="ridge-to-slice")
    pruned("other", compensation="ridge-to-slice", reconstruct=1, reconstruct_rate=1e-30)
    mine, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "other"))
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_validation_windows_choose_the_number_of_groups(best, pruned):
    root, reports = best
    scores = {}
    for kind in ("uniform", "all"):  # candidates are tried in closed form, on the text
        settings = {"preset": "balanced", "kv_groups": kind, "reconstruct": 0}
        scores[kind] = pruned(kind, **settings).reconstruction["kl"]
    nearer = min(scores, key=scores.get)
    chosen = reports["held-out"]
    assert chosen.reconstruction["kv_groups"] == nearer
    for kind, score in scores.items():
        assert chosen.reconstruction["candidates"][kind]["kl"] == score
    assert tm.same_weights(root / nearer, root / "held-out")
    parameters = [report.plan["parameters"]["after"] for report in reports.values()]
    assert max(parameters) - min(parameters) <= 2 * 3 * tm.HIDDEN  # a channel in every block
    assert reports["all"].plan["widths"]["kv_groups"] == {"before": 4, "after": 4}
    assert reports["all"].plan["parameters"]["after"] <= parameters[0]


def test_the_nearer_candidate_is_made_though_the_other_likes_the_windows(pruned, monkeypatch):
    """Few windows say little about perplexity: the distance from the dense model decides."""
    facts = {"windows": "held out", "dense": 2.0}
    found = iter([{**facts, "perplexity": 3.1, "kl": 0.2}, {**facts, "perplexity": 3.0, "kl": 0.3}])
    monkeypatch.setattr(trials, "_trial", lambda *given: dict(next(found)))
    report = pruned(preset="balanced", **QUICK)
    assert report.reconstruction["kv_groups"] == "uniform"
    assert report.reconstruction["candidates"]["all"]["perplexity"] == 3.0


def test_a_trial_prunes_a_quarter_of_the_blocks_and_four_at_least(pruned, monkeypatch):
    assert [tried_blocks(n) for n in (2, 5, 8)] == [[0, 1], [0, 1, 2, 3], [0, 2, 4, 6]]
    assert tried_blocks(32) == list(range(0, 32, 4))

    def kl(name, tried):
        monkeypatch.setattr(reconstruction, "tried_blocks", lambda layers: tried)
        report = pruned(name, preset="balanced", **QUICK)
        return {n: facts["kl"] for n, facts in report.reconstruction["candidates"].items()}

    assert kl("none", []) == pytest.approx({"uniform": 0, "all": 0}, abs=1e-9)
    one, all_blocks = kl("one", [1]), kl("all", [0, 1, 2, 3])
    assert all(0 < one[name] < all_blocks[name] for name in one)


def test_measured_costs_decide_the_groups_of_blocks_without_a_trial(dense, tokens):
    def candidates(**settings):
        recipe = Recipe(preset="balanced", calibration=str(tokens), samples=24, seq_len=32,
                        sparsity=0.5, **settings)  # fmt: skip
        return set(Plan.candidates(Dense.open(dense), recipe))

    assert candidates() == candidates(by_block=True)
    assert candidates() == {"uniform", "all"}
    assert candidates(by_block=True) == {"uniform"}
    assert candidates(by_block=True, target="vllm") == {"uniform", "all"}


@pytest.mark.slow
def test_the_last_block_is_trained_towards_the_predictions(pruned, tmp_path):
    """Only its weights change, the report says by how much, and validation KL falls."""
    settings = {"preset": "balanced", "kv_groups": "uniform", "reconstruct": 1}
    reports = {n: pruned(str(n), **settings, prediction_passes=n) for n in (0, 8)}
    plain, trained = (load_file(tmp_path / str(n) / "model.safetensors") for n in (0, 8))
    changed = {name for name in plain if not torch.equal(plain[name], trained[name])}
    assert changed == {name for name in plain if name.startswith("model.layers.1.")}
    row = reports[8].sites[-1]["predictions"]
    assert row["taken"]
    assert row["errors"][row["taken"]] == min(row["errors"]) < row["errors"][0]
    scores = [reports[n].reconstruction["kl"] for n in (0, 8)]
    assert row["errors"][0] == pytest.approx(scores[0], rel=0.05)  # there no last token counts
    assert row["errors"][row["taken"]] == pytest.approx(scores[1], rel=0.05)
    assert [n for n, site in enumerate(reports[8].sites) if "predictions" in site] == [3]
    assert not any("predictions" in site for site in reports[0].sites)


def test_the_row_of_a_blocks_last_site_says_how_it_was_trained(best):
    for report in best[1].values():
        for row in report.sites:
            assert ("reconstruction" in row) == (row["site"] == "mlp")
        for row in report.sites[1::2]:
            training = row["reconstruction"]
            assert training.keys() == {"taken", "fitted", "errors", "rate"}
            assert len(training["errors"]) == len(training["fitted"]) + 1 == 2
            assert training["errors"][training["taken"]] == min(training["errors"])


@pytest.mark.parametrize("weighted", ["equal", "residual"])
def test_the_error_of_a_block_is_that_of_the_models_as_they_are_written(
    weighted, dense, pruned, tokens, tmp_path
):
    """Of the hidden states behind it, all windows, from the checkpoints alone."""
    report = pruned(compensation="ridge-to-slice", token_weights=weighted, **LONGER)
    folders = (tmp_path / "out", dense)
    mine, theirs = (hidden(tm.load(folder), windows(tokens))[1] for folder in folders)
    weights = 1 if weighted == "equal" else 1 / theirs.square().mean(dim=-1, keepdim=True)
    error = (weights * (mine - theirs).square()).sum() / (weights * theirs.square()).sum()
    training = report.sites[1]["reconstruction"]
    assert training["errors"][training["taken"]] == pytest.approx(float(error), rel=1e-5)


def test_any_setting_of_the_training_changes_the_model(pruned, tmp_path):
    settings = {"compensation": "ridge-to-slice", "reconstruct": 1}
    found = {}
    for name, more in {
        "plain": {}, "again": {}, "rate": {"reconstruct_rate": 0.1}, "passes": {"reconstruct": 2},
        "weights": {"token_weights": "residual"}, "predictions": {"prediction_passes": 1},
        "seed": {"seed": 1},
    }.items():  # fmt: skip
        pruned(name, **settings | more)
        found[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert found.pop("again") == found["plain"]
    assert len(set(found.values())) == len(found)


def test_a_training_that_harms_validation_windows_is_not_taken(pruned, tmp_path, monkeypatch):
    """Steps are far too long."""
    monkeypatch.setattr(block_training, "_root_mean_square", lambda weight: 100.0)
    settings = {"preset": "balanced", "kv_groups": "uniform", "samples": 4, "holdout": 0.25}
    wild = pruned("wild", **settings, reconstruct=4, prediction_passes=2)
    none = pruned("none", **settings, reconstruct=0)
    fits = [row[n] for row in wild.sites for n in ("reconstruction", "predictions") if n in row]
    assert len(fits) == 3
    assert all(fit["taken"] == 0 for fit in fits)
    assert not any("not trained" in str(row["events"]) for row in wild.sites)
    assert tm.same_weights(tmp_path / "wild", tmp_path / "none")
    assert wild.reconstruction["kl"] == none.reconstruction["kl"]


def test_long_work_behind_the_last_block_and_on_the_way_back_is_said(pruned):
    seen = []
    settings = {"preset": "balanced", "by_block": True, "samples": 16, "holdout": 0.25}
    pruned(**settings, reconstruct=0, progress=lambda *step: seen.append(step))
    assert [entry for entry in seen if "way back" in entry[0]] == [
        ("allocating on the way back", 1, 2), ("allocating on the way back", 2, 2)
    ]  # fmt: skip
    scored = [entry for entry in seen if entry[0] == "predicting windows"]
    assert scored
    assert scored[-1][1:] == (4, 4)


def test_predictions_are_learned_at_a_lower_rate_where_the_whole_one_harms(pruned, monkeypatch):
    monkeypatch.setattr(block_training, "_root_mean_square", lambda weight: 100.0)
    monkeypatch.setattr(reconstruction, "_GENTLER", 1e-3)
    settings = {"preset": "balanced", "kv_groups": "uniform", "samples": 16, "holdout": 0.25}
    seen = []
    settings |= {"reconstruct": 1, "prediction_passes": 4}
    report = pruned(**settings, progress=lambda *step: seen.append(step))
    last = [done for phase, done, _ in seen if phase == "reconstructing"][-2:]
    said = seen.index(("solving the last block for its predictions", 0, 1))
    assert [seen[said - 1][1], seen[said + 1][1]] == last
    training = report.sites[-1]["predictions"]
    assert training["rate"] == pytest.approx(5e-6)
    assert training["taken"]
    assert training["errors"][training["taken"]] < training["errors"][0]


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_an_interrupted_run_goes_on_to_the_same_bytes(best, after, pruned, tmp_path, monkeypatch):
    """Both streams are run again through what is solved."""
    settings = {"preset": "balanced", **QUICK}
    root, reports = best
    solve, count = reconstruction.BlockReconstruction.solve, [0]

    def interrupted(self, *arguments):
        if count[0] == after:
            raise KeyboardInterrupt
        count[0] += 1
        return solve(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(reconstruction.BlockReconstruction, "solve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pruned(**settings)
    if after > 1:  # otherwise nothing is lost by asking for something else
        with pytest.raises(UnfinishedError, match="reconstruct_rate"):
            pruned(**settings, reconstruct_rate=0.2)
    report = pruned(**settings)
    assert json.dumps(report.reconstruction) == json.dumps(reports["held-out"].reconstruction)
    for name in ("model.safetensors", "coec/kept.safetensors", "config.json", "README.md"):
        assert (tmp_path / "out" / name).read_bytes() == (root / "held-out" / name).read_bytes()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"preset": "worst"}, "preset must be one of paper, fast, balanced, best, got 'worst'"),
        ({"propagate": "yes"}, "propagate must be true or false, got 'yes'"),
        ({"reconstruct_rate": 0.5}, "reconstruct_rate has no effect with reconstruct = 0"),
        ({"reconstruct": 1, "reconstruct_rate": 1.0}, "is above 0 and below 1, got 1.0"),
        ({"reconstruct": 1, "reconstruct_rate": 0}, "is above 0 and below 1, got 0"),
        ({"reconstruct": -1}, "reconstruct must be a whole number of at least 0, got -1"),
        ({"token_weights": "residual"}, "token_weights has no effect with neither"),
        ({"kv_groups": "held-out"}, "needs validation windows: set holdout"),
        ({"prediction_passes": 3}, "prediction_passes has no effect with reconstruct = 0"),
        ({"preset": "balanced", "prediction_passes": 0.5}, "prediction_passes must be"),
        ({"kv_groups": "all", "sparsity": 0.9}, "leaves no intermediate channels"),
        ({"preset": "balanced", "forward_dtype": "float16"}, "overflow in float16: set forward_dtype"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_before_work(
    settings, said, pruned, tmp_path
):
    with pytest.raises(OptionError, match=said):
        pruned(**settings)
    assert not list(tmp_path.iterdir())


def test_one_window_cannot_be_for_validation(pruned, tmp_path):
    with pytest.raises(CalibrationError, match="holdout"):
        pruned(preset="balanced", samples=1)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def statistics(dense, tokens, tmp_path_factory):
    """Without validation windows."""
    out = tmp_path_factory.mktemp("statistics") / "statistics"
    return coec.collect(dense, out, **SETTINGS, calibration=tokens)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"propagate": True}, "propagate"),
        ({"reconstruct": 1}, "reconstruct"),
        ({"kv_groups": "held-out", "holdout": 0.25}, "kv_groups"),
        ({"preset": "balanced"}, "preset = best"),
        ({"preset": "balanced", "reconstruct": 1}, "reconstruct"),
    ],
)
def test_statistics_alone_do_not_hold_token_streams(settings, name, dense, statistics, tmp_path):
    settings = {"preset": "paper", **settings}
    said = f"^{name} runs the pruned model over the text.*leave out the statistics, or {name}$"
    for call in (
        lambda: coec.prune(dense, tmp_path / "out", statistics=statistics, **settings),
        lambda: coec.plan(dense, statistics=statistics, **settings),
    ):
        with pytest.raises(OptionError, match=said):
            call()
    assert not (tmp_path / "out").exists()


def test_a_candidate_that_cannot_be_is_left_out_and_named(pruned):
    report = pruned(preset="balanced", sparsity=0.7, **QUICK)
    assert report.reconstruction["kv_groups"] == "uniform"
    assert not report.reconstruction["candidates"]
    assert any("kv_groups = all was not tried: " in note for note in report.plan["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "granite", "seed_oss"])
@pytest.mark.parametrize("settings", [
    {"preset": "balanced", "kv_groups": "uniform", **QUICK},
    {"reconstruct": 1},
    {"propagate": True},
    {"propagate": True, "sparsity": 0.03},  # attention keeps everything, and has a target
])  # fmt: skip
def test_biases_go_with_targets(variant, settings, pruned, tmp_path):
    """The format then has biases at other projections too, which nobody computes."""
    model = tm.save(tm.tiny(variant), tmp_path / "model")
    pruned(model=model, compensation="bias", **settings)
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state["model.layers.1.mlp.down_proj.bias"].abs().max() > 0
    assert torch.isfinite(tm.logits(tm.load(tmp_path / "out"))).all()


def test_going_on_keeps_no_graph_of_what_is_passed(pruned, monkeypatch):
    """Hidden states of every solved block would stay in memory."""
    settings = {"preset": "balanced", "kv_groups": "uniform", **QUICK}
    solve, seen = reconstruction.BlockReconstruction.solve, []

    def watched(self, block):
        streams = self._group.streams
        states = (*streams._dense_states.values(), *streams._pruned_states.values())
        seen.append([state.requires_grad for state in states])
        if block.index == 1 and len(seen) == 2:
            raise KeyboardInterrupt
        return solve(self, block)

    monkeypatch.setattr(reconstruction.BlockReconstruction, "solve", watched)
    with pytest.raises(KeyboardInterrupt):
        pruned(**settings)
    pruned(**settings)
    assert len(seen) == 3
    assert not any(flag for flags in seen for flag in flags)


@pytest.mark.slow
def test_a_damaged_piece_of_an_ended_candidate_is_made_again(best, pruned, tmp_path, monkeypatch):
    settings = {"preset": "balanced", **QUICK}
    with monkeypatch.context() as patch:
        patch.setattr(writing.Checkpoint, "write", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pruned(**settings)
    for path in (tmp_path / "out.partial").rglob("block-00000.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="it is made again"):
        pruned(**settings)
    assert tm.same_weights(best[0] / "held-out", tmp_path / "out")


def test_a_weight_that_the_output_cannot_hold_is_named(pruned, tmp_path, monkeypatch):
    """Training measures what is rounded to the dtype of the output: such a state is not taken."""

    def huge(*given, **how):
        start = given[1]
        return TrainedBlock({n: p * 1e30 for n, p in start.items()}, 1, [0.5], [1.0, 0.5])

    monkeypatch.setattr(reconstruction, "train_block", huge)
    report = pruned(preset="balanced", kv_groups="uniform", dtype="float16", **QUICK)
    assert any("the block is not trained" in str(row["events"]) for row in report.sites)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in loaded.values())


@pytest.mark.parametrize("preset", ["balanced", "paper"])
def test_a_training_that_fails_leaves_the_closed_form_and_says_so(
    preset, pruned, tmp_path, monkeypatch
):
    """The outputs at the start are not finite, of one block alone."""
    settings = {"preset": preset, "compensation": "ridge-to-slice"}
    pruned("closed", **settings, reconstruct=0)
    plain = Layers.function

    def spoilt(self, block):
        function = plain(self, block)
        return function if block.index == 0 else lambda *given: function(*given) * math.nan

    monkeypatch.setattr(Layers, "function", spoilt)
    monkeypatch.setattr(block_training, "_root_mean_square", lambda weight: 0.0)  # moves nothing
    report = pruned(**settings, **QUICK)
    first, last = report.sites[1], report.sites[3]
    assert first["reconstruction"]["taken"] == 0
    assert not first["events"]
    assert {"reconstruction", "predictions"}.isdisjoint(last)
    for name in ("reconstruction", "predictions"):
        said = f"{name}: the block is not trained: the outputs of the block at the start are not fi"
        assert any(event.startswith(said) for event in last["events"])
        assert any(event.startswith(said) for event in report.events)
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "closed"))
    for name in one:  # sums are made in other parts where nothing is trained
        torch.testing.assert_close(one[name], other[name], rtol=1e-7, atol=1e-9)


def test_options_of_the_compensation_win_over_a_preset():
    for given in ({"ridge": 0.5}, {"options": {"ridge": 0.5}}):
        assert Recipe(preset="balanced", **given).record()["options"] == {"ridge": 0.5}


def test_one_sampled_window_is_refused_before_it_is_sampled(pruned, monkeypatch):
    monkeypatch.setattr(Dense, "network", lambda *given: 1 / 0)
    with pytest.raises(CalibrationError, match="holdout"):
        pruned(preset="balanced", calibration="self", samples=1, seq_len=16)


@pytest.mark.slow
def test_a_preset_can_be_taken_in_parts(pruned, tmp_path):
    """What `best` sets, given one by one, is `best`."""
    whole = pruned("whole", preset="balanced", **QUICK)
    settings = {k: whole.recipe[k] for k in
                ("selection", "compensation", "propagate", "token_weights",
                 "kv_groups", "holdout", "reconstruct_rate")}  # fmt: skip
    pruned("parts", **settings, **whole.recipe["options"], **QUICK)
    assert tm.same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"propagate": True, "token_weights": "residual"},
        {"token_weights": "residual", "reconstruct": 1},
        {"kept": {"layers.0.mlp": [*range(3, 31)], "layers.1.mlp": [*range(28)]}},
        {"allocation": "error", "by_block": True, "propagate": True},
        {"allocation": "adaptive", "by_block": True},
        {"compensation": "coec", "lambda_a": 0.0, "propagate": True},
        {"compensation": "coec", "lambda_a": 5.0, "r_p": 4},
        {"compensation": "bias", "propagate": True},
        {"compensation": "none", "selection": "magnitude"},
        {"forward_dtype": "bfloat16", "propagate": True},
        {"forward_dtype": "bfloat16", "dtype": "bfloat16"},
        {"dtype": "float16", "forward_dtype": "float32", "propagate": True},
        {"holdout": 0.25, "kv_groups": "held-out"},
        {"samples": 3},
        {"samples": 2, "propagate": True},
        {"attention_sparsity": 0.0, "mlp_sparsity": 0.5},
        {"target": "vllm", "propagate": True},
    ],
    ids=str,
)  # fmt: skip
def test_training_goes_with_every_other_setting(
    settings, dense, pruned, tokens, tmp_path, monkeypatch
):
    """No state is taken of a higher validation error, and transformers loads what is written.

    A step has fewer tokens than a window here.
    """
    monkeypatch.setattr(block_training, "STEP_TOKENS", 16)
    given = {"compensation": "ridge-to-slice", **settings, **QUICK}
    report = pruned(**given)
    fits = [row["reconstruction"] for row in report.sites if "reconstruction" in row]
    assert len(fits) == 2
    assert all(fit["errors"][fit["taken"]] == min(fit["errors"]) for fit in fits)
    assert "predictions" in report.sites[-1]
    assert not any("is not trained" in event for row in report.sites for event in row["events"])
    trust = {"trust_remote_code": True} if settings.get("non_uniform") else {}
    score = coec.perplexity(tmp_path / "out", tokens, seq_len=32, baseline=dense, **trust)
    assert math.isfinite(score.kl)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize(
    "settings", [{}, {"expert_sparsity": 0.25}, {"token_weights": "residual"}], ids=str
)
def test_experts_are_trained_with_their_block(variant, settings, pruned, tmp_path):
    """Also where some of them go whole."""
    model = tm.save(tm.tiny(variant), tmp_path / "model")
    given = {"compensation": "ridge-to-slice", **settings}
    report = pruned(model=model, **given, **LONGER)
    plain = {"compensation": "ridge-to-slice", "expert_sparsity": given.get("expert_sparsity", 0)}
    closed = pruned("closed", model=model, **plain)
    fits = [row["reconstruction"] for row in report.sites if "reconstruction" in row]
    assert [fit["taken"] > 0 for fit in fits] == [True, True]
    assert report.plan["parameters"] == closed.plan["parameters"]
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "closed"))
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    assert any(".experts." in name for name in changed)
    assert any("gate.weight" in name for name in changed)  # the router
    tm.logits(tm.load(tmp_path / "out"))


def test_an_activation_that_is_not_silu_goes_through_the_same_path(pruned, tmp_path):
    model = tm.save(tm.tiny("llama", hidden_act="gelu"), tmp_path / "gelu")
    slowly = {**LONGER, "holdout": 0.25, "reconstruct_rate": 0.005}  # at 0.01 block 0 overfits
    report = pruned(model=model, propagate=True, **slowly)
    fits = [row["reconstruction"] for row in report.sites if "reconstruction" in row]
    assert all(fit["taken"] and fit["errors"][fit["taken"]] < fit["errors"][0] for fit in fits)
    assert math.isfinite(report.reconstruction["perplexity"])


def test_a_factor_on_what_a_part_adds_is_measured(pruned, tmp_path):
    """Granite has one: a model of small weights times a large factor is the same model."""
    one = tm.tiny("granite", residual_multiplier=0.25)
    other = tm.tiny("granite", residual_multiplier=1.0)
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        for layer in other.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.25)
            layer.mlp.down_proj.weight.mul_(0.25)
    logits = []
    for name, model in {"one": one, "other": other}.items():
        folder = tm.save(model, tmp_path / name)
        pruned(f"{name}-out", model=folder, compensation="ridge-to-slice", propagate=True)
        logits.append(tm.logits(tm.load(tmp_path / f"{name}-out")))
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-8)


def test_balanced_leaves_out_what_the_model_or_the_text_does_not_allow(
    dense, pruned, tokens, tmp_path
):
    """Parts that cannot be told apart, or statistics and no text; and it says so."""
    trained = coec.plan(dense, **SETTINGS | {"preset": "balanced"}, calibration=tokens)
    assert trained.recipe.reconstruction.reconstruct
    assert not any("not trained" in note for note in trained.notes)
    gemma = tm.save(tm.tiny("gemma2"), tmp_path / "gemma")
    report = pruned(model=gemma, preset="balanced")
    assert report.recipe["reconstruct"] == trained.recipe.reconstruction.reconstruct
    assert not report.recipe["propagate"]
    more = pruned("more", model=gemma, preset="balanced", reconstruct=1, samples=4)
    assert more.recipe["reconstruct"] == 1

    collected = {name: SETTINGS[name] for name in SETTINGS if name not in ("sparsity", "dtype")}
    coec.collect(dense, tmp_path / "stats", calibration=tokens, holdout=0.125, **collected)
    report = coec.prune(dense, tmp_path / "from", statistics=tmp_path / "stats", sparsity=0.5)
    [note] = [note for note in report.plan["notes"] if "not trained" in note]
    assert note.endswith("statistics hold sums only, and no text")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"forward_dtype": "float16"}, "sums over tokens overflow in forward_dtype = float16"),
        ({"propagate": False, "reconstruct": 0}, None),
    ],
)
def test_the_default_leaves_its_fits_out_and_says_the_true_reason(settings, why, dense, tokens):
    plan = coec.plan(dense, calibration=tokens, **settings)
    notes = [note for note in plan.notes if "not trained" in note]
    assert [note.rpartition(": ")[2] for note in notes] == ([] if why is None else [why])
    assert not plan.recipe.reconstruction.sequential


@pytest.mark.parametrize(
    ("variant", "settings", "why"),
    [
        ("llama", {}, None),
        ("llama", {"samples": 4}, "tokens are few"),
        ("gemma2", {}, "blocks of gemma2 add what a norm makes of each part"),
        ("llama", {"forward_dtype": "float16"}, None),
        ("llama", {"propagate": False}, None),
        ("llama", {"propagate": True, "samples": 4}, None),
    ],
)  # fmt: skip
def test_fast_takes_the_inputs_of_the_dense_model_where_it_must(
    variant, settings, why, tokens, tmp_path
):
    """And says why, unless it was asked to."""
    model = tm.save(tm.tiny(variant), tmp_path / "model")
    given = {"calibration": tokens, "samples": 24, "seq_len": 32, "preset": "fast", **settings}
    plan = coec.plan(model, **given)
    assert plan.recipe.reconstruction.propagate == (why is None and settings.get("propagate", True))
    assert [n.rpartition(": ")[2] for n in plan.notes if "for the dense model's inputs" in n] == (
        [why] if why else []
    )


def test_fast_takes_statistics_with_uniform_widths(dense, statistics):
    plan = coec.plan(dense, statistics=statistics, preset="fast", by_block=True)
    [note] = [note for note in plan.notes if "for the dense model's inputs" in note]
    assert note.endswith("statistics hold sums only, and no text; widths are uniform therefore")
    with pytest.raises(OptionError, match="allocation = error runs the pruned model over the text"):
        coec.plan(dense, statistics=statistics, preset="fast", by_block=True)


def test_the_default_takes_one_window_and_says_what_validates(run, dense, tokens, tmp_path):
    report = coec.prune(dense, tmp_path / "out", calibration=tokens, samples=1, seq_len=32)
    assert report.recipe["reconstruct"]
    assert report.reconstruction.keys() == {"kv_groups", "candidates"}
    assert any(
        note.startswith("one window leaves none for validation") for note in report.plan["notes"]
    )
    _, said, _ = run("prune", dense, tmp_path / "said", "--calibration", tokens, "--samples", 1,
                     "--seq-len", 32)  # fmt: skip
    assert "on fitted windows)" in said
    assert "on validation windows" not in said


def test_the_default_takes_statistics_beside_any_setting_but_allocation_by_error(
    dense, tokens, tmp_path
):
    saved = coec.collect(dense, tmp_path / "stats", calibration=tokens, samples=24, seq_len=32)
    assert saved.settings["holdout"] == 0  # no fit needs validation windows
    given = {"statistics": saved, "by_block": True}
    plan = coec.plan(dense, **given, kv_groups="all", propagate=False)
    assert plan.recipe.pruning.allocation == "uniform"
    assert plan.recipe.reconstruction.kv_groups == "all"
    assert any(note.endswith("; widths are uniform therefore") for note in plan.notes)
    assert coec.plan(dense, Recipe(), statistics=saved).recipe.calibration.holdout == 0
    with pytest.raises(OptionError, match="allocation = error runs the pruned model over the text"):
        coec.plan(dense, **given, allocation="error")


def test_predictions_are_trained_towards_in_narrow_dtypes_too(pruned):
    """As on a GPU, where the forward pass is in the model's dtype."""
    settings = {"preset": "balanced", "forward_dtype": "bfloat16", **QUICK}
    report = pruned(**settings)
    fit = report.sites[-1]["predictions"]
    assert fit["errors"][fit["taken"]] == min(fit["errors"])
    assert fit["fitted"][0] > 0


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_target_is_fitted_to_the_sums_of_all_parts(dense, factor):
    """`min Σ w ‖y − T x‖²`, y the wanted outputs, where a model scales what a site adds."""
    site = Dense.open(dense).layout.sites[1]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    W, x, moved, w = normal(4, site.columns), normal(90, site.columns), normal(90, 4), normal(90)
    w = w.abs() / w.abs().mean()
    parts = []
    for rows in torch.arange(90).split(30):
        part = ConsumerStatistics(GramSum(site.columns), added=factor, scale=1.0)
        part.gram.update(x[rows], w[rows])
        weighted = moved[rows] * w[rows, None]
        part.add_residual(weighted.T @ x[rows])
        parts.append(to_cpu(part))
    group = SimpleNamespace(each=lambda *args, **kwargs: parts)
    blocks = SimpleNamespace(_group=group, _run=SimpleNamespace(device="cpu"))
    gram, target = reconstruction.BlockReconstruction._gram_and_target(
        blocks, 1, site, {site.weight: W}, "fit"
    )
    inputs = w.sqrt()[:, None] * x
    root = (1e-3 * gram.xx.diagonal().mean()).sqrt() * torch.eye(site.columns).to(x)
    wanted = torch.cat([w.sqrt()[:, None] * moved / factor, torch.zeros(len(root), 4).to(x)])
    change = torch.linalg.lstsq(torch.cat([inputs, root]), wanted).solution.T
    torch.testing.assert_close(target, W + change)


@pytest.mark.parametrize("weights", ["equal", "residual"])
def test_rows_have_the_energy_of_top_tokens_as_they_were_weighted(weights, pruned, monkeypatch):
    """Of the first consumer's inputs, which are the dense model's."""
    batches = []
    update = GramSum.update

    def recorded(sums, inputs, by_token=None):
        batches.append((inputs, by_token))
        update(sums, inputs, by_token)

    monkeypatch.setattr(GramSum, "update", recorded)
    report = pruned(propagate=True, token_weights=weights)
    inputs = torch.cat([inputs.flatten(0, 1) for inputs, _ in batches[:8]])
    by_token = torch.ones(len(inputs))
    if weights == "residual":
        by_token = torch.cat([by_token.flatten() for _, by_token in batches[:8]])
        assert not bool((by_token == 1).any())
    else:
        assert {by_token for _, by_token in batches} == {None}
    assert len(inputs) == 24 * 32
    energies = by_token * inputs.square().sum(dim=1)
    expected = float(energies.max() / energies.sum())
    assert report.sites[0]["top_token_energy"] == pytest.approx(expected, rel=1e-5)
    assert all(0 < row["top_token_energy"] < 0.5 for row in report.sites)


@pytest.mark.parametrize("propagate", [False, True])
def test_a_note_says_where_a_thousandth_of_the_tokens_has_most_of_the_energy(
    pruned, propagate, monkeypatch
):
    many = torch.randint(2, tm.VOCABULARY, (40, 26), generator=torch.Generator().manual_seed(0))

    def sinks(name, share, **settings):
        monkeypatch.setattr(Gram, "top_token_energy", share)
        settings |= {"propagate": propagate}
        return pruned(name, **settings).events.get(SINKS)

    assert sinks("few", 0.6) is None  # of fewer than a thousand tokens
    enough = {"calibration": many, "samples": 40, "seq_len": 26}
    assert sinks("even", 0.5, **enough) is None
    assert len(sinks("sinks", 0.6, **enough)) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_the_result_does_not_depend_on_where_states_wait(preset, pruned, tmp_path, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    settings = {"preset": preset, "samples": 16, "device": "cuda"}
    for room in (0.8, 0.0):
        monkeypatch.setattr(planned_run, "_ROOM_FOR_STATES", room)
        pruned(str(room), **settings)
    assert tm.same_weights(tmp_path / "0.8", tmp_path / "0.0")
