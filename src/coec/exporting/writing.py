"""Writing of a GGUF file: the model's description, then its tensors, one after the other."""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType, RopeScalingType

from coec.events import Progress
from coec.exporting.hyperparameters import FACTORS, LINEAR, YARN
from coec.exporting.plan import ExportPlan

_FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
}
_MULTIPLIERS = {
    "attention_multiplier": GGUFWriter.add_attention_scale,
    "embedding_multiplier": GGUFWriter.add_embedding_scale,
    "residual_multiplier": GGUFWriter.add_residual_scale,
    "logits_scaling": GGUFWriter.add_logit_scale,
}
"""Writer's methods for Granite's multipliers, by their keys in a configuration."""
_DIVISORS = "rope_freqs.weight"
"""Tensor of the divisors of rotary frequencies."""


def write(plan: ExportPlan, path: Path, progress: Progress | None) -> None:
    """Write the file in one pass over the model's tensors, which its dtype must hold."""
    writer = GGUFWriter(path, plan.target.name)
    factors = np.array(plan.facts.rotary.factors, dtype=np.float32)
    try:
        _describe(writer, plan)
        if plan.facts.rotary.scaling == FACTORS:
            writer.add_tensor_info(_DIVISORS, factors.shape, factors.dtype, factors.nbytes)
        # Names, shapes and types of all tensors come first in the file, their numbers later.
        for entry in plan.entries:
            # Beside the type, the dtype of the numbers plays no role.
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


def _describe(writer: GGUFWriter, plan: ExportPlan) -> None:
    facts, shape = plan.facts, plan.model.shape
    writer.add_type("model")
    writer.add_name(facts.name)
    writer.add_file_type(_FILE_TYPES[plan.dtype])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(plan.model.vocabulary)
    writer.add_context_length(facts.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(len(facts.heads))
    # One number where all blocks are alike: most architectures read no list.
    first = 0 if facts.uniform else slice(None)
    writer.add_head_count(facts.heads[first])
    writer.add_head_count_kv(facts.kv_heads[first])
    writer.add_feed_forward_length(facts.ffn[first])
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(facts.epsilon)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(facts.rotary.base)
    if facts.rotary.scaling in (LINEAR, YARN):
        writer.add_rope_scaling_type(RopeScalingType(facts.rotary.scaling))
        writer.add_rope_scaling_factor(facts.rotary.factor)
    if facts.rotary.scaling == YARN:
        writer.add_rope_scaling_orig_ctx_len(facts.rotary.original)
    for key, value in facts.multipliers.items():
        _MULTIPLIERS[key](writer, value)
    if plan.tokenizer is None:
        writer.add_tokenizer_model("none")  # a file that takes and gives token ids alone
    else:
        plan.tokenizer.add_to(writer)
