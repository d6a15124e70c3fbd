"""Which units of a dense model another program kept, told from the rows that it left (FORMATS.md).

A unit is known by all its rows in the producers together. What the consumer has become plays no
part, but for columns that are zero: most programs change it, and it is computed anew.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from coec.errors import ModelError
from coec.models.layout import Rows, Site

ROUTES = (None, torch.bfloat16, torch.float16)
"""Dtypes through which weights may have gone on their way to the dtype that they are stored in."""
FEW = 32
"""Columns that tell almost all rows apart, where entries are compared with a tolerance."""
SHOWN = 3
"""How many rows an error names."""
Matrices = Sequence[Tensor]
"""The rows of several tensors, those of one unit or row number in one place."""


@dataclass(frozen=True, eq=False)
class Side:
    """One site of one of the two models.

    Attributes:
        name: what messages call the model.
        site: as the dense model has it.
        tensors: weights and biases of its modules, as far as they are there.
    """

    name: str
    site: Site
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, name: str, site: Site, tensors: Mapping[str, Tensor], dense: Mapping[str, torch.Size]
    ) -> "Side":
        """A site whose projections are apart, where a tensor holds several of them.

        Args:
            name: what messages call the model.
            site: as the dense model has it.
            tensors: weights and biases of its modules, as far as they are there.
            dense: the shapes of the dense model's.

        Raises:
            ModelError: a tensor has no whole number of rows of every projection.
        """
        parts = [r for r in site.producers if r.stop - r.start < dense[r.tensor][0]]
        known = {rows: f"{_module(rows.tensor)}[{rows.start}:{rows.stop}].weight" for rows in parts}
        apart = dict(tensors)
        for rows in parts:
            if rows.tensor not in tensors:
                raise ModelError(f"'{name}' lacks {rows.tensor}: it is not pruned from this model")
            ends = [end * len(tensors[rows.tensor]) for end in (rows.start, rows.stop)]
            if any(end % dense[rows.tensor][0] for end in ends):
                raise ModelError(
                    f"the projections in {rows.tensor} of '{name}' hold different shares of "
                    f"{site.unit}s: whole ones are removed from all of them"
                )
            first, last = (end // dense[rows.tensor][0] for end in ends)
            apart[known[rows]] = tensors[rows.tensor][first:last]
        named = {r: Rows(known[r], 0, r.stop - r.start) for r in parts}
        producers = tuple(named.get(r, r) for r in site.producers)
        value = None if site.value is None else named.get(site.value, site.value)
        return cls(name, replace(site, producers=producers, value=value), apart)

    def rows(self, tensor: str, count: int) -> Tensor:
        """A tensor with everything that one of `count` owns in a row."""
        return self.tensors[tensor].reshape(count, -1)

    @cached_property
    def count(self) -> int:
        """How many units there are.

        Raises:
            ModelError: the tensors do not agree, or hold parts of units.
        """
        counts = {
            rows.tensor: len(self.tensors[rows.tensor]) * self.site.units / (rows.stop - rows.start)
            for rows in self.site.producers
            if rows.tensor in self.tensors
        }
        counts[self.site.weight] = (
            self.tensors[self.site.weight].shape[1] / self.site.columns_per_unit
        )
        if len(set(counts.values())) > 1 or counts[self.site.weight] % 1:
            said = ", ".join(f"{_module(name)} {count:g}" for name, count in counts.items())
            raise ModelError(
                f"the modules of {self.site.key} in '{self.name}' hold different numbers of "
                f"{self.site.unit}s ({said}): whole ones are removed from all of them"
            )
        return int(counts[self.site.weight])

    @cached_property
    def silent(self) -> Bool[Tensor, " units"]:
        """The units that add nothing: without output, or read by columns of zeros."""
        found = self.unread.reshape(self.count, -1).all(dim=1)
        producers = [self.site.value] if self.site.value else self.site.producers
        for rows in producers:
            if rows.tensor.endswith(".weight") and rows.tensor in self.tensors:
                found = found | self._zero(rows.tensor)
        return found

    @cached_property
    def unread(self) -> Bool[Tensor, " columns"]:
        """The columns of the consumer that hold nothing but zeros."""
        return (self.tensors[self.site.weight] == 0).all(dim=0)

    def _zero(self, weight: str) -> Bool[Tensor, " units"]:
        """Units whose rows of a producer, bias included, are zero."""
        bias = weight.removesuffix("weight") + "bias"
        parts = [self.rows(name, self.count) for name in (weight, bias) if name in self.tensors]
        return torch.stack([(part == 0).all(dim=1) for part in parts]).all(dim=0)


def kept_units(dense: Side, pruned: Side) -> Int[Tensor, " k"]:
    """The units of a dense site that a pruned one has, sorted.

    Rows may stand in another order, in another dtype, and among zeros.

    Raises:
        ModelError: rows are none of the dense model's, stand for parts of units, or twice.
    """
    _check_shapes(dense, pruned)
    _check_heads(dense, pruned)
    if not pruned.count:
        raise ModelError(f"'{pruned.name}' keeps no {dense.site.unit} in {dense.site.key}")
    names = [r.tensor for r in dense.site.producers if r.tensor in pruned.tensors]
    mine = [dense.rows(name, dense.count) for name in names]
    theirs = [pruned.rows(name, pruned.count) for name in names]
    found = _same(mine, theirs, ~pruned.silent)
    lost = [n for n, units in enumerate(found) if not units and not pruned.silent[n]]
    if lost:
        raise _strange(dense, pruned, names, lost)
    units = _assigned(dense, pruned, found)
    _check_parts(dense, pruned, units)
    if not units:
        raise ModelError(f"'{pruned.name}' keeps no {dense.site.unit} in {dense.site.key}")
    return torch.tensor(sorted(units))


def _same(mine: Matrices, theirs: Matrices, wanted: Bool[Tensor, " n"]) -> list[Sequence[int]]:
    """Of each of their rows the numbers of those of mine that are the same but for rounding."""
    keys = list(_keys(theirs))
    found: list[Sequence[int]] = [()] * len(keys)
    for route in ROUTES:
        index: dict[bytes, list[int]] = {}
        cast = [_cast(one, route, other.dtype) for one, other in zip(mine, theirs, strict=True)]
        for number, key in enumerate(_keys(cast)):
            index.setdefault(key, []).append(number)
        found = [known or index.get(key, ()) for known, key in zip(found, keys, strict=True)]
        missing = [n for n, numbers in enumerate(found) if not numbers and wanted[n]]
        if not missing:
            return found
    for n, numbers in zip(missing, _near(mine, theirs, missing), strict=True):
        found[n] = numbers
    return found


def _near(mine: Matrices, theirs: Matrices, asked: Sequence[int]) -> Iterator[Sequence[int]]:
    """For some of their rows those of mine that rounding may have made of them, or they of those.

    Only rows that agree in the column in which rows differ most are compared in full.
    """
    kind = theirs[0].dtype
    wide = torch.promote_types(kind, torch.float32)
    rows = torch.cat([one.to(kind).to(wide) for one in mine], dim=1)
    column = int(rows.var(dim=0, correction=0).argmax())
    values, order = rows[:, column].sort()
    for number in asked:
        least, most = _around(torch.cat([other[number].to(wide) for other in theirs]), kind)
        first = int(torch.searchsorted(values, least[column]))
        last = int(torch.searchsorted(values, most[column], right=True))
        near = order[first:last]
        for some in (slice(FEW), slice(None)):
            part = rows[near, some]
            near = near[((part >= least[some]) & (part <= most[some])).all(dim=1)]
        yield near.sort().values.tolist()


def _around(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The least and the most that numbers of a dtype may have been before they were rounded."""
    kind = torch.finfo(dtype)
    slack = values.abs() * kind.eps + kind.smallest_normal * kind.eps
    return values - slack, values + slack


def _cast(rows: Tensor, route: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    return (rows if route is None else rows.to(route)).to(dtype)


def _keys(parts: Matrices) -> Iterator[bytes]:
    """A digest of every row of all parts together; zeros have one sign."""
    raw = [(part + 0.0).contiguous().view(torch.uint8).numpy() for part in parts]
    for rows in zip(*raw, strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for row in rows:
            digest.update(row)
        yield digest.digest()


def _assigned(dense: Side, pruned: Side, found: list[Sequence[int]]) -> dict[int, int]:
    """Whose every unit of the pruned model is: by the dense unit, the pruned one.

    Of units with the same rows the first is taken that keeps their order. A silent one stays where
    the dense model has it so; it was removed where that has not.
    """
    taken: dict[int, int] = {}
    for silent in (False, True):
        last = -1
        for number, units in enumerate(found):
            if bool(pruned.silent[number]) is not silent:
                continue
            free = [u for u in units if u not in taken and (not silent or dense.silent[u])]
            if free:
                last = next((unit for unit in free if unit > last), free[0])
                if number in free and pruned.count == dense.count:
                    last = number  # masked: every unit is in its place
                taken[last] = number
            elif not silent:
                raise ModelError(
                    f"'{pruned.name}' has {dense.site.unit} {units[0]} of {dense.site.key} twice "
                    f"(its {taken[units[0]]} and {number}): which units were kept cannot be told"
                )
    return taken


def _check_shapes(dense: Side, pruned: Side) -> None:
    """Raises ModelError where anything but the number of units differs."""
    producers = [rows.tensor for rows in dense.site.producers]
    for name in [*producers, dense.site.weight]:
        one, other = dense.tensors[name], pruned.tensors.get(name)
        if other is None:
            if name.endswith(".weight"):
                raise ModelError(f"'{pruned.name}' lacks {name}: it is not pruned from this model")
            continue
        kept = 0 if name == dense.site.weight else 1
        if one.ndim != other.ndim or (one.ndim == 2 and one.shape[kept] != other.shape[kept]):
            raise ModelError(
                f"{name} is {tuple(other.shape)} in '{pruned.name}' and {tuple(one.shape)} in "
                "the dense model: hidden states of another width, which coec does not prune"
            )


def _heads(dense: Side) -> tuple[str, int] | None:
    """The weight with rows for every query head, and how many of these share a KV head."""
    site = dense.site
    if site.value is None:
        return None
    head = (site.value.stop - site.value.start) // site.units
    group = site.columns_per_unit // head
    queries = next(r for r in site.producers if r.stop - r.start == site.columns)
    return (queries.tensor, group) if group > 1 else None


def _check_heads(dense: Side, pruned: Side) -> None:
    """Raises ModelError where query heads went without their KV heads."""
    heads = _heads(dense)
    if heads is None or dense.site.value is None:
        return
    queries, group = heads
    head = dense.site.columns_per_unit // group
    count, groups = (
        len(pruned.tensors[name]) / head for name in (queries, dense.site.value.tensor)
    )
    if count % 1 or groups % 1 or count == groups * group:
        return
    mine, theirs = dense.rows(queries, dense.site.units * group), pruned.rows(queries, int(count))
    known = _same([mine], [theirs], torch.zeros(len(theirs), dtype=torch.bool))
    left = sorted({head for heads in known for head in heads})
    raise ModelError(
        f"{_module(queries)} in '{pruned.name}' has {count:g} query heads for {groups:g} KV heads"
        + (f" (of the dense model's {left})" if left else "")
        + _alone(group)
    )


def _alone(group: int) -> str:
    return (
        f": query heads were removed alone, and coec removes whole KV groups of {group} query heads"
    )


def _check_parts(dense: Side, pruned: Side, units: Mapping[int, int]) -> None:
    """Raises ModelError where single query heads of a group that stays are masked."""
    heads = _heads(dense)
    if heads is None:
        return
    _, group = heads
    before = dense.unread.reshape(dense.count, group, -1).all(dim=2)
    after = pruned.unread.reshape(pruned.count, group, -1).all(dim=2)
    for unit, number in sorted(units.items()):
        gone = (after[number] & ~before[unit]).nonzero().flatten()
        if len(gone) and not pruned.silent[number]:
            raise ModelError(
                f"'{pruned.name}' masks query heads {[unit * group + int(n) for n in gone]} of "
                f"{dense.site.key}, and not all of KV group {unit}{_alone(group)}"
            )


def _strange(dense: Side, pruned: Side, names: list[str], lost: list[int]) -> ModelError:
    """What is wrong with units that are none of the dense model's."""
    ending = "which units were kept cannot be told"
    for name in names:
        per = len(dense.tensors[name]) // dense.count
        mine, theirs = (s.rows(name, len(s.tensors[name])) for s in (dense, pruned))
        asked = torch.zeros(len(theirs), dtype=torch.bool)
        for unit in lost:
            asked[unit * per : (unit + 1) * per] = True
        found = _same([mine], [theirs], asked)
        rows = [n for n, same in enumerate(found) if asked[n] and not same]
        if rows:
            nearest, off = _nearest(mine, theirs[rows[0]])
            more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
            return ModelError(
                f"rows {', '.join(map(str, rows[:SHOWN]))}{more} of {_module(name)} in "
                f"'{pruned.name}' are none of the dense model's (row {rows[0]} is {off:.2g} of the "
                f"nearest's length off that, row {nearest}): producers were changed, and {ending}"
            )
    if swapped := _swapped_heads(dense, pruned, lost[0]):
        return swapped
    return ModelError(
        f"{dense.site.unit} {lost[0]} of {dense.site.key} in '{pruned.name}' is put together of "
        f"rows of several {dense.site.unit}s of the dense model ({len(lost)} are): {ending}"
    )


def _swapped_heads(dense: Side, pruned: Side, unit: int) -> ModelError | None:
    """What is wrong with a KV group whose query heads are the dense model's, in another order."""
    heads = _heads(dense)
    if heads is None:
        return None
    queries, group = heads
    mine = dense.rows(queries, dense.count * group)
    theirs = pruned.rows(queries, pruned.count * group)[unit * group : (unit + 1) * group]
    same = _same([mine], [theirs], torch.ones(group, dtype=torch.bool))
    order = [heads[0] for heads in same if heads]
    groups = {head // group for head in order}
    if len(order) < group or len(groups) > 1 or order == sorted(order):
        return None
    module = _module(queries).rpartition(".")[2]
    consumer = dense.site.consumer.rpartition(".")[2]
    return ModelError(
        f"{dense.site.unit} {unit} of {dense.site.key} in '{pruned.name}' has the dense model's "
        f"query heads in another order ({', '.join(map(str, order))}): put {module}'s rows and "
        f"{consumer}'s columns into the dense model's order"
    )


def _nearest(rows: Tensor, row: Tensor) -> tuple[int, float]:
    """The nearest one to a row, and how far that is, relative to the length of the nearest."""
    distances = (rows.float() - row.float()).norm(dim=1)
    nearest = int(distances.argmin())
    return nearest, float(distances[nearest] / rows[nearest].float().norm().clamp_min(1e-30))


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]
