"""The tensors in the files of a model folder, whatever its configuration says."""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from coec.errors import ModelError
from coec.models.architectures import architecture_of
from coec.models.description import MERGE, check_merged, find_model, read_config
from coec.models.files import FLOAT_DTYPES, opened, parse_json

_WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WRAPPED = "base_model.model."
"""Prefix of the names in a model that PEFT wraps."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Header:
    """A tensor as its safetensors file declares it; the dtype by its name there."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RawCheckpoint:
    """The tensors of a checkpoint that another program pruned, as they are.

    Their shapes need not agree with the configuration, as long as the model is of a supported type
    and its tensors have the usual names. Nothing is computed with it.

    Attributes:
        name: the model, as the user gave it.
        folder: the folder of its files.
        headers: the declarations of its tensors, by name.
    """

    name: str
    folder: Path
    headers: dict[str, Header]

    @classmethod
    def open(cls, model: "str | Path | RawCheckpoint") -> "RawCheckpoint":
        """Read the configuration and every file's header.

        Raises:
            ModelError: it is missing, damaged, quantised, or of a type that is not supported.
        """
        if isinstance(model, RawCheckpoint):
            return model
        folder = find_model(model)
        architecture_of(read_config(folder))
        headers = headers_of(folder)
        for name, header in headers.items():
            if header.dtype not in FLOAT_DTYPES:
                raise ModelError(
                    f"{name} in '{header.file}' of '{model}' is {header.dtype}: the weights are "
                    "quantised; give the pruned model with float weights"
                )
        return cls(str(model), folder, headers)

    @property
    def layers(self) -> int:
        """Number of blocks with tensors."""
        return len({match[1] for name in self.headers if (match := LAYER.match(name))})

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, on the CPU in its stored dtype."""
        with opened(self.folder / self.headers[name].file) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all tensors and their names."""
        content = hashlib.sha256()
        for name in sorted(self.headers):
            tensor = self.tensor(name)
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()


def headers_of(folder: Path) -> dict[str, Header]:
    """Read the header of every tensor in the files that loaders read; keys are names.

    Raises:
        ModelError: files are missing or damaged, or loaders would read different ones.
    """
    check_merged(folder)
    index = _index(folder) if (folder / INDEX).exists() else None
    if index is None and not (folder / _WEIGHTS).exists():
        pickle = next(iter(sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))), None)
        hint = (
            f"; '{pickle.name}' is a pickle: convert it with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            if pickle
            else ""
        )
        raise ModelError(f"no safetensors weights in '{folder}'{hint}")
    names = [_WEIGHTS] if index is None else sorted(set(index.values()))
    if names != [_WEIGHTS] and (folder / _WEIGHTS).exists():
        raise ModelError(
            f"'{folder}' holds both {_WEIGHTS} and {INDEX}, which names '{names[0]}': loaders "
            "differ in which they read; remove the one that is out of date"
        )
    headers: dict[str, Header] = {}
    for file_name in names:
        with opened(folder / file_name) as file:
            for name in file.keys():
                if name in headers:
                    raise ModelError(
                        f"{name} is in both '{headers[name].file}' and '{file_name}' of "
                        f"'{folder}': loaders differ in which they read"
                    )
                if name.startswith(_WRAPPED):
                    raise ModelError(
                        f"tensors in '{folder / file_name}' are named {_WRAPPED}…, as PEFT saves a "
                        f"model that it still wraps: {MERGE}"
                    )
                stored = file.get_slice(name)
                headers[name] = Header(file_name, stored.get_dtype(), tuple(stored.get_shape()))
    for name, file_name in (index or {}).items():
        if name in headers and headers[name].file != file_name:
            raise ModelError(
                f"'{folder / INDEX}' is damaged: {name} is in '{headers[name].file}', "
                f"not in '{file_name}'"
            )
    return headers


def _index(folder: Path) -> dict[str, str]:
    """Read the index: tensor name → file name, in this folder."""
    path = folder / INDEX
    try:
        weight_map = parse_json(path)["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map names no tensor")
        for name in set(weight_map.values()):
            if not isinstance(name, str) or Path(name).name != name or not name.strip("."):
                raise ValueError(f"{str(name)[:80]!r} is no file of this folder")
            if len(name.encode()) > 255 or "\0" in name:
                raise ValueError("a file name is longer than file names are")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"'{path}' is damaged: {' '.join(str(error).split())}") from error
    return weight_map
