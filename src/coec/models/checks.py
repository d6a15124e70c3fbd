"""Checks that the headers of a model's files agree with its configuration."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from coec.errors import ModelError
from coec.models.architectures import architecture_of
from coec.models.files import FLOAT_DTYPES, JsonDict, opened
from coec.models.raw_checkpoint import LAYER, Header
from coec.models.shape import Shape

HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_PARAMETER = re.compile(r"(model|lm_head)\..*(weight|bias)")
"""Names of tensors that would change the function of a model with another configuration."""

Headers = Mapping[str, Header]


def check_layers(folder: Path, headers: Headers, config: JsonDict) -> None:
    """Raise ModelError unless the files hold as many layers as the configuration; builds none."""
    architecture_of(config)
    layers = Shape.of(config).layers
    first: dict[int, str] = {}
    for name in headers:
        if match := LAYER.match(name):
            first.setdefault(int(match[1]), name)
    beyond = next((name for number, name in sorted(first.items()) if number >= layers), None)
    if beyond:
        raise ModelError(
            f"'{folder}' holds more layers than the {layers} in config.json "
            f"(first: {beyond}); mend num_hidden_layers"
        )
    if first and (missing := next((n for n in range(layers) if n not in first), None)) is not None:
        raise ModelError(
            f"'{folder}' lacks layer {missing} of the {layers} in config.json; download it again, "
            "or mend num_hidden_layers"
        )


def has_separate_head(folder: Path, headers: Headers) -> bool:
    """Compare the stored head with the embedding; a copy in a narrower dtype is no other head."""
    if HEAD not in headers or _EMBEDDING not in headers:
        return False
    head, embedding = (_read(folder / headers[name].file, name) for name in (HEAD, _EMBEDDING))
    if head.shape != embedding.shape:
        return True
    narrow = min(head.dtype, embedding.dtype, key=lambda dtype: dtype.itemsize)
    return not torch.equal(head.to(narrow), embedding.to(narrow))


def _read(path: Path, name: str) -> Tensor:
    with opened(path) as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def check_headers(
    folder: Path, headers: Headers, expected: Mapping[str, torch.Size]
) -> torch.dtype:
    """Find the narrowest dtype that holds all expected tensors.

    Raises:
        ModelError: a tensor is missing, of another shape, quantised, or of no use to the model.
    """
    missing = [name for name in expected if name not in headers]
    if missing:
        raise ModelError(
            f"'{folder}' lacks {len(missing)} of {len(expected)} tensors "
            f"(first: {missing[0]}); download it again"
        )
    for name, header in headers.items():
        place = f"{name} in '{header.file}'"
        if name not in expected:
            if _PARAMETER.fullmatch(name) and name != HEAD:
                raise ModelError(
                    f"{place} has no place in a model of this config.json: it would be dropped; "
                    "mend the configuration (a bias has a flag there), or the files"
                )
            continue
        if header.dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{place} is {header.dtype}: the weights are quantised; pruning needs float weights"
            )
        if header.shape != tuple(expected[name]):
            raise ModelError(
                f"{place} has shape {header.shape}, config.json says {tuple(expected[name])}"
            )
    dtypes = {FLOAT_DTYPES[headers[name].dtype] for name in expected}
    return functools.reduce(torch.promote_types, sorted(dtypes, key=str))
