"""Statistics of the dense model on disk: one dense pass serves many recipes."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from coec.calibration.stream import Block
from coec.calibration.tokens import Windows
from coec.errors import CalibrationError, OptionError
from coec.models.checkpoint import Checkpoint, atomic_folder, write_json
from coec.types import Gram

RECORD = "statistics.json"
WINDOWS = "windows.safetensors"
FIT, HELD_OUT = "fit", "holdout"


@dataclass(frozen=True)
class Statistics:
    """The Grams of every block of one model on one calibration, bit for bit as summed.

    Attributes:
        folder: one file per block, and a record that is written last.
        calibration: where the windows came from, as in a report.
        made_with: every setting that the numbers depend on, by name.
    """

    folder: Path
    calibration: dict[str, Any]
    made_with: dict[str, Any]

    @classmethod
    def write(
        cls,
        folder: Path,
        blocks: Iterator[Block],
        windows: Windows,
        made_with: dict[str, Any],
    ) -> "Statistics":
        """Runs the dense pass and keeps what it sums; the folder appears when it is complete."""
        with atomic_folder(folder) as temporary:
            for block in blocks:
                tensors, counts = {}, {}
                for kind, grams in ((FIT, block.grams), (HELD_OUT, block.holdout)):
                    for site, gram in grams.items():
                        tensors[f"{kind}.{site}.xx"] = gram.xx.cpu()
                        tensors[f"{kind}.{site}.x"] = gram.x.cpu()
                        counts[f"{kind}.{site}.tokens"] = str(gram.tokens)
                save_file(tensors, temporary / _file(block.index), metadata=counts)
            save_file({"input_ids": windows.ids}, temporary / WINDOWS)
            record = {"calibration": windows.record(), "made_with": made_with}
            write_json(temporary / RECORD, record)
        return cls(folder, windows.record(), made_with)

    @classmethod
    def open(cls, folder: Path) -> "Statistics":
        """Reads the record.

        Raises:
            CalibrationError: the folder holds no complete statistics.
        """
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            return cls(folder, record["calibration"], record["made_with"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CalibrationError(
                f"'{folder}' holds no complete statistics ({RECORD}): collect them again"
            ) from error

    @property
    def windows(self) -> Int[Tensor, "n length"]:
        """The calibration windows, held-out ones included."""
        return load_file(self.folder / WINDOWS)["input_ids"]

    def check(self, wanted: dict[str, Any]) -> None:
        """Raises OptionError naming the first setting they were not made with."""
        for name, value in wanted.items():
            found = self.made_with.get(name)
            if found != value:
                raise OptionError(
                    f"the statistics in '{self.folder}' were collected with {name} = {found!r}, "
                    f"not {value!r}: collect them again, or change the recipe"
                )

    def blocks(self, checkpoint: Checkpoint, device: torch.device) -> Iterator[Block]:
        """Every block in order, as `DenseStream.blocks` yielded it.

        Raises:
            CalibrationError: a file is missing or damaged.
        """
        for index in range(int(checkpoint.config["num_hidden_layers"])):
            grams: dict[str, dict[str, Gram]] = {FIT: {}, HELD_OUT: {}}
            path = self.folder / _file(index)
            try:
                with safe_open(path, framework="pt", device=str(device)) as file:
                    for name, tokens in (file.metadata() or {}).items():
                        kind, site, _ = name.split(".")
                        xx = file.get_tensor(f"{kind}.{site}.xx")
                        x = file.get_tensor(f"{kind}.{site}.x")
                        grams[kind][site] = Gram(xx, x, int(tokens))
            except (OSError, SafetensorError, ValueError) as error:
                raise CalibrationError(
                    f"statistics of block {index} cannot be read from '{path}': {error}"
                ) from error
            tensors = checkpoint.tensors(f"model.layers.{index}.")
            yield Block(index, tensors, grams[FIT], grams[HELD_OUT])


def fingerprint(checkpoint: Checkpoint) -> str:
    """What tells one dense model from another without reading it: its configuration and files."""
    sizes = {name: (checkpoint.folder / name).stat().st_size for name in checkpoint.files.values()}
    content = json.dumps([checkpoint.config, sorted(sizes.items())], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _file(index: int) -> str:
    return f"block-{index:05}.safetensors"
