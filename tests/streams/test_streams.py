"""The pruned model with the dense one: how blocks are solved in sequence, trained, and written."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec import pruning, solve
from coec.checkpoint import checkpoint as writing
from coec.errors import CalibrationError, OptionError, UnfinishedError
from coec.methods import block_training
from coec.methods.block_training import TrainedBlock
from coec.models.dense import Dense
from coec.planning import memory
from coec.streams import streams as module
from coec.streams.layers import Layers
from coec.streams.streams import ConsumerSums
from coec.types import Gram, GramSum
from outcomes import succeeded
from prunings import prunes

SETTINGS = {"preset": "paper", "samples": 24, "seq_len": 32, "forward_dtype": "float64"}
CLOSED = {"compensation": "ridge-to-slice"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tm.save(tm.tiny("llama"), tmp_path_factory.mktemp("dense") / "model")


pruned = prunes(**SETTINGS)


@pytest.fixture(scope="module")
def balanced(dense, tokens, tmp_path_factory):
    """A folder of a run by `balanced`, and its report."""
    out = tmp_path_factory.mktemp("balanced") / "out"
    settings = SETTINGS | {"preset": "balanced", "calibration": tokens, "reconstruct": 1}
    return out, coec.prune(dense, out, **settings)


def hidden(model, ids):
    """The hidden states after every layer."""
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
        "compensated": CLOSED,
        "propagated": {**CLOSED, "propagate": True},
        "trained": {**CLOSED, "reconstruct": 8},
        "both": {**CLOSED, "propagate": True, "reconstruct": 8},
    }
    found = {}
    for name, settings in steps.items():
        pruned(name, **settings)
        found[name] = far(dense, tmp_path / name, tokens)
    assert found["none"] > found["compensated"] > found["propagated"] > found["both"], found
    assert found["compensated"] > found["trained"], found


def test_nothing_carried_leaves_dense_statistics(pruned, tmp_path):
    """In the first block both streams are one, and so are targets, kept units and weights."""
    pruned("one", **CLOSED)
    pruned("other", **CLOSED, propagate=True)
    mine, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "other"))
    name = "model.layers.0.self_attn.o_proj.weight"
    torch.testing.assert_close(mine[name], theirs[name], rtol=1e-6, atol=1e-8)
    later = "model.layers.1.mlp.down_proj.weight"
    assert not torch.allclose(mine[later], theirs[later], rtol=1e-3)


@pytest.mark.slow
def test_the_last_block_is_trained_towards_the_predictions(pruned, tmp_path, monkeypatch):
    """Only its weights change, the report says by how much, and validation KL falls."""
    reports = {}
    for passes in (0, 8):
        monkeypatch.setattr(solve, "PREDICTION_PASSES", passes)
        reports[passes] = pruned(str(passes), preset="balanced", reconstruct=1)
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


def test_the_row_of_a_blocks_last_site_says_how_it_was_trained(balanced):
    _, report = balanced
    assert [("reconstruction" in row) for row in report.sites] == [False, True, False, True]
    for row in report.sites[1::2]:
        training = row["reconstruction"]
        assert training.keys() == {"taken", "fitted", "errors", "rate"}
        assert len(training["errors"]) == len(training["fitted"]) + 1 == 2
        assert training["errors"][training["taken"]] == min(training["errors"])


def test_the_error_of_a_block_is_that_of_the_models_as_they_are_written(
    dense, pruned, tokens, tmp_path
):
    """Of the hidden states after it, all windows, tokens weighted, from the checkpoints alone."""
    report = pruned(**CLOSED, reconstruct=8)
    mine, theirs = (hidden(tm.load(f), windows(tokens))[1] for f in (tmp_path / "out", dense))
    weights = 1 / theirs.square().mean(dim=-1, keepdim=True)
    error = (weights * (mine - theirs).square()).sum() / (weights * theirs.square()).sum()
    training = report.sites[1]["reconstruction"]
    assert training["errors"][training["taken"]] == pytest.approx(float(error), rel=1e-5)


@pytest.mark.slow
def test_any_setting_of_the_training_changes_the_model(pruned, tmp_path):
    found = {}
    for name, more in {
        "plain": {}, "again": {}, "passes": {"reconstruct": 2}, "propagate": {"propagate": True},
        "seed": {"seed": 1},
    }.items():  # fmt: skip
        pruned(name, **CLOSED | {"reconstruct": 1} | more)
        found[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert found.pop("again") == found["plain"]
    assert len(set(found.values())) == len(found)


def test_a_training_that_harms_validation_windows_is_not_taken(pruned, tmp_path, monkeypatch):
    """Steps are far too long."""
    monkeypatch.setattr(block_training, "_root_mean_square", lambda weight: 100.0)
    settings = {"preset": "balanced", "samples": 8, "holdout": 0.25}
    wild = pruned("wild", **settings, reconstruct=4)
    none = pruned("none", **settings, reconstruct=0)
    fits = [row[n] for row in wild.sites for n in ("reconstruction", "predictions") if n in row]
    assert len(fits) == 3
    assert all(fit["taken"] == 0 for fit in fits)
    assert not any("not trained" in str(row["events"]) for row in wild.sites)
    # The tokens of what is trained are weighted, so closed forms differ a little.
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("wild", "none"))
    assert one.keys() == other.keys()
    assert none.reconstruction["kl"] == pytest.approx(wild.reconstruction["kl"], rel=0.3)


def test_predictions_are_learned_at_a_lower_rate_if_the_whole_one_harms(pruned, monkeypatch):
    monkeypatch.setattr(block_training, "_root_mean_square", lambda weight: 100.0)
    monkeypatch.setattr(solve, "GENTLER", 1e-3)
    monkeypatch.setattr(solve, "PREDICTION_PASSES", 4)
    report = pruned(preset="balanced", samples=16, holdout=0.25, reconstruct=1)
    training = report.sites[-1]["predictions"]
    assert training["rate"] == pytest.approx(1e-5)
    assert training["taken"]
    assert training["errors"][training["taken"]] < training["errors"][0]


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    balanced, after, pruned, tmp_path, monkeypatch
):
    """Both streams are run again through the blocks that are solved."""
    settings = {"preset": "balanced", "reconstruct": 1}
    plain, count = pruning.solve, [0]

    def interrupted(*arguments):
        if count[0] == after:
            raise KeyboardInterrupt
        count[0] += 1
        return plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(pruning, "solve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pruned(**settings)
    if after:  # otherwise nothing is lost by asking for something else
        with pytest.raises(UnfinishedError, match="reconstruct"):
            pruned(**settings | {"reconstruct": 2})
    report = pruned(**settings)
    out, undisturbed = balanced
    assert json.dumps(report.reconstruction) == json.dumps(undisturbed.reconstruction)
    for name in ("model.safetensors", "coec/kept.safetensors", "config.json", "README.md"):
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes()


def test_validation_windows_need_a_second_window(pruned, tmp_path):
    with pytest.raises(CalibrationError, match="holdout"):
        pruned(preset="balanced", samples=1, holdout=0.5)
    assert not list(tmp_path.iterdir())


def test_the_default_takes_one_window(run, dense, tokens, tmp_path):
    report = coec.prune(dense, tmp_path / "out", calibration=tokens, samples=1, seq_len=32)
    assert report.recipe["reconstruct"]
    assert not report.reconstruction
    _, said, _ = run("prune", dense, tmp_path / "said", "--calibration", tokens, "--samples", 1,
                     "--seq-len", 32)  # fmt: skip
    assert "on fitted windows)" in said
    assert "on validation windows" not in said


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "granite", "seed_oss"])
@pytest.mark.parametrize("settings", [
    {"preset": "balanced", "reconstruct": 1},
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


def test_no_graph_is_kept_of_what_is_passed(pruned, monkeypatch):
    """Hidden states of every solved block would stay in memory."""
    plain, seen = pruning.solve, []

    def watched(blocks, streams, plan):
        states = (*streams._dense_states.values(), *streams._pruned_states.values())
        seen.extend(state.requires_grad for state in states)
        return plain(blocks, streams, plan)

    monkeypatch.setattr(pruning, "solve", watched)
    pruned(preset="balanced", reconstruct=1)
    assert seen
    assert not any(seen)


@pytest.mark.slow
def test_a_damaged_piece_is_made_again(balanced, pruned, tmp_path, monkeypatch):
    settings = {"preset": "balanced", "reconstruct": 1}
    with monkeypatch.context() as patch:
        patch.setattr(writing.Checkpoint, "_write", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pruned(**settings)
    [path] = (tmp_path / "out.partial").rglob("block-00000.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="it is made again"):
        pruned(**settings)
    assert tm.same_weights(balanced[0], tmp_path / "out")


def test_a_weight_that_the_output_cannot_hold_is_not_taken(pruned, tmp_path, monkeypatch):
    def huge(*given, **how):
        return TrainedBlock({n: p * 1e30 for n, p in given[1].items()}, 1, [0.5], [1.0, 0.5])

    monkeypatch.setattr(solve, "train_block", huge)
    report = pruned(preset="balanced", dtype="float16", reconstruct=1)
    assert any("the block is not trained" in str(row["events"]) for row in report.sites)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in loaded.values())


def test_a_training_that_fails_leaves_the_closed_form_and_says_so(pruned, monkeypatch):
    """The outputs at the start are not finite, of one block alone."""
    plain = Layers.function

    def spoilt(self, block):
        function = plain(self, block)
        return function if block.index == 0 else lambda *given: function(*given) * math.nan

    monkeypatch.setattr(Layers, "function", spoilt)
    report = pruned(preset="balanced", reconstruct=1)
    first, last = report.sites[1], report.sites[3]
    assert not first["events"]
    assert {"reconstruction", "predictions"}.isdisjoint(last)
    for name in ("reconstruction", "predictions"):
        said = f"{name}: the block is not trained: the outputs of the block at the start are not fi"
        assert any(event.startswith(said) for event in last["events"])
        assert any(event.startswith(said) for event in report.events)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"propagate": True},
        {"kept": {"layers.0.mlp": [*range(3, 31)], "layers.1.mlp": [*range(28)]}},
        {"by_block": True, "propagate": True},
        {"compensation": "coec", "lambda_a": 0.0, "propagate": True},
        {"compensation": "coec", "lambda_a": 5.0, "r_p": 4},
        {"compensation": "bias", "propagate": True},
        {"compensation": "none", "selection": "magnitude"},
        {"forward_dtype": "bfloat16", "propagate": True},
        {"forward_dtype": "bfloat16", "dtype": "bfloat16"},
        {"dtype": "float16", "forward_dtype": "float32", "propagate": True},
        {"holdout": 0.25},
        {"samples": 3},
        {"attention_sparsity": 0.0, "sparsity": 0.5},
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
    report = pruned(**{**CLOSED, **settings, "reconstruct": 1})
    fits = [row["reconstruction"] for row in report.sites if "reconstruction" in row]
    assert len(fits) == 2
    assert all(fit["errors"][fit["taken"]] == min(fit["errors"]) for fit in fits)
    assert "predictions" in report.sites[-1]
    assert not any("is not trained" in event for row in report.sites for event in row["events"])
    trust = {"trust_remote_code": True} if settings.get("by_block") else {}
    score = coec.perplexity(tmp_path / "out", tokens, seq_len=32, baseline=dense, **trust)
    assert math.isfinite(score.kl)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("settings", [{}, {"expert_sparsity": 0.25}], ids=str)
def test_experts_are_trained_with_their_block(variant, settings, pruned, tmp_path):
    """Also if some of them are removed."""
    model = tm.save(tm.tiny(variant), tmp_path / "model")
    report = pruned(model=model, **CLOSED, **settings, reconstruct=8)
    closed = pruned("closed", model=model, **CLOSED, **settings)
    fits = [row["reconstruction"] for row in report.sites if "reconstruction" in row]
    assert [fit["taken"] > 0 for fit in fits] == [True, True]
    assert report.plan["parameters"] == closed.plan["parameters"]
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "closed"))
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    assert any(".experts." in name for name in changed)
    assert any("gate.weight" in name for name in changed)  # the router
    tm.logits(tm.load(tmp_path / "out"))


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
        pruned(f"{name}-out", model=folder, **CLOSED, propagate=True)
        logits.append(tm.logits(tm.load(tmp_path / f"{name}-out")))
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_presets_take_dense_inputs_if_the_blocks_of_a_model_allow_no_others(
    preset, dense, pruned, tmp_path
):
    """And the plan says so; what the user asked for is refused."""
    gemma = tm.save(tm.tiny("gemma2"), tmp_path / "gemma")
    report = pruned(model=gemma, preset=preset, reconstruct=int(preset == "balanced"))
    assert any("blocks of gemma2 add" in note for note in report.plan["notes"])
    assert ("reconstruction" in report.sites[-1]) == (preset == "balanced")
    plan = coec.plan(dense, preset=preset)
    assert plan.propagates
    assert not any("dense model's inputs" in note for note in plan.notes)
    with pytest.raises(OptionError, match="propagate is not supported for gemma2"):
        pruned("no", model=gemma, preset=preset, propagate=True)


def test_predictions_are_trained_towards_in_narrow_dtypes_too(pruned):
    """As on a GPU, where the forward pass is in the model's dtype."""
    report = pruned(preset="balanced", forward_dtype="bfloat16", reconstruct=1)
    fit = report.sites[-1]["predictions"]
    assert fit["errors"][fit["taken"]] == min(fit["errors"])
    assert fit["fitted"][0] > 0


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_target_is_fitted_to_the_sums_of_all_parts(dense, factor, monkeypatch):
    """`min Σ w ‖y − T x‖²`, y the wanted outputs, if a model scales what a site adds."""
    monkeypatch.setattr(module, "CARRIED", 1.0)
    site = Dense.open(dense).layout.sites[1]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    W, x, moved, w = normal(4, site.columns), normal(90, site.columns), normal(90, 4), normal(90)
    w = w.abs() / w.abs().mean()
    total = None
    for rows in torch.arange(90).split(30):
        part = ConsumerSums(GramSum(site.columns))
        after, added = normal(30, 4), normal(30, 4)
        states = (after - factor * added, after, after + moved[rows])
        part.update(x[rows][None], added[None], tuple(s[None] for s in states), w[rows][None])
        total = part if total is None else (total.merge(part), total)[1]
    gram, target = total.statistics(W)
    inputs = w.sqrt()[:, None] * x
    ridge = min(0.3, 9 * site.columns / gram.tokens)  # of every input's own energy
    root = (ridge * gram.xx.diagonal()).sqrt().diag()
    wanted = torch.cat([w.sqrt()[:, None] * moved / factor, torch.zeros(len(root), 4).to(x)])
    change = torch.linalg.lstsq(torch.cat([inputs, root]), wanted).solution.T
    torch.testing.assert_close(target, W + change)


@pytest.mark.parametrize("propagate", [False, True])
def test_a_note_says_that_a_thousandth_of_the_tokens_has_most_of_the_energy(
    pruned, propagate, monkeypatch
):
    many = torch.randint(2, tm.VOCABULARY, (40, 26), generator=torch.Generator().manual_seed(0))

    def sinks(name, share, **settings):
        monkeypatch.setattr(Gram, "top_token_energy", share)
        return pruned(name, propagate=propagate, **settings).events.get(solve.SINKS)

    assert sinks("few", 0.6) is None  # of fewer than a thousand tokens
    enough = {"calibration": many, "samples": 40, "seq_len": 26}
    assert sinks("even", 0.5, **enough) is None
    assert len(sinks("sinks", 0.6, **enough)) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_the_result_does_not_depend_on_where_states_wait(preset, pruned, tmp_path, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for room in (0.8, 0.0):
        monkeypatch.setattr(memory, "_ROOM_FOR_STATES", room)
        pruned(str(room), preset=preset, samples=16, device="cuda")
    assert tm.same_weights(tmp_path / "0.8", tmp_path / "0.0")


@pytest.mark.parametrize("size", [1e3, 1e36])
def test_predictions_that_are_no_numbers_do_not_end_a_run(size, tokens, tmp_path, run):
    """Of cross-entropies of thousands of nats there is no perplexity."""
    model = tm.tiny("llama", torch.float32)
    model.lm_head.weight.data.mul_(size)
    dense = tm.save(model, tmp_path / "dense")
    settings = SETTINGS | {"preset": "fast", "holdout": 0.25, "forward_dtype": "float32"}
    report = coec.prune(dense, tmp_path / "out", calibration=tokens, **settings)
    assert report.reconstruction["dense"] is None
    assert report.reconstruction["perplexity"] is None
    flags = "--preset", "fast", "--holdout", "0.25", "--samples", "24", "--seq-len", "32"
    said, _ = succeeded(run("prune", dense, tmp_path / "said", "--calibration", tokens, *flags))
    assert "perplexity inf (dense inf" in said
