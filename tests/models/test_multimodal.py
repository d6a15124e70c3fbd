"""Language models inside others (LLaVA, Gemma 3, …): pruned in place, the rest as it was."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec import solve
from coec.checkpoint import checkpoint
from coec.errors import ModelError, OptionError
from coec.models.dense import Dense
from coec.planning.memory import disk
from coec.types import KeptSet

pytestmark = pytest.mark.unchecked  # whole models

IMAGE = 299
"""The token id that stands for a part of an image."""
SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 300, "max_position_embeddings": 128,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16,
}  # fmt: skip
SETTINGS = {"preset": "paper", "sparsity": 0.5, "samples": 24, "seq_len": 32}
KINDS = ("llava", "gemma3", "qwen2_5_vl", "mistral3")


def config(kind):
    """A tiny configuration of a kind."""
    t = transformers
    if kind == "llava":
        return t.LlavaConfig(
            vision_config=t.CLIPVisionConfig(**VISION, patch_size=8),
            text_config=t.LlamaConfig(**SIZES, head_dim=4), image_token_index=IMAGE,
        )  # fmt: skip
    if kind == "gemma3":
        return t.Gemma3Config(
            text_config=t.Gemma3TextConfig(**SIZES, head_dim=4, sliding_window=64),
            vision_config=t.SiglipVisionConfig(**VISION, patch_size=4), mm_tokens_per_image=4,
            image_token_index=IMAGE, boi_token_index=297, eoi_token_index=298,
        )  # fmt: skip
    if kind == "mistral3":
        text = {k: v for k, v in tm.raw_config("ministral3").items() if k != "model_type"}
        return t.Mistral3Config(
            vision_config=t.PixtralVisionConfig(**VISION, patch_size=4),
            text_config=t.Ministral3Config(**text), image_token_index=IMAGE, spatial_merge_size=2,
            tie_word_embeddings=False,
        )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
    vision = {"hidden_size": 16, "intermediate_size": 32, "depth": 2, "num_heads": 2,
              "patch_size": 4, "out_hidden_size": 32, "spatial_merge_size": 2}  # fmt: skip
    return t.Qwen2_5_VLConfig(
        text_config=SIZES | {"rope_parameters": rope}, vision_config=vision,
        image_token_id=IMAGE, vision_start_token_id=298, video_token_id=297,
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Every kind on disk."""
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("these classes were tried with transformers 5")
    root, folders = tmp_path_factory.mktemp("multimodal"), {}
    for kind in KINDS:
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config(kind))
        model.save_pretrained(root / kind)
        (root / kind / "preprocessor_config.json").write_text('{"size": 16}')
        folders[kind] = root / kind
    return folders


def load(folder):
    model, said = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True
    )
    assert not any(said.values())
    return model.eval()


def logits(model):
    """Of a text with an image in it."""
    torch.manual_seed(1)
    kind = model.config.model_type
    ids = torch.tensor([[5, 6, 298, IMAGE, IMAGE, IMAGE, IMAGE, 8, 9]])
    more = {"pixel_values": torch.randn(1, 3, 16, 16, dtype=torch.float64)}
    if kind == "qwen2_5_vl":
        more["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4, dtype=torch.float64)
        more["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    if kind == "mistral3":
        more["image_sizes"] = torch.tensor([[16, 16]])
    if kind == "gemma3":
        more["token_type_ids"] = (ids == IMAGE).long()
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **more).logits


def masked(folder, out):
    """The dense model with the columns of removed units at 0."""
    model, kept = load(folder), load_file(out / "coec/kept.safetensors")
    units = json.loads((out / "coec.json").read_text())["recipe"]["attention_units"]
    with torch.no_grad():
        inner = getattr(model.model, "language_model", None) or model.model.text_model
        for site in Dense.open(folder).counted_in(units).layout.sites:
            name = site.weight.removeprefix("model.")
            columns = site.kept_columns(KeptSet(kept[site.key], site.units)).dropped()
            inner.get_parameter(name)[:, columns] = 0
    return model


CASES = [
    ("llava", {}), ("gemma3", {}), ("qwen2_5_vl", {"attention_sparsity": 0}),
    ("llava", {"attention_units": "heads"}), ("mistral3", {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_removing_is_masking_with_an_image_too(kind, changes, models, tokens, tmp_path):
    out = tmp_path / "out"
    settings = SETTINGS | {"compensation": "none", "calibration": tokens} | changes
    report = coec.prune(models[kind], out, **settings)
    torch.testing.assert_close(
        logits(load(out)), logits(masked(models[kind], out)), rtol=0, atol=1e-12
    )
    assert "is the language model inside" in report.plan["notes"][0]
    assert "other names" not in str(report.plan["notes"])  # nothing wraps it
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "model = AutoModelForImageTextToText.from_pretrained(" in card
    assert "processor = AutoProcessor.from_pretrained(" in card
    before, after = (load_file(folder / "model.safetensors") for folder in (models[kind], out))
    outside = Dense.open(models[kind]).carried
    assert outside
    assert all(torch.equal(before[name], after[name]) for name in outside)
    assert before.keys() == after.keys()
    assert (out / "preprocessor_config.json").read_text() == '{"size": 16}'
    planned, _ = disk(coec.plan(models[kind], **settings))
    assert planned == pytest.approx(sum(tensor.nbytes for tensor in after.values()), rel=0.02)


def gemma(folder, *left_out):
    """Gemma 3 with heads as its class has them, and keys left out of both configurations."""
    whole = config("gemma3")
    whole.text_config.head_dim = 256
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(whole).save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    for keys in (said, said["text_config"]):
        for key in left_out:
            keys.pop(key, None)
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_what_a_release_leaves_out_is_what_its_class_has(tokens, tmp_path):
    """As Gemma 3 4B is released: no number of heads, and no word on the head of the model."""
    left_out = ("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings")
    dense, out = gemma(tmp_path / "dense", *left_out), tmp_path / "out"
    settings = SETTINGS | {"compensation": "none", "calibration": tokens}
    coec.prune(dense, out, **settings)
    assert load(out).config.text_config.num_attention_heads == 4
    torch.testing.assert_close(logits(load(out)), logits(masked(dense, out)), rtol=0, atol=1e-12)


def test_a_head_apart_is_written_as_one(tokens, tmp_path):
    """Releases of transformers read one place or the other."""
    dense, out = gemma(tmp_path / "dense"), tmp_path / "out"
    tm.edit_weights(dense, lambda t: t.update({"lm_head.weight": torch.ones(300, 32)}))
    coec.prune(dense, out, **SETTINGS | {"compensation": "none", "calibration": tokens})
    said = json.loads((out / "config.json").read_text())
    assert said["tie_word_embeddings"] is said["text_config"]["tie_word_embeddings"] is False
    assert load(out).lm_head.weight.eq(1).all()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_calls_it_text_model(tied, tokens, tmp_path):
    """Idefics 3, and SmolVLM after it."""
    text = transformers.LlamaConfig(**SIZES, head_dim=4, tie_word_embeddings=tied)
    whole = transformers.Idefics3Config(
        vision_config=VISION | {"patch_size": 4}, text_config=text, image_token_id=IMAGE,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(whole)
    model.save_pretrained(dense := tmp_path / "dense")
    settings = SETTINGS | {"compensation": "none", "calibration": tokens}
    coec.prune(dense, tmp_path / "out", **settings)
    ids, out = torch.arange(5, 40)[None], tmp_path / "out"
    found, expected = (tm.logits(m, ids) for m in (load(out), masked(dense, out)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_block_less_with_an_image_too(kind, tokens, tmp_path, monkeypatch):
    torch.manual_seed(0)
    whole = config(kind)
    whole.text_config.num_hidden_layers = 4
    if hasattr(whole.text_config, "layer_types"):
        whole.text_config.layer_types = (whole.text_config.layer_types * 2)[:4]
    model = transformers.AutoModelForImageTextToText.from_config(whole)
    model.save_pretrained(tmp_path / "dense")
    settings = {"preset": "fast", "samples": 24, "seq_len": 32, "calibration": tokens}
    settings |= {"sparsity": 1e-6, "attention_sparsity": 0, "compensation": "none"}
    settings |= {"propagate": False, "reconstruct": 1}
    monkeypatch.setattr(solve, "RATE", 1e-30)
    report = coec.prune(tmp_path / "dense", tmp_path / "out", **settings, drop_blocks=1)
    [dropped] = report.plan["dropped_blocks"]
    expected = load(tmp_path / "dense")
    language = expected.model.language_model
    language.layers = torch.nn.ModuleList(
        layer for n, layer in enumerate(language.layers) if n != dropped
    )
    language.config.num_hidden_layers = 3
    loaded = load(tmp_path / "out")
    assert loaded.config.text_config.num_hidden_layers == 3
    torch.testing.assert_close(logits(loaded), logits(expected), rtol=0, atol=1e-6)


def test_transformers_alone_measures_the_same(models, tokens):
    """Sizes of the language model are in a part of the configuration."""
    settings = {"seq_len": 32, "device": "cpu"}
    one, other = (
        coec.perplexity(models["gemma3"], tokens, via=via, **settings)
        for via in ("coec", "transformers")
    )
    assert other.perplexity == pytest.approx(one.perplexity, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_of_memory_counts_what_is_around(kind, models, tokens, tmp_path):
    whole = (models[kind] / "model.safetensors").stat().st_size
    allowed = f"{0.85 * whole / 1000:.0f}kB"
    settings = SETTINGS | {"calibration": tokens, "attention_sparsity": 0, "compensation": "none"}
    settings |= {"dtype": "float32", "context": 1, "budget": allowed}
    settings.pop("sparsity")
    coec.prune(models[kind], tmp_path / "out", **settings)
    tensors = load_file(tmp_path / "out/model.safetensors").values()
    cache = 2 * 2 * 4 * 4 * 4  # keys and values of a token in both blocks
    assert 0.75 * whole < sum(t.nbytes for t in tensors) + cache <= 0.85 * whole + 500


@pytest.mark.parametrize("preset", ["fast", "balanced"])
@pytest.mark.slow
def test_compensations_and_shards(preset, models, tokens, tmp_path, monkeypatch):
    settings = {**SETTINGS, "preset": preset, "calibration": tokens, "dtype": "float32"}
    settings |= {"reconstruct": 1} if preset == "balanced" else {}
    coec.prune(models["llava"], tmp_path / "one", **settings)
    monkeypatch.setattr(checkpoint, "MAX_SHARD", 20_000)
    coec.prune(models["llava"], tmp_path / "several", **settings)
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    one, several = (load(tmp_path / name) for name in ("one", "several"))
    assert torch.equal(logits(one), logits(several))
    # Over text the whole model is what is measured.
    own = Dense.open(tmp_path / "one").network(torch.device("cpu"), torch.float64)
    ids = torch.arange(5, 40)[None]
    torch.testing.assert_close(tm.logits(one, ids), tm.logits(own, ids))
    found = coec.perplexity(tmp_path / "one", tokens, baseline=models["llava"], seq_len=32)
    assert 0 < found.kl < 1


def test_names_of_other_releases_are_read_and_kept(models, tokens, tmp_path):
    settings = {**SETTINGS, "preset": "fast", "calibration": tokens}
    coec.prune(models["llava"], tmp_path / "out", **settings)
    copy = shutil.copytree(models["llava"], tmp_path / "copy")
    tm.edit_weights(copy, lambda weights: {renamed(name): w for name, w in weights.items()})
    coec.prune(copy, tmp_path / "other", **settings)
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(tmp_path / "other")))
    names = load_file(tmp_path / "other/model.safetensors").keys()
    assert {"lm_head.weight", "model.language_model.norm.weight"} <= names


def renamed(name):
    name = name.replace("language_model.model.", "model.language_model.")
    return name.replace("language_model.lm_head", "lm_head")


def test_a_plan_needs_the_configuration_alone(models):
    plan = coec.plan(models["gemma3"] / "config.json", sparsity=0.5, preset="paper")
    assert (plan.pruned.ffn, plan.pruned.kv_heads) == (20, 2)
    assert plan.output.model_type == "gemma3_text"


def test_what_cannot_be_is_refused(models, tokens, tmp_path):
    settings = SETTINGS | {"calibration": tokens}
    with pytest.raises(OptionError, match="VL.* cannot hold a language model .* set attention_sp"):
        coec.prune(models["qwen2_5_vl"], tmp_path / "out", **settings)
    with pytest.raises(OptionError, match="by_block"):
        coec.prune(models["llava"], tmp_path / "out", **settings, by_block=True)
    coec.prune(models["llava"], tmp_path / "out", **settings)
    with pytest.raises(OptionError, match="models of language alone, and .*llava.* inside Llava"):
        coec.recover(models["llava"], tmp_path / "out", tmp_path / "trained", text=tokens)
    alone = tm.save(tm.tiny("llama", torch.float32), tmp_path / "alone")
    coec.prune(alone, tmp_path / "of-alone", **settings)
    with pytest.raises(OptionError, match="models of language alone, and .*llava.* inside Llava"):
        coec.recover(
            alone, tmp_path / "of-alone", tmp_path / "trained", text=tokens, teacher=models["llava"]
        )
    copy = shutil.copytree(models["llava"], tmp_path / "copy")
    said = json.loads((copy / "config.json").read_text())
    said["text_config"]["model_type"] = "mamba"
    (copy / "config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match="'mamba' has no channels to remove"):
        coec.prune(copy, tmp_path / "none", **settings)
    assert not (tmp_path / "none").exists()
