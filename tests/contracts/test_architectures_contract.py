"""Every architecture keeps the same promises, on random models in float64."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec.calibration.stream import DenseStream
from coec.compensation import COMPENSATIONS
from coec.errors import OptionError
from coec.models.architectures import ARCHITECTURES
from coec.models.dense import Dense
from coec.types import GramSum

pytestmark = pytest.mark.unchecked  # whole models

SETTINGS = {"sparsity": 0.3, "samples": 24, "seq_len": 32, "forward_dtype": "float64"}
BIASED = {
    "mistral sliding": "sliding window",
    "qwen2 mixed": "sliding window",
    "qwen3": "bias on down_proj",
}
"""Variants whose result no stock format can hold with biases, and what the error says."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every variant on disk, made once."""
    root = tmp_path_factory.mktemp("dense")
    tokens = tm.token_file(root / "tokens.npy")
    return {name: tm.save(tm.tiny(name), root / name) for name in tm.VARIANTS}, tokens


def test_every_architecture_has_a_variant():
    assert {v["model_type"] for v in tm.VARIANTS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("variant", tm.VARIANTS)
@pytest.mark.parametrize("compensation", COMPENSATIONS)
def test_a_written_checkpoint_computes_the_masked_dense_model(
    variant, compensation, folders, tmp_path
):
    models, tokens = folders
    options = {"rounds": 1} if compensation == "coec" else {}
    settings = {**SETTINGS, "calibration": tokens, "compensation": compensation, **options}
    if compensation == "bias" and variant in BIASED:
        with pytest.raises(OptionError, match=BIASED[variant]):
            coec.prune(models[variant], tmp_path / "out", **settings)
        return
    report = coec.prune(models[variant], tmp_path / "out", **settings)
    expected = tm.logits(tm.masked(tm.load(models[variant]), tmp_path / "out"))
    loaded = tm.load(tmp_path / "out")
    by_name = getattr(transformers, loaded.config.architectures[0])
    assert loaded.config.intermediate_size == 28
    assert loaded.config.num_key_value_heads == 3
    assert loaded.config.head_dim == tm.raw_config(variant)["head_dim"]
    assert sum(p.numel() for p in loaded.parameters()) == report.plan["parameters"]["after"]
    torch.testing.assert_close(tm.logits(loaded), expected, rtol=0, atol=1e-10)
    again = by_name.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert torch.equal(tm.logits(again), tm.logits(loaded))


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_removing_is_masking(variant, folders, tmp_path):
    """With no repair: the dense model with the removed units' outputs set to zero."""
    models, tokens = folders
    coec.prune(models[variant], tmp_path / "out", **SETTINGS, calibration=tokens,
               compensation="none", selection="magnitude")  # fmt: skip
    kept = load_file(tmp_path / "out/coec/kept.safetensors")
    dense = tm.load(models[variant])
    config = dense.config
    width = config.head_dim * config.num_attention_heads // config.num_key_value_heads
    for index, layer in enumerate(dense.model.layers):
        for site, module, columns in (
            ("attention", layer.self_attn.o_proj, width),
            ("mlp", layer.mlp.down_proj, 1),
        ):
            mask = torch.zeros(module.in_features, dtype=torch.float64)
            units = kept[f"layers.{index}.{site}"]
            mask[(units[:, None] * columns + torch.arange(columns)).flatten()] = 1
            module.register_forward_pre_hook(lambda _, args, mask=mask: (args[0] * mask,))
    difference = tm.logits(dense) - tm.logits(tm.load(tmp_path / "out"))
    assert float(difference.abs().max()) < 1e-10


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_streamed_statistics_are_those_of_the_whole_model(variant, folders):
    models, _ = folders
    ids = torch.randint(2, tm.VOCABULARY, (5, 32))
    checkpoint = Dense.open(models[variant])
    stream = DenseStream(checkpoint, ids, device=torch.device("cpu"), dtype=torch.float64)
    blocks = list(stream.blocks())
    dense, sums = tm.load(models[variant]), {}
    for index, layer in enumerate(dense.model.layers):
        for site, module in (("attention", layer.self_attn.o_proj), ("mlp", layer.mlp.down_proj)):
            total = sums[index, site] = GramSum(module.in_features)
            module.register_forward_pre_hook(lambda _, args, total=total: total.update(args[0]))
    tm.logits(dense, ids)
    assert len(blocks) == 2
    for block in blocks:
        for site, gram in block.grams.items():
            expected = sums[block.index, site].gram()
            assert gram.tokens == expected.tokens == 160
            torch.testing.assert_close(gram.xx, expected.xx, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(gram.x, expected.x, rtol=1e-9, atol=1e-9)
