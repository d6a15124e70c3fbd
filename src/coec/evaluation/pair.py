"""Models opened to be evaluated: one in memory, or a pruned one beside its dense one.

One in memory may be any that transformers loads: quantised, with an adapter, of any architecture.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from coec.allocation.kept import KEPT
from coec.devices import DTYPES, choose_forward_dtype
from coec.errors import ModelError, OptionError, first_line
from coec.models.dense import Dense
from coec.models.files import JsonDict, read_tensors
from coec.models.folder import REPORT, find_model, read_config
from coec.models.layout import Layout, Rows, Site
from coec.types import KeptSet

_UNLIMITED = 2**31
"""Positions of a model whose configuration names no number of them."""


def check_dtype(dtype: str | None) -> None:
    """Raise OptionError unless the dtype is None or a name in `DTYPES`."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def load_network(model: Dense, device: torch.device, dtype: str | None) -> PreTrainedModel:
    """Build the model for forward passes on a device."""
    return model.network(device, choose_forward_dtype(dtype, model.dtype, device))


@dataclass(frozen=True, eq=False)
class Loaded:
    """A causal model in memory, as `AutoModelForCausalLM` builds it.

    Attributes:
        folder: where it is from, whose tokenizer it has.
    """

    folder: Path
    network: PreTrainedModel

    @classmethod
    def open(
        cls, model: str | Path, device: torch.device, dtype: str | None, *, trust_remote_code: bool
    ) -> "Loaded":
        """Load a model; one that is quantised stays in its own dtypes.

        Raises:
            ModelError: it is missing, or transformers does not load it.
        """
        folder = find_model(model)
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": "auto"}
        try:
            network: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        except Exception as error:  # models and quantisers may raise anything
            reason = first_line(error)
            if not trust_remote_code and "trust_remote_code" in str(error):
                reason = "Python code of its own builds it: trust_remote_code=True runs that"
            raise ModelError(f"transformers does not load '{folder}': {reason}") from error
        # Quantised weights stay in their dtypes, and where their loader has put them.
        if getattr(network, "hf_quantizer", None) is None:
            network = network.to(device, choose_forward_dtype(dtype, network.dtype, device))
        return cls(folder, network.eval())

    @property
    def positions(self) -> int:
        """Tokens that it takes at most."""
        return getattr(self.network.config, "max_position_embeddings", None) or _UNLIMITED

    @property
    def vocabulary(self) -> int:
        """Number of tokens that it predicts."""
        return int(self.network.config.vocab_size)


@dataclass(frozen=True, eq=False)
class ModelPair:
    """A dense model and the one pruned from it, checked to belong together.

    Attributes:
        layout: the dense model's, without the blocks and experts that went whole.
        units: the kept units of every site of it, by `layers.<i>.<site>`.
        smaller: the pruned model's sites, by the same keys: blocks and experts have new numbers.
        trained: true if all weights of a block were trained (`reconstruct`, `recover`), and are
            no copies any more.
    """

    dense: Dense
    pruned: Dense
    layout: Layout
    units: dict[str, KeptSet]
    smaller: dict[str, Site]
    trained: bool

    @classmethod
    def open(
        cls, dense: str | Path | Dense | None, pruned: "str | Path | Dense | ModelPair"
    ) -> "ModelPair":
        """Open both models; every weight is read once, and nothing is computed.

        Args:
            dense: folder or hub name; None for the model that `coec.json` names, if it is here.
            pruned: a folder that `coec.prune` wrote.

        Raises:
            ModelError: a folder is damaged, not written by coec, or of another model.
        """
        if isinstance(pruned, ModelPair):
            return pruned
        folder = pruned.folder if isinstance(pruned, Dense) else find_model(pruned)
        for name in (KEPT, REPORT):
            if not (folder / name).is_file():
                raise ModelError(
                    f"no {name} in '{folder}': PRUNED must be a folder that `coec prune` wrote"
                )
        report = read_config(folder / REPORT)
        recipe, plan = (
            part if isinstance(part := report.get(name), dict) else {}
            for name in ("recipe", "plan")
        )
        dropped = frozenset(plan.get("dropped_blocks") or ())
        counted = recipe.get("attention_units", "groups")
        before, after = (
            Dense.open(model).counted_in(counted)
            for model in (
                _dense_model(folder, report) if dense is None else dense,
                pruned if isinstance(pruned, Dense) else folder,
            )
        )
        # A mismatch is reported before damaged weights.
        _check_sizes(folder, before, after, len(dropped))
        stored = read_tensors(folder / KEPT)
        # Sites of both models side by side: of the dense one without blocks and experts that went
        layout = _remaining(folder, before.layout, after.layout, stored, dropped)
        smaller = {a.key: b for a, b in zip(layout.sites, after.layout.sites, strict=True)}
        units = _units(folder, layout, smaller, stored)
        trained = bool(report.get("recoveries")) or bool(recipe.get("reconstruct"))
        pair = cls(before, after, layout, units, smaller, trained)
        # All weights are read once, which also gives the dense model's digest below.
        for model in (before, after):
            model.check_values()
        if not trained:
            pair._check_kinship()
        elif before.digest != report.get("model_sha256"):  # no weight is a copy any more
            raise pair._stranger("its weights are others")
        return pair

    def reads_the_same(self, site: Site) -> bool:
        """True if all direct inputs of the consumer are still copied rows of the dense model."""
        if not self.trained:
            return True
        smaller = self.smaller[site.key]
        # By names within the sublayer: experts that stay have other numbers where some went.
        stored = {_within(smaller, p) for p in smaller.producers if p.tensor in self.pruned.files}
        producers = [rows for rows in site.producers if _within(site, rows) in stored]
        return all(self._copied(site, rows) for rows in producers)

    def _copied(self, site: Site, rows: Rows) -> bool:
        """True if the kept rows of a producer are those of the dense model."""
        smaller = self.smaller[site.key]
        # The pruned model may have further producers: biases that its format demands.
        names = {_within(site, producer) for producer in site.producers}
        # Producers of both sites in the same order → kept rows of the dense one, cast as written
        written = [p for p in smaller.producers if _within(smaller, p) in names]
        after = written[site.producers.index(rows)]
        old = self.dense.tensor(rows.tensor)[rows.of(self.units[site.key])]
        new = self.pruned.tensor(after.tensor)[after.start : after.stop]
        return torch.equal(old.to(new.dtype), new)

    def _check_kinship(self) -> None:
        """Raise ModelError if the weights that pruning copies are another model's.

        These are the embedding, and the kept rows of the producers at the first site of every kind.
        """
        name = self.dense.layout.embedding
        old, new = self.dense.tensor(name), self.pruned.tensor(name)
        if not torch.equal(old.to(new.dtype), new):
            raise self._stranger(f"the rows of {name} are others")
        for site in self.layout.kinds:
            for rows in site.producers:
                if not self._copied(site, rows):
                    raise self._stranger(f"the rows that {rows.tensor} keeps are others")

    def _stranger(self, reason: str) -> ModelError:
        return ModelError(
            f"'{self.pruned.folder}' was not pruned from '{self.dense.folder}': {reason}; give the "
            "dense model it was made from"
        )


def _dense_model(folder: Path, report: JsonDict) -> Path:
    """Find the dense model that the report names, here or beside the pruned one."""
    path = Path(str(report.get("model")))
    for place in (path, folder.absolute().parent / path):
        if place.is_dir() and not place.samefile(folder):
            return place
    raise ModelError(
        f"'{folder}' was made from '{path}', which is no folder here or beside it: "
        "name the dense model, coec analyze DENSE PRUNED"
    )


def _check_sizes(folder: Path, dense: Dense, pruned: Dense, dropped: int) -> None:
    old, new = dense.shape, pruned.shape
    sizes = {
        "vocabulary": (dense.vocabulary, pruned.vocabulary),
        "blocks that stay": (old.layers - dropped, new.layers),
        "hidden size": (old.hidden, new.hidden),
        "head size": (old.head_dim, new.head_dim),
    }
    if any(site.groups for site in dense.layout.kinds):
        sizes["KV groups"] = old.kv_heads, new.kv_heads
    else:
        sizes["query heads per KV group"] = old.group, new.group
    for name, (before, after) in sizes.items():
        if before != after:
            raise ModelError(
                f"the two models do not belong together: {name} {before} in DENSE, {after} in "
                f"PRUNED; give the dense model that '{folder / REPORT}' names"
            )


def _within(site: Site, rows: Rows) -> str:
    """Name of a producer's tensor without the prefix that it shares with the consumer."""
    return rows.tensor.removeprefix(site.consumer.rpartition(".")[0])


def _remaining(
    folder: Path,
    before: Layout,
    after: Layout,
    stored: Mapping[str, Tensor],
    dropped: Collection[int],
) -> Layout:
    """Return the dense layout without what went whole; ModelError for another number of experts."""
    blocks = []
    for block in before.blocks:
        if block.index in dropped:
            continue
        experts = stored.get(block.experts_key)
        if block.router is not None and experts is not None:
            kept = _kept_set(folder, block.experts_key, experts, block.router.stop)
            block = replace(block, sites=block.remaining(kept))
        blocks.append(block)
    layout = replace(before, blocks=tuple(blocks))
    if len(layout.sites) != len(after.sites):
        raise ModelError(
            f"'{folder / KEPT}' is of a model with another number of experts than the pruned one: "
            "the files are of different runs"
        )
    return layout


def _kept_set(folder: Path, key: str, indices: Tensor, size: int) -> KeptSet:
    """Return a kept set of a file; raises ModelError where it does not fit the dense model."""
    try:
        return KeptSet(indices, size)
    except OptionError as error:
        raise ModelError(
            f"{key} in '{folder / KEPT}' does not fit the dense model: {error}"
        ) from error


def _units(
    folder: Path, layout: Layout, pruned: Mapping[str, Site], stored: Mapping[str, Tensor]
) -> dict[str, KeptSet]:
    """Return the kept set of every site, checked against both models."""
    units = {}
    for site in layout.sites:
        key = site.key
        if key not in stored:
            raise ModelError(f"'{folder / KEPT}' lacks {key}: it is of another model")
        units[key] = _kept_set(folder, key, stored[key], site.units)
        if len(units[key].indices) != pruned[key].units:
            raise ModelError(
                f"{key} in '{folder / KEPT}' keeps {len(units[key].indices)} units, the pruned "
                f"model has {pruned[key].units}: the files are of different runs"
            )
    return units
