"""Headers of a model's files, compared with its description before weights are read."""

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from coec.errors import ModelError
from coec.models.architectures import WIDE
from coec.models.description import DRAFTS, LAYER
from coec.models.files import FLOAT_DTYPES, Header, JsonDict, read_tensor
from coec.models.layout import Layout

_PARAMETER = re.compile(r"(model|lm_head)\..*(weight|bias)")
"""Names of tensors that would change the function of a model with another configuration."""


def numbered_layers(headers: Mapping[str, Header]) -> dict[str, int]:
    """Number of the layer that every tensor of a layer belongs to, by the tensor's name."""
    return {name: int(match[1]) for name in headers if (match := LAYER.match(name))}


def drafts_of(headers: Mapping[str, Header], config: JsonDict) -> set[str]:
    """Names of the tensors of the layers that `DRAFTS` counts."""
    layers, drafts = (config.get(key) for key in ("num_hidden_layers", DRAFTS))
    if not isinstance(layers, int) or not isinstance(drafts, int):
        return set()
    numbers = numbered_layers(headers)
    return {name for name, number in numbers.items() if layers <= number < layers + drafts}


def ignored_by(model: PreTrainedModel, unknown: Iterable[str]) -> set[str]:
    """Return the names, of those without a place in a model, that its class leaves out."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return {name for name in unknown if any(re.search(pattern, name) for pattern in patterns)}


def check_layers(folder: Path, headers: Mapping[str, Header], layers: int) -> None:
    """Raise ModelError unless the files hold as many layers as the configuration."""
    numbers = numbered_layers(headers)
    if beyond := [name for name, number in numbers.items() if number >= layers]:
        raise ModelError(
            f"'{folder}' holds more layers than the {layers} in config.json "
            f"(first: {min(beyond, key=numbers.__getitem__)}); mend num_hidden_layers"
        )
    missing = set(range(layers)).difference(numbers.values())
    if numbers and missing:
        raise ModelError(
            f"'{folder}' lacks layer {min(missing)} of the {layers} in config.json; download it "
            "again, or mend num_hidden_layers"
        )


def has_separate_head(folder: Path, headers: Mapping[str, Header], layout: Layout) -> bool:
    """Compare the stored head with the embedding; a copy in a narrower dtype is no other head."""
    names = (layout.head, layout.embedding)
    if not all(name in headers for name in names):
        return False
    head, embedding = (
        read_tensor(folder / headers[name].file, headers[name].stored) for name in names
    )
    if head.shape != embedding.shape:
        return True
    # A copy in a narrower dtype is the embedding, rounded: compared in that.
    narrow = min(head.dtype, embedding.dtype, key=lambda dtype: dtype.itemsize)
    return not torch.equal(head.to(narrow), embedding.to(narrow))


def check_headers(
    folder: Path, headers: Mapping[str, Header], expected: Mapping[str, torch.Size]
) -> torch.dtype:
    """Check every tensor by its header; return the narrowest dtype that holds all weights.

    Corrections of a router are left out: they are float32 next to narrower weights.
    """
    missing = [name for name in expected if name not in headers]
    if missing:
        raise ModelError(
            f"'{folder}' lacks {len(missing)} of {len(expected)} tensors "
            f"(first: {missing[0]}); download it again"
        )
    # A tensor beyond those expected may be let pass, unless the function would miss it.
    for name, header in headers.items():
        place = f"{name} in '{header.file}'"
        if name not in expected:
            if _PARAMETER.fullmatch(name) and name != Layout.head:
                raise ModelError(
                    f"{place} has no place in a model of this config.json: it would be dropped; "
                    "mend the configuration (a bias has a flag there), or the files"
                )
            continue
        if header.dtype in ("I64", "I32"):
            raise ModelError(f"{place} is {header.dtype}: models with tables are not supported")
        if header.dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{place} is {header.dtype}: the weights are quantised; pruning needs float weights"
            )
        if header.shape != tuple(expected[name]):
            hint = "; ZeRO-3 leaves empty tensors: gather them first (zero_to_fp32.py)"
            empty = hint if 0 in header.shape else ""
            raise ModelError(
                f"{place} has shape {header.shape}, config.json says {tuple(expected[name])}{empty}"
            )
    weights = [name for name in expected if not name.endswith(WIDE)]
    dtypes = {FLOAT_DTYPES[headers[name].dtype] for name in weights}
    return functools.reduce(torch.promote_types, sorted(dtypes, key=str))
