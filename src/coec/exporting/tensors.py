"""Tensors as a GGUF file stores them: names, the order of rows, numbers of fewer bits."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    get_tensor_name_map,
)
from gguf.constants import MODEL_ARCH_NAMES
from gguf.quants import quantize
from jaxtyping import Float
from torch import Tensor

from coec.errors import ModelError
from coec.exporting.dtypes import DTYPES
from coec.models.dense import Dense

KINDS = {name: GGMLQuantizationType[name.upper()] for name in DTYPES}
"""How a matrix is stored, by the dtype asked for."""
HALVES = {torch.float16: KINDS["f16"], torch.bfloat16: KINDS["bf16"]}
"""What needs no conversion."""
LARGEST = {"F16": 65504.0, "Q8_0": 65504.0 * 127, "BF16": torch.finfo(torch.bfloat16).max}
"""Numbers beyond which a kind has none."""
SUFFIXES = (".weight", ".bias")


@dataclass(frozen=True)
class Entry:
    """One tensor of the file.

    Attributes:
        name: in the file.
        source: the model's own name.
        shape: rows first, as the model has it.
        kind: how its numbers are stored.
        heads: how many heads its rows belong to, where their order changes; else 0.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    heads: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return self.size_as(self.kind)

    def size_as(self, kind: GGMLQuantizationType) -> int:
        """Bytes of as many numbers of another kind."""
        block, of_block = GGML_QUANT_SIZES[kind]
        return math.prod(self.shape) * of_block // block

    def read(self, model: Dense) -> np.ndarray:
        """The bytes to write; raises ModelError for numbers that the kind cannot hold."""
        weight = model.tensor(self.source)
        if self.heads:
            weight = interleaved(weight, self.heads)
        return encoded(weight, self.kind, self.source)


def named(model: Dense, arch: str) -> dict[str, str]:
    """The model's names of its tensors by those in GGUF, in the order of the model.

    Raises:
        ModelError: a tensor has no place in the file.
    """
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    known = get_tensor_name_map(number, len(model.layout.blocks))
    names: dict[str, str] = {}
    for source in model.shapes:
        name = known.get_name(source, SUFFIXES)
        if name is None:
            raise ModelError(f"{source} has no place in a GGUF file of architecture {arch}")
        names[name] = source
    return names


def entries(
    model: Dense, names: dict[str, str], dtype: str, heads: dict[str, tuple[int, ...]]
) -> tuple[Entry, ...]:
    """Every tensor of the file: matrices in the dtype asked for, vectors in f32.

    Args:
        names: as `named` gives them.
        dtype: a key of `KINDS`. A matrix whose rows do not divide into its blocks is f16.
        heads: of every block, for the tensors whose rows change their order.
    """
    found: list[Entry] = []
    for name, source in names.items():
        shape = tuple(model.shapes[source])
        kind = KINDS[dtype] if len(shape) > 1 else GGMLQuantizationType.F32
        if shape[-1] % GGML_QUANT_SIZES[kind][0]:
            kind = GGMLQuantizationType.F16
        entry = Entry(name, source, shape, kind)
        parts = name.split(".")
        if parts[0] == "blk" and parts[2] in heads:
            entry = replace(entry, heads=heads[parts[2]][int(parts[1])])
        found.append(entry)
    return tuple(found)


def interleaved(rows: Float[Tensor, "rows *columns"], heads: int) -> Float[Tensor, "rows *columns"]:
    """Rows of queries or keys in the order of llama.cpp's rotary positions.

    Rows `i` and `i + d/2` of a head, which transformers turns together, become rows `2i` and
    `2i + 1`, which llama.cpp does. Products of queries and keys stay what they are.
    """
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def encoded(weight: Tensor, kind: GGMLQuantizationType, name: str) -> np.ndarray:
    """The numbers as the file stores them.

    Raises:
        ModelError: they are not finite, or would not be.
    """
    if HALVES.get(weight.dtype) == kind and torch.isfinite(weight).all():
        return weight.contiguous().view(torch.uint8).numpy()  # as it is stored
    wide = weight.to(torch.float32)
    if not torch.isfinite(wide).all():
        raise ModelError(f"{name} holds NaN or Inf, or numbers beyond float32: it is damaged")
    # A block of q8_0 has its largest number over 127 in f16.
    most = LARGEST.get(kind.name)
    if most is not None and float(wide.abs().max()) > most:
        raise ModelError(f"{name} holds numbers beyond {most:.7g}: pass dtype=bf16 or dtype=f32")
    stored: Any = quantize(np.ascontiguousarray(wide.numpy()), kind)
    return stored
