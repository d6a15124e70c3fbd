"""Find which units of a dense model another program kept, by the rows that it left (FORMATS.md).

A unit is identified by all its rows in the producers together. The consumer plays no part, except
for its zero columns: most programs change it, and it is computed anew.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from coec.errors import ModelError
from coec.models.architectures import ARCHITECTURES, architecture_of
from coec.models.description import Description
from coec.models.files import FLOAT_DTYPES, Header, opened, read_headers
from coec.models.folder import find_model, read_config
from coec.models.headers import numbered_layers
from coec.models.layout import Rows, Site
from coec.models.names import placer

_NAMED = 3
"""Number of rows that an error names."""
_UNKNOWN = "which units were kept cannot be told"
_ROUTES = (None, torch.bfloat16, torch.float16)
"""Dtypes through which weights may have gone on the way to the dtype that they are stored in."""
Matrices = Sequence[Tensor]
"""Rows of several tensors; row n of each belongs to unit (or row) n."""


@dataclass(frozen=True, eq=False)
class RawCheckpoint:
    """The tensors of a checkpoint that another program pruned, as they are.

    Their shapes need not agree with the configuration, as long as the model is of a supported type
    and its tensors have the usual names. Nothing is computed with it.
    """

    name: str
    folder: Path
    headers: dict[str, Header]

    @classmethod
    def open(cls, model: "str | Path | RawCheckpoint", dense: Description) -> "RawCheckpoint":
        """Read the type of the model, and every file's header; both by names of the dense model."""
        if isinstance(model, RawCheckpoint):
            return model
        folder = find_model(model)
        model_type = architecture_of(read_config(folder)).model_type
        if model_type not in ARCHITECTURES and model_type != dense.architecture.model_type:
            raise ModelError(
                f"'{model}' is a {model_type}, and the dense model a "
                f"{dense.architecture.model_type}: it is not pruned from this model"
            )
        headers = read_headers(folder)
        if dense.names.running:
            headers = dense.names.of_headers(headers, placer(dense.skeleton()))
        for name, header in headers.items():
            if header.dtype not in FLOAT_DTYPES:
                raise ModelError(
                    f"{name} in '{header.file}' of '{model}' is {header.dtype}: the weights are "
                    "quantised; give the pruned model with float weights"
                )
        return cls(str(model), folder, headers)

    @property
    def layers(self) -> int:
        """Number of blocks with tensors."""
        return len(set(numbered_layers(self.headers).values()))

    def renumbered(self, numbers: Mapping[int, int]) -> "RawCheckpoint":
        """Return the checkpoint with other numbers of its blocks."""
        layers = numbered_layers(self.headers)
        headers = {
            name.replace(f".{layers[name]}.", f".{numbers[layers[name]]}.", 1)
            if name in layers else name: header
            for name, header in self.headers.items()
        }  # fmt: skip
        return replace(self, headers=headers)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, on the CPU in its stored dtype."""
        header = self.headers[name]
        with opened(self.folder / header.file) as file:
            return header.read(file, self.folder)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all tensors and their names."""
        content = hashlib.sha256()
        for name in sorted(self.headers):
            tensor = self.tensor(name)
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()


@dataclass(frozen=True, eq=False)
class SiteTensors:
    """The tensors that one of the two models has at a site of the dense model.

    These are weights and biases of the site's modules, as far as the model has them; `name` is the
    model, for messages.
    """

    name: str
    site: Site
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, name: str, site: Site, tensors: Mapping[str, Tensor], dense: Mapping[str, torch.Size]
    ) -> "SiteTensors":
        """Take apart tensors that hold several projections; `dense` has the dense model's shapes.

        Raises ModelError if a tensor has no whole number of rows of every projection.
        """
        # A tensor of several projections (q, k, v in one): each gets a separate name and rows.
        apart, renamed = dict(tensors), {}
        for rows in site.producers:
            size = dense[rows.tensor][0]
            if rows.count == size:
                continue
            if rows.tensor not in tensors:
                raise ModelError(f"'{name}' lacks {rows.tensor}: it is not pruned from this model")
            # The same share of every projection must have stayed: it says where each begins.
            ends = [end * len(tensors[rows.tensor]) for end in (rows.start, rows.stop)]
            if any(end % size for end in ends):
                raise ModelError(
                    f"the projections in {rows.tensor} of '{name}' hold different shares of "
                    f"{site.unit}s: whole ones are removed from all of them"
                )
            projection = f"{_module(rows.tensor)}[{rows.start}:{rows.stop}].weight"
            apart[projection] = tensors[rows.tensor][ends[0] // size : ends[1] // size]
            renamed[rows] = Rows(projection, 0, rows.count)
        producers = tuple(renamed.get(r, r) for r in site.producers)
        value = None if site.value is None else renamed.get(site.value, site.value)
        return cls(name, replace(site, producers=producers, value=value), apart)

    def rows(self, tensor: str, count: int) -> Tensor:
        """Reshape a tensor into rows, one for each owner."""
        return self.tensors[tensor].reshape(count, -1)

    @cached_property
    def count(self) -> int:
        """Number of units; raises ModelError if the tensors disagree, or hold parts of units."""
        # Every producer and the consumer must tell the same whole number of units.
        counts = {
            rows.tensor: len(self.tensors[rows.tensor]) * self.site.units / rows.count
            for rows in self.site.producers
            if rows.tensor in self.tensors
        }
        weight = self.site.weight
        counts[weight] = self.tensors[weight].shape[1] / self.site.columns_per_unit
        if len(set(counts.values())) > 1 or counts[weight] % 1:
            numbers = ", ".join(f"{_module(name)} {count:g}" for name, count in counts.items())
            raise ModelError(
                f"the modules of {self.site.key} in '{self.name}' hold different numbers of "
                f"{self.site.unit}s ({numbers}): whole ones are removed from all of them"
            )
        return int(counts[weight])

    @cached_property
    def silent(self) -> Bool[Tensor, " units"]:
        """Units that contribute nothing: zero rows in a producer, or zero columns in the consumer.

        Only the value projection counts among the producers of attention.
        """
        # A query or key projection of 0 leaves attention uniform, not silent; values of 0 end it.
        silent = self.unread.reshape(self.count, -1).all(dim=1)
        if self.site.groups:  # values are of whole groups
            return silent
        producers = [self.site.value] if self.site.value else self.site.producers
        for rows in producers:
            if rows.tensor.endswith(".weight") and rows.tensor in self.tensors:
                silent = silent | self._zero(rows.tensor)
        return silent

    @cached_property
    def unread(self) -> Bool[Tensor, " columns"]:
        """Columns of the consumer that are zero."""
        return (self.tensors[self.site.weight] == 0).all(dim=0)

    def _zero(self, weight: str) -> Bool[Tensor, " units"]:
        """Units whose rows of a producer, bias included, are zero."""
        bias = weight.removesuffix("weight") + "bias"
        tensors = [self.rows(name, self.count) for name in (weight, bias) if name in self.tensors]
        return torch.stack([(tensor == 0).all(dim=1) for tensor in tensors]).all(dim=0)


def kept_units(dense: SiteTensors, pruned: SiteTensors) -> Int[Tensor, " k"]:
    """Find the units of a dense site that a pruned one has, sorted.

    Rows may be in another order, in another dtype, and among zeros. Raises ModelError if they are
    not the dense model's, belong to parts of units, or occur twice.
    """
    _check_shapes(dense, pruned)
    if not dense.site.groups:
        _check_heads(dense, pruned)
    units = _matched(dense, pruned) if pruned.count else {}
    if not units:
        raise ModelError(f"'{pruned.name}' keeps no {dense.site.unit} in {dense.site.key}")
    if not dense.site.groups:
        _check_masks(dense, pruned, units)
    return torch.tensor(sorted(units))


def _matched(dense: SiteTensors, pruned: SiteTensors) -> dict[int, int]:
    """Find the dense unit of every pruned one; returns dense unit → pruned unit."""
    names = [r.tensor for r in dense.site.producers if r.tensor in pruned.tensors]
    # Rows of all producers → for every pruned unit the dense units with the same rows
    matches = match_rows(
        [dense.rows(name, dense.count) for name in names],
        [pruned.rows(name, pruned.count) for name in names],
    )
    unmatched = [n for n, units in enumerate(matches) if not units and not pruned.silent[n]]
    if unmatched:
        raise _changed_units(dense, pruned, names, unmatched)
    return _assigned(dense, pruned, matches)


def _assigned(
    dense: SiteTensors, pruned: SiteTensors, matches: list[Sequence[int]]
) -> dict[int, int]:
    """Assign a dense unit to every pruned one; returns dense unit → pruned unit.

    Among units with the same rows the first that keeps the order is chosen. A silent unit is
    assigned only if it is silent in the dense model too; otherwise it was removed.
    """
    assigned: dict[int, int] = {}
    # Units that contribute first: a silent one must not take a dense unit from one that does.
    for silent in (False, True):
        last = -1
        for number, units in enumerate(matches):
            if bool(pruned.silent[number]) is not silent:
                continue
            free = [u for u in units if u not in assigned and (not silent or dense.silent[u])]
            if free:
                # Programs that cut rows keep their order, so the next of equal units is likely.
                last = next((unit for unit in free if unit > last), free[0])
                if number in free and pruned.count == dense.count:
                    last = number  # masked: every unit is in its place
                assigned[last] = number
            elif not silent:
                raise ModelError(
                    f"'{pruned.name}' has {dense.site.unit} {units[0]} of {dense.site.key} twice "
                    f"(its {assigned[units[0]]} and {number}): {_UNKNOWN}"
                )
    return assigned


def _check_shapes(dense: SiteTensors, pruned: SiteTensors) -> None:
    producers = [rows.tensor for rows in dense.site.producers]
    for name in [*producers, dense.site.weight]:
        before, after = dense.tensors[name], pruned.tensors.get(name)
        if after is None:
            if name.endswith(".weight"):
                raise ModelError(f"'{pruned.name}' lacks {name}: it is not pruned from this model")
            continue
        hidden = 0 if name == dense.site.weight else 1
        if before.ndim != after.ndim or (
            before.ndim == 2 and before.shape[hidden] != after.shape[hidden]
        ):
            raise ModelError(
                f"{name} is {tuple(after.shape)} in '{pruned.name}' and {tuple(before.shape)} in "
                "the dense model: hidden states of another width, which coec does not prune"
            )


def _check_heads(dense: SiteTensors, pruned: SiteTensors) -> None:
    """Raise ModelError if query heads were removed without their KV heads."""
    site, group = dense.site, dense.site.group
    if site.value is None or group == 1:
        return
    queries = next(r.tensor for r in site.producers if r.count == site.columns)
    head_dim = site.columns_per_unit // group
    count, groups = (len(pruned.tensors[n]) / head_dim for n in (queries, site.value.tensor))
    if count % 1 or groups % 1 or count == groups * group:
        return
    before, after = dense.rows(queries, site.units * group), pruned.rows(queries, int(count))
    remaining = sorted({head for heads in match_rows([before], [after]) for head in heads})
    raise ModelError(
        f"{_module(queries)} in '{pruned.name}' has {count:g} query heads for {groups:g} KV heads"
        + (f" (of the dense model's {remaining})" if remaining else "")
        + _REMOVED_ALONE.format(group)
    )


_REMOVED_ALONE = (
    ": query heads were removed alone, and units are matched as whole KV groups of {} query heads"
)


def _check_masks(dense: SiteTensors, pruned: SiteTensors, units: Mapping[int, int]) -> None:
    """Raise ModelError if single query heads of a kept group are masked."""
    # A head is masked where no column of the consumer reads it any more, and one did before.
    group = dense.site.group
    if group == 1:
        return
    before = dense.unread.reshape(dense.count, group, -1).all(dim=2)
    after = pruned.unread.reshape(pruned.count, group, -1).all(dim=2)
    for unit, number in sorted(units.items()):
        masked = (after[number] & ~before[unit]).nonzero().flatten()
        if len(masked) and not pruned.silent[number]:
            raise ModelError(
                f"'{pruned.name}' masks query heads {[unit * group + int(n) for n in masked]} of "
                f"{dense.site.key}, and not all of KV group {unit}{_REMOVED_ALONE.format(group)}"
            )


def _changed_units(
    dense: SiteTensors, pruned: SiteTensors, names: list[str], unmatched: list[int]
) -> ModelError:
    for name in names:
        before, after = (side.rows(name, len(side.tensors[name])) for side in (dense, pruned))
        per_unit = len(before) // dense.count
        matches = match_rows([before], [after])
        rows = (unit * per_unit + row for unit in unmatched for row in range(per_unit))
        changed = [row for row in rows if not matches[row]]
        if changed:
            first = after[changed[0]].float()
            distances = (before.float() - first).norm(dim=1)
            nearest = int(distances.argmin())
            length = before[nearest].float().norm().clamp_min(1e-30)
            unnamed = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            return ModelError(
                f"rows {', '.join(map(str, changed[:_NAMED]))}{unnamed} of {_module(name)} in "
                f"'{pruned.name}' are none of the dense model's (row {changed[0]} is "
                f"{float(distances[nearest] / length):.2g} of the nearest's length off that, row "
                f"{nearest}): producers were changed, and {_UNKNOWN}"
            )
    return ModelError(
        f"{dense.site.unit} {unmatched[0]} of {dense.site.key} in '{pruned.name}' is put together "
        f"of rows of several {dense.site.unit}s of the dense model, or of its rows in another "
        f"order ({len(unmatched)} are): {_UNKNOWN}"
    )


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def match_rows(dense: Matrices, pruned: Matrices) -> list[Sequence[int]]:
    """List, for each pruned row, the numbers of the dense rows that agree but for rounding."""
    keys = list(_keys(pruned))
    matches: list[Sequence[int]] = [()] * len(keys)
    for route in _ROUTES:
        if all(matches):
            break
        # Dense rows, cast as the other program may have cast them → their digests; rows that an
        # earlier route matched stay matched.
        index: dict[bytes, list[int]] = {}
        cast = [(d.to(route or d.dtype)).to(p.dtype) for d, p in zip(dense, pruned, strict=True)]
        for number, key in enumerate(_keys(cast)):
            index.setdefault(key, []).append(number)
        matches = [rows or index.get(key, ()) for rows, key in zip(matches, keys, strict=True)]
    return matches


def _keys(matrices: Matrices) -> Iterator[bytes]:
    """Digest each row of all matrices together; zeros have one sign."""
    # −0.0 + 0.0 is 0.0: the bytes of a zero must not depend on its sign.
    raw = [(matrix + 0.0).contiguous().view(torch.uint8).numpy() for matrix in matrices]
    for rows in zip(*raw, strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for row in rows:
            digest.update(row)
        yield digest.digest()
