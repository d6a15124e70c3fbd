"""Shards of a checkpoint, planned beforehand and written as soon as they are complete."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from coec.models.dense import INDEX
from coec.models.files import write_json, write_tensors

MAX_SHARD = "2GB"


@dataclass(eq=False)
class ShardWriter:
    """Writes tensors into shards planned beforehand, each as soon as it is complete.

    Attributes:
        folder: where to write.
        shapes: every tensor's name and shape.
        dtype: of every tensor.
    """

    folder: Path
    shapes: dict[str, torch.Size]
    dtype: torch.dtype
    _pending: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        state = {
            name: torch.empty(shape, dtype=self.dtype, device="meta")
            for name, shape in self.shapes.items()
        }
        self._split = split_torch_state_dict_into_shards(state, max_shard_size=MAX_SHARD)
        self._left = {f: set(names) for f, names in self._split.filename_to_tensors.items()}

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Takes finished tensors; a shard whose last tensor came is written and forgotten."""
        for name, tensor in tensors.items():
            if tensor.shape != self.shapes[name] or tensor.dtype != self.dtype:
                raise AssertionError(
                    f"{name}: planned {self.shapes[name]} {self.dtype}, "
                    f"got {tensor.shape} {tensor.dtype}"
                )
            file_name = self._split.tensor_to_filename[name]
            self._pending.setdefault(file_name, {})[name] = tensor.contiguous()
            self._left[file_name].remove(name)
            if not self._left[file_name]:
                shard = dict(sorted(self._pending.pop(file_name).items()))
                write_tensors(shard, self.folder / file_name, {"format": "pt"})
                del self._left[file_name]

    def finish(self) -> None:
        """Writes the index; every planned tensor must have come."""
        if self._left:
            raise AssertionError(f"tensors never written: {self._left}")
        if self._split.is_sharded:
            index = {
                "metadata": self._split.metadata,
                "weight_map": dict(sorted(self._split.tensor_to_filename.items())),
            }
            write_json(self.folder / INDEX, index)
