"""Compensate for what another program removed: kept units are inferred, the rest is `prune`."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from coec.allocation.kept import KeptUnits
from coec.errors import ModelError, OptionError
from coec.events import Progress
from coec.execution.journal import unfinished
from coec.execution.output import check_output, path_of
from coec.models.dense import Dense
from coec.models.layout import Site
from coec.models.matching import RawCheckpoint, SiteTensors, kept_units
from coec.pipeline.prune import prune
from coec.pipeline.report import Report
from coec.planning.recipe import Recipe
from coec.settings.parts import CHOOSING
from coec.settings.typed import PruningSettings
from coec.streaming.statistics import Statistics


def infer_kept(
    dense: str | Path | Dense, pruned: str | Path | RawCheckpoint, progress: Progress | None = None
) -> KeptUnits:
    """Return the units of a dense model that another program kept when it pruned it.

    A unit is found by its rows in the producers, which the other program must have left as they
    were; what it did to the consumers plays no part. It may have cut rows, or set them or the
    columns that read them to zero. One block is read at a time.

    Args:
        dense: a folder with config.json and safetensors, or a hub name.
        pruned: likewise, its tensors named as those of the dense model.
        progress: called with (phase, done, total).

    Returns:
        KeptUnits: of every site, for `prune(..., kept=...)`.

    Raises:
        ModelError: a model cannot be read, or units are none of the dense model's.
    """
    dense, pruned = Dense.open(dense), RawCheckpoint.open(pruned)
    layout = dense.layout
    if pruned.layers != len(layout.blocks):
        raise ModelError(
            f"'{pruned.name}' has {pruned.layers} blocks, '{dense.name}' {len(layout.blocks)}: "
            "which blocks went is not inferred; give the dense model without them"
        )
    _check_rest(dense, pruned)
    # Site by site: producers of both models → rows matched → kept units
    kept_by_site = {}
    for block in layout.blocks:
        for site in block.sites:
            sides = (_side(model, site, dense) for model in (dense, pruned))
            kept_by_site[site.key] = kept_units(*sides)
        if progress:
            progress("matching", block.index + 1, len(layout.blocks))
    return KeptUnits.of(kept_by_site, pruned.name, pruned.digest)


def _check_rest(dense: Dense, pruned: RawCheckpoint) -> None:
    """Raise ModelError where a matrix of a block has lost something that belongs to no site."""
    # Matrices of a block that belong to no site must have kept their shape.
    sites = {name for site in dense.layout.sites for name in site.tensors}
    prefixes = tuple(block.prefix for block in dense.layout.blocks)
    routers = {block.router.tensor for block in dense.layout.blocks if block.router is not None}
    for name, shape in dense.shapes.items():
        header = pruned.headers.get(name)
        if not name.startswith(prefixes) or name in sites or len(shape) < 2 or header is None:
            continue
        if header.shape != tuple(shape):
            why = "infers no experts that went" if name in routers else "removes nothing there"
            raise ModelError(
                f"{name} is {header.shape} in '{pruned.name}' and {tuple(shape)} in the dense "
                f"model: coec {why}"
            )


def compensate_pruned(
    dense: str | Path | Dense,
    pruned: str | Path | RawCheckpoint,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    statistics: str | Path | Statistics | None = None,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[PruningSettings],
) -> Report:
    """Compensate a model that another program pruned: its units, our weights.

    The dense model is pruned to the units that are left in the other (`infer_kept`), as `prune`
    does it, with any compensation, preset or reconstruction. Of the other model nothing else is
    used.

    Args:
        dense: the model before it was pruned: a folder with config.json and safetensors, or a hub
            name.
        pruned: what the other program made of it, likewise.
        out: the folder to make.
        recipe: as in `prune`, and so is the rest; the settings `sparsity`, `selection` and `kept`
            have no place here.

    Returns:
        Report: also written to `out/coec.json`; its `plan["kept"]` says from what the units are.

    Raises:
        CoecError: with one line that says what to change.

    Example:
        >>> report = coec.compensate_pruned("llama", "llama-flap", "llama-mended")
        >>> report.plan["kept"]["inferred_from"]
    """
    check_settings(settings, pruned)
    if Recipe.or_of(recipe, settings).pruning.kept is not None:
        raise OptionError(
            "the recipe names kept units, and so does the pruned model: leave one out"
        )
    dense = Dense.open(dense)
    out = path_of(out)
    check_output(out, dense.folder, force=force or unfinished(out))
    kept = infer_kept(dense, pruned, progress)
    if recipe is None:
        settings["kept"] = kept
    else:
        recipe = replace(recipe, pruning=replace(recipe.pruning, kept=kept))
    return prune(
        dense, out, recipe, statistics=statistics, force=force, restart=restart, progress=progress,
        **settings,
    )  # fmt: skip


def check_settings(settings: Collection[str], pruned: str | Path | RawCheckpoint) -> None:
    """Raise OptionError for settings that say which units stay."""
    name = pruned.name if isinstance(pruned, RawCheckpoint) else pruned
    for setting in CHOOSING:  # here the pruned model does
        if setting in settings:
            raise OptionError(
                f"{setting} has no place where '{name}' says which units stay: leave it out"
            )


def _side(model: Dense | RawCheckpoint, site: Site, dense: Dense) -> SiteTensors:
    """Return a model's tensors of a site."""
    stored = model.files if isinstance(model, Dense) else model.headers
    names = {*(rows.tensor for rows in site.producers), site.weight}
    names |= {name.removesuffix("weight") + "bias" for name in names}
    tensors = {n: model.tensor(n) for n in sorted(names) if n in stored}
    return SiteTensors.of(model.name, site, tensors, dense.shapes)
