"""Whole experts that go: against plain transformers, and what every command makes of it."""

import copy
import functools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import coec
import tiny_models as tm
from coec.errors import OptionError, UnfinishedError
from coec.models.architectures import ARCHITECTURES
from coec.models.dense import Dense
from coec.models.description import Description
from coec.types import KeptSet
from outcomes import succeeded
from prunings import interrupt

pytestmark = pytest.mark.unchecked  # whole models

EXPERTS = [n for n, v in tm.VARIANTS.items() if ARCHITECTURES[v["model_type"]].count]
GROUPED = [n for n in EXPERTS if "n_group" in tm.VARIANTS[n]]
"""Families whose router corrects its scores, and may choose among groups of experts."""
ONE_GROUP = {"n_group": 1, "topk_group": 1}
TWO_GROUPS = {"n_group": 2, "topk_group": 1, "n_routed_experts": 8}
TEXT = {
    "preset": "paper", "samples": 24, "seq_len": 32, "forward_dtype": "float64",
    "compensation": "ridge-to-slice",
}  # fmt: skip
WHOLE = {"expert_sparsity": 0.25, "sparsity": 1e-6, "attention_sparsity": 0}
"""One expert of four goes, and nothing else."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Every variant with experts on disk, by its name."""
    root = tmp_path_factory.mktemp("dense")
    grouped = dict.fromkeys(GROUPED, ONE_GROUP)
    return {
        name: tm.save(corrected(name, **grouped.get(name, {})), root / name) for name in EXPERTS
    }


def within(variant):
    """Routers that correct their scores multiply in float32, whatever the model's dtype is."""
    return 1e-5 if variant in GROUPED else 1e-10


def corrected(variant, **changes):
    """Make a tiny model; a router's corrections are of the size of its scores."""
    model = tm.tiny(variant, **changes)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.fixture
def mixtral(models, tokens):
    """Prunes the tiny Mixtral of four experts."""
    return functools.partial(coec.prune, models["mixtral"], **TEXT, calibration=tokens)


def experts_of(report):
    """Rows of the experts by block, in their order."""
    by_block = {}
    for row in report.sites:
        if row["site"] == "expert":
            by_block.setdefault(row["block"], []).append(row)
    return by_block


def weights_of(gate, hidden, gone=()):
    """What a router says of tokens, as transformers computes it: weight of every expert, 0 or p."""
    if hasattr(gate, "e_score_correction_bias"):
        gate = copy.deepcopy(gate)
        gate.e_score_correction_bias[list(gone)] = -torch.inf
        return type(gate).forward(gate, hidden)
    logits = hidden @ gate.weight.T
    logits[:, list(gone)] = -torch.inf
    values, chosen = logits.float().softmax(dim=-1).topk(gate.top_k, dim=-1)
    if getattr(gate, "norm_topk_prob", True):  # Mixtral always does
        values = values / values.sum(dim=-1, keepdim=True)
    return logits, values.to(hidden if hasattr(gate, "norm_topk_prob") else values), chosen


def silence(model, kept):
    """Masks the router's logits of experts that went, in every block."""
    for index, layer in enumerate(model.model.layers):
        if f"layers.{index}.experts" in kept:
            gate = layer.mlp.gate
            stays = set(kept[f"layers.{index}.experts"].tolist())
            gone = sorted(set(range(gate.num_experts)) - stays)
            gate.forward = functools.partial(weights_of, gate, gone=gone)
    return model


def outputs_of(experts, number, hidden):
    """What an expert makes of tokens."""
    gate, up = nn.functional.linear(hidden, experts.gate_up_proj[number]).chunk(2, dim=-1)
    return nn.functional.linear(experts.act_fn(gate) * up, experts.down_proj[number])


@pytest.mark.parametrize("windows", [4, 24])
@pytest.mark.parametrize("variant", EXPERTS)
@torch.no_grad()
def test_the_experts_that_add_least_to_their_tokens_go(variant, windows, models, tmp_path):
    """The score by its formula, from the inputs of plain transformers' blocks."""
    tokens = tm.token_file(tmp_path / "tokens.npy", rows=windows)
    settings = {**TEXT, **WHOLE, "samples": windows, "calibration": tokens}
    report = coec.prune(models[variant], tmp_path / "out", **settings)
    model, inputs = tm.load(models[variant]), {}
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda _, args, index=index: inputs.update({index: args[0].flatten(0, 1)})
        )
    tm.logits(model, torch.from_numpy(np.load(tokens)).long())
    kept = load_file(tmp_path / "out/coec/kept.safetensors")
    by_block = experts_of(report)
    assert len(by_block) == (1 if variant in ("qwen3_moe mixed", *GROUPED) else 2)
    for block, rows in by_block.items():
        mlp, hidden = model.model.layers[block].mlp, inputs[block]
        _, values, chosen = weights_of(mlp.gate, hidden)
        for number, row in enumerate(rows):
            token, place = (chosen == number).nonzero(as_tuple=True)
            norms = outputs_of(mlp.experts, number, hidden[token]).norm(dim=-1)
            expected = (values[token, place] * norms).sum()
            assert row["score"] == pytest.approx(float(expected), rel=1e-9)
            assert row["tokens"] == len(token)
        scores = torch.tensor([row["score"] for row in rows])
        stays = [number for number in range(4) if number != int(scores.argmin())]
        assert kept[f"layers.{block}.experts"].tolist() == stays
        assert [row["units_after"] > 0 for row in rows] == [n in stays for n in range(4)]


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("variant", EXPERTS)
def test_what_is_written_is_the_dense_model_whose_router_never_picks_them(
    variant, share, models, tokens, tmp_path
):
    settings = {**WHOLE, "expert_sparsity": share}
    report = coec.prune(models[variant], tmp_path / "out", **TEXT, **settings, calibration=tokens)
    loaded, kept = tm.load(tmp_path / "out"), load_file(tmp_path / "out/coec/kept.safetensors")
    masked = silence(tm.load(models[variant]), kept)
    torch.testing.assert_close(tm.logits(loaded), tm.logits(masked), rtol=0, atol=within(variant))
    assert float((tm.logits(tm.load(models[variant])) - tm.logits(loaded)).abs().max()) > 1e-3
    assert type(loaded) is type(masked)
    assert loaded.config.num_experts_per_tok == 2
    remaining = round(4 * (1 - share))
    assert report.plan["widths"]["whole_experts"] == {"before": 4, "after": remaining}
    stored = sum(
        tensor.numel() for tensor in loaded.state_dict().values()
    )  # corrections are buffers
    assert stored == report.plan["parameters"]["after"]
    network = Dense.open(tmp_path / "out").network(torch.device("cpu"), torch.float64)
    assert torch.equal(tm.logits(network), tm.logits(loaded))


@pytest.mark.parametrize("variant", EXPERTS)
def test_the_others_are_narrowed_as_if_none_had_gone(variant, models, tokens, tmp_path):
    """On the dense model's statistics; the result is again a masked dense model."""
    both = {"sparsity": 0.3, "expert_sparsity": 0.25, "calibration": tokens}
    report = coec.prune(models[variant], tmp_path / "both", **TEXT, **both)
    coec.prune(models[variant], tmp_path / "narrow", **TEXT, **{**both, "expert_sparsity": 0})
    narrow, pruned = Dense.open(tmp_path / "narrow"), Dense.open(tmp_path / "both")
    kept = load_file(tmp_path / "both/coec/kept.safetensors")
    masked = silence(tm.load(models[variant]), kept)
    with torch.no_grad():
        blocks = Dense.open(models[variant]).layout.blocks
        experts = [
            KeptSet(kept[block.experts_key], 4) if block.experts_key in kept else None
            for block in blocks
        ]
        left = [site for block, ids in zip(blocks, experts) for site in block.remaining(ids)]
        for site, smaller in zip(left, pruned.layout.sites, strict=True):
            written = pruned.tensor(smaller.weight)
            assert torch.equal(written, narrow.tensor(site.weight))
            weight = tm.consumer(masked, site)
            spread = torch.zeros_like(weight)
            spread[:, site.kept_columns(KeptSet(kept[site.key], site.units)).indices] = written
            weight.copy_(spread)
    logits = tm.logits(tm.load(tmp_path / "both"))
    torch.testing.assert_close(logits, tm.logits(masked), rtol=0, atol=within(variant))
    assert report.plan["parameters"]["after"] == pruned.parameters


@pytest.mark.parametrize("variant", GROUPED)
def test_every_group_of_experts_keeps_the_same_number(variant, tokens, tmp_path):
    model = tm.save(corrected(variant, **TWO_GROUPS), tmp_path / "model")
    coec.prune(model, tmp_path / "out", **TEXT, **WHOLE | {"expert_sparsity": 0.5},
               calibration=tokens)  # fmt: skip
    loaded, kept = tm.load(tmp_path / "out"), load_file(tmp_path / "out/coec/kept.safetensors")
    assert [(ids < 4).sum() for ids in (kept["layers.1.experts"],)] == [2]
    masked = silence(tm.load(model), kept)
    torch.testing.assert_close(tm.logits(loaded), tm.logits(masked), rtol=0, atol=within(variant))
    assert (loaded.config.n_routed_experts, loaded.config.n_group) == (4, 2)


def test_of_less_than_one_expert_none_goes(mixtral, tmp_path):
    plain = mixtral(tmp_path / "plain")
    report = mixtral(tmp_path / "out", expert_sparsity=0.2)
    assert tm.same_weights(tmp_path / "plain", tmp_path / "out")
    assert any("no whole expert is removed" in note for note in report.plan["notes"])
    assert not any("whole expert" in note for note in plain.plan["notes"])
    assert not any("score" in row for row in report.sites)


def test_what_stays_is_the_dense_model_to_the_bit(mixtral, models, tmp_path):
    mixtral(tmp_path / "out", **WHOLE)
    kept = load_file(tmp_path / "out/coec/kept.safetensors")
    dense, out = Dense.open(models["mixtral"]), Dense.open(tmp_path / "out")
    for name in out.files:
        old, rows = name, slice(None)
        for block in (0, 1):
            prefix = f"model.layers.{block}.mlp."
            numbers = kept[f"layers.{block}.experts"]
            for new, number in enumerate(numbers.tolist()):
                if name.startswith(f"{prefix}experts.{new}."):
                    old = name.replace(f"experts.{new}.", f"experts.{number}.")
            if name == f"{prefix}gate.weight":
                rows = numbers
        assert torch.equal(out.tensor(name), dense.tensor(old)[rows]), name


def test_an_expert_without_tokens_goes_first(models, tmp_path):
    """Few tokens reach few experts; a tie is decided by the number."""
    tokens = tm.token_file(tmp_path / "tokens.npy", rows=1, length=2)
    report = coec.prune(
        models["mixtral"], tmp_path / "out", **{**TEXT, "samples": 1, "seq_len": 2}, **WHOLE,
        calibration=tokens,
    )  # fmt: skip
    unseen = 0
    for rows in experts_of(report).values():
        without = [number for number, row in enumerate(rows) if not row["tokens"]]
        if without:
            unseen += 1
            assert all(rows[number]["score"] == 0 for number in without)
            assert rows[without[-1]]["units_after"] == 0
    assert unseen


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama", {}), ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
        *((variant, {"n_routed_experts": 8, "n_group": 8}) for variant in GROUPED),  # groups of one
    ],
)  # fmt: skip
def test_a_model_without_experts_that_may_go_keeps_them(variant, changes):
    with pytest.raises(OptionError, match="expert_sparsity"):
        coec.plan(Description.of(tm.raw_config(variant, **changes)), expert_sparsity=0.25)


def test_how_many_a_token_goes_to_is_the_class_default_where_the_file_says_nothing():
    config = tm.raw_config("mixtral")
    del config["num_experts_per_tok"]  # 2
    assert coec.plan(Description.of(config), expert_sparsity=0.5).pruned.experts == 2
    with pytest.raises(OptionError, match="expert_sparsity"):
        coec.plan(Description.of(config), expert_sparsity=0.75)


def test_both_names_of_their_number_are_rewritten():
    config = tm.raw_config("qwen3_moe")
    config["num_local_experts"] = config["num_experts"]
    written = coec.plan(Description.of(config), expert_sparsity=0.5).output
    assert (written.config["num_experts"], written.config["num_local_experts"]) == (2, 2)


@pytest.mark.parametrize("variant", EXPERTS)
def test_a_budget_counts_the_experts_that_go(variant):
    one_group = ONE_GROUP if variant in GROUPED else {}
    config = tm.raw_config(variant, moe_intermediate_size=256, intermediate_size=256, **one_group)
    described = Description.of(config)
    plan = coec.plan(described, expert_sparsity=0.25, budget=0.6)
    assert plan.parameters_after <= 0.6 * plan.parameters_before
    removed = plan.widths.removed(plan.costs)
    assert removed == plan.parameters_before - plan.parameters_after
    cut_less = coec.plan(described, budget=0.6)
    channels = (p.record()["widths"]["experts"]["after"] for p in (plan, cut_less))
    assert next(channels) > next(channels)


def test_a_plan_has_the_parameters_that_one_token_passes():
    """Two of four experts of 3 × 20 × 32 per token, in every block of Mixtral's two."""
    plan = coec.plan(Description.of(tm.raw_config("mixtral", intermediate_size=20)),
                     preset="paper", sparsity=0.5, attention_sparsity=0)  # fmt: skip
    idle = 2 * 2 * 3 * 32
    active = plan.record()["active"]
    assert active["before"] == plan.parameters_before - 20 * idle
    assert active["after"] == plan.parameters_after - plan.pruned.ffn * idle
    assert coec.plan(Description.of(tm.raw_config()), preset="paper").record()["active"] is None


ACTIVE = {"preset": "paper", "attention_sparsity": 0, "multiple_of": 1}


@pytest.mark.parametrize("variant", EXPERTS)
def test_a_budget_of_active_parameters_is_of_what_one_token_passes(variant):
    config = tm.raw_config(variant, moe_intermediate_size=1024, intermediate_size=1024)
    described = Description.of(config)
    active = (plan := coec.plan(described, budget_active=0.8, **ACTIVE)).record()["active"]
    assert plan.widths.removed(plan.costs) == active["before"] - active["after"]
    # Experts lose eight of 1,024 channels at a time.
    assert 0.77 * active["before"] < active["after"] <= 0.8 * active["before"]
    number = int(0.8 * active["before"])
    assert coec.plan(described, budget_active=number, **ACTIVE).widths == plan.widths
    whole = coec.plan(described, budget=0.8, **ACTIVE)
    assert whole.parameters_after > plan.parameters_after


def test_whole_experts_that_go_leave_active_parameters_as_they_are():
    described = Description.of(tm.raw_config("mixtral", intermediate_size=256))
    fewer, all_ = (coec.plan(described, budget_active=0.8, expert_sparsity=share, **ACTIVE)
                   for share in (0.25, 0))  # fmt: skip
    assert fewer.parameters_after < 0.8 * all_.parameters_after
    assert fewer.record()["active"]["after"] <= 0.8 * fewer.record()["active"]["before"]
    assert fewer.pruned.ffn - all_.pruned.ffn in (0, 8)  # a row of the router


def test_a_dropped_block_counts_with_the_experts_that_a_token_passes():
    config = tm.raw_config("mixtral", intermediate_size=256, num_hidden_layers=4)
    settings = {"preset": "balanced", "multiple_of": 1, "drop_blocks": 1}
    plan = coec.plan(Description.of(config), budget_active=0.6, **settings)
    active = plan.record()["active"]
    removed = plan.widths.removed(plan.costs, plan.dropped)
    assert removed == active["before"] - active["after"] >= 0.4 * active["before"]


@pytest.mark.parametrize("budget", [1.0, 10**9, 1])
def test_a_budget_of_active_parameters_that_removes_nothing_or_all_is_refused(budget):
    with pytest.raises(OptionError, match=r"^budget_active = "):
        coec.plan(Description.of(tm.raw_config("mixtral")), budget_active=budget)


def test_a_model_without_experts_has_no_budget_of_active_parameters():
    with pytest.raises(OptionError, match=r"^budget_active .*llama has none: give budget = 0.8"):
        coec.plan(Description.of(tm.raw_config()), budget_active=0.8)


def test_an_interrupted_run_goes_on_with_the_same_share_only(mixtral, tmp_path, monkeypatch):
    interrupt(monkeypatch, mixtral, tmp_path / "out", expert_sparsity=0.25)
    with pytest.raises(UnfinishedError, match="expert_sparsity"):
        mixtral(tmp_path / "out", expert_sparsity=0.5)
    again = mixtral(tmp_path / "out", expert_sparsity=0.25)
    straight = mixtral(tmp_path / "straight", expert_sparsity=0.25)
    for file in ("model.safetensors", "coec/kept.safetensors", "config.json", "README.md"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()
    assert [row.get("score") for row in again.sites] == [row.get("score") for row in straight.sites]


def test_commands_say_what_became_of_whole_experts(models, tokens, tmp_path, run):
    text = ["--samples", "8", "--seq-len", "32", "--calibration", tokens]
    flags = [*text, "--sparsity", "0.3", "--expert-sparsity", "0.25"]
    dry, _ = succeeded(run("prune", models["mixtral"], tmp_path / "out", *flags, "--dry-run"))
    assert "whole experts × 2 blocks" in dry
    assert "nothing compensates the loss of whole experts" in dry
    made, _ = succeeded(run("prune", models["mixtral"], tmp_path / "out", *flags))
    assert "4 → 3" in made
    card = (tmp_path / "out/README.md").read_text()
    assert "| whole experts per block | 4 | 3 |" in card
    assert "--expert-sparsity 0.25" in card
    record = json.loads((tmp_path / "out/coec.json").read_text())
    assert record["recipe"]["expert_sparsity"] == 0.25
    assert record["plan"]["removed"]["expert"] == pytest.approx(1 - 3 / 4 * 32 / 40)
    flags = ["--baseline", models["mixtral"], "--text", tokens, "--seq-len", "32"]
    evaluated, _ = succeeded(run("eval", tmp_path / "out", *flags, "--json"))
    assert json.loads(evaluated)["ratio"] > 0
