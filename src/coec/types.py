"""The nouns of the package: frozen, validated when made.

Letters follow the paper: d input columns of a consumer, m its output rows, k kept columns,
N calibration tokens.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coec.devices import is_finite, summed_products, widens
from coec.errors import NumericalError, OptionError

_TILE, _MIRRORED = 1024, 4096
"""Columns of a tile of a Gram; rows and columns that are copied below its diagonal at once."""
_FEW = 64
"""Rows that are summed in their own dtype."""
LARGEST = 4096
"""Energies of single tokens that sums keep: a thousandth of four million tokens. Of more tokens,
`top_token_energy` counts these."""


@dataclass(frozen=True, eq=False)
class Gram:
    """Second-order statistics of one site's inputs, additive over batches and workers (METHODS §2).

    Attributes:
        xx: `Σ x xᵀ`, the raw (not centred) second moment, float64 as accumulated.
        x: `Σ x`, the channel sums.
        tokens: N, how many token positions were summed; 0 if all sums are 0, as for an expert
            that no token was routed to.
        centred: `Σ (x − μ)²` of every channel. From xx and x alone it would lose all its digits
            if a mean is large compared with the deviation; None computes it from these anyway.
        precision: how far `xx_ij` may be off, relative to `√(xx_ii xx_jj)`, beyond the rounding of
            its dtype: it decides which eigenvalues are noise. 0 for sums as exact as their dtype.
        output_norms: `Σ ‖W₀ x‖₂`, where the consumer is an expert's; else None.
        largest: the largest energies `w ‖x‖²` of single tokens, descending, `LARGEST` at most; None
            where they are not known.
    """

    xx: Float[Tensor, "d d"]
    x: Float[Tensor, " d"]
    tokens: int
    centred: Float[Tensor, " d"] | None = None
    precision: float = 0.0
    output_norms: float | None = None
    largest: Float[Tensor, " t"] | None = None

    def __post_init__(self) -> None:
        d = self.x.shape[0] if self.x.ndim == 1 else -1
        if self.x.ndim != 1 or self.xx.shape != (d, d):
            raise OptionError(
                f"Gram needs xx of shape (d, d) and x of shape (d,), "
                f"got {tuple(self.xx.shape)} and {tuple(self.x.shape)}"
            )
        if self.centred is not None and self.centred.shape != (d,):
            raise OptionError(f"Gram needs centred of shape ({d},), got {self.centred.shape}")
        if self.tokens < 0 or (self.tokens == 0 and self.xx.any()):
            raise OptionError(f"Gram needs at least one token, got {self.tokens}")

    def __add__(self, addend: "Gram") -> "Gram":
        # What one of the two did not measure is unknown of both.
        centred = norms = largest = None
        if self.centred is not None and addend.centred is not None:
            means = self.mean, addend.mean
            centred, counts = self.centred, (self.tokens, addend.tokens)
            if any(counts):
                centred = _pooled((self.centred, addend.centred), means, counts)
        if self.output_norms is not None and addend.output_norms is not None:
            norms = self.output_norms + addend.output_norms
        if self.largest is not None and addend.largest is not None:
            largest = _largest(self.largest, addend.largest)
        xx, x, tokens = self.xx + addend.xx, self.x + addend.x, self.tokens + addend.tokens
        precision = max(self.precision, addend.precision)
        return Gram(xx, x, tokens, centred, precision, norms, largest)

    def to(self, dtype: torch.dtype) -> "Gram":
        """Return the same sums in another floating-point dtype.

        In a wider one the rounding of the narrower becomes part of the precision.
        """
        precision, eps = self.precision, torch.finfo(self.xx.dtype).eps
        if eps > torch.finfo(dtype).eps:
            precision = max(precision, eps)
        centred = None if self.centred is None else self.centred.to(dtype)
        sums = (self.xx.to(dtype), self.x.to(dtype))
        return Gram(*sums, self.tokens, centred, precision, self.output_norms, self.largest)

    @property
    def top_token_energy(self) -> float | None:
        """The share of all energy that is in a thousandth of the tokens, and in one at least.

        None where it is not known, and where there is no energy.
        """
        total = float(self.energy.sum())
        if self.largest is None or not total > 0:
            return None
        return min(float(self.largest[: max(1, self.tokens // 1000)].sum()) / total, 1.0)

    @property
    def mean(self) -> Float[Tensor, " d"]:
        """`μ = Σ x / N`; 0 where N = 0."""
        return self.x / max(self.tokens, 1)

    @property
    def energy(self) -> Float[Tensor, " d"]:
        """`‖X_j‖² = Σ x_j²` of every channel, never below 0."""
        return self.xx.diagonal().clamp_min(0)

    @property
    def variance(self) -> Float[Tensor, " d"]:
        """The unbiased variance of every channel, never below 0; 0 where N = 1."""
        centred = self.centred
        if centred is None:
            centred = self.energy - self.x.square() / max(self.tokens, 1)
        return centred.clamp_min(0) / max(self.tokens - 1, 1)

    def check_finite(self) -> None:
        """Raises NumericalError naming the first channel whose statistics are NaN or infinite."""
        centred = self.x if self.centred is None else self.centred
        if is_finite(self.xx) and is_finite(self.x) and is_finite(centred):
            return
        bad = ~(self.xx.isfinite().all(dim=1) & self.x.isfinite() & centred.isfinite())
        raise NumericalError(
            f"calibration statistics hold NaN or Inf in {int(bad.sum())} of {len(bad)} "
            f"channels (first: {int(bad.nonzero()[0])}): the dense model overflows on the "
            "calibration text; run it in float32 or bfloat16 (forward_dtype=NAME)"
        )


class GramSum:
    """Accumulates a Gram: batch products in float32 (float64 for float64 inputs), float64 sums.

    Products on tensor cores, where a device has them, lose no digit (`summed_products`). Of `xx`
    only tiles on and above the diagonal are computed.
    """

    def __init__(self, d: int, device: torch.device | str = "cpu") -> None:
        self.xx = torch.zeros(d, d, dtype=torch.float64, device=device)
        self.x = torch.zeros(d, dtype=torch.float64, device=device)
        self.centred = torch.zeros(d, dtype=torch.float64, device=device)
        self.output_norms = torch.zeros((), dtype=torch.float64, device=device)
        self.largest = torch.zeros(0, dtype=torch.float64, device=device)
        self.tokens = 0
        # Of all rows. Where tokens have weights it stays on the device: to read it would wait.
        self.weight: float | Tensor = 0.0
        self.precision = 0.0

    def update(
        self, inputs: Float[Tensor, "... d"], weights: Float[Tensor, "..."] | None = None
    ) -> None:
        """Adds every row of `inputs` (any leading shape), times its weight where there are some."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        if len(rows) == 0:
            return
        stored, exact = rows, rows.dtype == torch.float64  # a float64 model keeps its digits
        rows = rows.to(torch.float64 if exact else torch.float32)
        w = None if weights is None else weights.reshape(-1, 1).to(rows)
        weighted = rows if w is None else rows * w
        # The sums of this batch alone, then added to the others
        batch = GramSum(0, rows.device)
        energies = torch.linalg.vector_norm(rows, dim=1).double().square()
        batch.largest = energies if w is None else energies * w[:, 0]
        batch.x = _summed(weighted)
        batch.tokens = len(rows)
        batch.weight = n = len(rows) if w is None else w.sum(dtype=torch.float64)
        # Squares around the batch's own mean: squares of the raw values would swamp the deviations.
        deviations = rows - (batch.x / n).to(rows.dtype)
        off = _summed(deviations if w is None else deviations * w)
        squares = deviations.square_() if w is None else deviations.square_() * w
        batch.centred = _summed(squares) - off.square() / n
        batch.precision = 0.0 if exact else torch.finfo(rows.dtype).eps
        self._add(batch)
        factor = stored if widens(stored.device, stored.dtype) else rows
        left = factor if w is None else weighted
        for begin in range(0, len(self.xx), _TILE):
            tile = slice(begin, begin + _TILE)
            self.xx[tile, begin:] += summed_products(left[:, tile], factor[:, begin:])

    def add_outputs(self, norms: Float[Tensor, "..."]) -> None:
        """Adds the norms of the consumer's outputs for rows."""
        self.output_norms += norms.sum(dtype=torch.float64)

    def merge(self, addend: "GramSum") -> None:
        """Adds the sums of another, as if its rows had come after these."""
        if addend.tokens:
            addend = addend.to(self.xx.device)
            self.xx += addend.xx
            self._add(addend)

    def _add(self, addend: "GramSum") -> None:
        """Adds all sums of another but `xx`."""
        if self.tokens:
            means = self.x / self.weight, addend.x / addend.weight
            weights = self.weight, addend.weight
            self.centred = _pooled((self.centred, addend.centred), means, weights)
        else:
            self.centred = addend.centred
        self.x += addend.x
        self.output_norms += addend.output_norms
        self.largest = _largest(self.largest, addend.largest)
        self.tokens += addend.tokens
        self.weight += addend.weight
        self.precision = max(self.precision, addend.precision)

    def to(self, device: torch.device | str) -> "GramSum":
        """Return the sums on another device, to go on there."""
        moved = copy.copy(self)
        for name in ("xx", "x", "centred", "output_norms", "largest"):
            setattr(moved, name, getattr(self, name).to(device))
        if isinstance(self.weight, Tensor):
            moved.weight = self.weight.to(device)
        return moved

    def gram(self) -> Gram:
        """The sums, completed in place and handed over, not copied: update no more.

        Weights count as if their mean were 1.
        """
        _mirror(self.xx)
        if self.weight != self.tokens:
            for sums in (self.xx, self.x, self.centred, self.largest):
                sums *= self.tokens / self.weight
        norms = float(self.output_norms)
        return Gram(self.xx, self.x, self.tokens, self.centred, self.precision, norms, self.largest)


def _summed(rows: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """Sum rows in float64; on a CPU a few at a time in their own dtype, 12 times as fast."""
    if not rows.is_cpu:
        return rows.sum(dim=0, dtype=torch.float64)
    return torch.stack([few.sum(dim=0) for few in rows.split(_FEW)]).sum(dim=0, dtype=torch.float64)


def _pooled(
    centred: tuple[Float[Tensor, " d"], Float[Tensor, " d"]],
    means: tuple[Float[Tensor, " d"], Float[Tensor, " d"]],
    weights: tuple[float | Tensor, float | Tensor],
) -> Float[Tensor, " d"]:
    """`Σ (x − μ)²` of two samples together, μ the mean of both."""
    weight = weights[0] * weights[1] / (weights[0] + weights[1])
    return centred[0] + centred[1] + weight * (means[1] - means[0]).square()


def _largest(a: Float[Tensor, " s"], b: Float[Tensor, " t"]) -> Float[Tensor, " u"]:
    """The largest numbers of both, descending."""
    joined = torch.cat([a, b])
    return joined.topk(min(LARGEST, len(joined))).values


def _mirror(A: Float[Tensor, "n n"]) -> None:
    """Copy all above the diagonal below it, in blocks: memory may not hold a copy of A."""
    for begin in range(0, len(A), _MIRRORED):
        end = begin + _MIRRORED
        corner = A[begin:end, begin:end]
        corner.copy_(corner.triu() + corner.triu(1).T)
        A[end:, begin:end] = A[begin:end, end:].T


@dataclass(frozen=True, eq=False)
class KeptSet:
    """Indices of the units that stay, of `size`: sorted, distinct, at least one."""

    indices: Int[Tensor, " k"]
    size: int

    def __post_init__(self) -> None:
        kept = self.indices
        if kept.ndim != 1 or kept.dtype not in (torch.int64, torch.int32) or len(kept) == 0:
            raise OptionError(
                f"a kept set is a non-empty 1-D integer tensor, got {kept.dtype} of shape "
                f"{tuple(kept.shape)}"
            )
        if int(kept.min()) < 0 or int(kept.max()) >= self.size:
            raise OptionError(
                f"kept indices must lie in 0..{self.size - 1}, "
                f"got {int(kept.min())}..{int(kept.max())}"
            )
        if len(kept) > 1 and not bool((kept[1:] > kept[:-1]).all()):
            raise OptionError("kept indices must be sorted and distinct; sort them first")

    @property
    def everything(self) -> bool:
        """True when nothing is removed."""
        return len(self.indices) == self.size

    def columns(self, width: int) -> "KeptSet":
        """The kept columns when every unit owns `width` consecutive columns."""
        offsets = torch.arange(width, device=self.indices.device)
        return KeptSet((self.indices[:, None] * width + offsets).flatten(), self.size * width)

    def dropped(self) -> Int[Tensor, " dropped"]:
        """The indices that do not stay, sorted."""
        mask = torch.ones(self.size, dtype=torch.bool, device=self.indices.device)
        mask[self.indices] = False
        return mask.nonzero().flatten()


@dataclass(frozen=True)
class Convergence:
    """End of an iteration.

    Attributes:
        iterations: steps taken.
        reason: the rule that ended it, in words.
        history: the objective before the first step and after every step.
    """

    iterations: int
    reason: str
    history: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class SiteProblem:
    """Consumer some of whose input columns are removed: the argument of every compensation.

    Attributes:
        dense: `W₀`, the dense consumer (`down_proj` or `o_proj`), outputs × inputs; float64 like
            every tensor here.
        gram: statistics of its inputs, one channel per column of W₀.
        kept: the columns that stay.
        value: where the consumer follows attention and the method needs it: the pruned value
            projection as the consumer sees it, one row per kept column.
        target: T, whose products with the inputs are the desired outputs, if that is not
            W₀; a method reads `weight`.
        solve_dtype: of the products of long iterations, which a device may multiply much faster in
            float32. Decompositions, closed forms and errors are float64 in any case.
    """

    dense: Float[Tensor, "m d"]
    gram: Gram
    kept: KeptSet
    value: Float[Tensor, "k h"] | None = None
    target: Float[Tensor, "m d"] | None = None
    solve_dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        channels = len(self.gram.x)
        if self.dense.ndim != 2 or self.dense.shape[1] != channels or self.kept.size != channels:
            raise OptionError(
                f"weight {tuple(self.dense.shape)}, statistics of {channels} channels and a kept "
                f"set out of {self.kept.size} do not fit: the weight's columns are the channels"
            )
        if self.target is not None and self.target.shape != self.dense.shape:
            raise OptionError(
                f"the target {tuple(self.target.shape)} does not fit the weight "
                f"{tuple(self.dense.shape)}: it has the same outputs and the same inputs"
            )

    @property
    def weight(self) -> Float[Tensor, "m d"]:
        """T: a compensation aims at the outputs `T x`. The target, or W₀ if there is none.

        On the dense model's inputs x, W₀ x is the dense output. On inputs x̃ of a pruned model the
        output y to be restored is no product of W₀: the target is then the least-squares map
        `T = W₀ + (Σ y x̃ᵀ − W₀ G)(G + ε I)⁻¹`, so that `T G` is `Σ y x̃ᵀ`. The slice `W₀[:, K]`, from
        which every compensation starts, may then have a relative error above 1.
        """
        return self.dense if self.target is None else self.target

    @property
    def nothing_to_compensate(self) -> bool:
        """True where W₀ itself is the answer: every column stays, and its products are wanted."""
        return self.kept.everything and self.target is None


@dataclass(frozen=True, eq=False)
class SiteResult:
    """Replacement of the kept columns of one consumer.

    Attributes:
        weight: `W̃`, m×k.
        bias: an amount to add to the consumer's bias, or None.
        diagnostics: numbers and words for the report; JSON-ready.
    """

    weight: Float[Tensor, "m k"]
    bias: Float[Tensor, " m"] | None = None
    diagnostics: dict[str, Any] = field(default_factory=dict)
