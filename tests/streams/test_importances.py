"""Widths that differ by block: shared out, written, loaded, evaluated, pruned again."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import coec
import tiny_models as tm
from coec.config.recipe import Recipe
from coec.errors import ModelError, NumericalError, OptionError
from coec.models.architectures import ARCHITECTURES
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.layout import Shape
from coec.planning.plan import Plan
from coec.streams import importances as module
from coec.streams.importances import Sensitivity
from coec.text.tokens import load_tokenizer
from outcomes import WORK, raising
from prunings import interrupt, prunes

SETTINGS = {
    "preset": "paper",
    "samples": 12,
    "seq_len": 32,
    "selection": "obs",
    "compensation": "ridge-to-slice",
}
OWN = {
    "layers.0.mlp": [0, 1, 2, 5], "layers.1.mlp": list(range(0, 40, 2)),
    "layers.0.attention": [0, 2, 3], "layers.1.attention": [1],
}  # fmt: skip
CPU = torch.device("cpu")


prune = prunes(**SETTINGS)


def widths(report):
    return report.plan["widths"]["mlp"]["after"], report.plan["widths"]["kv_groups"]["after"]


ROUTED = [v for v, c in tm.VARIANTS.items() if ARCHITECTURES[c["model_type"]].count]


@pytest.mark.parametrize("variant", [v for v in tm.VARIANTS if v not in ROUTED])
def test_the_code_beside_the_weights_computes_what_the_package_does(
    variant, prune, tmp_path, modules
):
    """Loaded as a user does, and without the code by the package; saved and loaded again."""
    model = tm.save(tm.tiny(variant, torch.float32), tmp_path / "dense")
    sites = {site.key for site in Dense.open(model).layout.sites}  # OLMo 2 has no attention there
    own = {key: units for key, units in OWN.items() if key in sites}
    report = prune(model=model, kept=own, by_block=True)
    assert widths(report) == ([4, 20], [3, 1] if own == OWN else 4)
    assert report.plan["loads_in"]["transformers"] == "with trust_remote_code=True"
    loaded = tm.load(tmp_path / "out", torch.float64, trust_remote_code=True)
    assert type(loaded).__name__.startswith("NonUniform")
    assert sum(p.numel() for p in loaded.parameters()) == report.plan["parameters"]["after"]
    expected = tm.logits(Dense.open(tmp_path / "out").network(CPU, torch.float64))
    torch.testing.assert_close(tm.logits(loaded), expected, rtol=0, atol=1e-12)
    tm.check_use(loaded, tmp_path / "again")


@pytest.mark.parametrize("variant", ROUTED)
def test_experts_have_one_width(variant, prune, tmp_path):
    model = tm.save(tm.tiny(variant, torch.float32), tmp_path / "dense")
    with pytest.raises(OptionError, match="by_block"):
        prune(model=model, by_block=True)


def test_without_trust_nothing_is_loaded_by_mistake(prune, tmp_path):
    prune(kept=OWN, by_block=True)
    for auto in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            auto.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert load_tokenizer(tmp_path / "out")("the cat").input_ids
    card = (tmp_path / "out/README.md").read_text()
    assert 'from_pretrained("path/to/this/folder", trust_remote_code=True)' in card
    assert "| mlp per block | 40 | 4 to 20 |" in card


@pytest.mark.parametrize("more", [{}, {"multiple_of": 8}, {"attention_sparsity": 0}])
def test_as_many_parameters_stay_as_with_uniform_widths(more, prune):
    plain = prune("plain", **more)
    own = prune("own", by_block=True, **more)
    before, after = (r.plan["parameters"]["after"] for r in (plain, own))
    assert before - 8 * 3 * 32 < after <= before
    mlp, groups = widths(own)
    if "attention_sparsity" in more:
        assert groups == 4
    if more.get("multiple_of"):
        assert all(width % 8 == 0 for width in ([mlp] * 2 if isinstance(mlp, int) else mlp))


def test_units_of_some_sites_do_not_let_others_lose_what_nobody_asked_for(prune, tmp_path):
    """Of two groups 30 % takes none; one block's single group is given."""
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = tm.save(tm.tiny("llama", torch.float32, **changes), tmp_path / "dense")
    own = {"layers.0.attention": [0]}
    report = prune(model=model, by_block=True, kept=own)
    assert widths(report)[1] == [1, 2]


def test_heights_that_are_no_costs_leave_the_shapes(dense):
    plan = coec.plan(dense, by_block=True)
    curves = {s.key: torch.tensor([torch.inf, 2.0, 1.0]).double() for s in plan.model.layout.sites}
    for cost in (0.0, -1.0):
        found = module._scaled(curves, dict.fromkeys(curves, cost), plan)
        assert all(worth[1] == 2 * worth[2] > 0 for worth in found.values())


def test_units_of_every_site_leave_nothing_to_allocate(prune, monkeypatch):
    monkeypatch.setattr("coec.pruning.importances", raising(WORK))  # is not called
    assert widths(prune(by_block=True, kept=OWN)) == ([4, 20], [3, 1])


def test_own_kept_units_of_own_widths_give_the_same_weights(prune, tmp_path):
    first = prune("first", by_block=True)
    assert isinstance(widths(first)[0], list)
    prune("again", kept=tmp_path / "first", by_block=True)
    assert tm.same_weights(tmp_path / "first", tmp_path / "again")


def test_equal_widths_are_written_in_a_stock_format(dense, prune, tmp_path, monkeypatch):
    even = {"attention": 4, "mlp": 40}

    def same(plan, dense, windows, progress):
        return {site.key: torch.linspace(1, 0, even[site.name]).double()
                for site in dense.layout.sites}, {}  # fmt: skip

    monkeypatch.setattr("coec.pruning.importances", same)
    report = prune(sparsity=0.5, by_block=True)
    assert widths(report) == (20, 2)
    assert report.plan["code"] is None
    tm.load(tmp_path / "out")
    assert not (tmp_path / "out/modeling_non_uniform.py").exists()


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("variant", ["gemma2", "llama", "qwen3"])
def test_no_widths_are_refused_once_work_has_begun(variant, groups, prune, tmp_path, monkeypatch):
    """Heads that do not divide the hidden size, and none that a stock configuration takes."""

    def found(plan, dense, windows, progress):
        worth = {}
        for site in dense.layout.sites:
            values = torch.linspace(0.9, 0.1, site.units).double()
            if site.name == "attention":  # the first groups are worth more than any channel
                values = torch.where(torch.arange(4) < groups, values + 1, values - 1)
            worth[site.key] = values
        return worth, {}

    monkeypatch.setattr("coec.pruning.importances", found)
    model = tm.save(tm.tiny(variant, torch.float32, hidden_size=40), tmp_path / "dense")
    report = prune(model=model, sparsity=0.5, by_block=True)
    assert widths(report)[1] == groups
    Dense.open(tmp_path / "out").network(CPU, torch.float32)


@pytest.mark.parametrize(("preset", "few"), [("fast", {}), ("balanced", {"reconstruct": 1})])
def test_presets_take_it(preset, few, dense, tokens, tmp_path):
    report = coec.prune(
        dense, tmp_path / "out", preset=preset, by_block=True,
        calibration=tokens, samples=12, seq_len=32, **few,
    )  # fmt: skip
    assert report.plan["parameters"]["after"] < report.plan["parameters"]["before"]
    value = coec.perplexity(tmp_path / "out", text=tokens, seq_len=32, max_windows=4)
    assert value.perplexity > 0


def test_a_model_of_own_widths_is_pruned_again_and_its_code_replaced(prune, tmp_path):
    prune(kept=OWN, by_block=True)
    report = prune("less", model=tmp_path / "out", sparsity=0.5, by_block=True)
    assert report.plan["widths"]["mlp"]["before"] == [4, 20]
    assert report.plan["widths"]["kv_groups"]["before"] == [3, 1]
    assert Dense.open(tmp_path / "less").parameters == report.plan["parameters"]["after"]
    with pytest.raises(OptionError, match="by_block"):
        prune("no", model=tmp_path / "out", sparsity=0.5)
    prune(force=True)
    assert not (tmp_path / "out/modeling_non_uniform.py").exists()


@pytest.mark.parametrize("target", ["hf", "vllm"])
@pytest.mark.slow
def test_a_killed_run_goes_on_behind_its_allocation(target, prune, tmp_path, monkeypatch):
    own = {"by_block": True, "target": target}
    prune("whole", **own)
    interrupt(monkeypatch, prune, **own)
    monkeypatch.setattr("coec.pruning.importances", raising(WORK))  # is not called again
    prune(**own)
    for name in ("model.safetensors", "config.json", "coec/kept.safetensors"):
        one, other = ((tmp_path / n / name).read_bytes() for n in ("whole", "out"))
        assert one == other


@pytest.mark.parametrize("compensation", ["ridge-to-slice", "bias"])
@pytest.mark.parametrize("align", [1, 16])
def test_a_budget_is_used_where_uniform_widths_cannot(compensation, align, dense, tokens, prune):
    """Aligned ones go in steps of all blocks; where widths differ, of one."""
    own = {"budget": 0.9, "multiple_of": align, "compensation": compensation}
    own |= {"by_block": True}
    plan = coec.plan(dense, calibration=tokens, **SETTINGS | own)
    report = prune(**own)
    after, budget = report.plan["parameters"]["after"], int(0.9 * plan.parameters_before)
    assert plan.parameters_after - 8 * 3 * 32 < after <= budget
    if compensation != "bias":  # what is left is less than the smallest step at one site
        assert after > budget - align * 3 * 32


def test_a_plan_says_that_its_widths_are_not_decided(dense, tokens):
    plan = coec.plan(dense, calibration=tokens, by_block=True, **SETTINGS)
    assert not plan.decided
    assert plan.record()["code"] == "modeling_non_uniform.py"
    assert plan.record()["widths"]["mlp"] == {"before": 40, "after": 28}


BROKEN = {
    "no list": ("a", "is no list of tables"),
    "too few": ([{"intermediate_size": 3}], "is of 1 blocks of 2"),
    "unknown": ([{"hidden_size": 3}, {}], "holds 'hidden_size'; known are num_attention_heads"),
    "zero": ([{"intermediate_size": 0}, {}], "it must be at least 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_widths_by_block_that_cannot_be_are_named(name):
    value, match = BROKEN[name]
    with pytest.raises(ModelError, match=match):
        Description.of(tm.raw_config("mistral", block_widths=value))


def test_heads_by_block_whose_size_nobody_says_are_refused():
    config = tm.raw_config("mistral", block_widths=[{"num_attention_heads": 4}, {}])
    assert Description.of(config).shape.at(0).group == 1
    with pytest.raises(ModelError, match="has heads of size 8, and others of 4"):
        Description.of({key: value for key, value in config.items() if key != "head_dim"})


def test_a_shape_of_own_widths_is_read_as_it_was_written():
    config = tm.raw_config("mistral")
    shape = Shape.of(config).with_blocks([{"kv_heads": 3, "ffn": 9}, {"kv_heads": 1, "ffn": 20}])
    assert (shape.kv_heads, shape.ffn, shape.uniform) == (3, 20, False)
    assert (shape.at(1).kv_heads, shape.at(1).heads, shape.at(0).ffn) == (1, 2, 9)
    written = [shape.at(0).keys(), shape.at(1).keys()]
    assert Shape.of({**config, "block_widths": written}) == shape
    assert Shape.of(config).with_blocks([{"kv_heads": 3, "ffn": 9}] * 2).uniform


@pytest.mark.parametrize("size", [0.1, 1e-3])
def test_costs_share_out_the_divergence_of_the_pruned_model(size, dense):
    """Derivatives of whole networks on the way there; together they are all of it. Of small changes
    each is what the site costs alone and what it costs beside the others, on average.
    """
    model = Dense.open(dense)
    ids = torch.randint(2, tm.VOCABULARY, (3, 16), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    whole, change = {}, {}
    for site in model.layout.sites:
        weight, bias = model.tensor(site.weight).double(), None
        moved = size * torch.randn(weight.shape, generator=generator).double()
        if site.block == 0:
            bias = size * torch.randn(len(weight), generator=generator).double()
        whole[site.key], change[site.key] = weight, (moved, bias)
    recipe = Recipe(preset="paper", forward_dtype="float64", device="cpu")
    found = Sensitivity(model, ids, Plan.of(model, recipe))
    for block in model.layout.blocks:
        compensated = {
            key: (whole[key] + change[key][0], change[key][1])
            for key in (site.key for site in block.sites)
        }
        found.advance(block, model.tensors(block), compensated)
    costs = found.costs()

    network = model.network(CPU, torch.float64)
    for site in model.layout.sites:  # a bias that stands in all models
        network.get_submodule(site.consumer).bias = torch.nn.Parameter(torch.zeros(32).double())
    sites = {site.key: site for site in model.layout.sites}

    def log_p(shares):
        weights = {}
        for key, site in sites.items():
            moved, bias = change[key]
            weights[site.weight] = whole[key] + shares[key] * moved
            if bias is not None:
                weights[site.bias] = shares[key] * bias
        out = torch.func.functional_call(network, weights, kwargs={"input_ids": ids})
        return out.logits.log_softmax(dim=-1)

    def at(share):
        return {k: torch.tensor(share, dtype=torch.float64, requires_grad=True) for k in whole}

    dense_p = log_p(at(0.0)).detach()

    def kl(shares):
        return (dense_p.exp() * (dense_p - log_p(shares))).sum(dim=-1).mean()

    expected = dict.fromkeys(whole, 0.0)
    for share, weight in ((0.5, 2 / 3), (1.0, 1 / 6)):
        shares = at(share)
        slopes = torch.autograd.grad(kl(shares), list(shares.values()))
        for key, slope in zip(shares, slopes, strict=True):
            expected[key] += weight * slope.item()
    assert costs == pytest.approx(expected, rel=1e-4)
    pruned = kl(at(1.0)).item()
    assert sum(costs.values()) == pytest.approx(pruned, rel=0.15 if size == 0.1 else 0.02)
    for key, cost in costs.items():
        alone, spared = kl(at(0.0) | {key: 1.0}), kl(at(1.0) | {key: 0.0})
        if size < 0.01:
            assert cost == pytest.approx((alone.item() + pruned - spared.item()) / 2, rel=0.05)


def test_predictions_that_are_not_finite_are_refused(prune, monkeypatch):
    original = module._in_dense_shape

    def broken(cut, tensors):
        weight, bias = original(cut, tensors)
        return weight * float("inf"), bias

    monkeypatch.setattr(module, "_in_dense_shape", broken)
    with pytest.raises(NumericalError, match="by_block"):
        prune(by_block=True)


NATIVE = {"by_block": True, "target": "vllm"}
CHANNELS = {"layers.0.mlp": OWN["layers.0.mlp"], "layers.1.mlp": OWN["layers.1.mlp"]}


@pytest.mark.parametrize("variant", ["llama", "llama tied", "llama rope", "mistral"])
def test_what_vllm_builds_by_its_own_code_computes_what_the_package_does(
    variant, prune, tmp_path, modules
):
    """The same weights as in the other format of widths by block."""
    model = tm.save(tm.tiny(variant, torch.float32), tmp_path / "dense")
    report = prune(model=model, kept=CHANNELS, **NATIVE)
    prune("plain", model=model, kept=tmp_path / "out", by_block=True)
    assert widths(report) == ([4, 20], 3)
    assert report.plan["output_model_type"] == "nemotron-nas"
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == "nemotron-nas"
    assert config["architectures"] == ["DeciLMForCausalLM"]
    assert [block["ffn"]["intermediate_size"] for block in config["block_configs"]] == [4, 20]
    assert {block["attention"]["n_heads_in_group"] for block in config["block_configs"]} == {2}
    native, plain = (
        tm.load(tmp_path / name, torch.float64, trust_remote_code=True) for name in ("out", "plain")
    )
    assert torch.equal(tm.logits(native), tm.logits(plain))
    expected = tm.logits(Dense.open(tmp_path / "out").network(CPU, torch.float64))
    torch.testing.assert_close(tm.logits(native), expected, rtol=0, atol=1e-12)
    blocks = native.config.block_configs  # as servers read them
    assert not blocks[1].attention.no_op
    assert blocks[1].ffn.intermediate_size == 20
    assert not hasattr(blocks[1].ffn, "ffn_mult")
    native.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again/config.json").read_text())
    for key in ("architectures", "block_configs", "model_type"):
        assert saved[key] == config[key]
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False)


def test_heads_are_alike_in_what_vllm_builds(tokens, prune, tmp_path):
    report = prune(sparsity=0.5, **NATIVE)
    plain = prune("plain", sparsity=0.5)
    mlp, groups = widths(report)
    assert isinstance(mlp, list)
    assert groups == 2
    assert report.plan["parameters"]["after"] == plain.plan["parameters"]["after"]
    value = coec.perplexity(tmp_path / "out", text=tokens, seq_len=32, max_windows=4)
    assert value.perplexity > 0
    again = prune("less", model=tmp_path / "out", sparsity=0.5, by_block=True)
    assert again.plan["output_model_type"] == "mistral"
    assert "block_configs" not in json.loads((tmp_path / "less/config.json").read_text())


@pytest.mark.slow
def test_multiples_of_256_are_written_as_the_factor_that_servers_compute(tokens, prune, tmp_path):
    model = tm.tiny("llama", torch.float32, intermediate_size=1024)
    tm.save(model, tmp_path / "dense")
    kept = {"layers.0.mlp": list(range(256)), "layers.1.mlp": list(range(768))}
    report = prune(model=tmp_path / "dense", kept=kept, attention_sparsity=0, **NATIVE)
    config = json.loads((tmp_path / "out/config.json").read_text())
    for block, channels in zip(config["block_configs"], (256, 768), strict=True):
        assert "intermediate_size" not in block["ffn"]  # MLX-LM takes no keys that it lacks
        size = int(2 * round(block["ffn"]["ffn_mult"], 6) * config["hidden_size"] / 3)
        assert -(-size // 256) * 256 == channels
    assert report.plan["loads_in"]["MLX-LM"] == "yes"
    assert report.plan["loads_in"]["SGLang"].startswith("with trust_remote_code=True")
    odd = coec.plan(
        tmp_path / "dense", kept=CHANNELS, **NATIVE | {"calibration": tokens, **SETTINGS}
    )
    for loader in ("MLX-LM", "SGLang"):
        assert odd.output.loads_in[loader] == "no (it wants multiple_of = 256)"


NOT_NATIVE = {
    "heads": ("llama", {"kept": OWN}, "not nemotron-nas: it has as many heads in every block"),
    "window": ("mistral sliding", {"kept": CHANNELS}, "it has no sliding window"),
    "norms": ("qwen3", {"kept": CHANNELS}, "it computes what a Llama does, and qwen3 something"),
    "biases": ("llama biases", {"kept": CHANNELS}, "not nemotron-nas: it has no bias on o_proj"),
    "new biases": ("llama", {"kept": CHANNELS, "compensation": "bias"}, "no bias on"),
}


@pytest.mark.parametrize("name", NOT_NATIVE)
def test_what_vllm_builds_by_no_code_of_its_own_is_refused_before_any_work(name, prune, tmp_path):
    variant, settings, match = NOT_NATIVE[name]
    model = tm.save(tm.tiny(variant, torch.float32), tmp_path / "dense")
    with pytest.raises(OptionError, match=f"so that vLLM loads it .*{match}.*leave out target"):
        prune(model=model, **NATIVE | settings)
    assert not (tmp_path / "out").exists()
