"""Language models without a table inside multimodal ones, with the names that the hub has."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

import coec
from coec.models.dense import Dense
from masking import masked

pytestmark = pytest.mark.unchecked  # whole models

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
QWEN = {
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 64, "spatial_merge_size": 2, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    },
    "image_token_id": 299, "video_token_id": 297, "vision_start_token_id": 298,
}  # fmt: skip
SIGHT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS = {
    "qwen3_5": {**QWEN, "text_config": TEXT | LINEAR},
    "qwen3_5_moe": {**QWEN, "text_config": TEXT | LINEAR | EXPERTS},
    "gemma4": {
        "text_config": TEXT | {
            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 300, "global_head_dim": 16, "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": SIGHT | {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8,
                                  "global_head_dim": 8},
        "audio_config": None, "image_token_id": 299,
    },
    "llama4": {
        "text_config": TEXT | {"num_local_experts": 4, "intermediate_size_mlp": 96,
                               "moe_layers": [1, 3], "attention_chunk_size": 64},
        "vision_config": SIGHT | {
            "intermediate_size": 64, "image_size": 16, "patch_size": 4, "projector_input_dim": 16,
            "projector_output_dim": 16, "vision_output_dim": 16,
        },
    },
}  # fmt: skip
"""Configurations of every kind."""


def load(folder):
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 51).reshape(2, 24), use_cache=False).logits


def language_model(model):
    return next(part for name, part in model.named_modules() if name.endswith("language_model"))


@pytest.mark.skipif(int(transformers.__version__.partition(".")[0]) < 5, reason="needs these types")
@pytest.mark.parametrize("kind", KINDS)
def test_the_language_model_is_pruned_in_place(kind, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **KINDS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    folder, out = tmp_path / "dense", tmp_path / "out"
    model.save_pretrained(folder)
    coec.prune(
        folder, out, calibration=torch.randint(3, 290, (24, 32)), preset="paper", sparsity=0.3,
        compensation="none", samples=24, seq_len=32, multiple_of=8, forward_dtype="float32",
    )  # fmt: skip
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    around = Dense.open(folder).carried
    assert any("vision" in name or "visual" in name for name in around)
    assert all(torch.equal(before[name], after[name]) for name in around)
    assert before.keys() == after.keys()
    assert sum(t.numel() for t in after.values()) < sum(t.numel() for t in before.values())
    dense = load(folder)
    with masked(language_model(dense), folder, out):
        expected = logits(dense)
    torch.testing.assert_close(logits(load(out)), expected, rtol=0, atol=1e-6)
