"""Every architecture keeps the same promises, on random models in float64."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
import torch
import transformers
from promises import (
    check_that_a_written_checkpoint_is_the_masked_model,
    check_that_removing_is_masking,
    check_that_streamed_statistics_are_those_of_the_whole_model,
)

import coec
import tiny_models as tm
from coec.errors import OptionError
from coec.methods import COMPENSATIONS
from coec.models.architectures import ARCHITECTURES
from coec.models.dense import Dense
from coec.models.formats import LOADERS, TARGETS
from coec.streams.layers import Layers
from coec.streams.streams import Streams
from coec.text.windows import Windows, split_windows
from prunings import CONTRACT

pytestmark = pytest.mark.unchecked  # whole models

ADDING = [name for name, v in tm.VARIANTS.items() if not ARCHITECTURES[v["model_type"]].adds]
"""Variants whose blocks add what their parts return, so that errors can propagate."""
NO_FORMAT = {
    "sliding window": {"mistral sliding", "qwen2 mixed"},
    "bias on down_proj": {
        "qwen3", "gemma2", "gemma3", "cohere2", "olmo2", "olmo3", "olmoe", "qwen3_moe",
        "qwen3_moe mixed", "deepseek_v3",
    },
    "bias on o_proj": {
        "ernie4_5", "exaone4", "glm4", "phi3", "phi3 partial", "mixtral", "glm4_moe", "ministral3",
    },
}  # fmt: skip
BIASED = {variant: said for said, variants in NO_FORMAT.items() for variant in variants}
"""Variants whose result no stock format can hold with biases, and what the error says."""

WHOLE = [name for name, v in tm.VARIANTS.items() if ARCHITECTURES[v["model_type"]].attention_kept]
"""Variants whose attention keeps all its units."""

EXPERTS = [name for name, v in tm.VARIANTS.items() if ARCHITECTURES[v["model_type"]].count]
"""Variants some of whose sites get the tokens that a router sends them."""
CHANNELS = {"mixtral": 32, "olmoe": 32, "qwen3_moe": 40}
"""`intermediate_size` where it is not 28: experts keep a multiple of 8; it may be of none."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Every variant on disk by its name, made once."""
    root = tmp_path_factory.mktemp("dense")
    return {name: tm.save(tm.tiny(name), root / name) for name in tm.VARIANTS}


def test_every_architecture_has_a_variant():
    assert {v["model_type"] for v in tm.VARIANTS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("compensation", "variant"),
    # An architecture cares whether a compensation brings a bias, and for nothing else of it.
    [(c, v) for v in tm.VARIANTS for c in COMPENSATIONS if v == "llama" or c in ("coec", "bias")],
)
def test_a_written_checkpoint_computes_the_masked_dense_model(
    variant, compensation, models, tokens, tmp_path
):
    settings = {**CONTRACT, "calibration": tokens, "compensation": compensation}
    if compensation == "bias" and variant in BIASED:
        with pytest.raises(OptionError, match=BIASED[variant]):
            coec.prune(models[variant], tmp_path / "out", **settings)
        return
    report = coec.prune(models[variant], tmp_path / "out", **settings)
    check_that_a_written_checkpoint_is_the_masked_model(models[variant], tmp_path / "out")
    loaded = tm.load(tmp_path / "out")
    by_name = getattr(transformers, loaded.config.architectures[0])
    assert loaded.config.intermediate_size == CHANNELS.get(variant, 28)
    if "moe_intermediate_size" in tm.VARIANTS[variant]:
        assert loaded.config.moe_intermediate_size == 16
    kv_heads = tm.raw_config(variant)["num_key_value_heads"] if variant in WHOLE else 3
    assert loaded.config.num_key_value_heads == kv_heads
    assert loaded.config.head_dim == tm.raw_config(variant)["head_dim"]
    stored = {**dict(loaded.named_parameters()), **corrections(loaded)}
    assert sum(p.numel() for p in stored.values()) == report.plan["parameters"]["after"]
    again = by_name.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert torch.equal(tm.logits(again), tm.logits(loaded))


def corrections(model):
    """What routers add to scores: stored, and no parameter."""
    return {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}


UNLOADED = {
    "vllm": {"qwen2 mixed", "cohere2", "deepseek_v3"},
    "llama.cpp": {
        "qwen2 mixed", "cohere2", "mistral sliding", "granite", "llama biases", "exaone4",
        "starcoder2", "phi3", "phi3 partial",
    },
}  # fmt: skip
"""Variants for which no model type will do, by the loader that they are written for; besides those
of types that nobody tried there."""
LOADED = {**CONTRACT, "compensation": "ridge-to-slice"}


@pytest.fixture(scope="module")
def for_transformers(models, tokens, tmp_path_factory):
    """Every variant as it is written where no loader is named, made when asked for."""

    @functools.cache
    def made(variant):
        out = tmp_path_factory.mktemp("default") / "out"
        coec.prune(models[variant], out, **LOADED, calibration=tokens)
        return out

    return made


@pytest.mark.parametrize("target", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_the_type_written_for_a_loader_computes_the_same(
    variant, target, models, tokens, for_transformers, tmp_path
):
    settings = {**LOADED, "calibration": tokens}
    tried = tm.VARIANTS[variant]["model_type"] in LOADERS[TARGETS[target]].types
    if variant in UNLOADED[target] or not tried:
        with pytest.raises(OptionError, match=f"so that {TARGETS[target]} loads it .*leave out"):
            coec.prune(models[variant], tmp_path / "out", target=target, **settings)
        return
    report = coec.prune(models[variant], tmp_path / "out", target=target, **settings)
    assert report.plan["loads_in"][TARGETS[target]] == "yes"
    mine, other = tm.load(tmp_path / "out"), tm.load(for_transformers(variant))
    relabelled = "seed_oss" if variant == "qwen2" else other.config.model_type
    assert mine.config.model_type == relabelled
    assert torch.equal(tm.logits(mine), tm.logits(other))


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_removing_is_masking(variant, models, tokens, tmp_path):
    check_that_removing_is_masking(models[variant], tokens, tmp_path / "out")


HEADS = {"attention_units": "heads", "attention_sparsity": 0.5}


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_query_heads_go_and_leave_keys_and_values_as_they_are(variant, models, tokens, tmp_path):
    dense, out = Dense.open(models[variant]), tmp_path / "out"
    if variant in WHOLE:
        with pytest.raises(OptionError, match="attention_units = heads has no effect"):
            coec.plan(dense, attention_units="heads", calibration=tokens)
        return
    check_that_removing_is_masking(
        models[variant], tokens, out, units="heads", attention_sparsity=0.5
    )
    pruned = Dense.open(out)
    assert (pruned.shape.kv_heads, pruned.shape.group) == (dense.shape.kv_heads, 1)
    for site, smaller in zip(dense.layout.sites, pruned.layout.sites, strict=True):
        if site.value is not None:
            old, new = (
                model.tensor(rows.tensor)[rows.start : rows.stop]
                for model, rows in ((dense, site.value), (pruned, smaller.value))
            )
            assert torch.equal(old, new)


@pytest.mark.parametrize("variant", ["llama wide heads", "phi3"])
@pytest.mark.parametrize("compensation", ["coec", "ridge-to-slice"])
def test_a_compensation_behind_fewer_heads_is_the_masked_model(
    variant, compensation, models, tokens, tmp_path
):
    settings = {**CONTRACT, **HEADS, "calibration": tokens, "compensation": compensation}
    coec.prune(models[variant], tmp_path / "out", **settings)
    check_that_a_written_checkpoint_is_the_masked_model(models[variant], tmp_path / "out")
    record = json.loads((tmp_path / "out/coec.json").read_text())
    attention = [row for row in record["sites"] if row["site"] == "attention"]
    assert [row["units_after"] for row in attention] == [4, 4]


@pytest.mark.parametrize("preset", ["fast", "balanced"])
@pytest.mark.parametrize("by_block", [False, True])
def test_every_preset_takes_query_heads(preset, by_block, models, tokens, tmp_path):
    more = {"attention_units": "heads"} if by_block else HEADS
    more |= {} if preset == "fast" else {"reconstruct": 1}
    coec.prune(
        models["llama"], tmp_path / "out", preset=preset, calibration=tokens, samples=24,
        seq_len=32, by_block=by_block, budget=0.8, **more,
    )  # fmt: skip
    shape = Dense.open(tmp_path / "out").shape
    blocks = [shape.at(block) for block in range(shape.layers)]
    assert {block.kv_heads for block in blocks} == {4}
    assert all(block.group in (1, 2) for block in blocks)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True
    ).eval()
    built = Dense.open(tmp_path / "out").network(torch.device("cpu"), torch.float64)
    assert torch.equal(tm.logits(loaded), tm.logits(built))
    if preset == "fast" and shape.uniform:  # the others train what is read as well
        check_that_a_written_checkpoint_is_the_masked_model(
            models["llama"], tmp_path / "out", atol=1e-4
        )


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_streamed_statistics_are_those_of_the_whole_model(variant, models):
    check_that_streamed_statistics_are_those_of_the_whole_model(models[variant])


@pytest.mark.parametrize("variant", EXPERTS)
@torch.no_grad()
def test_statistics_of_an_expert_say_what_a_change_of_it_does_to_the_hidden_states(variant, models):
    """What the block adds then differs by `tr(Δ G Δᵀ)`, whatever the router makes of its tokens."""
    ids = torch.randint(2, tm.VOCABULARY, (5, 32))
    checkpoint = Dense.open(models[variant])
    plan = coec.plan(models[variant], preset="paper", forward_dtype="float64")
    streams, blocks = Streams(plan, checkpoint, ids, pruned=False), checkpoint.layout.blocks
    dense, outputs, tokens = tm.load(models[variant]), [], 0
    for block in blocks:
        module, (_, summed) = dense.model.layers[block.index].mlp, streams.measure(block)
        for site in (one for one in block.sites if one.routed):
            gram, weight = summed[site.name].gram(), tm.consumer(dense, site)
            hook = module.register_forward_hook(lambda _, args, out: outputs.append(out))
            tm.logits(dense, ids)
            change = torch.randn_like(weight)
            weight += change
            tm.logits(dense, ids)
            weight -= change
            hook.remove()
            before, after = outputs[-2:]
            expected = float((change @ gram.xx * change).sum())
            assert float((after - before).square().sum()) == pytest.approx(expected, rel=1e-9)
            torch.testing.assert_close(
                (after - before).sum(dim=(0, 1)), change @ gram.x, rtol=1e-9, atol=1e-9
            )
            tokens += gram.tokens
    sparse = sum(any(site.routed for site in block.sites) for block in blocks)
    assert tokens == 2 * ids.numel() * sparse  # every token goes to two of them


@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense"])
def test_an_architecture_is_one_value(model_type, tmp_path, monkeypatch):
    """One that the package does not list: nothing but the value is needed."""
    listed = dataclasses.replace(
        ARCHITECTURES["llama"],
        model_type=model_type,
        class_name=type(tm.tiny(model_type=model_type, head_dim=4)).__name__,
        written_as=(model_type,),
    )
    monkeypatch.setitem(ARCHITECTURES, model_type, listed)
    model = tm.save(tm.tiny(model_type=model_type), tmp_path / "model")
    check_that_removing_is_masking(model, tm.token_file(tmp_path / "t.npy"), tmp_path / "out")
    check_that_streamed_statistics_are_those_of_the_whole_model(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("variant", ADDING)
def test_the_parts_of_a_layer_one_after_the_other_are_the_layer(variant, dtype, models, tokens):
    dense = Dense.open(models[variant])
    layers, states = embedded(dense, tokens, dtype)
    with torch.no_grad():
        for block in dense.layout.blocks:
            layers.load(block, dense.tensors(block))
            whole = layers.advance(block.index, states)
            for site in block.sites:
                states = layers.call(layers.sublayer(block, site), block.index, states)
            assert torch.equal(states, whole)  # to the bit: a run that is resumed takes the whole


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_the_function_of_a_block_gives_what_its_layer_gives(variant, models, tokens):
    """Of a model without weights, in batches of another size; each weight moves the outputs."""
    dense = Dense.open(models[variant])
    layers, states = embedded(dense, tokens)
    without = Layers(dense, device=torch.device("cpu"), dtype=torch.float64)
    for block in dense.layout.blocks:
        tensors = dense.tensors(block)
        layers.load(block, tensors)
        whole = layers.advance(block.index, states)
        theta = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        function = without.function(block)
        with torch.no_grad():
            for some in (states, states[:1]):
                torch.testing.assert_close(function(theta, some), whole[: len(some)])
        direction = torch.randn_like(whole)
        (function(theta, states) * direction).sum().backward()
        for name, tensor in theta.items():
            if not name.endswith("e_score_correction_bias"):  # which only chooses experts
                assert tensor.grad.isfinite().all(), name
                assert tensor.grad.abs().max() > 0, name
        states = whole


@pytest.mark.parametrize("variant", ["llama", "gemma2", "phi3", "qwen3_moe"])
def test_derivatives_of_a_block_are_its_differences(variant, models, tokens):
    """To the digits that norms leave, which round to float32."""
    dense = Dense.open(models[variant])
    layers, states = embedded(dense, tokens)
    block = dense.layout.blocks[-1]
    function = layers.function(block)
    theta = {name: t.clone().requires_grad_() for name, t in dense.tensors(block).items()}
    direction = torch.randn_like(states)
    (function(theta, states) * direction).sum().backward()
    moved = {name: t.detach() * torch.randn_like(t) for name, t in theta.items()}
    expected = sum(float((t.grad * moved[name]).sum()) for name, t in theta.items())
    with torch.no_grad():
        ends = [
            float((function({n: t + h * moved[n] for n, t in theta.items()}, states)
                   * direction).sum())
            for h in (1e-3, -1e-3)
        ]  # fmt: skip
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(expected, rel=1e-3)


def embedded(dense, tokens, dtype=torch.float64):
    """The layers of a model, and the hidden states before the first of them."""
    layers = Layers(dense, device=torch.device("cpu"), dtype=dtype)
    windows = torch.from_numpy(np.load(tokens))[:3, :16].long()
    return layers, layers.embed({0: windows}, dense.outside_tensors())[0]


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_a_trained_checkpoint_is_what_the_streams_ended_with(variant, models, tmp_path):
    """Loaded by stock transformers it predicts the validation windows as the report says."""
    tokens = tm.token_file(tmp_path / "tokens.npy", rows=12, length=16)
    settings = {**CONTRACT, "samples": 12, "seq_len": 16, "calibration": tokens}
    report = coec.prune(
        models[variant], tmp_path / "out", **settings | {"preset": "balanced"}, reconstruct=1,
        holdout=0.125,
    )  # fmt: skip
    validation = split_windows(
        Windows(torch.from_numpy(np.load(tokens)).long(), "", 0, ""), 0.125, 0
    )[1]
    with torch.no_grad():
        model = tm.load(tmp_path / "out")
        predicted = tm.logits(model, validation)[:, :-1].flatten(0, 1)
        loss = float(torch.nn.functional.cross_entropy(predicted, validation[:, 1:].flatten()))
    # Norms round to float32.
    assert math.log(report.reconstruction["perplexity"]) == pytest.approx(loss, rel=1e-6)
    dense = Dense.open(models[variant])
    last = {block.sites[-1].consumer for block in dense.layout.blocks}
    trained = {row["module"]: row for row in report.sites if "reconstruction" in row}
    assert set(trained) == last
    for row in trained.values():
        errors = row["reconstruction"]["errors"]
        assert errors[row["reconstruction"]["taken"]] == min(errors)
    assert [row["module"] for row in report.sites if "predictions" in row] == [
        dense.layout.sites[-1].consumer
    ]


@pytest.mark.parametrize("variant", [name for name in tm.VARIANTS if name not in ADDING])
def test_errors_do_not_propagate_through_parts_that_cannot_be_told_apart(variant, models, tokens):
    """A preset leaves that out, and the plan says so; what was asked for is refused."""
    settings = {**CONTRACT, "calibration": tokens}
    plan = coec.plan(models[variant], **settings | {"preset": "balanced"})
    [note] = [note for note in plan.notes if "for the dense model's inputs" in note]
    assert note.endswith(f"add {ARCHITECTURES[tm.VARIANTS[variant]['model_type']].adds}")
    assert plan.trains
    assert not plan.propagates
    with pytest.raises(OptionError, match="propagate is not supported for .*propagate=False"):
        coec.plan(models[variant], **settings, propagate=True)


@pytest.mark.parametrize("variant", WHOLE)
def test_attention_that_cannot_lose_a_unit_is_not_asked_to(variant, models, tokens, tmp_path):
    plan = coec.plan(models[variant], **CONTRACT, calibration=tokens, attention_sparsity=0)
    assert any("attention is kept whole: " in note for note in plan.notes)
    kv_heads = tm.raw_config(variant)["num_key_value_heads"]
    assert plan.record()["widths"]["kv_groups"] == {"before": kv_heads, "after": kv_heads}
    with pytest.raises(OptionError, match=r"attention of .* is kept whole .* leave it out"):
        coec.plan(models[variant], **CONTRACT, calibration=tokens, attention_sparsity=0.3)


def test_a_fused_projection_is_only_another_slice(models, tokens, tmp_path):
    """Phi-3 and Mistral compute the same: the one has in one matrix what the other has in several.

    So the same units go, and what is written of the one is what is written of the other, unless
    they are trained: the rate of a matrix follows its size.
    """
    apart = tm.tiny("mistral")
    state = tm.load(models["phi3"]).state_dict()
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for part, fused, rows in (
            ("self_attn", "qkv_proj", {"q_proj": 32, "k_proj": 16, "v_proj": 16}),
            ("mlp", "gate_up_proj", {"gate_proj": 40, "up_proj": 40}),
        ):
            stack = state.pop(f"{prefix}{part}.{fused}.weight").split(list(rows.values()))
            state |= {f"{prefix}{part}.{n}.weight": p for n, p in zip(rows, stack, strict=True)}
    apart.config.rms_norm_eps = 1e-5
    apart.load_state_dict(state)
    split = tm.save(apart, tmp_path / "split")
    assert torch.equal(tm.logits(tm.load(split)), tm.logits(tm.load(models["phi3"])))
    settings = {**CONTRACT, "calibration": tokens, "preset": "fast"}
    for model, out in ((models["phi3"], "fused"), (split, "apart")):
        coec.prune(model, tmp_path / out, **settings)
    one, other = (tm.load(tmp_path / out) for out in ("fused", "apart"))
    torch.testing.assert_close(tm.logits(one), tm.logits(other), rtol=0, atol=1e-9)
