"""The plan: what pruning will do, from the configuration alone, in seconds."""

from dataclasses import dataclass
from typing import Any

import torch

from coec.compensation import adds_bias
from coec.errors import OptionError
from coec.models.architectures import SITES, Architecture, Shape, architecture_of
from coec.models.checkpoint import parameter_shapes, skeleton
from coec.models.formats import OutputFormat, choose_format
from coec.recipe import DTYPES, Recipe
from coec.selection import kept_count

DEFAULT_SEQ_LEN = 2048


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
    def of(cls, config: dict[str, Any], recipe: Recipe) -> "Plan":
        """Decides widths and output format.

        Raises:
            ModelError: the model cannot be pruned.
            OptionError: the recipe does not fit the model, or no format holds the result.
        """
        architecture = architecture_of(config)
        dense = Shape.of(config)
        model = skeleton(config)
        pruned = Shape(
            layers=dense.layers,
            hidden=dense.hidden,
            head_dim=dense.head_dim,
            kv_heads=kept_count(dense.kv_heads, recipe.sparsity),
            group=dense.group,
            ffn=kept_count(dense.ffn, recipe.sparsity),
        )
        dense_shapes = parameter_shapes(model)
        biased = adds_bias(recipe.method)
        output = choose_format(
            config,
            pruned,
            o_proj_bias="model.layers.0.self_attn.o_proj.bias" in dense_shapes
            or (biased and pruned.kv_heads < dense.kv_heads),
            down_proj_bias="model.layers.0.mlp.down_proj.bias" in dense_shapes
            or (biased and pruned.ffn < dense.ffn),
        )
        positions = int(getattr(model.config, "max_position_embeddings", DEFAULT_SEQ_LEN))
        return cls(
            architecture,
            dense,
            pruned,
            output,
            dense_shapes,
            parameter_shapes(skeleton(output.config)),
            resolve_seq_len(recipe.seq_len, positions, DEFAULT_SEQ_LEN),
            positions,
            int(model.config.vocab_size),
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
    def _widths(self) -> list[int]:
        """D of every site: how many columns its consumer has."""
        return [self.dense.units(site) * self.dense.columns_per_unit(site) for site in SITES]

    @property
    def statistics_per_block(self) -> int:
        """Bytes of one block's Grams in float64, held-out ones included."""
        kinds = 2 if self.recipe.holdout else 1
        return kinds * sum(d * d for d in self._widths) * torch.float64.itemsize

    def memory(self, stored: torch.dtype, forward: torch.dtype) -> dict[str, int]:
        """Bytes in memory at the fullest moment, by purpose (docs/FORMATS.md explains each)."""
        block = sum(
            shape.numel()
            for name, shape in self.dense_shapes.items()
            if name.startswith("model.layers.0.")
        )
        tokens = self.recipe.samples * self.seq_len
        widths = self._widths
        solve = DTYPES[self.recipe.solve_dtype].itemsize
        return {
            "one block's weights": block * (stored.itemsize + forward.itemsize),
            "hidden states": tokens * self.dense.hidden * forward.itemsize,
            "statistics": self.statistics_per_block,
            "solver": 4 * max(widths) ** 2 * solve,
        }

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
            "seq_len": self.seq_len,
        }


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
    """The dtype of the dense forward pass; see `Recipe.forward_dtype`."""
    if asked is not None:
        return DTYPES[asked]
    if device.type == "cpu" and stored != torch.float64:
        return torch.float32
    return stored
