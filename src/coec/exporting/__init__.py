"""Checkpoints in the formats of other programs: GGUF, which llama.cpp reads."""

GGUF_DTYPES = ("f32", "f16", "bf16", "q8_0")
DEFAULT_DTYPES = {"float64": "f32", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""The dtype in the file by that of the weights, where the user names none."""
