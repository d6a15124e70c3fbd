"""Random models of two blocks, and what goes with them; no network."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM

from coec.models.dense import Dense
from coec.types import KeptSet

HIDDEN, FFN, VOCABULARY, POSITIONS = 32, 40, 300, 64
BASE = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
DEEP = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "pad_token_id": 0,
}
VARIANTS = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama wide heads": {"model_type": "llama", "head_dim": 6},
    "llama rope": {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral sliding": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 mixed": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3"},
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    },
    "seed_oss": {"model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": 0},
    # Their configurations, like Llama's, want the hidden size to be a multiple of the heads.
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 48,
        "sliding_window": 8,
        "query_pre_attn_scalar": 4,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_size": 48,
        "sliding_window": 8,
        "query_pre_attn_scalar": 4,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "cohere2": {
        "model_type": "cohere2",
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "olmo2": {"model_type": "olmo2", "pad_token_id": 0},
    "olmo3": {"model_type": "olmo3", "sliding_window": 8, "pad_token_id": 0},
    "ernie4_5": {"model_type": "ernie4_5", "pad_token_id": 0},
    "exaone4": {
        "model_type": "exaone4",
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "pad_token_id": 0,
    },
    "glm4": {"model_type": "glm4", "attention_bias": True, "pad_token_id": 0},
    "starcoder2": {"model_type": "starcoder2", "use_bias": True, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "phi3 partial": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "partial_rotary_factor": 0.5,
        "sliding_window": 8,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
    },
    # Its first block has no experts.
    "qwen3_moe mixed": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [0],
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    # Their first block has no experts.
    "glm4_moe": {"model_type": "glm4_moe", **DEEP, "use_qk_norm": True, "n_shared_experts": 1},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **DEEP,
        "n_shared_experts": 2,
        "num_key_value_heads": 8,
        "kv_lora_rank": 8,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}

USUAL = ("llama", "qwen2", "qwen3", "gemma2", "starcoder2", "phi3", "mixtral", "deepseek_v3")
"""Those that every run of the tests takes; the others take `make slow`."""


def raw_config(variant: str = "llama", **changes) -> dict:
    """A configuration as config.json has it."""
    # Configuration classes change the dictionaries they are given.
    return copy.deepcopy({**BASE, **VARIANTS[variant], **changes})


def tiny(variant: str = "llama", dtype: torch.dtype = torch.float64, **changes):
    """A random model; biases and norms are random too, since zeros and ones hide mistakes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**raw_config(variant, **changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    return model.to(dtype)


def save(model, folder: Path, *, tokenizer: bool = True) -> Path:
    """The model as a folder, with a byte-level tokenizer unless told otherwise."""
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token per byte, ids from 2; 0 and 1 are the start and end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {symbol: i + 2 for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def begin_texts(folder: Path) -> Path:
    """Have the tokenizer of a folder put its start before a text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def token_file(path: Path, rows: int = 24, length: int = 32) -> str:
    """Random token ids as .npy, rows of one length."""
    ids = np.random.default_rng(0).integers(2, VOCABULARY, size=(rows, length))
    np.save(path, ids)
    return str(path)


def text_file(path: Path, characters: int = 4000) -> str:
    """Some text with as many byte tokens as characters."""
    words = "the cat sat on a mat and looked at the moon for a long while. "
    path.write_text((words * (characters // len(words) + 1))[:characters])
    return str(path)


@torch.no_grad()
def logits(model, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Logits on fixed random tokens, or on those given."""
    if ids is None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(2, VOCABULARY, (3, 24), generator=generator)
    if hasattr(model.config, "num_experts") or hasattr(model.config, "n_routed_experts"):
        model.set_experts_implementation("eager")  # all at once they run in float32 at most
    return model(input_ids=ids, use_cache=False).logits


def load(folder: Path, dtype: torch.dtype | None = None):
    """What a user does with a written checkpoint."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto").eval()


def check_use(loaded, folder: Path) -> None:
    """A model of code beside its weights generates with a cache, and is saved and loaded again."""
    start = torch.tensor([[3, 4, 5]])
    cached, plain = (
        loaded.generate(start, max_new_tokens=8, do_sample=False, use_cache=cache)
        for cache in (True, False)
    )
    assert torch.equal(cached, plain)
    loaded.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float64
    )
    assert torch.equal(logits(again.eval()), logits(loaded))


def masked(dense, out):
    """The dense model with the written consumers spread back over all columns, zeros elsewhere."""
    kept, written = load_file(out / "coec/kept.safetensors"), Dense.open(out)
    with torch.no_grad():
        for site in Dense.open(dense.config._name_or_path).layout.sites:
            weight = consumer(dense, site)
            units = KeptSet(kept[site.key], site.units)
            spread = torch.zeros_like(weight)
            spread[:, site.kept_columns(units).indices] = written.tensor(site.weight).to(weight)
            weight.copy_(spread)
            if site.bias in written.files:
                module = dense.get_submodule(site.consumer)
                module.bias = torch.nn.Parameter(written.tensor(site.bias).to(weight))
    return dense


def consumer(model, site) -> torch.Tensor:
    """The weight of a site's consumer in a model."""
    if site.routed:
        block, number = model.model.layers[site.block], int(site.name.removeprefix("expert."))
        return block.mlp.experts.down_proj[number]
    return model.get_submodule(site.consumer).weight


def readable(folder: Path, copy: Path) -> Path:
    """A copy whose tokenizer class both transformers 4.57 and 5 know; the weights are the same."""
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    path = copy / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return copy
