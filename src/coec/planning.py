"""The plan: what pruning will do, from the configuration alone, in seconds."""

import math
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coec.calibration.stream import TOKENS_PER_BATCH
from coec.calibration.tokens import TOKEN_SUFFIXES, WHOLE
from coec.errors import OptionError
from coec.models.architectures import SITES, Architecture, Shape
from coec.models.description import Description
from coec.models.formats import OutputFormat, choose_format
from coec.recipe import DTYPES, Recipe
from coec.selection import kept_count

DEFAULT_SEQ_LEN = 2048
SOLVER_MATRICES = 6
"""Matrices of the wider consumer's size in a solve: four are counted (benchmarks), and an
eigendecomposition takes two more inside."""
BYTES_PER_CHARACTER = 170
"""Memory that tokenising takes, measured (docs/FORMATS.md)."""
NAMED_TEXT = 11_000_000
"""Characters that are read of a data set at most."""
SHARD_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Plan:
    """Sizes and formats of one pruning run.

    Attributes:
        architecture: the dense model's.
        dense, pruned: the sizes before and after.
        output: the format the result is written in.
        dense_shapes, pruned_shapes: every stored tensor's shape.
        seq_len, positions: calibration window and the most the model can take.
        vocabulary: number of token ids.
        recipe: what was asked for.
    """

    architecture: Architecture
    dense: Shape
    pruned: Shape
    output: OutputFormat
    dense_shapes: dict[str, torch.Size]
    pruned_shapes: dict[str, torch.Size]
    seq_len: int
    positions: int
    vocabulary: int
    recipe: Recipe

    @classmethod
    def of(cls, model: Description, recipe: Recipe) -> "Plan":
        """Decides widths and output format.

        Raises:
            ModelError: the model cannot be pruned.
            OptionError: the recipe does not fit the model, or no format holds the result.
        """
        dense = model.shape
        check_effect(dense, recipe.repair.sparsity)
        pruned = Shape(
            layers=dense.layers,
            hidden=dense.hidden,
            head_dim=dense.head_dim,
            kv_heads=kept_count(dense.kv_heads, recipe.repair.sparsity),
            group=dense.group,
            ffn=kept_count(dense.ffn, recipe.repair.sparsity),
        )
        biased = recipe.method.adds_bias
        output = choose_format(
            model.config,
            pruned,
            o_proj_bias="model.layers.0.self_attn.o_proj.bias" in model.shapes
            or (biased and pruned.kv_heads < dense.kv_heads),
            down_proj_bias="model.layers.0.mlp.down_proj.bias" in model.shapes
            or (biased and pruned.ffn < dense.ffn),
        )
        return cls(
            model.architecture,
            dense,
            pruned,
            output,
            model.shapes,
            Description.of(output.config).shapes,
            resolve_seq_len(recipe.calibration.seq_len, model.positions, DEFAULT_SEQ_LEN),
            model.positions,
            model.vocabulary,
            recipe,
        )

    @property
    def parameters_before(self) -> int:
        """Parameters of the dense model, tied ones once."""
        return sum(shape.numel() for shape in self.dense_shapes.values())

    @property
    def parameters_after(self) -> int:
        """Parameters of the pruned model, tied ones once."""
        return sum(shape.numel() for shape in self.pruned_shapes.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Where nothing goes, although a fraction of every site was asked for."""
        sites = [site for site in SITES if self.pruned.units(site) == self.dense.units(site)]
        return tuple(
            f"nothing is removed at {site.name}: {self.recipe.repair.sparsity:.4g} of "
            f"{self.dense.units(site)} {site.unit}s is less than one"
            for site in sites
        )

    @property
    def _widths(self) -> list[int]:
        """D of every site: how many columns its consumer has."""
        return [self.dense.units(site) * self.dense.columns_per_unit(site) for site in SITES]

    @property
    def statistics_per_block(self) -> int:
        """Bytes of one block's Grams in float64, held-out ones included."""
        kinds = 2 if self.recipe.calibration.holdout else 1
        return kinds * sum(d * d for d in self._widths) * torch.float64.itemsize

    def memory(self, stored: torch.dtype, forward: torch.dtype) -> dict[str, int]:
        """Bytes in memory at the fullest moment, by purpose (docs/FORMATS.md explains each)."""
        block, embedding = (
            sum(shape.numel() for name, shape in self.dense_shapes.items() if name.startswith(part))
            for part in ("model.layers.0.", "model.embed_tokens.")
        )
        length, hidden, widest = self.seq_len, self.dense.hidden, max(self._widths)
        per_token = (6 * hidden + 4 * self.dense.ffn) * forward.itemsize + 8 * widest
        batch = max(1, TOKENS_PER_BATCH // length) * length
        written = self.parameters_after * DTYPES[self.recipe.repair.dtype or "float32"].itemsize
        solve = DTYPES[self.recipe.repair.solve_dtype].itemsize
        return {
            "program": resident_bytes(),
            "text": self._text_bytes(forward),
            "one block's weights": max(block, embedding) * (stored.itemsize + forward.itemsize),
            "hidden states": self.recipe.calibration.samples * length * hidden * forward.itemsize,
            "forward pass": min(batch, self.recipe.calibration.samples * length) * per_token,
            "statistics": self.statistics_per_block + 8 * widest**2,
            "solver": SOLVER_MATRICES * widest**2 * solve,
            "shard being filled": min(written, SHARD_BYTES),
        }

    def _text_bytes(self, forward: torch.dtype) -> int:
        """What making the windows takes: tokenising a text, or a whole model that is sampled."""
        source = self.recipe.calibration.source
        if not isinstance(source, str | Path):
            return 0
        if source == "self":
            return self.parameters_before * forward.itemsize
        path = Path(source)
        if path.suffix in TOKEN_SUFFIXES:
            return 2 * path.stat().st_size if path.is_file() else 0
        size = path.stat().st_size if path.is_file() else NAMED_TEXT
        return BYTES_PER_CHARACTER * min(size, WHOLE)

    def record(self) -> dict[str, Any]:
        """What `--dry-run --json` prints and the report keeps."""
        return {
            "model_type": self.architecture.model_type,
            "output_model_type": self.output.model_type,
            "relabelled": self.output.relabelled,
            "loads_in": self.output.loads_in,
            "layers": self.dense.layers,
            "widths": {
                "mlp": {"before": self.dense.ffn, "after": self.pruned.ffn},
                "kv_groups": {"before": self.dense.kv_heads, "after": self.pruned.kv_heads},
                "query_heads": {"before": self.dense.heads, "after": self.pruned.heads},
            },
            "parameters": {"before": self.parameters_before, "after": self.parameters_after},
            "removed": {
                **{s.name: _share(self.dense.units(s), self.pruned.units(s)) for s in SITES},
                "parameters": _share(self.parameters_before, self.parameters_after),
            },
            "notes": list(self.notes),
            "seq_len": self.seq_len,
        }


def _share(before: int, after: int) -> float:
    """The fraction that went."""
    return (before - after) / before


def check_effect(dense: Shape, sparsity: float) -> None:
    """Raises OptionError where the sparsity is below one unit at every site."""
    units = {site: dense.units(site) for site in SITES}
    if any(kept_count(count, sparsity) < count for count in units.values()):
        return
    counts = " and ".join(f"{count:,} {site.unit}s" for site, count in units.items())
    most = max(units.values())
    advice = (
        f"the smallest that removes something is {math.ceil(10**6 / most) / 10**6:g}"
        if most > 1
        else "this model cannot be pruned"
    )
    raise OptionError(f"sparsity {sparsity:g} removes nothing from {counts}: {advice}")


def resolve_seq_len(asked: int | None, positions: int, default: int) -> int:
    """The window length: as asked, or the default capped at the model's positions.

    Raises:
        OptionError: more was asked than the model has positions, or too little to predict.
    """
    if positions < 2:
        raise OptionError(
            f"the model has {positions} positions (max_position_embeddings): a window needs two"
        )
    if asked is None:
        return min(default, positions)
    if asked < 2:
        raise OptionError(f"seq_len must be at least 2, got {asked}")
    if asked > positions:
        raise OptionError(
            f"seq_len={asked} is beyond the model's {positions} positions; use {positions} or less"
        )
    return asked


def stored_dtype(config: dict[str, Any]) -> torch.dtype:
    """The weights' dtype as the configuration declares it, float32 where it does not."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return DTYPES.get(name.removeprefix("torch."), torch.float32)


def resident_bytes() -> int:
    """What this process takes by now: the interpreter, torch and the other libraries."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux: the most that it ever took, in bytes on a Mac
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize()


def choose_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one; raises OptionError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.ones(1, device=chosen).item()  # a device that holds no data, such as meta, fails
    except Exception as error:  # backends that are not there raise errors of many kinds
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise OptionError(f"device '{device}' cannot be used: {reason}") from error
    return chosen


def choose_forward_dtype(
    asked: str | None, stored: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype of the dense forward pass; see `Calibration.forward_dtype`."""
    if asked is not None:
        return DTYPES[asked]
    if device.type == "cpu" and stored != torch.float64:
        return torch.float32
    return stored
