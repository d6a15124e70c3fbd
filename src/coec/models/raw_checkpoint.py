"""The tensors in the files of a model folder, whatever its configuration says."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from coec.errors import ModelError
from coec.models.architectures import architecture_of
from coec.models.description import LAYER
from coec.models.files import FLOAT_DTYPES, Header, read_headers, read_tensor
from coec.models.folder import find_model, read_config


@dataclass(frozen=True, eq=False)
class RawCheckpoint:
    """The tensors of a checkpoint that another program pruned, as they are.

    Their shapes need not agree with the configuration, as long as the model is of a supported type
    and its tensors have the usual names. Nothing is computed with it.
    """

    name: str
    folder: Path
    headers: dict[str, Header]

    @classmethod
    def open(cls, model: "str | Path | RawCheckpoint") -> "RawCheckpoint":
        """Read the configuration, whose type must be supported, and every file's header."""
        if isinstance(model, RawCheckpoint):
            return model
        folder = find_model(model)
        architecture_of(read_config(folder))
        headers = read_headers(folder)
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
        return read_tensor(self.folder / self.headers[name].file, name)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all tensors and their names."""
        content = hashlib.sha256()
        for name in sorted(self.headers):
            tensor = self.tensor(name)
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()
