"""The story: a dense checkpoint in, a smaller dense one out, one block in memory at a time."""

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coec.calibration.stream import Block
from coec.collecting import block_source
from coec.compensation import compensate, relative_errors
from coec.errors import NumericalError
from coec.models.architectures import ATTENTION, SITES, Site
from coec.models.carried import carry_files
from coec.models.dense import Dense
from coec.models.description import CONFIG, Description
from coec.models.files import write_json, write_tensors
from coec.models.output import check_output, check_space, new_folder
from coec.models.shards import ShardWriter
from coec.models.surgery import Cut, cut_block, value_rows
from coec.planning import Plan, choose_device, choose_forward_dtype
from coec.recipe import DTYPES, Recipe
from coec.report import KEPT, Report, environment
from coec.selection import keep_highest, unit_scores
from coec.settings import SEEDS
from coec.types import KeptSet, SiteResult

Progress = Callable[[str, int, int], None]
ERRORS = ("error_before", "error_after")


def plan(model: str | Path | Description, recipe: Recipe | None = None, **settings: Any) -> Plan:
    """What `prune` would do, from the configuration alone: no weights are read.

    Args:
        model: a model folder, a config.json, or a hub name.
        recipe: or its settings, as in `prune`.

    Raises:
        CoecError: the model or a setting cannot be used.
    """
    recipe = Recipe.or_of(recipe, settings)
    return Plan.of(Description.read(model), recipe)


def prune(
    model: str | Path | Dense,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    statistics: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Prunes a dense causal language model and writes a smaller dense checkpoint.

    Every check comes before any work; the output appears by one rename at the end, and on any
    error nothing of it is left.

    Args:
        model: a folder with config.json and safetensors, or a hub name.
        out: the folder to make.
        recipe: what to do; or give its fields and the compensation's options as `settings`
            (`sparsity=0.3, compensation="coec", alpha=0.8`).
        statistics: a folder made by `collect` under the same calibration settings, instead of a
            dense pass; the result is the same to the bit.
        force: replace an existing model in `out`.
        progress: called with (phase, done, total).

    Returns:
        Report: also written to `out/coec.json`.

    Raises:
        CoecError: with one line that says what to change.

    Example:
        >>> report = coec.prune("llama", "llama-70", sparsity=0.3, calibration="wiki.txt")
        >>> report.plan["parameters"]
    """
    recipe = Recipe.or_of(recipe, settings)
    seconds = _Stopwatch()
    out = Path(out)
    dense = Dense.open(model)
    check_output(out, dense.folder, force)
    plan = Plan.of(dense, recipe)
    device = choose_device(recipe.runtime.device)
    blocks_from = block_source(recipe, dense, statistics, progress)
    dense.check_values()
    dtype = DTYPES[recipe.repair.dtype] if recipe.repair.dtype else dense.dtype
    check_space(out, int(plan.parameters_after * dtype.itemsize * 1.01) + 2**24)
    forward = choose_forward_dtype(recipe.calibration.forward_dtype, dense.dtype, device)
    seconds.lap("checking")

    with new_folder(out, force=force) as folder:
        calibration, blocks = blocks_from(device, forward, progress)
        seconds.lap("reading text")
        writer = ShardWriter(folder, plan.pruned_shapes, dtype)
        sites: list[dict[str, Any]] = []
        kept: dict[str, Tensor] = {}
        for block in blocks:
            seconds.lap("calibrating")
            cuts, rows = _solve_block(block, plan, device)
            tensors = _fill_biases(cut_block(block.tensors, cuts, dtype), plan, block.index, dtype)
            writer.add({f"model.layers.{block.index}.{name}": t for name, t in tensors.items()})
            kept |= {f"layers.{block.index}.{c.site.name}": c.units.kept.cpu() for c in cuts}
            sites += rows
            seconds.lap("solving")
            if progress:
                progress("solving", block.index + 1, plan.dense.layers)
        outside = [name for name in plan.pruned_shapes if not name.startswith("model.layers.")]
        writer.add({name: dense.tensor(name).to(dtype) for name in outside})
        writer.finish()
        _write_side_files(folder, dense, plan, kept, dtype)
        seconds.lap("writing")
        report = Report(
            model=dense.name,
            model_sha256=dense.digest,
            out=str(out),
            recipe={
                **recipe.record(),
                "seq_len": plan.seq_len,
                "dtype": _dtype_name(dtype),
                "forward_dtype": _dtype_name(forward),
            },
            plan=plan.record() | {"notes": [*dense.notes, *plan.notes]},
            calibration=calibration,
            sites=sites,
            seconds=seconds.laps,
            environment=environment(str(device)),
        )
        report.write(folder)
    return report


def _solve_block(
    block: Block, plan: Plan, device: torch.device
) -> tuple[list[Cut], list[dict[str, Any]]]:
    """Selects and compensates every site of one block."""
    cuts, rows = [], []
    for site in SITES:
        began = time.perf_counter()
        module = f"model.layers.{block.index}.{site.consumer}"
        try:
            cut = _solve_site(block, site, plan, device)
        except NumericalError as error:
            raise NumericalError(f"{module}: {error}") from error
        cuts.append(cut)
        rows.append(
            {
                "module": module,
                "site": site.name,
                "units_before": cut.units.size,
                "units_after": len(cut.units.kept),
                **dict.fromkeys(ERRORS),
                "events": [],
                **cut.compensation.diagnostics,
                "seconds": time.perf_counter() - began,
            }
        )
    return cuts, rows


def _solve_site(block: Block, site: Site, plan: Plan, device: torch.device) -> Cut:
    recipe, dtype = plan.recipe, DTYPES[plan.recipe.repair.solve_dtype]
    weight = block.tensors[f"{site.consumer}.weight"].to(device)
    sums = block.grams.pop(site.name)
    sums.check_finite()
    # Variances are differences of sums: scores want the float64 that these were summed in.
    scores = _seeded(recipe.score, recipe.calibration.seed, block.index)(weight.to(sums.xx), sums)
    gram = sums.to(dtype)
    del sums  # the largest matrix there is, unless it is the one that is used
    units = keep_highest(unit_scores(scores, plan.dense.units(site)), plan.pruned.units(site))
    if units.everything:
        return Cut(site, units, SiteResult(weight))
    value = None
    if site is ATTENTION and "value" in recipe.method.needs:
        value = value_rows(block.tensors, plan.dense, units)
    kept = units.columns(plan.dense.columns_per_unit(site))
    result = compensate(
        weight,
        gram,
        kept,
        method=recipe.method,
        value_weight=value,
        **recipe.repair.options,
    )
    return Cut(site, units, _with_holdout(result, weight, block, site, kept))


def _with_holdout(
    result: SiteResult, weight: Tensor, block: Block, site: Site, kept: KeptSet
) -> SiteResult:
    """Adds the error on the held-out windows to the diagnostics, where there are any."""
    gram = block.holdout.pop(site.name, None)
    if gram is None:
        return result
    gram.check_finite()
    kept = KeptSet(kept.kept.to(gram.x.device), kept.size)
    wide = SiteResult(
        result.weight.to(gram.x), None if result.bias is None else result.bias.to(gram.x)
    )
    before, after = relative_errors(weight.to(gram.x), gram, kept, wide)
    held = {"holdout_before": before, "holdout_after": after}
    return replace(result, diagnostics={**result.diagnostics, **held})


def _seeded(score: Callable[..., Tensor], seed: int, block: int) -> Callable[..., Tensor]:
    """A score that takes a seed gets one of its own in every block."""
    if "seed" in inspect.signature(score).parameters:
        return functools.partial(score, seed=(seed * 1_000_003 + block) % SEEDS)
    return score


def _fill_biases(
    tensors: dict[str, Tensor], plan: Plan, block: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Exactly the tensors of the output format: biases it demands and nobody computed are 0."""
    prefix = f"model.layers.{block}."
    wanted = {
        name.removeprefix(prefix): shape
        for name, shape in plan.pruned_shapes.items()
        if name.startswith(prefix)
    }
    zeros = {
        name: torch.zeros(shape, dtype=dtype)
        for name, shape in wanted.items()
        if name.endswith(".bias") and name not in tensors
    }
    return {name: tensor for name, tensor in (tensors | zeros).items() if name in wanted}


def _write_side_files(
    folder: Path, dense: Dense, plan: Plan, kept: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """config.json with the dtype written, the kept units, and the files that travel unchanged."""
    config = dict(plan.output.config)
    for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
        config[key] = _dtype_name(dtype)
    write_json(folder / CONFIG, config)
    (folder / KEPT).parent.mkdir()
    write_tensors(kept, folder / KEPT, {"format": "pt"})
    carry_files(dense.folder, folder)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class _Stopwatch:
    """Wall-clock seconds by phase."""

    def __post_init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now
