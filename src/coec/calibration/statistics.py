"""Statistics of the dense model on disk: one dense pass serves many recipes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from coec.calibration.stream import Block
from coec.calibration.tokens import Windows
from coec.errors import CalibrationError, CoecError, OptionError
from coec.models.architectures import SITES
from coec.models.dense import Dense
from coec.models.files import parse_json, write_json, write_tensors
from coec.models.output import new_folder
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
        with new_folder(folder) as temporary:
            for block in blocks:
                tensors: dict[str, Tensor] = {}
                counts: dict[str, str] = {}
                for kind, grams in ((FIT, block.grams), (HELD_OUT, block.holdout)):
                    for site, gram in grams.items():
                        assert gram.centred is not None  # a GramSum has it
                        sums = {"xx": gram.xx, "x": gram.x, "centred": gram.centred}
                        tensors |= {f"{kind}.{site}.{n}": value.cpu() for n, value in sums.items()}
                        counts[f"{kind}.{site}.tokens"] = str(gram.tokens)
                        counts[f"{kind}.{site}.precision"] = repr(gram.precision)
                write_tensors(tensors, temporary / _file(block.index), counts)
            write_tensors({"input_ids": windows.ids}, temporary / WINDOWS)
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
            record = parse_json(folder / RECORD)
            calibration, made_with = record["calibration"], record["made_with"]
            if not isinstance(made_with, dict):
                raise TypeError("a part of the record is no table")
            for key in ("source", "windows", "seq_len", "text_sha256"):
                calibration[key]
            return cls(folder, calibration, made_with)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CalibrationError(
                f"'{folder}' holds no complete statistics ({RECORD}): collect them again"
            ) from error

    @property
    def windows(self) -> Int[Tensor, "n length"]:
        """The calibration windows, held-out ones included; raises CalibrationError if damaged."""
        path = self.folder / WINDOWS
        try:
            ids = load_file(path)["input_ids"]
        except (OSError, SafetensorError, KeyError) as error:
            raise CalibrationError(f"'{path}' cannot be read ({error}): collect again") from error
        if ids.ndim != 2 or ids.dtype != torch.int64:
            raise CalibrationError(f"'{path}' holds no windows of token ids: collect again")
        return ids

    def check(self, wanted: dict[str, Any]) -> None:
        """Raises OptionError naming the first setting they were not made with."""
        for name, value in wanted.items():
            found = self.made_with.get(name)
            if found != value:
                raise OptionError(
                    f"the statistics in '{self.folder}' were collected with {name} = {found!r}, "
                    f"not {value!r}: collect them again, or change the recipe"
                )

    def blocks(self, dense: Dense, device: torch.device) -> Iterator[Block]:
        """Every block in order, as `DenseStream.blocks` yielded it.

        Raises:
            CalibrationError: a file is missing or damaged.
        """
        kinds = [FIT, HELD_OUT] if self.made_with.get("holdout") else [FIT]
        for index in range(dense.shape.layers):
            path = self.folder / _file(index)
            grams: dict[str, dict[str, Gram]] = {FIT: {}, HELD_OUT: {}}
            try:
                with safe_open(path, framework="pt", device=str(device)) as file:
                    counts = file.metadata() or {}
                    for kind in kinds:
                        for site in SITES:
                            width = dense.shape.units(site) * dense.shape.columns_per_unit(site)
                            gram = _read_gram(file, counts, f"{kind}.{site.name}")
                            if gram.x.shape != (width,):
                                raise ValueError(f"sums of {len(gram.x)} channels, not {width}")
                            grams[kind][site.name] = gram
            except (OSError, SafetensorError, ValueError, KeyError, CoecError) as error:
                raise CalibrationError(
                    f"statistics of block {index} cannot be read from '{path}': {error}"
                ) from error
            tensors = dense.tensors(f"model.layers.{index}.")
            yield Block(index, tensors, grams[FIT], grams[HELD_OUT])


def _read_gram(file: Any, counts: dict[str, str], name: str) -> Gram:
    """One Gram of an open file; raises ValueError, KeyError or a CoecError where it is damaged."""
    precision = float(counts[f"{name}.precision"])
    if not 0 <= precision < 1:
        raise ValueError(f"a precision of {precision}")
    xx, x, centred = (file.get_tensor(f"{name}.{part}") for part in ("xx", "x", "centred"))
    return Gram(xx, x, int(counts[f"{name}.tokens"]), centred, precision)


def _file(index: int) -> str:
    return f"block-{index:05}.safetensors"
