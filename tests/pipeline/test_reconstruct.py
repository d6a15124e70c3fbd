"""The pruned model beside the dense one: what is fitted, chosen, refused, and written."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec.distributed.workers import to_cpu
from coec.errors import CalibrationError, OptionError, UnfinishedError
from coec.models.dense import Dense
from coec.pipeline import reconstruct as reconstruction
from coec.pipeline import write as writing
from coec.pipeline.solve import SINKS
from coec.planning.plan import Plan, tried_blocks
from coec.planning.recipe import Recipe
from coec.reconstruction import Fitted, Step
from coec.streaming.head import Head
from coec.streaming.two_streams import ConsumerStatistics
from coec.types import Gram, GramSum

SETTINGS = {"preset": "paper", "samples": 24, "seq_len": 32, "forward_dtype": "float64"}
QUICK = {"reconstruct": 1, "cg_iterations": 3, "logit_iterations": 2}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tm.save(tm.tiny("llama"), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tm.token_file(tmp_path_factory.mktemp("text") / "tokens.npy")


def pruned(dense, out, tokens, **settings):
    return coec.prune(dense, out, **{**SETTINGS, "calibration": tokens, **settings})


@pytest.fixture(scope="module")
def best(dense, tokens, tmp_path_factory):
    """A folder of runs by `best`, by the rule for KV groups, and their reports."""
    root = tmp_path_factory.mktemp("best")
    return root, {
        kind: pruned(dense, root / kind, tokens, preset="best", kv_groups=kind, **QUICK)
        for kind in ("uniform", "all", "held-out")
    }


def hidden(model, ids):
    """The hidden states behind every layer."""
    with torch.no_grad():
        return model(input_ids=ids, output_hidden_states=True).hidden_states


def hidden_before_the_norm(model, ids):
    """What the last layer returns."""
    caught = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        model(input_ids=ids)
    hook.remove()
    return caught[0]


def windows(tokens):
    return torch.from_numpy(np.load(tokens)).long()


def far(dense, out, tokens):
    """How far the pruned model's last hidden states are from the dense model's."""
    mine, theirs = (hidden(tm.load(folder), windows(tokens))[-2] for folder in (out, dense))
    return float((mine - theirs).square().sum() / theirs.square().sum())


@pytest.mark.slow
def test_every_part_brings_the_hidden_states_closer(dense, tokens, tmp_path):
    """Repair, then targets with the carried error, then producers fitted as well."""
    steps = {
        "none": {"compensation": "none"},
        "repaired": {"compensation": "ridge-to-slice"},
        "propagated": {"compensation": "ridge-to-slice", "propagate": True},
        "independent": {"compensation": "ridge-to-slice", "reconstruct": 3},
        "both": {"compensation": "ridge-to-slice", "propagate": True, "reconstruct": 3},
    }
    found = {}
    for name, settings in steps.items():
        pruned(dense, tmp_path / name, tokens, **settings)
        found[name] = far(dense, tmp_path / name, tokens)
    assert found["none"] > found["repaired"] > found["propagated"] > found["both"], found
    assert found["repaired"] > found["independent"] > found["both"], found


def test_nothing_carried_leaves_dense_statistics(dense, tokens, tmp_path):
    """In the first block both streams are one, and so are targets, kept units and weights."""
    one, other = tmp_path / "one", tmp_path / "other"
    pruned(dense, one, tokens, compensation="ridge-to-slice")
    pruned(dense, other, tokens, compensation="ridge-to-slice", propagate=True)
    mine, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    torch.testing.assert_close(mine[name], theirs[name], rtol=1e-6, atol=1e-8)
    later = "model.layers.1.mlp.down_proj.weight"
    assert not torch.allclose(mine[later], theirs[later], rtol=1e-3)


def test_without_a_step_the_independent_form_is_the_dense_pass(dense, tokens, tmp_path):
    """Only a final norm is asked for: sites are solved from dense inputs, as ever."""
    one, other = tmp_path / "one", tmp_path / "other"
    pruned(dense, one, tokens, compensation="ridge-to-slice")
    pruned(dense, other, tokens, compensation="ridge-to-slice", final_norm=True)
    mine, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    for name in mine:
        if name != "model.norm.weight":
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_held_out_windows_choose_the_number_of_groups(best, dense, tokens, tmp_path):
    root, reports = best
    scores = {}
    for kind in ("uniform", "all"):  # candidates are tried without fits, on the text
        settings = {"preset": "best", "kv_groups": kind, "reconstruct": 0, "self_samples": 0}
        scores[kind] = pruned(dense, tmp_path / kind, tokens, **settings).reconstruction["kl"]
    nearer = min(scores, key=scores.get)
    chosen = reports["held-out"]
    assert chosen.reconstruction["kv_groups"] == nearer
    for kind, score in scores.items():
        assert chosen.reconstruction["candidates"][kind]["kl"] == score
    one, other = (load_file(root / n / "model.safetensors") for n in (nearer, "held-out"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    parameters = [report.plan["parameters"]["after"] for report in reports.values()]
    assert max(parameters) - min(parameters) <= 2 * 3 * tm.HIDDEN  # a channel in every block
    assert reports["all"].plan["widths"]["kv_groups"] == {"before": 4, "after": 4}
    assert reports["all"].plan["parameters"]["after"] <= parameters[0]


def test_the_nearer_candidate_is_made_though_the_other_likes_the_windows(
    dense, tokens, tmp_path, monkeypatch
):
    """Few windows say little about perplexity: the distance from the dense model decides."""
    facts = {"windows": "held out", "dense": 2.0}
    found = iter([{**facts, "perplexity": 3.1, "kl": 0.2}, {**facts, "perplexity": 3.0, "kl": 0.3}])
    monkeypatch.setattr(reconstruction, "_trial", lambda *given: dict(next(found)))
    report = pruned(dense, tmp_path / "out", tokens, preset="best", **QUICK)
    assert report.reconstruction["kv_groups"] == "uniform"
    assert report.reconstruction["candidates"]["all"]["perplexity"] == 3.0


def test_a_trial_prunes_a_quarter_of_the_blocks_and_four_at_least(
    dense, tokens, tmp_path, monkeypatch
):
    assert [tried_blocks(n) for n in (2, 5, 8)] == [[0, 1], [0, 1, 2, 3], [0, 2, 4, 6]]
    assert tried_blocks(32) == list(range(0, 32, 4))

    def kl(name, tried):
        monkeypatch.setattr(reconstruction, "tried_blocks", lambda layers: tried)
        report = pruned(dense, tmp_path / name, tokens, preset="best", **QUICK)
        return {n: facts["kl"] for n, facts in report.reconstruction["candidates"].items()}

    assert kl("none", []) == pytest.approx({"uniform": 0, "all": 0}, abs=1e-9)
    one, all_blocks = kl("one", [1]), kl("all", [0, 1, 2, 3])
    assert all(0 < one[name] < all_blocks[name] for name in one)


def test_measured_costs_decide_the_groups_of_blocks_without_a_trial(dense, tokens):
    def candidates(**settings):
        recipe = Recipe(preset="best", calibration=str(tokens), samples=24, seq_len=32,
                        sparsity=0.5, **settings)  # fmt: skip
        return set(Plan.candidates(Dense.open(dense), recipe))

    assert candidates() == candidates(non_uniform=True, allocation="uniform")
    assert candidates() == {"uniform", "all"}
    assert candidates(non_uniform=True) == {"uniform"}
    assert candidates(non_uniform=True, target="vllm") == {"uniform", "all"}


@pytest.mark.slow
def test_the_last_half_block_is_fitted_to_the_predictions(dense, tokens, tmp_path):
    """Only its weights change, the report says by how much, and held-out KL falls.

    Where errors count by their direction, fits leave it nothing to gain on this model.
    """
    settings = {"preset": "best", "kv_groups": "uniform", "self_samples": 0.0,
                "final_norm": False, "fisher": 0.0, **QUICK}  # fmt: skip
    reports = {
        n: pruned(dense, tmp_path / str(n), tokens, **{**settings, "logit_iterations": n})
        for n in (0, 8)
    }
    plain, fitted = (load_file(tmp_path / str(n) / "model.safetensors") for n in (0, 8))
    last = f"model.layers.{len(reports[0].sites) // 2 - 1}.mlp"
    changed = {name for name in plain if not torch.equal(plain[name], fitted[name])}
    assert changed == {f"{last}.{name}_proj.weight" for name in ("gate", "up", "down")}
    row = reports[8].sites[-1]["logits"]
    assert row["kl_after"] < row["kl_before"]
    assert row["kl_after"] == pytest.approx(reports[8].reconstruction["kl"], rel=0.05)
    assert "logits" not in reports[8].sites[0]
    assert "logits" not in reports[0].sites[-1]


def test_the_gradient_of_the_divergence_is_that_of_the_whole_model(dense, tokens):
    """Against autograd through the model of transformers."""
    model, ids = tm.load(dense), windows(tokens)[:3]
    states = hidden_before_the_norm(model, ids)
    other = (states + 0.1 * torch.randn(states.shape, generator=torch.manual_seed(0))).double()
    opened = Dense.open(dense)
    head = Head(opened, device=torch.device("cpu"), dtype=torch.float64)
    value, gradient = head.divergence(other, states.double(), gradient=True)
    leaf = other.clone().requires_grad_()
    final, out = model.double().model.norm, model.lm_head
    log_p, log_q = (out(final(s)).log_softmax(-1) for s in (leaf, states.double()))
    kl = (log_q.exp() * (log_q - log_p)).sum()
    kl.backward()
    assert value == pytest.approx(float(kl), rel=1e-6)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-5, atol=1e-7)
    assert head.divergence(other, states.double(), gradient=False)[0] == pytest.approx(value)


def test_the_final_norm_is_kept_where_it_helps(dense, best):
    root, reports = best
    tried = reports["uniform"].reconstruction["final_norm"]
    stored = load_file(root / "uniform" / "model.safetensors")["model.norm.weight"]
    before = Dense.open(dense).tensor("model.norm.weight")
    assert tried["taken"] == (tried["with"] < tried["without"])
    assert torch.equal(stored, before) != tried["taken"]


def test_steps_are_taken_back_where_they_harm_held_out_windows(dense, tokens, tmp_path):
    """With four windows a fit of thousands of numbers learns them by heart."""
    report = pruned(dense, tmp_path / "out", tokens, samples=4, preset="best", damping=0.0,
                    kv_groups="uniform", reconstruct=4, cg_iterations=30)  # fmt: skip
    rows = [row["reconstruction"] for row in report.sites]
    assert any(step["length"] == 0 for row in rows for step in row["steps"])
    assert all(row["holdout_after"] <= row["holdout_before"] for row in rows)
    assert all(row["error_after"] <= row["error_before"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    dense, tokens, best, after, tmp_path, monkeypatch
):
    """Both streams are run again through what is solved."""
    settings = {"preset": "best", **QUICK}
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
            pruned(dense, tmp_path / "out", tokens, **settings)
    if after:  # otherwise nothing is lost by asking for something else
        with pytest.raises(UnfinishedError, match="damping"):
            pruned(dense, tmp_path / "out", tokens, **settings, damping=0.2)
    report = pruned(dense, tmp_path / "out", tokens, **settings)
    assert json.dumps(report.reconstruction) == json.dumps(reports["held-out"].reconstruction)
    for name in ("model.safetensors", "coec/kept.safetensors", "config.json", "README.md"):
        assert (tmp_path / "out" / name).read_bytes() == (root / "held-out" / name).read_bytes()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"preset": "worst"}, "preset must be one of paper, fast, balanced, best, got 'worst'"),
        ({"propagate": "yes"}, "propagate must be true or false, got 'yes'"),
        ({"cg_iterations": 5}, "cg_iterations has no effect with reconstruct = 0"),
        ({"token_weights": "residual"}, "token_weights has no effect with neither"),
        ({"kv_groups": "held-out"}, "needs windows that are held out: set holdout"),
        ({"logit_iterations": 3}, "logit_iterations has no effect with reconstruct = 0"),
        ({"fisher": 0.5}, "fisher has no effect with reconstruct = 0"),
        ({"preset": "best", "fisher": 1.0}, "fisher is a share, at least 0 and below 1, got 1.0"),
        ({"kv_groups": "all", "sparsity": 0.9}, "leaves no intermediate channels"),
        ({"preset": "best", "compensation": "auto"}, "auto' fits what it chose on the held-out"),
        ({"preset": "best", "forward_dtype": "float16"}, "overflow in float16: set forward_dtype"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_before_work(
    settings, said, dense, tokens, tmp_path
):
    with pytest.raises(OptionError, match=said):
        pruned(dense, tmp_path / "out", tokens, **settings)
    assert not list(tmp_path.iterdir())


def test_one_window_cannot_be_held_out(dense, tokens, tmp_path):
    with pytest.raises(CalibrationError, match="holdout"):
        pruned(dense, tmp_path / "out", tokens, preset="best", samples=1)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def statistics(dense, tokens, tmp_path_factory):
    """Without held-out windows."""
    out = tmp_path_factory.mktemp("statistics") / "statistics"
    return coec.collect(dense, out, **SETTINGS, calibration=tokens)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"propagate": True}, "propagate"),
        ({"reconstruct": 1}, "reconstruct"),
        ({"final_norm": True}, "final_norm"),
        ({"kv_groups": "held-out"}, "kv_groups"),
        ({"preset": "best"}, "preset = best"),
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


def test_a_candidate_that_cannot_be_is_left_out_and_named(dense, tokens, tmp_path):
    report = pruned(dense, tmp_path / "out", tokens, preset="best", sparsity=0.7, **QUICK)
    assert report.reconstruction["kv_groups"] == "uniform"
    assert not report.reconstruction["candidates"]
    assert any("kv_groups = all was not tried: " in note for note in report.plan["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "granite", "seed_oss"])
@pytest.mark.parametrize("settings", [
    {"preset": "best", "kv_groups": "uniform", "self_samples": 0.0, **QUICK},
    {"propagate": True},
    {"propagate": True, "sparsity": 0.03},  # attention keeps everything, and has a target
])  # fmt: skip
def test_biases_go_with_targets(variant, settings, tokens, tmp_path):
    """The format then has biases at other projections too, which nobody computes."""
    model = tm.save(tm.tiny(variant), tmp_path / "model")
    pruned(model, tmp_path / "out", tokens, compensation="bias", **settings)
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state["model.layers.1.mlp.down_proj.bias"].abs().max() > 0
    assert torch.isfinite(tm.logits(tm.load(tmp_path / "out"))).all()


def test_going_on_keeps_no_graph_of_what_is_passed(dense, tokens, tmp_path, monkeypatch):
    """Hidden states of every solved block would stay in memory."""
    settings = {"preset": "best", "kv_groups": "uniform", **QUICK}
    solve, seen = reconstruction.BlockReconstruction.solve, []

    def watched(self, block, information):
        streams = self._group.streams
        states = (*streams._dense_states.values(), *streams._pruned_states.values())
        seen.append([state.requires_grad for state in states])
        if block.index == 1 and len(seen) == 2:
            raise KeyboardInterrupt
        return solve(self, block, information)

    monkeypatch.setattr(reconstruction.BlockReconstruction, "solve", watched)
    with pytest.raises(KeyboardInterrupt):
        pruned(dense, tmp_path / "out", tokens, **settings)
    pruned(dense, tmp_path / "out", tokens, **settings)
    assert len(seen) == 3
    assert not any(flag for flags in seen for flag in flags)


@pytest.mark.slow
def test_a_damaged_piece_of_an_ended_candidate_is_made_again(
    dense, tokens, best, tmp_path, monkeypatch
):
    settings = {"preset": "best", **QUICK}
    with monkeypatch.context() as patch:
        patch.setattr(writing.Checkpoint, "write", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pruned(dense, tmp_path / "out", tokens, **settings)
    for path in (tmp_path / "out.partial").rglob("block-00000.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="it is made again"):
        pruned(dense, tmp_path / "out", tokens, **settings)
    one, other = (
        folder / "model.safetensors" for folder in (best[0] / "held-out", tmp_path / "out")
    )
    assert one.read_bytes() == other.read_bytes()


def test_a_weight_that_the_output_cannot_hold_is_taken_back(dense, tokens, tmp_path, monkeypatch):
    """As a step that is not finite: the repair before it stands."""

    def huge(problem, held_out, theta, **how):
        return Fitted({n: p * 1e30 for n, p in theta.items()}, 1.0, None,
                      [Step(1.0, 0.5, None, 4, 0.1)])  # fmt: skip

    monkeypatch.setattr(reconstruction, "fit", huge)
    report = pruned(dense, tmp_path / "out", tokens, preset="best", kv_groups="uniform",
                    dtype="float16", **QUICK)  # fmt: skip
    assert all("the reconstruction is taken back" in str(row["events"]) for row in report.sites)
    assert all(row["reconstruction"]["error_after"] == 1.0 for row in report.sites)


def test_options_of_the_compensation_win_over_a_preset():
    for given in ({"ridge": 0.5}, {"options": {"ridge": 0.5}}):
        assert Recipe(preset="best", **given).record()["options"] == {"ridge": 0.5}


def test_one_sampled_window_is_refused_before_it_is_sampled(dense, tmp_path, monkeypatch):
    monkeypatch.setattr(Dense, "network", lambda *given: 1 / 0)
    with pytest.raises(CalibrationError, match="holdout"):
        coec.prune(dense, tmp_path / "out", preset="best", calibration="self", samples=1,
                   seq_len=16)  # fmt: skip


@pytest.mark.slow
def test_a_preset_can_be_taken_in_parts(dense, tokens, tmp_path):
    """What `best` sets, given one by one, is `best`."""
    whole = pruned(dense, tmp_path / "whole", tokens, preset="best", **QUICK)
    settings = {k: whole.recipe[k] for k in
                ("selection", "compensation", "propagate", "token_weights", "final_norm",
                 "kv_groups", "holdout", "self_samples", "curvature_tokens", "fisher")}  # fmt: skip
    pruned(dense, tmp_path / "parts", tokens, **settings, **whole.recipe["options"], **QUICK)
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_activation_that_is_not_silu_goes_through_the_same_path(tokens, tmp_path):
    model = tm.save(tm.tiny("llama", hidden_act="gelu"), tmp_path / "gelu")
    report = pruned(model, tmp_path / "out", tokens, preset="best", kv_groups="uniform", **QUICK)
    rows = [row["reconstruction"] for row in report.sites]
    assert all(row["error_after"] <= row["error_before"] for row in rows)
    assert any(row["error_after"] < row["error_before"] for row in rows)
    assert math.isfinite(report.reconstruction["perplexity"])


def test_a_factor_on_what_a_part_adds_is_measured(tokens, tmp_path):
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
        out = tmp_path / f"{name}-out"
        pruned(folder, out, tokens, compensation="ridge-to-slice", propagate=True)
        logits.append(tm.logits(tm.load(out)))
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-8)


def test_balanced_leaves_its_fits_out_where_blocks_cannot_be_fitted(dense, tokens, tmp_path):
    """Blocks that add something else, or statistics and no text: closed forms, and it says so."""
    fitted = pruned(dense, tmp_path / "fitted", tokens, preset="balanced")
    assert fitted.recipe["reconstruct"] == 2
    assert not any("not fitted" in note for note in fitted.plan["notes"])
    gemma = tm.save(tm.tiny("gemma2"), tmp_path / "gemma")
    report = pruned(gemma, tmp_path / "out", tokens, preset="balanced")
    [note] = [note for note in report.plan["notes"] if "not fitted" in note]
    assert note.endswith("blocks of gemma2 add what a norm makes of each part")
    assert report.recipe["reconstruct"] == 0
    with pytest.raises(OptionError, match="propagate needs blocks"):  # a fit that was asked for
        pruned(gemma, tmp_path / "more", tokens, preset="balanced", reconstruct=5)

    collected = {name: SETTINGS[name] for name in SETTINGS if name not in ("sparsity", "dtype")}
    coec.collect(dense, tmp_path / "stats", calibration=tokens, holdout=0.125, **collected)
    report = coec.prune(dense, tmp_path / "from", statistics=tmp_path / "stats", sparsity=0.5)
    [note] = [note for note in report.plan["notes"] if "not fitted" in note]
    assert note.endswith("statistics hold sums only, and no text")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"compensation": "auto"}, "compensation = auto needs the held-out windows for itself"),
        ({"forward_dtype": "float16"}, "sums over tokens overflow in forward_dtype = float16"),
        ({"propagate": False, "reconstruct": 0, "final_norm": False}, None),
    ],
)
def test_the_default_leaves_its_fits_out_and_says_the_true_reason(settings, why, dense, tokens):
    plan = coec.plan(dense, calibration=tokens, **settings)
    notes = [note for note in plan.notes if "not fitted" in note]
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
        ("llama", {"compensation": "auto", "holdout": 0.5},
         "compensation = auto needs the held-out windows for itself"),
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
    assert [n.rpartition(": ")[2] for n in plan.notes if "inputs that the dense" in n] == (
        [why] if why else []
    )


def test_fast_takes_statistics_with_uniform_widths(dense, tokens, tmp_path):
    saved = coec.collect(dense, tmp_path / "stats", calibration=tokens, samples=24, seq_len=32)
    plan = coec.plan(dense, statistics=saved, preset="fast", non_uniform=True)
    [note] = [note for note in plan.notes if "inputs that the dense" in note]
    assert note.endswith("statistics hold sums only, and no text; widths are uniform therefore")
    with pytest.raises(OptionError, match="allocation = error runs the pruned model over the text"):
        coec.plan(dense, statistics=saved, preset="fast", non_uniform=True, allocation="error")


def test_the_default_takes_one_window_and_says_what_judges(dense, tokens, tmp_path):
    report = coec.prune(dense, tmp_path / "out", calibration=tokens, samples=1, seq_len=32)
    assert report.recipe["reconstruct"] == 2
    assert report.reconstruction["windows"] == "fitted"
    assert any(note.startswith("one window holds none out") for note in report.plan["notes"])


def test_the_default_takes_statistics_beside_any_setting_but_allocation_by_error(
    dense, tokens, tmp_path
):
    saved = coec.collect(dense, tmp_path / "stats", calibration=tokens, samples=24, seq_len=32)
    assert saved.settings["holdout"] == 0  # no fit needs windows that judge
    given = {"statistics": saved, "non_uniform": True}
    plan = coec.plan(dense, **given, kv_groups="all", propagate=False)
    assert plan.recipe.pruning.allocation == "uniform"
    assert plan.recipe.reconstruction.kv_groups == "all"
    assert any(note.endswith("; widths are uniform therefore") for note in plan.notes)
    assert coec.plan(dense, Recipe(), statistics=saved).recipe.calibration.holdout == 0
    with pytest.raises(OptionError, match="allocation = error runs the pruned model over the text"):
        coec.plan(dense, **given, allocation="error")


def test_predictions_are_fitted_in_narrow_dtypes_too(dense, tokens, tmp_path):
    """As on a GPU, where the forward pass is in the model's dtype."""
    settings = {"preset": "balanced", "forward_dtype": "bfloat16", **QUICK}
    report = pruned(dense, tmp_path / "out", tokens, **settings)
    fit = report.sites[-1]["logits"]
    assert fit["kl_after"] <= fit["kl_before"]
    assert fit["evaluations"] > 1


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_energy_that_a_target_leaves_is_summed_over_parts(dense, factor):
    """`Σ w ‖y − T x‖²`, y the outputs that are wanted, where a model scales what a site adds."""
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
        part.residual_energy += float((weighted * moved[rows]).sum())
        parts.append(to_cpu(part))
    group = SimpleNamespace(each=lambda *args, **kwargs: parts)
    blocks = SimpleNamespace(_group=group, _run=SimpleNamespace(device="cpu"))
    _, target, unexplained = reconstruction.BlockReconstruction._gram_and_target(
        blocks, 1, site, {site.weight: W}, "fit"
    )
    left = x @ W.T + moved / factor - x @ target.T
    assert unexplained == pytest.approx(float((w[:, None] * left.square()).sum()), rel=1e-9)


@pytest.mark.parametrize("weights", ["equal", "residual"])
def test_rows_have_the_energy_of_top_tokens_as_they_were_weighted(
    dense, tokens, weights, tmp_path, monkeypatch
):
    """Of the first consumer's inputs, which are the dense model's."""
    batches = []
    update = GramSum.update

    def recorded(sums, inputs, by_token=None):
        batches.append((inputs, by_token))
        update(sums, inputs, by_token)

    monkeypatch.setattr(GramSum, "update", recorded)
    report = pruned(dense, tmp_path / "out", tokens, propagate=True, token_weights=weights)
    inputs, by_token = (torch.cat([b[n].flatten(0, 1) for b in batches[:8]]) for n in (0, 1))
    assert len(inputs) == 24 * 32
    assert (weights == "equal") == bool((by_token == 1).all())
    energies = by_token * inputs.square().sum(dim=1)
    expected = float(energies.max() / energies.sum())
    assert report.sites[0]["top_token_energy"] == pytest.approx(expected, rel=1e-5)
    assert all(0 < row["top_token_energy"] < 0.5 for row in report.sites)


@pytest.mark.parametrize("propagate", [False, True])
def test_a_note_says_where_a_thousandth_of_the_tokens_has_most_of_the_energy(
    dense, tokens, propagate, tmp_path, monkeypatch
):
    many = torch.randint(2, tm.VOCABULARY, (40, 26), generator=torch.Generator().manual_seed(0))

    def sinks(name, share, **settings):
        monkeypatch.setattr(Gram, "top_token_energy", share)
        settings |= {"propagate": propagate, "guard": False}
        return pruned(dense, tmp_path / name, **settings).events.get(SINKS)

    assert sinks("few", 0.6, tokens=tokens) is None  # of fewer than a thousand tokens
    enough = {"tokens": many, "samples": 40, "seq_len": 26}
    assert sinks("even", 0.5, **enough) is None
    assert len(sinks("sinks", 0.6, **enough)) == 4
