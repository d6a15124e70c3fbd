"""Greedy backward elimination: the optimal brain surgeon on whole columns (METHODS §3).

The columns of a set S are left, refitted by ridge regression: W is their weight and
`A = (G_SS + (δ + λ) diag G_SS)⁻¹`. To remove unit g, some columns of both, costs

    tr(W_g A_gg⁻¹ W_gᵀ)          (‖W_j‖² / A_jj for a single column j)

and leaves `A − A_:g A_gg⁻¹ A_g:` and `W − W_g A_gg⁻¹ A_g:`. The cheapest unit goes, again and
again. Costs depend on W through `N = WᵀW` alone, which takes its place. With `A_gg = C Cᵀ` and

    L = C⁻¹ A_g:,   V = C⁻¹ N_g:,   K = V_:g C⁻ᵀ,   U = V − ½ K L,

a removal costs tr K and is `A ← A − LᵀL`, `N ← N − UᵀL − LᵀU`.

Single columns are removed in panels. Inside a panel only the diagonals of A and N are kept up to
date. A row of either is formed where it is needed, from the matrix at the panel's start and the
rows of L and U so far; the matrices are updated at the panel's end, by products of matrices. They
are symmetric: only their lower triangles are kept up to date.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.cuda import CUDAGraph

from coec.devices import is_finite
from coec.errors import NumericalError, OptionError
from coec.linalg.spd import channel_scale, power_of_two, regularized_inverse
from coec.types import Gram

RIDGE = 1e-3
"""λ, relative to the energy of every channel, so that their scales do not matter."""
DAMPING = 0.1
"""δ: correlations of channels on the calibration text are multiplied by 1/(1 + δ). Without it the
kept units serve text of another kind worse, by a third of the error (docs/lab/LOG.md)."""
PANEL = 128
"""Columns of a panel. More make the products of matrices faster, fewer the rows that are formed
inside it at the speed of memory, which are the average of `3 d · PANEL` operations each."""
_STRIP = 512
"""Rows of a triangle that are updated together."""
CROWDED = 15 / 16
"""Removed columns are dropped from the matrices if less than this share is left."""
TIE = 1e-9
"""Costs that differ by less than this, relatively, are equal: A is not known better."""


def obs(
    weight: Float[Tensor, "m d"], gram: Gram, *, units: int, keep: int, ranges: int = 1
) -> Float[Tensor, " d"]:
    """The unit that costs least once the rest is refitted goes first, one by one.

    The scores rank the units by the step of their removal, counted from 0; kept units share the
    highest. Of units of equal cost, the highest index is removed.

    Three d×d matrices in float64 at the peak, `gram.xx` included if it is of that dtype.

    Args:
        weight: `W₀`.
        gram: statistics of its inputs.
        units: number of units, of equally many consecutive columns.
        keep: number of units to keep.
        ranges: as in `removal_path`.

    Raises:
        NumericalError: the weight is not finite.

    Source: optimal brain surgeon (Hassibi and Stork 1993); structured, ZipLM (Kurtić et al. 2023).
    """
    if weight.shape[1] % units or not 0 < keep <= units:
        raise OptionError(f"{weight.shape[1]} columns are not {units} units of which {keep} stay")
    removed = [unit for unit, _ in removal_path(weight, gram.xx, units, keep, ranges=ranges)]
    # Order of removal → a score for every column; units that stay keep the number of steps.
    steps = torch.full((units,), len(removed))
    steps[removed] = torch.arange(len(removed))
    return steps.repeat_interleave(weight.shape[1] // units).to(gram.xx)


def removal_path(
    weight: Float[Tensor, "m d"],
    G: Float[Tensor, "d d"],
    units: int,
    keep: int,
    panel: int = PANEL,
    ranges: int = 1,
) -> list[tuple[int, float]]:
    """Return the removed units in order, and the cost of each after the rest is refitted.

    Costs are squares of outputs, summed over the tokens of the Gram, with the ridge's share, in
    units of the path's own.

    Args:
        weight: `W₀`.
        G: the Gram.
        units: number of units.
        keep: number of units to keep, at least 1.
        panel: columns whose removals are gathered, where a unit is one column.
        ranges: number of equal ranges of consecutive units, of several columns each; they lose one
            unit in turn.

    Raises:
        NumericalError: the weight is not finite.
    """
    if not is_finite(weight):
        raise NumericalError("the weight holds NaN or Inf")
    if keep == units:
        return []
    # Panels of columns, or single units of several columns, until `keep` are left. The last removal
    # needs no update of A and N.
    state = _Elimination.of(weight, G, units)
    path: list[tuple[int, float]] = []
    turn: set[int] = set()  # ranges that have lost a unit in this turn
    while True:
        excess = units - keep - len(path)
        if state.width == 1 and ranges == 1:
            gone, costs, L, U = state.panel(min(panel, excess))
        else:
            gone, costs, L, U = state.group(turn, units // ranges)
            turn = turn | {int(state.names[gone[0]]) * ranges // units}
            turn = set() if len(turn) == ranges else turn
        path += zip(state.names[gone].tolist(), costs, strict=True)
        if len(gone) == excess:
            return path
        state.remove(gone, L, U)


Removal = tuple[list[int], list[float], Float[Tensor, "b n"], Float[Tensor, "b n"]]
"""Positions of the removed units among the units that A and N hold, their costs, and the rows of L
and U."""


@dataclass(eq=False)
class _Elimination:
    """State of the elimination at the start of a panel.

    Attributes:
        A: the inverse above, lower triangle, with removed columns that were not yet dropped.
        N: `WᵀW`, in the same form.
        width: columns of a unit.
        floor: a bound below all eigenvalues of A, whatever is removed; only rounding goes below.
        names: the original indices of the units that A and N hold.
        stays: which of these are left.
        graph: the launches of the last panel's step, on a GPU.
    """

    A: Float[Tensor, "n n"]
    N: Float[Tensor, "n n"]
    width: int
    floor: float
    names: Int[Tensor, " u"]
    stays: Bool[Tensor, " u"]
    graph: CUDAGraph | None = None

    @classmethod
    def of(
        cls, weight: Float[Tensor, "m d"], G: Float[Tensor, "d d"], units: int
    ) -> "_Elimination":
        """Return the state before any removal.

        Channels are measured in units of unit energy, so that their scales do not matter; costs
        are only compared, so the weight is measured in a separate unit.
        """
        d = len(G)
        # Channels of unit energy: A = (G + δ diag G + λI)⁻¹ and N = W₀ᵀW₀, rows of W₀ by strips
        scale = channel_scale(G)
        norms = torch.where(G.diagonal() > 0, scale, 0.0)
        A, ridge = regularized_inverse(G, RIDGE, DAMPING, scale)
        N, unit = torch.zeros_like(A), power_of_two(weight.abs().amax(dim=0) * norms)
        for rows in weight.split(_STRIP):
            scaled = rows * norms / unit
            _add(N, scaled, scaled)
        names, stays = torch.arange(units), torch.ones(units, dtype=torch.bool)
        # No eigenvalue of G + δ diag G exceeds its trace.
        least = RIDGE / (d * ridge * (1 + DAMPING + RIDGE))
        return cls(A, N, d // units, least, names, stays)

    def panel(self, steps: int) -> Removal:
        """Find the next columns to go, where a unit is one column."""
        A, N = self.A, self.N
        L, U = A.new_zeros(steps, len(A)), A.new_zeros(steps, len(A))
        a, w = A.diagonal().clone(), N.diagonal().clone()  # A_jj and ‖W_j‖² of every column
        out = ~self.stays.to(A.device)
        gone = torch.empty(steps, dtype=torch.int64, device=A.device)
        costs, places = w.new_empty(steps), torch.arange(len(A), device=A.device)
        t = torch.zeros(1, dtype=torch.int64, device=A.device)

        def step(done: slice) -> None:
            # j and t stay on the device, as indices of one element: no step waits for another.
            j = _cheapest((w / a).masked_fill_(out, torch.inf))
            a_j, w_j, l_j, u_j = (S.index_select(-1, j)[..., 0] for S in (a, w, L[done], U[done]))
            root, cost = a_j.sqrt(), w_j / a_j
            # Row j of A and of N as they are after the removals of this panel → L_t, V_t, U_t
            L_t = (_row(A, j, places) - l_j @ L[done]) / root
            V_t = (_row(N, j, places) - u_j @ L[done] - l_j @ U[done]) / root
            U_t = V_t - cost / 2 * L_t
            for rows, row in ((gone, j), (costs, cost.view(1)), (L, L_t[None]), (U, U_t[None])):
                rows.index_copy_(0, t, row)
            # Diagonals only: A_jj − L_tj² and N_jj − 2 U_tj L_tj. The rest is updated at the end.
            a.sub_(L_t.square()).clamp_min_(self.floor)
            w.sub_(2 * U_t * L_t).clamp_min_(0)
            out.index_fill_(0, j, True)
            t.add_(1)

        if A.is_cuda:  # rows of L and U that are not there yet are 0
            whole = functools.partial(step, slice(None))
            self.graph = _replayed(whole, steps, A.device, self.graph)
        else:
            for done in range(steps):
                step(slice(done))
        return gone.tolist(), costs.tolist(), L, U

    def group(self, spared: set[int], size: int) -> Removal:
        """Find the next unit to go, where units have several columns.

        None goes of the ranges of `size` units that are spared.
        """
        A, N, c = self.A, self.N, self.width
        starts = range(0, len(A), c)
        # A_gg = C Cᵀ for all units at once → costs tr(A_gg⁻¹ N_gg)
        C = torch.linalg.cholesky(torch.stack([_diagonal_block(A, i, i + c) for i in starts]))
        N_gg = torch.stack([_diagonal_block(N, i, i + c) for i in starts])
        costs = torch.cholesky_solve(N_gg, C).diagonal(dim1=1, dim2=2).sum(dim=1)
        for unit, name in enumerate(self.names.tolist() if spared else ()):
            if name // size in spared:
                costs[unit] = torch.inf
        g = int(_cheapest(costs.clamp_min_(0)))
        start, stop = g * c, (g + 1) * c
        # The cheapest unit's L = C⁻¹ A_g:, V = C⁻¹ N_g:, K = V_:g C⁻ᵀ, U = V − ½ K L
        L = _divided(_rows(A, start, stop), C[g])
        V = _divided(_rows(N, start, stop), C[g])
        K = _divided(V[:, start:stop].T, C[g])
        return [g], [float(costs[g])], L, V - K @ L / 2

    def remove(self, gone: list[int], L: Float[Tensor, "b n"], U: Float[Tensor, "b n"]) -> None:
        """`A ← A − LᵀL`, `N ← N − UᵀL − LᵀU`, in place; drop removed columns when that pays."""
        _add(self.A, L, L, -1)
        _add(self.N, U, L, -1)
        _add(self.N, L, U, -1)
        self.stays[gone] = False
        if self.width > 1 or int(self.stays.sum()) < CROWDED * len(self.stays):
            # Products over removed columns are wasted; to drop them is a pass over both matrices.
            columns = self.stays.repeat_interleave(self.width).nonzero().flatten()
            self.A = _dropped(self.A, columns.to(self.A.device))
            self.N = _dropped(self.N, columns.to(self.N.device))
            self.names = self.names[self.stays]
            self.stays = torch.ones(len(self.names), dtype=torch.bool)


def _replayed(
    step: Callable[[], None], times: int, device: torch.device, before: CUDAGraph | None
) -> CUDAGraph | None:
    """Do a step on a GPU several times: once as it is, then as one launch each, a CUDA graph.

    One by one, the small kernels of a step take longer to launch than to run. Returns the graph,
    which has to live until its work is done; one from before lends its memory.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()  # loads libraries, which nothing may while a graph is captured
        if times == 1:
            graph = before
        else:
            graph = CUDAGraph()
            graph.capture_begin(
                pool=before.pool() if before else None, capture_error_mode="thread_local"
            )
            try:
                step()
            finally:
                graph.capture_end()
            for _ in range(times - 1):
                graph.replay()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph


def _cheapest(costs: Float[Tensor, " n"]) -> Int[Tensor, "1"]:
    """Return the index of the least cost, on its device; of equal costs, the last."""
    cheapest = costs <= costs.min() * (1 + TIE)
    # argmax finds the first; the columns are in reverse order.
    return len(costs) - 1 - cheapest.flip(0).to(torch.uint8).argmax(dim=0, keepdim=True)


def _row(
    S: Float[Tensor, "n n"], j: Int[Tensor, "1"], places: Int[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Return a whole row of the symmetric matrix of which S holds the lower triangle."""
    # Left of the diagonal in row j, below it in column j
    n = len(S)
    return S.view(-1).index_select(0, torch.where(places <= j, j * n + places, places * n + j))


def _rows(S: Float[Tensor, "n n"], start: int, stop: int) -> Float[Tensor, "c n"]:
    """Return whole rows of the symmetric matrix of which S holds the lower triangle."""
    block = _diagonal_block(S, start, stop)
    return torch.cat([S[start:stop, :start], block, S[stop:, start:stop].T], dim=1)


def _diagonal_block(S: Float[Tensor, "n n"], start: int, stop: int) -> Float[Tensor, "c c"]:
    lower = S[start:stop, start:stop].tril()
    return lower + lower.tril(-1).T


def _divided(B: Float[Tensor, "c n"], C: Float[Tensor, "c c"]) -> Float[Tensor, "c n"]:
    """`C⁻¹ B`, C lower triangular."""
    return torch.linalg.solve_triangular(C, B, upper=False)


def _add(
    S: Float[Tensor, "n n"], X: Float[Tensor, "b n"], Y: Float[Tensor, "b n"], factor: float = 1
) -> None:
    """`S ← S + factor · XᵀY`, in the lower triangle."""
    for i in range(0, len(S), _STRIP):
        # Left of the strip's last column only: nothing reads the upper triangle.
        j = i + _STRIP
        S[i:j, :j].addmm_(X[:, i:j].T, Y[:, :j], alpha=factor)


def _dropped(S: Float[Tensor, "n n"], columns: Int[Tensor, " r"]) -> Float[Tensor, "r r"]:
    """`S[columns][:, columns]`, columns ascending, in the memory of S.

    Row i of the result ends no later than row i + 1 of S begins, and its entries come from its own
    place or after it: when it is written, nothing there is needed any more.
    """
    r, flat = len(columns), S.view(-1)
    for i in range(0, r, _STRIP):
        strip = S.index_select(0, columns[i : i + _STRIP]).index_select(1, columns)
        flat[i * r : (i + len(strip)) * r] = strip.flatten()
    return flat[: r * r].view(r, r)
