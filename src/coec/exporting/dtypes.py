"""The dtypes that a GGUF file's matrices may have, without importing what writes them."""

from typing import Literal, get_args

DtypeName = Literal["f32", "f16", "bf16", "q8_0"]
DTYPES: tuple[str, ...] = get_args(DtypeName)
STORED = {"float64": "f32", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""That of the file by that of the weights, where none is asked for."""
