"""Statistics of the dense model on disk: one dense pass serves many recipes."""

import itertools
import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coec.errors import CalibrationError, CoecError, OptionError
from coec.execution.journal import Journal, seal
from coec.models.dense import Dense
from coec.models.files import JsonDict, parse_json, sha256, write_json, write_tensors
from coec.streaming.dense_stream import Measured
from coec.types import Gram

RECORD = "statistics.json"
WINDOWS = "windows.safetensors"
FIT, VALIDATION = "fit", "holdout"
_PARTS = ("calibration", "made_with", "settings", "made_of", "files")
"""What the record holds, besides its own digest."""
_SEAL = "record_sha256"
COUNTS = "counts"
"""The entry in a file's metadata that holds the numbers of its Grams that are no tensors."""
_Counts = dict[str, list[Any]]
"""Tokens, precision and the sum of an expert's output norms, by windows and site."""
Grams = dict[str, dict[str, Gram]]
"""Of one block, by kind of windows and site."""


@dataclass(frozen=True)
class Statistics:
    """Grams of every block of one model on one calibration, bit for bit as summed.

    Attributes:
        folder: one file per block, and a record that is written last.
        calibration: where the windows came from, as in a report.
        made_with: all that the numbers depend on, by name; model and text by digests.
        settings: the settings of the calibration, as in a recipe.
        made_of: the weights of the model, as in `Dense.digests_of`.
        files: size and SHA-256 of every other file, by name.
    """

    folder: Path
    calibration: JsonDict
    made_with: JsonDict
    settings: JsonDict
    made_of: dict[str, str]
    files: dict[str, tuple[int, str]]

    @classmethod
    def open(cls, folder: "str | Path | Statistics") -> "Statistics":
        """Read the record; raises CalibrationError where a folder has no complete statistics."""
        if isinstance(folder, Statistics):
            return folder
        if not isinstance(folder, str | Path):
            raise CalibrationError(
                f"statistics are a folder that `coec collect` made, got {folder!r:.80}"
            )
        folder = Path(folder)
        try:
            record = parse_json(folder / RECORD, distinct=True)
            if record.pop(_SEAL) != seal(record):
                raise ValueError("it was changed")
            content = {piece: record[piece] for piece in _PARTS}
            content["files"] = {name: (size, sha) for name, (size, sha) in content["files"].items()}
            return cls(folder, **content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CalibrationError(
                f"'{folder}' holds no complete statistics ({RECORD}: {reason}): collect them again"
            ) from error

    def record(self) -> JsonDict:
        """Return what they were made of and with."""
        return {name: getattr(self, name) for name in ("calibration", "made_with", "settings")}

    def _check_file(self, path: Path) -> None:
        """Raises ValueError unless a file is what was collected; OSError where it is not there."""
        expected = tuple(self.files.get(path.name, ()))
        if (path.stat().st_size, sha256(path)) != expected:
            raise ValueError("it is not what was collected: collect again")

    def check(self, expected: JsonDict) -> None:
        """Raises OptionError naming the first of these that they were not made with."""
        for name, value in expected.items():
            actual = self.made_with.get(name)
            if actual != value:
                raise OptionError(
                    f"the statistics in '{self.folder}' were collected with {name} = {actual!r}, "
                    f"not {value!r}: collect them again, or change the recipe"
                )

    def blocks(
        self, dense: Dense, device: torch.device, skip: Container[int] = ()
    ) -> Iterator[Measured]:
        """Yield the blocks in order, as `DenseStream.blocks` did.

        Raises:
            CalibrationError: a file is missing or damaged.
        """
        # Windows were set apart either by the user or because tokens were few.
        validation = self.made_with.get("holdout") or self.made_with.get("judging")
        subsets = [FIT, VALIDATION] if validation else [FIT]
        for block in dense.layout.blocks:
            if block.index in skip:
                continue
            # Digests vouch for the file; sites and widths are checked against the model.
            grams = self.grams(block.index, device)
            for subset, site in itertools.product(subsets, block.sites):
                gram = grams[subset].get(site.name)
                if gram is None or gram.x.shape != (site.columns,):
                    sums = "none" if gram is None else f"sums of {len(gram.x)} channels"
                    raise CalibrationError(
                        f"statistics of block {block.index} cannot be used: '{self.folder}' has "
                        f"{sums} for {site.name}, which has {site.columns}: collect them again"
                    )
            yield Measured(block, dense.tensors(block), grams[FIT], grams[VALIDATION])

    def grams(self, index: int, device: torch.device) -> Grams:
        """Return the Grams of a block; raises CalibrationError where its file is damaged."""
        path = self.folder / block_file(index)
        grams: Grams = {FIT: {}, VALIDATION: {}}
        try:
            self._check_file(path)
            with safe_open(path, framework="pt", device=str(device)) as file:
                counts = json.loads(file.metadata()[COUNTS])
                for name in [key.removesuffix(".x") for key in file.keys() if key.endswith(".x")]:
                    subset, site = name.split(".", 1)
                    grams[subset][site] = _read_gram(file, counts, name)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, CoecError) as error:
            raise CalibrationError(
                f"statistics of block {index} cannot be read from '{path}': {error}"
            ) from error
        return grams


def finish(journal: Journal, windows: Int[Tensor, "n length"], **record: JsonDict) -> None:
    """Write what makes a folder of blocks complete: the fields of `Statistics`, but for `files`."""
    journal.put(WINDOWS, journal.new / WINDOWS, lambda p: write_tensors({"input_ids": windows}, p))
    record["files"] = journal.recorded()
    # The seal is taken of what a reader will parse: JSON has lists where this record has tuples.
    write_json(journal.new / RECORD, {**record, _SEAL: seal(json.loads(json.dumps(record)))})


def write_grams(path: Path, grams: Grams) -> None:
    """Write the file of one block: sums as they are, counts beside them."""
    tensors: dict[str, Tensor] = {}
    counts: _Counts = {}
    for subset, by_site in grams.items():
        for site, gram in by_site.items():
            assert gram.centred is not None  # a GramSum has both
            assert gram.largest is not None
            sums = {"xx": gram.xx, "x": gram.x, "centred": gram.centred, "largest": gram.largest}
            tensors |= {f"{subset}.{site}.{n}": value.cpu() for n, value in sums.items()}
            counts[f"{subset}.{site}"] = [gram.tokens, gram.precision, gram.output_norms]
    # In one entry: safetensors writes several in any order, and equal sums make equal files.
    write_tensors(tensors, path, {COUNTS: json.dumps(counts)})


def block_file(index: int) -> str:
    """Return the name of a block's file."""
    return f"block-{index:05}.safetensors"


def _read_gram(file: Any, counts: _Counts, name: str) -> Gram:
    """Return a Gram of an open file; raises ValueError, KeyError or a CoecError if damaged."""
    tokens, precision, norms = counts[name]
    if not isinstance(tokens, int) or not 0 <= precision < 1:
        raise ValueError(f"{tokens} tokens, and a precision of {precision}")
    pieces = ("xx", "x", "centred", "largest")
    xx, x, centred, largest = (file.get_tensor(f"{name}.{piece}") for piece in pieces)
    return Gram(xx, x, tokens, centred, precision, norms, largest)
