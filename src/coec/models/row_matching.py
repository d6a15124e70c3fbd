"""Match the rows of two models, in spite of rounding and other orders."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

_ROUTES = (None, torch.bfloat16, torch.float16)
"""Dtypes through which weights may have gone on the way to the dtype that they are stored in."""
_FEW = 32
"""Columns that distinguish almost all rows when entries are compared with a tolerance."""
Matrices = Sequence[Tensor]
"""Rows of several tensors; row n of each belongs to unit (or row) n."""


def match_rows(
    dense: Matrices, pruned: Matrices, needed: Bool[Tensor, " n"]
) -> list[Sequence[int]]:
    """List, for each pruned row, the numbers of the dense rows that agree but for rounding.

    Args:
        needed: rows for which rounding is considered; for others exact matches are enough.
    """
    keys = list(_keys(pruned))
    matches: list[Sequence[int]] = [()] * len(keys)
    for route in _ROUTES:
        index: dict[bytes, list[int]] = {}
        cast = [_cast(d, route, p.dtype) for d, p in zip(dense, pruned, strict=True)]
        for number, key in enumerate(_keys(cast)):
            index.setdefault(key, []).append(number)
        matches = [rows or index.get(key, ()) for rows, key in zip(matches, keys, strict=True)]
        missing = [n for n, rows in enumerate(matches) if not rows and needed[n]]
        if not missing:
            return matches
    for n, rows in zip(missing, _near(dense, pruned, missing), strict=True):
        matches[n] = rows
    return matches


def _near(dense: Matrices, pruned: Matrices, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """List, for some pruned rows, the dense rows that are equal within rounding either way.

    Only rows that agree in the column in which rows differ most are compared in full.
    """
    dtype = pruned[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    rows = torch.cat([d.to(dtype).to(wide) for d in dense], dim=1)
    column = int(rows.var(dim=0, correction=0).argmax())
    values, order = rows[:, column].sort()
    for number in numbers:
        low, high = _interval(torch.cat([p[number].to(wide) for p in pruned]), dtype)
        first = int(torch.searchsorted(values, low[column]))
        last = int(torch.searchsorted(values, high[column], right=True))
        near = order[first:last]
        for columns in (slice(_FEW), slice(None)):
            entries = rows[near, columns]
            near = near[((entries >= low[columns]) & (entries <= high[columns])).all(dim=1)]
        yield near.sort().values.tolist()


def _interval(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bounds of the numbers that rounding to a dtype may have turned into these values."""
    info = torch.finfo(dtype)
    slack = values.abs() * info.eps + info.smallest_normal * info.eps
    return values - slack, values + slack


def _cast(rows: Tensor, route: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    return (rows if route is None else rows.to(route)).to(dtype)


def _keys(matrices: Matrices) -> Iterator[bytes]:
    """Digest each row of all matrices together; zeros have one sign."""
    raw = [(matrix + 0.0).contiguous().view(torch.uint8).numpy() for matrix in matrices]
    for rows in zip(*raw, strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for row in rows:
            digest.update(row)
        yield digest.digest()


def nearest_row(rows: Tensor, row: Tensor) -> tuple[int, float]:
    """The nearest of some rows, and its distance relative to its length."""
    distances = (rows.float() - row.float()).norm(dim=1)
    nearest = int(distances.argmin())
    return nearest, float(distances[nearest] / rows[nearest].float().norm().clamp_min(1e-30))
