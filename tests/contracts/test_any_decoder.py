"""Types without a table: their MLPs and experts are inferred, and removing is masking."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import coec
import tiny_models as tm
from coec.config.recipe import Recipe
from coec.errors import ModelError, OptionError
from coec.models.calls import decoder_of
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.folder import read_config
from coec.models.formats import renumbered, without_blocks
from coec.models.inferred import infer
from coec.planning import checks
from coec.planning.plan import Plan
from coec.streams.importances import Sensitivity
from coec.streams.layers import Layers
from coec.streams.streams import summed_inputs
from masking import masked
from places import SHARED

pytestmark = pytest.mark.unchecked  # whole models

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TYPES = {
    "apertus": {},
    "gpt_neox": {},
    "phi": {},
    "glm": {},
    "gpt_oss": EXPERTS,
    "granitemoe": EXPERTS,
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 80, "moe_layers": [0, 2]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
                    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                    "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
                     "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "deepseek_v2": {**LATENT, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
                    "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 2,
                    "first_k_dense_replace": 1},
    "gemma4_text": {"num_kv_shared_layers": 1, "use_double_wide_mlp": True,
                    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128,
                    "global_head_dim": 16,
                    "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "gemma3n_text": {"intermediate_size": [96, 64, 96], "num_kv_shared_layers": 0,
                     "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128,
                     "laurel_rank": 16, "altup_num_inputs": 2,
                     "activation_sparsity_pattern": [0.0] * 3,
                     "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
}  # fmt: skip
"""What every type has besides SIZES."""
CHOOSING = ("gpt_oss", "llama4_text", "ernie4_5_moe", "deepseek_v2")
"""Types of which whole experts are removed here."""
SETTINGS = {
    "preset": "paper", "compensation": "none", "samples": 24, "seq_len": 32, "multiple_of": 8,
    "sparsity": 0.3, "forward_dtype": "float32",
}  # fmt: skip


def saved(model_type, folder, **changes):
    """A small random model of a type, saved by transformers."""
    known = AutoConfig.for_model(model_type).to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    config = AutoConfig.for_model(model_type, **{**sizes, **TYPES.get(model_type, {}), **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("decoders")
    return {name: saved(name, root / name) for name in TYPES}


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(3, 128, (24, 32)))
    return path


def masked_logits(folder, out):
    """Logits of the dense model where removed channels and experts have no effect."""
    model = load(folder)
    with masked(model, folder, out):
        return logits(model)


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def logits(model):
    tokens = torch.arange(3, 51).reshape(2, 24)
    return model(tokens, use_cache=False).logits


def check(folder, out, ids, **settings):
    coec.prune(folder, out, calibration=ids, **SETTINGS | settings)
    expected = masked_logits(folder, out)
    error = (logits(load(out)) - expected).abs().max() / expected.abs().max()
    assert float(error) < 1e-4


@pytest.mark.parametrize("name", TYPES)
def test_removing_channels_is_masking_them(name, models, ids, tmp_path):
    check(models[name], tmp_path / "out", ids)


@pytest.mark.parametrize("name", CHOOSING)
def test_removing_experts_is_never_choosing_them(name, models, ids, tmp_path):
    check(models[name], tmp_path / "out", ids, expert_sparsity=0.25)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4_text", "olmo_hybrid"])
def test_every_preset_runs_and_a_run_resumes_to_the_bit(name, models, ids, tmp_path, monkeypatch):
    settings = {"calibration": ids, "samples": 8, "seq_len": 32, "preset": "balanced"}
    report = coec.prune(models[name], tmp_path / "one", **settings)
    trained = any("reconstruction" in row for row in report.sites)
    assert trained == (name != "gemma4_text")
    said = "not trained: its layers get more of the tokens" in str(report.plan["notes"])
    assert said == (name == "gemma4_text")
    solve, done = coec.pruning.solve, []

    def failing(*args):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(args)
        return solve(*args)

    monkeypatch.setattr(coec.pruning, "solve", failing)
    with pytest.raises(KeyboardInterrupt):
        coec.prune(models[name], tmp_path / "two", **settings)
    monkeypatch.undo()
    coec.prune(models[name], tmp_path / "two", **settings)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_an_inputs_gram_of_experts_is_that_of_their_own_products(models, ids):
    """Of gpt-oss, whose gate clamps: what the last product of every expert reads, times p."""
    dense = Dense.open(models["gpt_oss"])
    layers = Layers(dense, device=torch.device("cpu"), dtype=torch.float32)
    tokens = torch.arange(3, 35)[None]
    states = layers.embed({0: tokens}, dense.outside_tensors())[0]
    block, sums = dense.layout.blocks[0], {}
    layers.load(block, dense.tensors(block))
    with summed_inputs(layers, block, sums):
        layers.advance(0, states)
    experts, found = load(models["gpt_oss"]).model.layers[0].mlp.experts, []
    experts.register_forward_pre_hook(lambda _, args: found.append(args))
    model = load(models["gpt_oss"])
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, a: found.append(a))
    logits_of = model(tokens, use_cache=False)
    assert logits_of is not None
    hidden, index, weights = found[0]
    for expert in range(4):
        token, place = (index == expert).nonzero(as_tuple=True)
        both = hidden[token] @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
        gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
        h = (up + 1) * gate * torch.sigmoid(gate * 1.702) * weights[token, place, None]
        torch.testing.assert_close(sums[f"expert.{expert}"].xx.float(), (h.T @ h).detach(),
                                   rtol=1e-4, atol=1e-5)  # fmt: skip


def test_files_of_the_running_form_are_read_alike(models, tmp_path):
    """As programs save them that know nothing of the released names."""
    dense = Dense.open(models["ernie4_5_moe"])
    state = load(models["ernie4_5_moe"]).state_dict()
    (tmp_path / "model").mkdir()
    config = (models["ernie4_5_moe"] / "config.json").read_text()
    (tmp_path / "model/config.json").write_text(config)
    if dense.tied:
        del state["lm_head.weight"]
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, tmp_path / "model/model.safetensors")
    assert Dense.open(tmp_path / "model").digest == dense.digest


def test_parts_of_a_convolution_have_the_rows_that_files_have(models, ids, tmp_path):
    """As OLMo-hybrid's are released; transformers saves equal ones."""
    dense, out = tmp_path / "dense", tmp_path / "out"
    shutil.copytree(models["olmo_hybrid"], dense)
    tensors, rows = load_file(dense / "model.safetensors"), {"q": 32, "k": 32, "v": 64}
    for layer in (0, 2):
        start = f"model.layers.{layer}.linear_attn"
        names = [f"{start}.{part}_conv1d.weight" for part in rows]
        parts = torch.cat([tensors[name] for name in names]).split(list(rows.values()))
        assert {len(tensors[name]) for name in names} == {42, 43}
        tensors |= {n: part.contiguous() for n, part in zip(names, parts, strict=True)}
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    check(dense, out, ids)
    written = load_file(out / "model.safetensors")
    kept = [n for n in tensors if "conv1d" in n]
    assert len(kept) == 6
    assert all(torch.equal(written[name], tensors[name]) for name in kept)
    # As training writes them
    pruned = Dense.open(out)
    state = pruned.network(torch.device("cpu"), torch.float32).state_dict()
    found = pruned.names.in_files(pruned.names.from_model(state))
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in written.items()
    }


def test_lists_of_widths_hold_those_of_their_blocks(models, ids, tmp_path):
    report = coec.prune(models["gemma3n_text"], tmp_path / "out", calibration=ids, **SETTINGS)
    assert report.plan["widths"]["mlp"] == {"before": [96, 64, 96], "after": [72, 48, 72]}
    assert load(tmp_path / "out").config.intermediate_size == [72, 48, 72]
    assert report.plan["code"] is None


@pytest.mark.parametrize("shared", [0, 1], ids=["own keys", "shared keys"])
def test_widths_by_block_need_no_code_where_config_json_holds_them(shared, ids, tmp_path):
    folder = saved("gemma3n_text", tmp_path / "dense", num_kv_shared_layers=shared)
    out = tmp_path / "out"
    check(folder, out, ids, by_block=True, multiple_of=1)
    report = coec.Report.read(out)
    after = report.plan["widths"]["mlp"]["after"]
    assert after == load(out).config.intermediate_size != [68, 45, 68]
    assert sum(after) == pytest.approx(68 + 45 + 68, abs=1)
    assert report.plan["code"] is None
    assert report.plan["loads_in"]["transformers"] == "yes"
    assert not any("is rounded" in note for note in report.plan["notes"])


def test_costs_by_block_are_those_of_the_tokens_that_layers_read(models):
    """Together they are the divergence of the changed model, over two batches."""
    dense = Dense.open(models["gemma3n_text"])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 128, (3, 200), generator=generator)
    recipe = Recipe(preset="paper", forward_dtype="float64", device="cpu")
    found, network = (Sensitivity(dense, tokens, Plan.of(dense, recipe)),
                      dense.network(torch.device("cpu"), torch.float64))  # fmt: skip
    with torch.no_grad():
        log_q = network(tokens, use_cache=False).logits.log_softmax(dim=-1)
        for block in dense.layout.blocks:
            (site,), tensors = block.sites, dense.tensors(block)
            weight = tensors[site.weight].double()
            weight += 1e-3 * torch.randn(weight.shape, generator=generator).double()
            found.advance(block, tensors, {site.key: (weight, None)})
            network.get_submodule(site.consumer).weight.copy_(weight)
        log_p = network(tokens, use_cache=False).logits.log_softmax(dim=-1)
    divergence = (log_q.exp() * (log_q - log_p)).sum(dim=-1).mean()
    assert sum(found.costs().values()) == pytest.approx(divergence.item(), rel=0.02)


@pytest.mark.parametrize("key", ["intermediate_size", "block_ff_dim"])
def test_widths_that_a_class_derives_are_written_as_they_are(key, ids, tmp_path):
    """Published LFM2: two thirds of the configured width, rounded up."""
    folder = saved(
        "lfm2", tmp_path / "model", intermediate_size=130, block_multiple_of=48,
        block_auto_adjust_ff_dim=True, layer_types=["conv", "full_attention", "conv"],
    )  # fmt: skip
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config[key] = config.pop("intermediate_size")
    path.write_text(json.dumps(config))
    check(folder, tmp_path / "out", ids)
    described = Description.of(read_config(tmp_path / "out"))
    assert (Dense.open(folder).shape.ffn, described.shape.ffn) == (96, 72)
    assert (described.config[key], described.config["block_auto_adjust_ff_dim"]) == (72, False)


@pytest.mark.parametrize("name", ["helium", "modernbert-decoder"])
def test_a_key_gives_all_projections_a_bias(name, ids, tmp_path):
    """Those that no compensation computes are zero."""
    dense, out = saved(name, tmp_path / "dense"), tmp_path / "out"
    coec.prune(dense, out, calibration=ids, **SETTINGS | {"compensation": "bias"})
    model, written = load(dense), Dense.open(out)
    layers, _ = decoder_of(model)
    with torch.no_grad(), masked(model, dense, out):
        for site in written.layout.sites:
            bias = written.tensor(site.bias)
            assert bias.any()
            consumer = model.get_submodule(layers + site.consumer.removeprefix("model.layers."))
            consumer.bias = torch.nn.Parameter(bias)
        torch.testing.assert_close(logits(load(out)), logits(model), rtol=1e-4, atol=1e-4)


def test_dropped_blocks_are_renumbered(models, ids, tmp_path):
    settings = {"calibration": ids, "samples": 8, "seq_len": 32, "preset": "balanced"}
    coec.prune(models["gpt_oss"], tmp_path / "out", drop_blocks=1, **settings)
    assert load(tmp_path / "out").config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama4_text", {"moe_layers": [0, 1, 2]}),
        ("llama4_text", {"moe_layers": [0, 2]}),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}),
        ("ernie4_5_moe", {"moe_layer_start_index": 2}),
        ("deepseek_v2", {"first_k_dense_replace": 2}),
    ],
)
def test_a_dropped_block_leaves_others_with_or_without_experts(name, changes, models, monkeypatch):
    config = read_config(models[name]) | changes
    dense = Description.of(config)
    plan = coec.plan(dense, preset="balanced", drop_blocks=1)
    short = Description.of(without_blocks(config, [1]))
    assert short.shapes == {
        new: shape for old, shape in dense.shapes.items() if (new := renumbered(old, [1]))
    }
    assert plan.dropped == (1,)
    # A class that reads none of these keys
    monkeypatch.setattr(checks, "without_blocks", lambda config, dropped: config)
    with pytest.raises(OptionError, match=f"drop_blocks is not supported for {name}: which of"):
        coec.plan(dense, preset="balanced", drop_blocks=1)


def test_kinds_that_follow_from_numbers_are_kept_or_refused():
    """Jamba's class takes no list of them; no more does Falcon-H1's, whose blocks are alike."""
    config = {**SIZES, "model_type": "jamba", "num_hidden_layers": 6, "attn_layer_period": 2,
              "attn_layer_offset": 1}  # fmt: skip
    with pytest.raises(OptionError, match="jamba: the kinds of its blocks follow from"):
        without_blocks(config, [2])
    config = {**SIZES, "model_type": "falcon_h1"}
    assert without_blocks(config, [1]) == {**config, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("gemma4_text", {"reconstruct": 2}, "reconstruct is not supported for gemma4_text"),
        ("gemma4_text", {"drop_blocks": 1}, "drop_blocks is not supported for gemma4_text"),
        ("apertus", {"by_block": True}, "intermediate_size of apertus is one number for all"),
        ("gpt_oss", {"by_block": True}, "by_block is not supported for a model of experts"),
        ("apertus", {"propagate": True}, "propagate is not supported for apertus"),
        ("apertus", {"attention_sparsity": 0.5}, "attention of apertus is kept whole"),
        ("apertus", {"compensation": "bias", "preset": "paper"}, "apertus: it has no bias"),
        ("apertus", {"expert_sparsity": 0.5}, "apertus has none"),
    ],
)
def test_what_a_type_cannot_have_is_said_before_work(name, settings, match, models):
    with pytest.raises(OptionError, match=match):
        coec.plan(models[name], **settings)


def test_types_without_channels_are_refused_with_the_reason(tmp_path):
    config = {**SIZES, "model_type": "bitnet", "architectures": ["BitNetForCausalLM"]}
    with pytest.raises(ModelError, match=r"'bitnet' has no channels .*ffn_sub_norm\.weight"):
        Description.of(config)
    sparse = {"activation_sparsity_pattern": [0.5, 0.0, 0.0]}
    with pytest.raises(ModelError, match="mlp compares channels with each other before mlp.down"):
        Dense.open(saved("gemma3n_text", tmp_path / "sparse", **sparse))
    with pytest.raises(ModelError, match="'bloom' is not supported: no decoder layers"):
        Description.of({"model_type": "bloom", "architectures": ["BloomForCausalLM"]})


def test_an_mlp_that_is_called_with_more_is_refused(monkeypatch):
    """Whether it compares channels with each other cannot be proven."""
    known = AutoConfig.for_model("apertus").to_dict()
    config = {**SIZES, "model_type": "apertus", "rope_parameters": known["rope_parameters"]}
    mlp = type(Description.of(config).skeleton().model.layers[0].mlp)
    monkeypatch.setattr(mlp, "forward", lambda self, hidden, routing: hidden)
    with pytest.raises(ModelError, match=r"'apertus' has no channels .*ApertusMLP cannot be run"):
        Description.of(config)


def test_a_class_that_builds_other_widths_is_refused(models, monkeypatch):
    """The size of a configuration that its class rounds: proven before work."""
    described = Description.of(Dense.open(models["apertus"]).config)
    of = Description.of

    def rounding(config, like=None):
        rounded = {**config, "intermediate_size": config["intermediate_size"] // 64 * 64}
        return of(rounded, like)

    monkeypatch.setattr(Description, "of", staticmethod(rounding))
    with pytest.raises(OptionError, match="a apertus of these widths is built otherwise"):
        coec.plan(described, sparsity=0.2)


def test_a_size_that_no_mlp_has_is_none():
    described = Description.of(tm.raw_config("llama"))
    model = described.skeleton()

    def build(config):
        raise ModelError("refused")

    with pytest.raises(ModelError, match="no size in its configuration belongs to an MLP alone"):
        infer(described.architecture, described.config, model, "model.layers.", build)


REFUSED = {
    "bitnet": "ffn_sub_norm.weight has numbers for every channel",
    "deepseek_v4": "is I64: models with tables are not supported",
    "zamba2": "has no channels to remove",
}
"""Types that cannot be pruned, and the reason."""


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "tools/tiny_decoders.py").is_file(), reason="needs shared/tools")
@pytest.mark.skipif(int(transformers.__version__.split(".")[1]) < 23, reason="has fewer types")
def test_every_decoder_that_is_built_small_keeps_the_contract(ids, tmp_path):
    tool = SHARED / "tools/tiny_decoders.py"
    types = tool.read_text().partition("TYPES='''")[2].partition("'''")[0].split()
    types.remove("emu3")  # whose size it does not set: several GB
    command = [sys.executable, tool, tmp_path / "dense", *types]
    subprocess.run(command, check=True, capture_output=True)
    folders = sorted((tmp_path / "dense").iterdir())
    failed, done = {}, 0
    for folder in folders:
        try:
            check(folder, tmp_path / "out" / folder.name, ids)
            done += 1
        except (ModelError, OptionError, AssertionError) as error:
            failed[folder.name] = str(error)
    assert failed.keys() == REFUSED.keys(), failed
    assert all(REFUSED[name] in said for name, said in failed.items()), failed
    assert done >= 60
