"""Small random checkpoints of every model type, dense and pruned, for clients to load.

Beside each are token ids, the logits that transformers computes of them in float64, and a greedy
text: what a client has to reproduce.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import coec
from coec.errors import CoecError
from coec.models.architectures import ARCHITECTURES
from coec.models.dense import Dense
from coec.models.formats import Traits
from coec.models.layout import Shape

VOCABULARY, POSITIONS, LENGTH, START, STEPS = 320, 64, 32, 8, 8
"""Of a model, and of what is run: ids whose logits are compared, the first of them, from which a
text is continued, and by how many tokens."""
DIVISIBLE = 192
"""A hidden size that is a multiple of 8 heads, and of the 6 that 30 % leaves; 256 is none of 6."""
BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
WINDOWED = {"hidden_size": DIVISIBLE, "sliding_window": 16, "tie_word_embeddings": True}
DEEP = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
PARTICULARS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "granite": {
        "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    },
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
    "smollm3": {"num_hidden_layers": 4},  # of which the last has no positions
    "gemma2": {**WINDOWED, "query_pre_attn_scalar": 32},
    "gemma3_text": {**WINDOWED, "query_pre_attn_scalar": 32},
    "cohere2": {
        "num_hidden_layers": 4, "sliding_window": 16, "tie_word_embeddings": True,
        "rotary_pct": 1.0,  # which published ones have, and nothing but converters reads
    },
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 16},
    "exaone4": {
        "sliding_window": None, "sliding_window_pattern": None,
        "layer_types": ["full_attention"] * 2,
    },
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "starcoder2": {"use_bias": True, "tie_word_embeddings": True, "sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 8},
    "glm4_moe": {
        **DEEP, "n_shared_experts": 1, "use_qk_norm": True, "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": {
        **DEEP, "n_shared_experts": 2, "num_key_value_heads": 8, "q_lora_rank": 96,
        "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
        "head_dim": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
}  # fmt: skip
"""What a model type has besides `BASE`; one that is not here needs nothing. Which layers are
without positions or see a window is as in published models: some clients know no other."""
HYBRID = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
STATE_SPACE = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 32}
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
INFERRED: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HYBRID,
    "qwen3_next": {
        **HYBRID, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160,
        "shared_expert_intermediate_size": 160,
    },
    "gemma4_text": {
        "num_hidden_layers": 6, "sliding_window": 16, "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY,
        "global_head_dim": 64, "final_logit_softcapping": 30.0,
    },
    "gpt_oss": {
        **FOUR, "intermediate_size": 160, "sliding_window": 16, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": True, "original_max_position_embeddings": 16,
        },
    },
    "llama4_text": {
        **FOUR, "num_hidden_layers": 4, "intermediate_size": 96, "intermediate_size_mlp": 300,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    },
    "granitemoehybrid": {
        **FOUR, **STATE_SPACE, "intermediate_size": 96, "shared_intermediate_size": 300,
        "layer_types": ["linear_attention", "full_attention"],
        "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 1.5,
        "attention_multiplier": 0.3,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "num_hidden_layers": 4, "mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 32,
        "n_groups": 2, "chunk_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 96,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"], "tie_word_embeddings": True,
        "intermediate_size": 448, "block_multiple_of": 100,
    },
    "glm4_moe_lite": {
        **DEEP, "n_group": 1, "n_shared_experts": 1, "num_key_value_heads": 8, "q_lora_rank": 96,
        "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
        "head_dim": 64, "scoring_func": "sigmoid",  # known to llama.cpp by 47 layers otherwise
    },
    "minimax_m2": {**FOUR, "intermediate_size": 160, "rotary_dim": 16},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 96, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 1, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""The most used types without a table, and what each has besides `BASE`."""
RELEASED: dict[str, dict[str, Any]] = {
    "gemma4_text": {"global_head_dim": 64, "per_layer_config": None},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "time_step_limit": None},
    "nemotron_h": {
        "hybrid_override_pattern": "ME*E", "num_hidden_layers": 4, "layers_block_type": None,
        "time_step_limit": None,
    },
    "lfm2": {
        "conv_dim": 256, "block_dim": 256, "block_ff_dim": 448, "block_auto_adjust_ff_dim": True,
        "intermediate_size": None,
    },
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
}  # fmt: skip
"""Keys of published configurations, which transformers 5 writes otherwise or leaves out (None:
which it adds): some clients read no other."""
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama, llama3 positions": {"model_type": "llama", "rope_scaling": LLAMA_3},
    "mistral, sliding window": {"model_type": "mistral", "sliding_window": 16},
}
"""Subjects besides one of every model type."""
WAYS: dict[str, dict[str, Any]] = {
    "paper": {},
    "fast": {"preset": "fast"},
    "balanced": {"preset": "balanced"},
    "bias": {"compensation": "bias"},
    "align 32": {"multiple_of": "32"},
    "query heads": {"attention_units": "heads", "attention_sparsity": 0.5},
    "MLP alone": {"attention_sparsity": 0},
    "MLP alone, bias": {"attention_sparsity": 0, "compensation": "bias"},
    "target vllm": {"target": "vllm"},
    "target llama.cpp": {"target": "llama.cpp"},
    "experts": {"preset": "fast", "expert_sparsity": 0.25},
}
"""How a dense model is pruned: by `paper` but for these settings."""
OF_INFERRED = ("fast", "align 32", "experts")
"""How a type without a table is pruned: its attention keeps all units."""
DENSE = "dense"


@dataclass(frozen=True)
class Checkpoint:
    """A folder that clients are given, or why there is none.

    Attributes:
        subject: the dense model.
        way: how it was pruned, of `WAYS`, or `DENSE`.
        stored: the model type that it is stored as; None where coec refuses.
        sizes: its sizes; none where coec refuses.
        biased: the sites whose consumer has a bias.
        config: the keys of its configuration that findings ask about, `CONFIG`.
        refusal: why coec does not make it, in its words.
    """

    subject: str
    way: str
    stored: str | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    biased: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None

    @property
    def name(self) -> str:
        """Of its folder."""
        words = f"{self.subject} {self.way}".replace(",", "").replace(".", "-")
        return words.replace(" ", "-")

    def known(self) -> Traits:
        """The properties that loaders disagree on."""
        config = {"num_hidden_layers": self.sizes["layers"], **self.config}
        assert self.stored is not None
        return Traits(self.stored, config, Shape(**self.sizes), frozenset(self.biased))


CONFIG = (
    "sliding_window", "layer_types", "use_sliding_window", "max_window_layers",
    "max_position_embeddings", "rope_scaling", "rope_parameters",
)  # fmt: skip


def subjects() -> dict[str, dict[str, Any]]:
    """Name → configuration of every dense model."""
    found = {name: {"model_type": name} for name in (*ARCHITECTURES, *INFERRED)} | VARIANTS
    return {
        name: {**BASE, **(PARTICULARS | INFERRED).get(changes["model_type"], {}), **changes}
        for name, changes in found.items()
    }


def made(folder: Path, names: list[str]) -> Iterator[Checkpoint]:
    """Every checkpoint of some subjects, written below a folder, or why it is not.

    What is asked for as a loader's is left out where that changes nothing, or is refused: what a
    loader cannot do is found here in the first place.
    """
    tokens = folder / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(2, VOCABULARY, size=(32, 48)))
    for subject in names:
        dense = _dense(folder, subject)
        yield dense
        of_defaults = None
        for way, settings in _ways(dense).items():
            one = _pruned(folder, dense, way, {"calibration": str(tokens), **settings})
            of_defaults = one.stored if way == "paper" else of_defaults
            if not way.startswith("target") or one.stored not in (None, of_defaults):
                yield one


def _ways(dense: Checkpoint) -> dict[str, dict[str, Any]]:
    """The ways to prune a model: without experts, and without a table, there are fewer."""
    ways = WAYS if dense.subject not in INFERRED else {way: WAYS[way] for way in OF_INFERRED}
    return {way: it for way, it in ways.items() if way != "experts" or dense.sizes["experts"]}


def _dense(folder: Path, subject: str) -> Checkpoint:
    """A random model; biases and norms are random too, since zeros and ones hide mistakes."""
    config = AutoConfig.for_model(**subjects()[subject])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(0.0, 0.5)  # 4.57 takes a score below 0 for one of another group
    place = folder / Checkpoint(subject, DENSE).name
    model.save_pretrained(place)
    described = place / "config.json"
    keys = json.loads(described.read_text(encoding="utf-8")) | RELEASED.get(subject, {})
    keys = {key: value for key, value in keys.items() if value is not None}
    described.write_text(json.dumps(keys), encoding="utf-8")
    _tokenizer().save_pretrained(place)
    settings = place / "tokenizer_config.json"
    text = settings.read_text(encoding="utf-8")
    # The class that transformers 5 names is unknown to 4.
    settings.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    return _described(Checkpoint(subject, DENSE), place)


def _pruned(folder: Path, dense: Checkpoint, way: str, settings: dict[str, Any]) -> Checkpoint:
    one = Checkpoint(dense.subject, way)
    place = folder / one.name
    try:
        settings = {"preset": "paper", "samples": 32, "seq_len": 48, **settings}
        coec.prune(folder / dense.name, place, sparsity=0.3, **settings)
    except CoecError as error:
        return Checkpoint(dense.subject, way, refusal=str(error))
    return _described(one, place)


def _described(one: Checkpoint, place: Path) -> Checkpoint:
    """The checkpoint as it is stored, with what is expected of it beside it."""
    dense = Dense.open(place)
    network = dense.network(torch.device("cpu"), torch.float64)
    ids = torch.randint(2, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = network(input_ids=ids, use_cache=False).logits[0]
        text = ids[:, :START]
        for _ in range(STEPS):
            following = network(input_ids=text, use_cache=False).logits[:, -1:].argmax(dim=-1)
            text = torch.cat([text, following], dim=1)
    np.savez(place.with_suffix(".npz"), ids=ids[0], logits=logits, greedy=text[0, START:])
    biased = (site.name for site in dense.layout.kinds if site.bias in dense.files)
    return Checkpoint(
        one.subject, one.way, dense.config["model_type"], asdict(dense.shape),
        tuple(biased), {key: dense.config[key] for key in CONFIG if key in dense.config},
    )  # fmt: skip


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, after the start, the end and what is unknown; others to fill it up."""
    names = ["<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<unused{place}>" for place in range(VOCABULARY - len(names))]
    vocabulary = {name: at for at, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>",
        unk_token="<unk>", model_max_length=POSITIONS,
    )  # fmt: skip
