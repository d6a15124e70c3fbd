"""Every architecture keeps the same promises, on random models in float64."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import coec
import tiny_models as tm
from coec.calibration.windows import Windows, hold_out
from coec.compensation import COMPENSATIONS
from coec.errors import OptionError
from coec.models.architectures import ARCHITECTURES
from coec.models.dense import Dense
from coec.models.formats import LOADERS, TARGETS
from coec.models.layout import Rows
from coec.models.surgery import with_rows
from coec.reconstruction import (
    AttentionProducts,
    Batch,
    DifferentiatedProducts,
    GatedMlp,
    GatedProducts,
    HeldAttention,
    LeastSquares,
)
from coec.reconstruction.least_squares import watched
from coec.streaming.dense_stream import DenseStream
from coec.streaming.layers import Layers
from coec.types import GramSum, KeptSet
from prunings import CONTRACT

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("hasty_auto")]  # whole models

ADDING = [name for name, v in tm.VARIANTS.items() if not ARCHITECTURES[v["model_type"]].adds]
"""Variants whose blocks add what their parts return, and can be fitted part by part."""
BIASED = {
    "mistral sliding": "sliding window",
    "qwen2 mixed": "sliding window",
    **dict.fromkeys(
        ("qwen3", "gemma2", "gemma3", "cohere2", "olmo2", "olmo3", "olmoe"), "bias on down_proj"
    ),
    **dict.fromkeys(("ernie4_5", "exaone4", "glm4"), "bias on o_proj"),
    **dict.fromkeys(("phi3", "phi3 partial", "mixtral"), "bias on o_proj"),
    "qwen3_moe": "bias on down_proj",
    "qwen3_moe mixed": "bias on down_proj",
    "glm4_moe": "bias on o_proj",
    "deepseek_v3": "bias on down_proj",
}
"""Variants whose result no stock format can hold with biases, and what the error says."""

WHOLE = [name for name, v in tm.VARIANTS.items() if ARCHITECTURES[v["model_type"]].attention_kept]
"""Variants whose attention keeps all its units."""

EXPERTS = [name for name, v in tm.VARIANTS.items() if ARCHITECTURES[v["model_type"]].blocks.experts]
"""Variants some of whose sites get the tokens that a router sends them."""
CHANNELS = {"mixtral": 32, "olmoe": 32, "qwen3_moe": 40}
"""`intermediate_size` where it is not 28: experts keep a multiple of 8; it may be of none."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every variant on disk, made once."""
    root = tmp_path_factory.mktemp("dense")
    tokens = tm.token_file(root / "tokens.npy")
    return {name: tm.save(tm.tiny(name), root / name) for name in tm.VARIANTS}, tokens


def test_every_architecture_has_a_variant():
    assert {v["model_type"] for v in tm.VARIANTS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("compensation", "variant"),
    # What an architecture does with a repair depends on whether it brings a bias, and no more.
    [(c, v) for v in tm.VARIANTS for c in COMPENSATIONS if v == "llama" or c in ("coec", "bias")],
)
def test_a_written_checkpoint_computes_the_masked_dense_model(
    variant, compensation, folders, tmp_path
):
    models, tokens = folders
    options = {"coec": {"rounds": 1, "iterations": 5}, "auto": {"holdout": 0.125}}.get(
        compensation, {}
    )
    settings = {**CONTRACT, "calibration": tokens, "compensation": compensation, **options}
    if compensation == "bias" and variant in BIASED:
        with pytest.raises(OptionError, match=BIASED[variant]):
            coec.prune(models[variant], tmp_path / "out", **settings)
        return
    report = coec.prune(models[variant], tmp_path / "out", **settings)
    expected = tm.logits(tm.masked(tm.load(models[variant]), tmp_path / "out"))
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
    torch.testing.assert_close(tm.logits(loaded), expected, rtol=0, atol=1e-10)
    again = by_name.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert torch.equal(tm.logits(again), tm.logits(loaded))


def corrections(model):
    """What routers add to scores: stored, and no parameter."""
    return {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}


TARGETED = {
    ("qwen2", "vllm"): "seed_oss",
    ("qwen2", "llama.cpp"): "seed_oss",
    **{("qwen2 mixed", target): None for target in ("vllm", "llama.cpp")},
    ("mistral sliding", "llama.cpp"): None,
    ("granite", "llama.cpp"): None,
    ("llama biases", "llama.cpp"): None,
    **{
        (variant, target): None
        for variant, values in tm.VARIANTS.items()
        for target in ("vllm", "llama.cpp")
        if values["model_type"] not in LOADERS[TARGETS[target]].types
    },
    **{("cohere2", target): None for target in ("vllm", "llama.cpp")},
    **{
        (variant, "llama.cpp"): None
        for variant in ("exaone4", "starcoder2", "phi3", "phi3 partial")
    },
    ("deepseek_v3", "vllm"): None,
}
"""The model type written for a loader where it is not the one written for transformers; None where
no type will do."""
LOADED = {**CONTRACT, "compensation": "ridge-to-slice"}


@pytest.fixture(scope="module")
def for_transformers(folders, tmp_path_factory):
    """Every variant as it is written where no loader is named, made when asked for."""
    models, tokens = folders

    @functools.cache
    def made(variant):
        out = tmp_path_factory.mktemp("default") / "out"
        coec.prune(models[variant], out, **LOADED, calibration=tokens)
        return out

    return made


@pytest.mark.parametrize("target", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_the_type_written_for_a_loader_computes_the_same(
    variant, target, folders, for_transformers, tmp_path
):
    models, tokens = folders
    settings = {**LOADED, "calibration": tokens}
    expected = TARGETED.get((variant, target), "as before")
    if expected is None:
        with pytest.raises(OptionError, match=f"so that {TARGETS[target]} loads it .*leave out"):
            coec.prune(models[variant], tmp_path / "out", target=target, **settings)
        return
    report = coec.prune(models[variant], tmp_path / "out", target=target, **settings)
    assert report.plan["loads_in"][TARGETS[target]] == "yes"
    mine, other = tm.load(tmp_path / "out"), tm.load(for_transformers(variant))
    assert mine.config.model_type == (
        other.config.model_type if expected == "as before" else expected
    )
    assert torch.equal(tm.logits(mine), tm.logits(other))


def check_that_removing_is_masking(model, tokens, out):
    """With no repair: the dense model with the removed units' outputs set to zero."""
    coec.prune(model, out, **CONTRACT, calibration=tokens, compensation="none",
               selection="magnitude")  # fmt: skip
    kept = load_file(out / "coec/kept.safetensors")
    dense = tm.load(model)
    with torch.no_grad():
        for site in Dense.open(model).layout.sites:
            columns = site.kept_columns(KeptSet(kept[site.key], site.units))
            tm.consumer(dense, site)[:, columns.dropped()] = 0
    difference = tm.logits(dense) - tm.logits(tm.load(out))
    assert float(difference.abs().max()) < 1e-10


def check_that_streamed_statistics_are_those_of_the_whole_model(model):
    ids = torch.randint(2, tm.VOCABULARY, (5, 32))
    checkpoint = Dense.open(model)
    stream = DenseStream(checkpoint, ids, device=torch.device("cpu"), dtype=torch.float64)
    measured = list(stream.blocks())
    dense, sums = tm.load(model), {}
    for site in checkpoint.layout.sites:
        if site.routed:
            continue  # its inputs are those of no module: see below
        total = sums[site.key] = GramSum(site.columns)
        dense.get_submodule(site.consumer).register_forward_pre_hook(
            lambda _, args, total=total: total.update(args[0])
        )
    tm.logits(dense, ids)
    assert len(measured) == 2
    for block in measured:
        for site in (one for one in block.block.sites if not one.routed):
            gram, expected = block.grams[site.name], sums[site.key].gram()
            assert gram.tokens == expected.tokens == 160
            torch.testing.assert_close(gram.xx, expected.xx, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(gram.x, expected.x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_removing_is_masking(variant, folders, tmp_path):
    models, tokens = folders
    check_that_removing_is_masking(models[variant], tokens, tmp_path / "out")


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_streamed_statistics_are_those_of_the_whole_model(variant, folders):
    models, _ = folders
    check_that_streamed_statistics_are_those_of_the_whole_model(models[variant])


@pytest.mark.parametrize("variant", EXPERTS)
@torch.no_grad()
def test_statistics_of_an_expert_say_what_a_change_of_it_does_to_the_hidden_states(
    variant, folders
):
    """What the block adds then differs by `tr(Δ G Δᵀ)`, whatever the router makes of its tokens."""
    ids = torch.randint(2, tm.VOCABULARY, (5, 32))
    checkpoint = Dense.open(folders[0][variant])
    stream = DenseStream(checkpoint, ids, device=torch.device("cpu"), dtype=torch.float64)
    measured, dense, outputs = list(stream.blocks()), tm.load(folders[0][variant]), []
    tokens = 0
    for block in measured:
        module = dense.model.layers[block.index].mlp
        for site in (one for one in block.block.sites if one.routed):
            gram, weight = block.grams[site.name], tm.consumer(dense, site)
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
    sparse = sum(any(site.routed for site in block.block.sites) for block in measured)
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


@pytest.mark.parametrize("variant", ADDING)
def test_the_parts_of_a_layer_one_after_the_other_are_the_layer(variant, folders):
    models, tokens = folders
    dense = Dense.open(models[variant])
    layers, states = embedded(dense, tokens)
    with torch.no_grad():
        for block in dense.layout.blocks:
            layers.load(block, dense.tensors(block))
            whole = layers.advance(block.index, states)
            for site in block.sites:
                states = layers.call(layers.half(block, site), block.index, states)
            torch.testing.assert_close(states, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ADDING)
def test_products_with_the_jacobian_are_those_of_forward_and_reverse_mode(variant, folders):
    """Of both parts, by torch.func on the layer itself; attention without its fused form."""
    models, tokens = folders
    dense = Dense.open(models[variant])
    layers, states = embedded(dense, tokens)
    block = dense.layout.blocks[0]
    layers.load(block, dense.tensors(block))
    weights = torch.rand(states.shape[:2], dtype=torch.float64)
    root = torch.randn(2 * [states.shape[-1]], dtype=torch.float64)
    for site in block.sites:
        half = layers.half(block, site)
        rows = {str(n): r for n, r in enumerate(site.fitted)}
        rows["consumer"] = Rows(site.weight, 0, dense.shapes[site.weight][0])
        own = {n: r.tensor.removeprefix(block.prefix) for n, r in rows.items()}
        held = {name: half.get_parameter(name).detach() for name in own.values()}
        gated = site.value is None and variant != "starcoder2"
        assert len(rows) == (3 if gated else 2)

        def function(theta, state, half=half, rows=rows, own=own, held=held):
            new = {
                name: with_rows(held[name], {rows[n]: theta[n] for n in rows if own[n] == name})
                for name in held
            }
            return layers.call(
                lambda *a, **k: torch.func.functional_call(half, new, a, k), block.index, state
            )

        theta = {n: held[own[n]][r.start : r.stop] for n, r in rows.items()}
        batch = Batch(states, torch.randn_like(states), weights)
        modules = {n: half.get_submodule(o.removesuffix(".weight")) for n, o in own.items()}
        slices = {n: slice(r.start, r.stop) for n, r in rows.items()}
        products = DifferentiatedProducts(
            function, modules, [[batch]], torch.device("cpu"), rows=slices,
            quadratic=site.value is not None, root=root,
        )  # fmt: skip
        run = functools.partial(layers.call, half, block.index)
        if site.value is None:
            around = half.get_submodule(site.consumer.removeprefix(block.prefix).rpartition(".")[0])
            mlp = GatedMlp.of(run, states, modules, slices, around)
            assert HeldAttention.of(run, states, modules, slices) is None
            assert (mlp is not None) == gated
        if gated:
            with watched({"gate": modules[mlp.gate]}) as calls:
                run(states)
            added = Batch(calls["gate"][0], batch.targets - states, weights)
            make = functools.partial(GatedProducts, mlp, [[added]], root=root)
        elif site.value is None:  # nothing is written out without a gate

            def make(products=products, **_):
                return products

        else:
            attention = HeldAttention.of(run, states, modules, slices)
            make = functools.partial(
                AttentionProducts, attention, function, modules, [[batch]], rows=slices, root=root
            )
        again, kept = (
            LeastSquares.of(make(device=torch.device("cpu"), kept_bytes=size))
            for size in (0, 2**30)
        )
        delta = {n: torch.randn_like(p) for n, p in theta.items()}
        with sdpa_kernel(SDPBackend.MATH):
            moved = torch.func.jvp(lambda t, f=function: f(t, states), (theta,), (delta,))[1]
            out, back = torch.func.vjp(lambda t, f=function: f(t, states), theta)
            normal, gradient = (
                back(weights[..., None] * (v @ root.T @ root))[0]
                for v in (moved, batch.targets - out)
            )
        again.linearise(theta)
        for made in (LeastSquares.of(products), kept):
            made.linearise(theta)
            found = [made.normal(delta), made.gradient(theta)]
            for one, expected in zip(found, (normal, gradient), strict=True):
                for name in theta:
                    scale = float(expected[name].norm())
                    assert float((one[name] - expected[name]).norm()) < 1e-6 * scale, name
        assert all(torch.equal(again.normal(delta)[n], kept.normal(delta)[n]) for n in theta)


def embedded(dense, tokens):
    """The layers of a model, and the hidden states before the first of them."""
    layers = Layers(dense, device=torch.device("cpu"), dtype=torch.float64)
    windows = torch.from_numpy(np.load(tokens))[:3, :16].long()
    return layers, layers.embed([windows], dense.tensor(dense.layout.embedding))[0]


@pytest.mark.parametrize("variant", ADDING)
def test_a_reconstructed_checkpoint_is_what_the_streams_ended_with(variant, folders, tmp_path):
    """Loaded by stock transformers it predicts the held-out windows as the report says."""
    models, _ = folders
    tokens = tm.token_file(tmp_path / "tokens.npy", rows=12, length=16)
    settings = {**CONTRACT, "samples": 12, "seq_len": 16}
    report = coec.prune(
        models[variant], tmp_path / "out", **settings | {"preset": "best"}, calibration=tokens,
        reconstruct=1, cg_iterations=3, logit_iterations=2, kv_groups="uniform",
    )  # fmt: skip
    held = hold_out(Windows(torch.from_numpy(np.load(tokens)).long(), "", 0, ""), 0.125, 0)[1]
    loss = 0.0
    with torch.no_grad():
        model = tm.load(tmp_path / "out")
        loss = float(model(input_ids=held, labels=held).loss)
    # The loss is rounded to float32, and its exponential is off by as much as the loss.
    assert math.log(report.reconstruction["perplexity"]) == pytest.approx(loss, rel=1e-6)
    for row in report.sites:
        steps = row["reconstruction"]
        assert steps["error_after"] <= steps["error_before"]
        assert steps["holdout_after"] <= steps["holdout_before"]


@pytest.mark.parametrize("variant", [name for name in tm.VARIANTS if name not in ADDING])
def test_blocks_that_add_something_else_are_not_fitted(variant, folders, tmp_path):
    models, tokens = folders
    settings = {**CONTRACT, "calibration": tokens, "preset": "best"}
    with pytest.raises(OptionError, match=r"propagate needs blocks that .*preset = fast does"):
        coec.prune(models[variant], tmp_path / "out", **settings)


@pytest.mark.parametrize("variant", WHOLE)
def test_attention_that_cannot_lose_a_unit_is_not_asked_to(variant, folders, tmp_path):
    models, tokens = folders
    plan = coec.plan(models[variant], **CONTRACT, calibration=tokens, attention_sparsity=0)
    assert any("attention keeps all KV groups: " in note for note in plan.notes)
    kv_heads = tm.raw_config(variant)["num_key_value_heads"]
    assert plan.record()["widths"]["kv_groups"] == {"before": kv_heads, "after": kv_heads}
    with pytest.raises(OptionError, match=r"attention of .* keeps all KV groups .* leave it out"):
        coec.plan(models[variant], **CONTRACT, calibration=tokens, attention_sparsity=0.3)


@pytest.mark.parametrize("preset", ["fast", "best"])
def test_a_fused_projection_is_only_another_slice(preset, folders, tmp_path):
    """Phi-3 and Mistral compute the same: the one has in one matrix what the other has in several.

    So the same units go, and what is written of the one is what is written of the other.
    """
    models, tokens = folders
    apart = tm.tiny("mistral")
    state = tm.load(models["phi3"]).state_dict()
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for fused, rows in {
            "self_attn.qkv_proj": {
                "self_attn.q_proj": 32,
                "self_attn.k_proj": 16,
                "self_attn.v_proj": 16,
            },
            "mlp.gate_up_proj": {"mlp.gate_proj": 40, "mlp.up_proj": 40},
        }.items():
            parts = state.pop(f"{prefix}{fused}.weight").split(list(rows.values()))
            state |= {f"{prefix}{n}.weight": p for n, p in zip(rows, parts, strict=True)}
    apart.config.rms_norm_eps = 1e-5
    apart.load_state_dict(state)
    split = tm.save(apart, tmp_path / "split")
    assert torch.equal(tm.logits(tm.load(split)), tm.logits(tm.load(models["phi3"])))
    small = {"reconstruct": 1, "cg_iterations": 3, "logit_iterations": 2, "self_samples": 0.0,
             "kv_groups": "uniform"}  # fmt: skip
    small = small if preset == "best" else {}
    settings = {**CONTRACT, "calibration": tokens, "preset": preset, **small}
    for model, out in ((models["phi3"], "fused"), (split, "apart")):
        coec.prune(model, tmp_path / out, **settings)
    one, other = (tm.load(tmp_path / out) for out in ("fused", "apart"))
    torch.testing.assert_close(tm.logits(one), tm.logits(other), rtol=0, atol=1e-9)
