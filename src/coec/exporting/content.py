"""The content of a GGUF file, planned before a byte of it is written, and its writing.

A tensor has another name there than in the model, perhaps another order of rows, and numbers of
fewer bits.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES
from gguf.quants import quantize
from jaxtyping import Float
from torch import Tensor

from coec.devices import is_finite
from coec.errors import ModelError
from coec.events import Progress
from coec.exporting import DEFAULT_DTYPES, GGUF_DTYPES
from coec.exporting.hyperparameters import (
    FACTORS,
    LINEAR,
    YARN,
    ExportTarget,
    Hyperparameters,
    choose_target,
)
from coec.exporting.tokenizer import GgufTokenizer, tokenizer_of
from coec.models.dense import Dense

_ROTATED = ("attn_q", "attn_k")
"""Matrices whose outputs rotary positions turn."""
_METADATA = 2**20
"""Bytes reserved for everything in a file except tensors and tokens."""
GGUF_TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in GGUF_DTYPES}
"""GGUF's types of numbers by the names of dtypes."""
_HALVES = {torch.float16: GGUF_TYPES["f16"], torch.bfloat16: GGUF_TYPES["bf16"]}
"""Types of weights that need no conversion."""
_LARGEST = {"F16": 65504.0, "Q8_0": 65504.0 * 127, "BF16": torch.finfo(torch.bfloat16).max}
"""Largest numbers that a type can hold."""
_SUFFIXES = (".weight", ".bias")
_MULTIPLIERS = {
    "attention_multiplier": "attention_scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
"""GGUF's names of Granite's multipliers, by their keys in a configuration."""
_DIVISORS = "rope_freqs.weight"
"""Tensor of the divisors of rotary frequencies."""


@dataclass(frozen=True)
class Entry:
    """Tensor of the file.

    Attributes:
        name, source: its name in the file, and in the model.
        shape: rows first, as in the model.
        heads: number of heads of its rows, where their order changes; else 0.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    gguf_type: gguf.GGMLQuantizationType
    heads: int = 0

    @property
    def size(self) -> int:
        """Size in bytes."""
        numbers, size = gguf.GGML_QUANT_SIZES[self.gguf_type]
        return math.prod(self.shape) * size // numbers

    def read(self, model: Dense) -> np.ndarray:
        """Read the bytes to write; raises ModelError for numbers that the type cannot hold."""
        weight = model.tensor(self.source)
        if self.heads:
            weight = interleaved(weight, self.heads)
        return encoded(weight, self.gguf_type, self.source)


def entries(
    model: Dense, arch: str, dtype: str, heads: dict[str, tuple[int, ...]]
) -> tuple[Entry, ...]:
    """List the tensors of the file: matrices in the chosen dtype, vectors in f32.

    A matrix whose rows do not divide into blocks of the dtype is f16. `heads` holds the
    heads of every block, for the tensors whose rows change their order.
    """
    # gguf's own table of names for this architecture; a tensor without a name there is refused.
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, len(model.layout.blocks))
    tensors: list[Entry] = []
    for source, shape in model.shapes.items():
        name = names.get_name(source, _SUFFIXES)
        if name is None:
            raise ModelError(f"{source} has no place in a GGUF file of architecture {arch}")
        gguf_type = GGUF_TYPES[dtype] if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        # Blocks of q8_0 hold 32 numbers of one row.
        if shape[-1] % gguf.GGML_QUANT_SIZES[gguf_type][0]:
            gguf_type = gguf.GGMLQuantizationType.F16
        scope, block, module = (*name.split("."), "", "")[:3]
        reordered = heads[module][int(block)] if scope == "blk" and module in heads else 0
        tensors.append(Entry(name, source, tuple(shape), gguf_type, reordered))
    return tuple(tensors)


def interleaved(rows: Float[Tensor, "rows *columns"], heads: int) -> Float[Tensor, "rows *columns"]:
    """Reorder rows of queries or keys for llama.cpp's rotary positions.

    Transformers turns rows `i` and `i + d/2` of a head together, llama.cpp rows `2i` and `2i + 1`.
    Products of queries and keys stay the same.
    """
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def encoded(weight: Tensor, gguf_type: gguf.GGMLQuantizationType, name: str) -> np.ndarray:
    """Convert numbers to the dtype of the file; raises ModelError if they would not be finite."""
    if _HALVES.get(weight.dtype) == gguf_type and is_finite(weight):
        return weight.contiguous().view(torch.uint8).numpy()  # as the weights are stored
    # Stored dtype → float32 → the file's type, whose range must hold it
    wide = weight.to(torch.float32)
    if not is_finite(wide):
        raise ModelError(f"{name} holds NaN or Inf, or numbers beyond float32: it is damaged")
    # A block of q8_0 has its largest number over 127 in f16.
    limit = _LARGEST.get(gguf_type.name)
    if limit is not None and float(wide.abs().max()) > limit:
        raise ModelError(f"{name} holds numbers beyond {limit:.7g}: pass dtype=bf16 or dtype=f32")
    numbers: Any = quantize(np.ascontiguousarray(wide.numpy()), gguf_type)
    return numbers


@dataclass(frozen=True)
class ExportPlan:
    """Content of one GGUF file; `dtype` is that of matrices."""

    model: Dense
    facts: Hyperparameters
    target: ExportTarget
    entries: tuple[Entry, ...]
    tokenizer: GgufTokenizer | None
    dtype: str

    @classmethod
    def of(
        cls, model: Dense, dtype: str | None, context: int | None, *, with_tokenizer: bool
    ) -> "ExportPlan":
        """Plan a file; raises CoecError where llama.cpp would compute another model."""
        facts = Hyperparameters.of(model, context)
        target = choose_target(model, facts)
        heads = dict(zip(_ROTATED, (facts.heads, facts.kv_heads))) if target.interleaved else {}
        chosen = dtype or DEFAULT_DTYPES[str(model.dtype).removeprefix("torch.")]
        tensors = entries(model, target.name, chosen, heads)
        tokenizer = tokenizer_of(model) if with_tokenizer else None
        return cls(model, facts, target, tensors, tokenizer, chosen)

    @property
    def fallback(self) -> tuple[Entry, ...]:
        """Matrices that do not have the chosen dtype."""
        chosen = GGUF_TYPES[self.dtype]
        return tuple(e for e in self.entries if len(e.shape) > 1 and e.gguf_type != chosen)

    @property
    def size(self) -> int:
        """Size of the file in bytes, rounded up."""
        tokens = self.tokenizer.tokens if self.tokenizer else ()
        # UTF-8 has at most 4 bytes a character; the rest is for lengths, types and scores.
        described = sum(4 * len(token) + 24 for token in tokens)
        return _METADATA + described + sum(entry.size for entry in self.entries)


def write(plan: ExportPlan, path: Path, progress: Progress | None) -> None:
    """Write the file in one pass over the model's tensors, which its dtype must hold."""
    writer = gguf.GGUFWriter(path, plan.target.name)
    factors = np.array(plan.facts.rotary.factors, dtype=np.float32)
    try:
        _describe(writer, plan)
        if plan.facts.rotary.scaling == FACTORS:
            writer.add_tensor_info(_DIVISORS, factors.shape, factors.dtype, factors.nbytes)
        # Names, shapes and types of all tensors come first in the file, their numbers later.
        for entry in plan.entries:
            # Only the type matters here, not the dtype of the numbers.
            dtype = np.dtype(np.float32)
            writer.add_tensor_info(entry.name, entry.shape, dtype, entry.size, entry.gguf_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if plan.facts.rotary.scaling == FACTORS:
            writer.write_tensor_data(factors)
        for count, entry in enumerate(plan.entries, start=1):
            writer.write_tensor_data(entry.read(plan.model))
            if progress:
                progress("writing", count, len(plan.entries))
    finally:
        writer.close()


def _describe(writer: gguf.GGUFWriter, plan: ExportPlan) -> None:
    facts, shape = plan.facts, plan.model.shape
    kind = "ALL_F32" if plan.dtype == "f32" else f"MOSTLY_{plan.dtype.upper()}"
    # One number if all blocks are alike: most architectures read no list.
    first = 0 if shape.uniform else slice(None)
    described = {
        "type": "model", "name": facts.name, "file_type": gguf.LlamaFileType[kind],
        "quantization_version": gguf.GGML_QUANT_VERSION, "vocab_size": plan.model.vocabulary,
        "context_length": facts.context, "embedding_length": shape.hidden,
        "block_count": len(facts.heads), "head_count": facts.heads[first],
        "head_count_kv": facts.kv_heads[first], "feed_forward_length": facts.ffn[first],
        "key_length": shape.head_dim, "value_length": shape.head_dim,
        "layer_norm_rms_eps": facts.epsilon, "rope_dimension_count": shape.head_dim,
        "rope_freq_base": facts.rotary.base,
    }  # fmt: skip
    described |= {_MULTIPLIERS[key]: value for key, value in facts.multipliers.items()}
    for name, value in described.items():
        getattr(writer, f"add_{name}")(value)
    if facts.rotary.scaling in (LINEAR, YARN):
        writer.add_rope_scaling_type(gguf.RopeScalingType(facts.rotary.scaling))
        writer.add_rope_scaling_factor(facts.rotary.factor)
    if facts.rotary.scaling == YARN:
        writer.add_rope_scaling_orig_ctx_len(facts.rotary.original)
    if plan.tokenizer is None:
        writer.add_tokenizer_model("none")  # a file that takes and gives token ids alone
    else:
        plan.tokenizer.add_to(writer)
