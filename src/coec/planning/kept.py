"""Units that stay where the user names them instead of a selection (docs/FORMATS.md)."""

import difflib
import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from os.path import isdir
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coec.errors import ModelError, OptionError
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import JsonDict, parse_json
from coec.models.folder import REPORT
from coec.models.layout import BlockLayout, Layout, Site
from coec.models.matching import RawCheckpoint, SiteTensors, kept_units, match_rows
from coec.models.renumbering import VOCABULARY
from coec.types import KeptSet

KEPT = "coec/kept.safetensors"
"""File in a separate folder: servers read every safetensors file next to the weights as weights."""
MAPPING = "mapping"
"""What records call kept units that a caller gave as they are."""
IDLE = ("sparsity", "attention_sparsity", "budget", "budget_active", "multiple_of")
"""Settings without effect where every site is named."""
WANTED = (
    "give a safetensors or JSON file of unit indices by site (layers.0.mlp), or a folder that coec "
    "wrote"
)


def is_foreign(kept: Any) -> bool:
    """Return whether the setting `kept` names a folder that another program pruned."""
    return isinstance(kept, str) and isdir(kept) and not (Path(kept) / KEPT).exists()


@dataclass(frozen=True)
class KeptUnits:
    """Units that stay because the user names them, at some sites or all: checked and sorted.

    Attributes:
        source: where they are from, as it was named.
        digest: SHA-256 of the sorted sites and indices; independent of file format and order.
        units: sorted, by `Site.key`.
        inferred_from: the digest of the checkpoint that they were inferred from; None where they
            were given.
        attention_units: kind of units removed from attention, by the report next to the file of
            units; None if there is no report.
        dropped: blocks that are left out, by the same report.
    """

    source: str
    digest: str
    units: Mapping[str, Int[Tensor, " k"]] = field(compare=False, repr=False)
    inferred_from: str | None = None
    attention_units: Literal["groups", "heads"] | None = None
    dropped: tuple[int, ...] = ()

    @property
    def identity(self) -> str:
        """Digest of the units, and the blocks that are left out: they determine a result."""
        return f"{self.digest} {self.dropped}"

    @classmethod
    def named(cls, kept: Any, model: Description) -> "KeptUnits":
        """Return the units that the setting `kept` names.

        A folder that another program pruned is matched with the dense model.
        """
        if isinstance(model, Dense) and is_foreign(kept):
            return infer_kept(model, kept)
        return cls.read(kept)

    @classmethod
    def of(
        cls, units: Mapping[str, Any], source: str = MAPPING, inferred_from: str | None = None
    ) -> "KeptUnits":
        """Return kept units of indices by site; OptionError unless they are distinct numbers."""
        if not units:
            raise OptionError(f"'{source}' names no site: {WANTED}")
        sorted_units = {
            str(key): _sorted(indices, f"{key!s:.80} in '{source}'")
            for key, indices in sorted(units.items(), key=lambda item: str(item[0]))
        }
        # Sites and indices are sorted: the digest depends neither on their order nor on the source.
        content = hashlib.sha256()
        for key, indices in sorted_units.items():
            content.update(f"{key} {len(indices)} ".encode())
            content.update(indices.numpy().tobytes())
        return cls(source, content.hexdigest(), sorted_units, inferred_from)

    @classmethod
    def read(cls, kept: "str | Path | Mapping[str, Any] | KeptUnits") -> "KeptUnits":
        """Read kept units of a file, a folder that coec wrote, or a mapping.

        Raises OptionError where it is not there, cannot be read, or holds no kept units.
        """
        if isinstance(kept, KeptUnits):
            return kept
        if isinstance(kept, Mapping):
            return cls.of(kept)
        if not isinstance(kept, str | Path):
            raise OptionError(f"kept is a {type(kept).__name__}: {WANTED}")
        path = Path(kept)
        if (path.parent.parent / KEPT) == path:
            path = path.parent.parent  # the folder that coec wrote, whose report says more
        return replace(cls.of(_content(path), str(kept)), **_reported(path))

    def of_site(self, site: Site) -> KeptSet | None:
        """Return the units that a site keeps; None where they are not named."""
        indices = self.units.get(site.key)
        return None if indices is None else KeptSet(indices, site.units)

    def count(self, site: Site) -> int | None:
        """Return how many units a site keeps; in a block left out as many as in the first named."""
        units = self.units.get(site.key)
        if units is None and site.block in self.dropped:
            end = f".{site.name}"
            units = next((u for key, u in self.units.items() if key.endswith(end)), None)
        return None if units is None else len(units)

    def covers(self, layout: Layout) -> bool:
        """Return whether every site of a model is named."""
        return all(s.key in self.units or s.block in self.dropped for s in layout.sites)

    def check(self, layout: Layout) -> None:
        """Raises OptionError where they are of another model: sites or units that it lacks."""
        if self.attention_units not in (None, layout.attention_units):
            words = "KV groups" if self.attention_units == "groups" else "query heads"
            raise OptionError(
                f"'{self.source}' keeps {words}: set "
                f"attention_units = {self.attention_units}, or auto"
            )
        if any(number not in range(len(layout.blocks)) for number in self.dropped):
            raise OptionError(
                f"'{self.source}' leaves out blocks {', '.join(map(str, self.dropped))}, and this "
                f"model has {len(layout.blocks)}: is it of another model?"
            )
        sites = {site.key: site for site in layout.sites}
        experts = {block.experts_key for block in layout.blocks if block.router}
        if named_experts := experts & self.units.keys():
            raise OptionError(
                f"'{self.source}' names experts that stay ({min(named_experts)}): kept units are "
                "of sites, give expert_sparsity and leave kept out"
            )
        for key, indices in self.units.items():
            if key not in sites:
                close = difflib.get_close_matches(key, sites, 1, cutoff=0)
                raise OptionError(
                    f"'{self.source}' names '{key:.80}', which is no site of this model of "
                    f"{len(layout.blocks)} blocks; did you mean '{close[0]}'?"
                )
            if int(indices[-1]) >= (units := sites[key].units):
                raise OptionError(
                    f"{key} in '{self.source}' names unit {int(indices[-1])}, this model has "
                    f"{units} {sites[key].unit}s (0 to {units - 1}): are they of another model?"
                )
            groups = sites[key].ranges
            each = torch.bincount(indices * groups // units, minlength=groups)
            if len(each.unique()) > 1:
                raise OptionError(
                    f"{key} in '{self.source}' keeps {int(each.min())} to {int(each.max())} query "
                    "heads of a KV group: keep as many of each"
                )

    def record(self) -> JsonDict:
        """JSON-ready, without the units themselves."""
        record = {"source": self.source, "sha256": self.digest, "sites": len(self.units)}
        return record | ({"inferred_from": self.inferred_from} if self.inferred_from else {})


def _reported(path: Path) -> JsonDict:
    """Return the units of attention, and the blocks that are left out, by a folder's report."""
    try:
        plan = parse_json(path / REPORT)["plan"]
        units, dropped = plan["attention_units"], tuple(map(int, plan["dropped_blocks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {"attention_units": units, "dropped": dropped} if units in ("groups", "heads") else {}


def _content(path: Path) -> Mapping[str, Any]:
    """Return the content of a file, or of the one in a folder that coec wrote."""
    folder = isdir(path)
    file = path / KEPT if folder else path
    try:
        if file.suffix == ".safetensors":
            return {site: ids for site, ids in load_file(file).items() if site != VOCABULARY}
        content = parse_json(file, distinct=True)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        return content
    except (FileNotFoundError, NotADirectoryError) as error:
        if folder:
            raise OptionError(f"no {KEPT} in '{path}': it is no folder that coec pruned") from error
        raise OptionError(f"no kept units at '{path!s:.200}': {WANTED}") from error
    except (OSError, ValueError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise OptionError(f"'{file!s:.200}' holds no kept units ({why}): {WANTED}") from error


def _sorted(indices: Any, description: str) -> Int[Tensor, " k"]:
    """Return sorted int64; raises OptionError unless they are distinct whole numbers from 0 on."""
    try:
        array = np.asarray(indices)
    except (ValueError, TypeError, RuntimeError):
        array = np.empty(0)
    # numpy turns a list of whole numbers and truth values into whole numbers.
    flags = isinstance(indices, list | tuple) and any(isinstance(flag, bool) for flag in indices)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array) or flags:
        got = f"{indices!r:.60}"
        if isinstance(indices, Tensor):
            got = f"{tuple(indices.shape)} of {indices.dtype}"
        raise OptionError(
            f"{description} is a list of the units that stay, at least one, whole numbers, got "
            f"{got}"
        )
    ordered = torch.from_numpy(array.astype(np.int64)).sort().values
    if int(ordered[0]) < 0:
        raise OptionError(f"{description} names unit {int(ordered[0])}: units are counted from 0")
    repeated = (ordered[1:] == ordered[:-1]).nonzero()
    if len(repeated):
        raise OptionError(
            f"{description} names unit {int(ordered[int(repeated[0])])} twice: name each unit that "
            "stays once"
        )
    return ordered


def infer_kept(dense: str | Path | Dense, pruned: str | Path) -> KeptUnits:
    """Return the units of a dense model that another program kept when it pruned it.

    A unit is found by its rows in the producers, which the other program must have left
    unchanged; changes to the consumers do not matter. It may have cut rows, or set them or the
    columns that read them to zero; removed whole KV groups, query heads or blocks. One block is
    read at a time.

    Args:
        dense: a folder with config.json and safetensors, or a hub name.
        pruned: a folder whose tensors have the names of the dense model.

    Raises:
        ModelError: a model cannot be read, or units are none of the dense model's.
    """
    dense = Dense.open(dense)
    checkpoint = RawCheckpoint.open(pruned, dense)
    numbers = _matched_blocks(dense, checkpoint)
    checkpoint = checkpoint.renumbered(numbers)
    dropped = tuple(sorted(set(range(dense.shape.layers)) - set(numbers.values())))
    units: Literal["groups", "heads"] = "groups"
    try:
        kept = _matched_units(dense.counted_in("groups"), checkpoint, dropped)
    except ModelError as error:
        try:
            kept, units = _matched_units(dense.counted_in("heads"), checkpoint, dropped), "heads"
        except ModelError:
            raise error from None
    found = KeptUnits.of(kept, checkpoint.name, checkpoint.digest)
    return replace(found, attention_units=units, dropped=dropped)


def _matched_blocks(dense: Dense, pruned: RawCheckpoint) -> dict[int, int]:
    """Return the number of the dense block of every block, by the norms that pruning leaves."""
    if pruned.layers >= len(dense.layout.blocks):
        return {index: index for index in range(pruned.layers)}
    numbers: dict[int, int] = {}
    for index in range(pruned.layers):
        for block in dense.layout.blocks[max(numbers.values(), default=-1) + 1 :]:
            norms = [
                n for n, s in dense.shapes.items() if n.startswith(block.prefix) and len(s) == 1
            ]
            names = [n.replace(f".{block.index}.", f".{index}.", 1) for n in norms]
            pairs = [(n, m) for n, m in zip(norms, names, strict=True) if m in pruned.headers]
            same = (match_rows([dense.tensor(n)[None]], [pruned.tensor(m)[None]]) for n, m in pairs)
            if pairs and all(rows for [rows] in same):
                numbers[index] = block.index
                break
        else:
            raise ModelError(
                f"block {index} of '{pruned.name}' has the norms of none of the dense model's "
                f"{len(dense.layout.blocks)} blocks: which blocks were removed cannot be told"
            )
    return numbers


def _matched_units(
    dense: Dense, pruned: RawCheckpoint, dropped: Collection[int]
) -> dict[str, Tensor]:
    """Return the units that are left at every site of the blocks that are left."""
    blocks = [block for block in dense.layout.blocks if block.index not in dropped]
    _check_rest(dense, pruned, blocks)
    # Site by site: producers of both models → rows matched → kept units
    return {
        site.key: kept_units(*(_side(model, site, dense) for model in (dense, pruned)))
        for block in blocks
        for site in block.sites
    }


def _check_rest(dense: Dense, pruned: RawCheckpoint, blocks: Iterable[BlockLayout]) -> None:
    """Raise ModelError if a matrix of a block has lost something that belongs to no site."""
    sites = {name for site in dense.layout.sites for name in site.tensors}
    prefixes = tuple(block.prefix for block in blocks)
    for name, shape in dense.shapes.items():
        header = pruned.headers.get(name)
        if not name.startswith(prefixes) or name in sites or len(shape) < 2 or header is None:
            continue
        if header.shape != tuple(shape):
            raise ModelError(
                f"{name} is {header.shape} in '{pruned.name}' and {tuple(shape)} in the dense "
                "model: coec removes nothing there"
            )


def _side(model: Dense | RawCheckpoint, site: Site, dense: Dense) -> SiteTensors:
    """Return a model's tensors of a site."""
    stored = model.files if isinstance(model, Dense) else model.headers
    names = {*(rows.tensor for rows in site.producers), site.weight}
    names |= {name.removesuffix("weight") + "bias" for name in names}
    tensors = {n: model.tensor(n) for n in sorted(names) if n in stored}
    return SiteTensors.of(model.name, site, tensors, dense.shapes)
