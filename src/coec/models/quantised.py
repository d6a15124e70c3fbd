"""Weights that are released in FP8 or MXFP4: read as bfloat16. Other formats are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import BFloat16, Float, UInt8
from torch import Tensor

from coec.errors import ModelError
from coec.models.files import Header, JsonDict, opened

QUANTISATION = "quantization_config"
"""Configuration key of the format of quantised weights."""
_FP8 = "F8_E4M3"
_SCALES = ("_scale_inv", "_scale")
"""Ends of the names of FP8's scales, after the name of their weight."""
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
"""Ends of the names of MXFP4's codes and of their scales, after the name of their weight."""
_BIAS = 127
"""Exponent that a scale of one byte has too much (E8M0)."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""Values of the 4-bit codes: the highest bit is the sign."""
_COMPRESSED = "compressed-tensors"
_WRITTEN = (
    "AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config="
    "CompressedTensorsConfig(dequantize=True)).save_pretrained(OUT)"
)
"""Expression by which transformers writes bfloat16 for weights of compressed-tensors."""


@dataclass(frozen=True, kw_only=True)
class _Scaled(Header):
    """A weight whose scales are another tensor."""

    scale: Header

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that it is read from."""
        return self.file, self.scale.file


@dataclass(frozen=True, kw_only=True)
class Fp8(_Scaled):
    """A weight in FP8, with a scale for every `block` of rows and columns."""

    block: tuple[int, int]

    def read(self, content: Any, folder: Path) -> Tensor:
        """Read the weight in bfloat16; its scales are in any file of the folder."""
        piece = self.piece
        scale = _read(folder, self.scale, None if piece is None else piece.expert)
        if piece is not None and (piece.transposed or piece.rows.step):
            # Blocks are of rows and columns as they are stored
            stored = content.get_slice(self.stored)[piece.expert]
            return piece.of({piece.expert: scaled(stored, scale, self.block)}).contiguous()
        weight = super().read(content, folder)
        if weight.ndim == 2:
            return scaled(weight, scale, self.block, 0 if piece is None else piece.rows.start)
        return torch.stack([scaled(*pair, self.block) for pair in zip(weight, scale, strict=True)])


@dataclass(frozen=True, kw_only=True)
class Mxfp4(_Scaled):
    """The weights of all experts in MXFP4: experts × inputs × outputs, stored as codes of
    experts × outputs × groups × 16 bytes.
    """

    def read(self, content: Any, folder: Path) -> Tensor:
        """Read the weights in bfloat16, or of a piece; one expert is decoded at a time."""
        if self.piece is None:
            codes, scales = super().read(content, folder), _read(folder, self.scale, None)
            pairs = zip(codes, scales, strict=True)
            return torch.stack([mxfp4(*pair).mT for pair in pairs])
        codes = content.get_slice(self.stored)[self.piece.expert]
        rows = mxfp4(codes, _read(folder, self.scale, self.piece.expert))
        return rows[self.piece.rows].contiguous()


def _read(folder: Path, header: Header, expert: int | None) -> Tensor:
    """Read the scales of one expert, or all of them."""
    with opened(folder / header.file) as content:
        if expert is None or not header.shape:
            return header.read(content, folder)
        scale: Tensor = content.get_slice(header.stored)[expert]
        return scale


def scaled(
    weight: Float[Tensor, "rows columns"], scale: Tensor, block: tuple[int, int], first: int = 0
) -> BFloat16[Tensor, "rows columns"]:
    """Return `W[i, j] · s[⌊(first + i) / b₀⌋, ⌊j / b₁⌋]` of a weight in FP8 and its scales.

    Args:
        weight: consecutive rows of a matrix.
        scale: of all blocks of the matrix; bytes are exponents, `2^(s − 127)`.
        block: rows and columns of a block; one row, or all of them, for scales of these.
        first: number of the first row in the matrix.

    Source: DeepSeek-AI 2024 (`weight_scale_inv`); compressed-tensors (`weight_scale`).
    """
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    scale = scale.to(torch.float32).reshape(len(scale) if scale.ndim else 1, -1)
    rows, columns = (
        torch.arange(start, start + size) // each
        for start, size, each in zip((first, 0), weight.shape, block, strict=True)
    )
    return (weight.to(torch.float32) * scale[rows][:, columns]).to(torch.bfloat16)


def mxfp4(
    codes: UInt8[Tensor, "rows groups 16"], scales: UInt8[Tensor, "rows groups"]
) -> BFloat16[Tensor, "rows columns"]:
    """Return `2^(s − 127) · E2M1(code)` of 32 codes for every scale, two in a byte, low bits first.

    Source: OCP Microscaling Formats (MX) Specification 1.0 (2023), §5.
    """
    values = torch.tensor(_E2M1)
    # Both values of every byte → one lookup for two codes → a group's power of two
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
    decoded = pairs[codes.int()].flatten(-2)
    exponents = scales.int() - _BIAS
    return torch.ldexp(decoded, exponents[..., None]).to(torch.bfloat16).flatten(-2)


def with_scales(headers: Mapping[str, Header], config: JsonDict) -> dict[str, Header]:
    """Pair every weight in FP8 or MXFP4 with its scales: it reads as bfloat16.

    Args:
        headers: of all tensors by name.
        config: raw configuration, which may say how many rows and columns share a scale.

    Raises:
        ModelError: scales are missing, or have another shape than the blocks of their weight.
    """
    block, paired, used = fp8_block(config), dict(headers), set[str]()
    for name, header in headers.items():
        if header.dtype == _FP8 and len(header.shape) in (2, 3):
            ends = [end for end in _SCALES if name + end in headers]
            if ends:  # without scales it is refused with all weights that are no floats
                used.add(name + ends[0])
                paired[name] = _fp8(header, headers[name + ends[0]], block)
        elif header.dtype == "U8" and name.endswith(_BLOCKS):
            weight = name.removesuffix(_BLOCKS)
            used |= {name, weight + _EXPONENTS}
            paired[weight] = _mxfp4(header, headers.get(weight + _EXPONENTS))
    return {name: header for name, header in paired.items() if name not in used}


def _fp8(header: Header, scale: Header, block: tuple[int, int] | None) -> Fp8:
    """Pair a weight in FP8 with its scales; without a `block` these say how large it is."""
    *experts, rows, columns = header.shape
    ahead, grid = scale.shape[: len(experts)], (*scale.shape[len(experts) :], 1, 1)[:2]
    each = block or (rows // max(grid[0], 1) or 1, columns // max(grid[1], 1) or 1)
    expected = -(-rows // each[0]), -(-columns // each[1])
    if grid != expected or list(ahead) != experts or len(scale.shape) > len(header.shape):
        raise ModelError(
            f"{scale.stored} in '{scale.file}' has shape {scale.shape}, and the blocks of "
            f"{each[0]} × {each[1]} of its weight have {(*experts, *expected)}: download it "
            f"again, or mend {QUANTISATION}"
        )
    return Fp8(header.file, "BF16", header.shape, header.stored, scale=scale, block=each)


def _mxfp4(codes: Header, scale: Header | None) -> Mxfp4:
    """Pair the codes of experts with their scales."""
    if scale is None or codes.shape != (*scale.shape, 16) or len(scale.shape) != 3:
        found = "no scales" if scale is None else f"scales of shape {scale.shape}"
        raise ModelError(
            f"{codes.stored} in '{codes.file}' has shape {codes.shape} and {found}: MXFP4 has "
            "experts × rows × groups × 16 bytes, and a scale for each group; download it again"
        )
    experts, rows, groups = scale.shape
    shape = experts, groups * 32, rows
    return Mxfp4(codes.file, "BF16", shape, codes.stored, scale=scale)


def released_in(config: JsonDict) -> str | None:
    """Return the format of quantised weights, `FP8` or `MXFP4`; None if they are floats.

    Raises ModelError for a format that is not read.
    """
    quantisation = config.get(QUANTISATION)
    if not quantisation:
        return None
    known = quantisation if isinstance(quantisation, dict) else {"quant_method": quantisation}
    method, weights = str(known.get("quant_method", "unknown method")), _weights(known)
    if method == "mxfp4":
        return "MXFP4"
    floats = [(w.get("num_bits"), w.get("type")) == (8, "float") for w in weights]
    compressed = method == _COMPRESSED
    if method in ("fp8", "fbgemm_fp8") or (compressed and floats and all(floats)):
        return "FP8"
    # Some models are released in no other format
    written = f"; if there is none, as of Kimi-K2-Thinking, write it: {_WRITTEN}"
    raise ModelError(
        f"the weights are quantised ({method:.80}), and pruning reads floats, FP8 and MXFP4: give "
        f"the original checkpoint (bfloat16{written if compressed else ''}), prune it, then "
        "quantise the result"
    )


def _weights(quantisation: JsonDict) -> list[JsonDict]:
    """Return what compressed-tensors says of the weights of every group of modules."""
    groups = quantisation.get("config_groups")
    found = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") if isinstance(group, dict) else None for group in found]
    return [entry if isinstance(entry, dict) else {} for entry in weights]


def fp8_block(config: JsonDict) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale of FP8; None if the configuration has none.

    Raises ModelError for a size that is no pair of whole numbers.
    """
    known = config.get(QUANTISATION)
    if not isinstance(known, dict):
        return None
    key, size = "weight_block_size", known.get("weight_block_size")
    if size is None:
        key = "block_structure"
        size = next((w[key] for w in _weights(known) if w.get(key) is not None), None)
    if size is None:
        return None
    if not isinstance(size, list) or [type(n) for n in size] != [int, int] or min(size) < 1:
        raise ModelError(f"{key} in config.json is no pair of sizes: {size!r:.60}")
    return size[0], size[1]
