"""What the files of a model folder hold, whatever its configuration says."""

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

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
WRAPPED = "base_model.model."
"""Before the names of a model that PEFT wraps."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of a tensor: its file, its dtype's name there, its shape."""

    file: str
    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RawCheckpoint:
    """The tensors of a checkpoint as they are: what another program made of a model.

    Its shapes need not be those of its configuration, as long as it is of a supported type and its
    tensors have the names that these have. Nothing is computed with it.

    Attributes:
        name: as it was asked for.
        folder: where its files are.
        headers: of its tensors, by name.
    """

    name: str
    folder: Path
    headers: dict[str, Header]

    @classmethod
    def open(cls, model: "str | Path | RawCheckpoint") -> "RawCheckpoint":
        """Reads the configuration and every file's header.

        Raises:
            ModelError: it is not there, damaged, quantised, or of a type that is not supported.
        """
        if isinstance(model, RawCheckpoint):
            return model
        folder = find_model(model)
        architecture_of(read_config(folder))
        headers = headers_of(folder)
        for name, header in headers.items():
            if header.kind not in FLOAT_DTYPES:
                raise ModelError(
                    f"{name} in '{header.file}' of '{model}' is {header.kind}: the weights are "
                    "quantised; give the pruned model with float weights"
                )
        return cls(str(model), folder, headers)

    @property
    def layers(self) -> int:
        """How many blocks it has tensors of."""
        return len({found[1] for name in self.headers if (found := LAYER.match(name))})

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU in its stored dtype."""
        with opened(self.folder / self.headers[name].file) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    @cached_property
    def digest(self) -> str:
        """SHA-256 of every tensor by name: what tells one checkpoint from another."""
        content = hashlib.sha256()
        for name in sorted(self.headers):
            tensor = self.tensor(name)
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()


def headers_of(folder: Path) -> dict[str, Header]:
    """Every tensor of the files that loaders read, by name.

    Raises:
        ModelError: files are missing or damaged, or loaders would read different ones.
    """
    check_merged(folder)
    index = _index(folder) if (folder / INDEX).exists() else None
    if index is None and not (folder / WEIGHTS).exists():
        other = next(iter(sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))), None)
        hint = (
            f"; '{other.name}' is a pickle: convert it with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            if other
            else ""
        )
        raise ModelError(f"no safetensors weights in '{folder}'{hint}")
    names = [WEIGHTS] if index is None else sorted(set(index.values()))
    if names != [WEIGHTS] and (folder / WEIGHTS).exists():
        raise ModelError(
            f"'{folder}' holds both {WEIGHTS} and {INDEX}, which names '{names[0]}': loaders "
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
                if name.startswith(WRAPPED):
                    raise ModelError(
                        f"tensors in '{folder / file_name}' are named {WRAPPED}…, as PEFT saves a "
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
    """Tensor name → file name, of files in this folder."""
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
