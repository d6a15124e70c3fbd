"""The cost of running a model, from its configuration alone (docs/ANALYSIS.md)."""

from dataclasses import asdict, dataclass
from pathlib import Path

from coec.devices import DTYPES, stored_dtype
from coec.errors import OptionError
from coec.evaluation.pair import check_dtype
from coec.models.description import Description
from coec.models.files import JsonDict
from coec.planning import Plan
from coec.planning.recipe import Recipe


@dataclass(frozen=True)
class Cost:
    """The cost of a model.

    Attributes:
        parameters: tied ones count once.
        dtype: that of weights and cache.
        weight_bytes: `parameters × bytes of the dtype`. The peak memory of inference, the paper's
            `Mem`, adds activations, cache and the allocator's share; `speed` measures it.
        gflops_per_token: `2 × parameters / 1e9`, the paper's rule (embeddings count too).
        kv_cache_bytes_per_token: bytes of keys and values in all blocks.
    """

    parameters: int
    dtype: str
    weight_bytes: int
    gflops_per_token: float
    kv_cache_bytes_per_token: int


@dataclass(frozen=True)
class Efficiency:
    """The cost of a dense and of a pruned model."""

    dense: Cost
    pruned: Cost

    def as_dict(self) -> JsonDict:
        """List both costs by name, and `ratio`: pruned over dense."""
        dense, pruned = asdict(self.dense), asdict(self.pruned)
        ratio = {name: pruned[name] / dense[name] for name in dense if name != "dtype"}
        return {"dense": dense, "pruned": pruned, "ratio": ratio}


def efficiency(
    model: str | Path | Description,
    pruned: str | Path | Description | None = None,
    *,
    sparsity: float | None = None,
    dtype: str | None = None,
) -> Efficiency:
    """Compute the cost before and after pruning, without weights. Paper, Efficiency Analysis.

    Args:
        model: the dense model: a folder, a config.json, or a hub name.
        pruned: a pruned model likewise; None for the dense model pruned by `sparsity`.
        sparsity: fraction of units removed, with `pruned = None`; None for 0.3.
        dtype: dtype of weights and cache; None for the dtype that each configuration declares.

    Raises:
        CoecError: with one line that says what to change.

    Example:
        >>> coec.efficiency("Qwen2.5-7B/config.json", sparsity=0.3).pruned.gflops_per_token
    """
    if pruned is not None and sparsity is not None:
        raise OptionError("give a pruned model or a sparsity, not both")
    check_dtype(dtype)
    before = Description.read(model)
    if pruned is None:
        recipe = Recipe(sparsity=0.3 if sparsity is None else sparsity)
        after = Description.of(Plan.of(before, recipe).output.config)
    else:
        after = Description.read(pruned)
    return Efficiency(_cost(before, dtype), _cost(after, dtype))


def _cost(model: Description, dtype: str | None) -> Cost:
    chosen = DTYPES[dtype] if dtype else stored_dtype(model.config)
    parameters, shape = model.parameters, model.shape
    groups = sum(shape.at(block).kv_heads for block in range(shape.layers))
    return Cost(
        parameters=parameters,
        dtype=str(chosen).removeprefix("torch."),
        weight_bytes=parameters * chosen.itemsize,
        gflops_per_token=2 * parameters / 1e9,
        kv_cache_bytes_per_token=2 * groups * shape.head_dim * chosen.itemsize,
    )
