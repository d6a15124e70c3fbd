"""Phases of a run: the work of each, and what it holds in memory."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from coec.planning import work
from coec.planning.compute import ComputeConfig
from coec.planning.machines import Work
from coec.planning.memory import (
    fitted_matrices,
    placed,
    purposes_of,
    text_characters,
    tried_tokens,
)
from coec.planning.sizes import PlanSizes
from coec.settings import CoecOptions
from coec.streaming.dense_stream import batch_size

_PROCESS = ("program", "text")
_STREAM = (*_PROCESS, "block's weights", "hidden states", "forward pass", "statistics")
_SOLVE = (*_PROCESS, "hidden states", "Grams", "weight", "solver", "decomposition")
_FIT = (*_PROCESS, "block's weights", "hidden states", "fit")
_ALLOCATE = (*_STREAM, "Grams", "weight", "solver", "decomposition", "logits")
_PREDICT = (*_PROCESS, "hidden states", "logits")


@dataclass(frozen=True)
class Phase:
    """Phase of a run.

    Attributes:
        name: in plans.
        lap: phase under which a report counts its seconds; "" for the start of the process.
        work: everything that it does.
        device, host: bytes of memory by purpose; all of it is the host's where that computes.
        tasks: number of independent pieces (blocks or windows) that it can be cut into.
    """

    name: str
    lap: str
    work: tuple[Work, ...]
    device: dict[str, int]
    host: dict[str, int]
    tasks: int = 1

    @property
    def operations(self) -> float:
        """Floating-point operations, without elementwise ones."""
        return sum(piece.operations for piece in self.work)


def phases_of(
    plan: PlanSizes,
    compute: ComputeConfig,
    candidates: Sequence[PlanSizes] = (),
    effort: str = "typical",
) -> list[Phase]:
    """List the phases of a run, in order.

    Args:
        plan: sizes and settings.
        compute: device and dtypes.
        candidates: plans that are reconstructed before, to choose among them.
        effort: length of descents, which depend on the data: `least`, `typical` or `most`.
    """
    run, layers, phases = PlanWork(plan, compute, effort), plan.dense.layers, []

    def add(
        name: str, lap: str, steps: Iterable[Work], purposes: tuple[str, ...] = (), tasks: int = 1
    ) -> None:
        site_kind = name.removeprefix("solving ") if purposes == _SOLVE else ""
        sizes = purposes_of(plan, compute, site_kind) if purposes else {}
        memory = placed({purpose: sizes[purpose] for purpose in purposes}, compute.device)
        phases.append(Phase(name, lap, tuple(steps), *memory, tasks))

    # Opening takes calls; a million characters are tokenised per second.
    text = 0.0 if compute.measured else text_characters(plan) / 1e6
    opening = [Work("call", 40_000.0 + 900.0 * layers), Work("host", text)]
    add("starting", "", [Work("host", 4.0)])
    add("checking", "checking", opening, _PROCESS)
    if plan.recipe.calibration.written and not compute.measured:
        add("sampling text", "reading text", run.sampling(), (*_PROCESS, "whole model"))
    if not plan.decided:
        add("allocating", "allocating", run.allocating(), _ALLOCATE)
    sequential = plan.recipe.reconstruction.sequential
    lap = "reconstructing" if sequential else "solving" if compute.measured else "calibrating"
    stored = float(plan.parameters_before * compute.stored.itemsize)
    add("reading weights", lap, [Work("read", stored)])
    if sequential:
        brief = [PlanWork(candidate, compute, effort).reconstruction() for candidate in candidates]
        if tried := [w for phase in brief for _, steps, _ in phase for w in steps]:
            add("trying candidates", lap, tried)
        for name, steps, purposes in run.reconstruction():
            add(name, lap, steps, purposes)
    else:
        if not compute.measured:
            add("loading weights", lap, run.loading())
        passes = [] if compute.measured else run.dense_pass()
        add("calibrating", "calibrating", passes, _STREAM, plan.recipe.calibration.windows)
        for site_kind in run.site_kinds:
            add(f"solving {site_kind}", "solving", run.solving(site_kind), _SOLVE, layers)
    add("writing", "writing", run.writing(), (*_PROCESS, "shard"))
    return phases


class PlanWork:
    """Work of the phases of one plan."""

    def __init__(self, plan: PlanSizes, compute: ComputeConfig, effort: str = "typical") -> None:
        self.plan, self.compute, self.effort = plan, compute, effort
        self.sites = plan.model.layout.sites
        self.site_kinds = [site.kind for site in plan.model.layout.kinds]
        names, config = plan.model.architecture.blocks.experts, plan.model.config
        routed = float(config.get("num_experts_per_tok") or 1)
        self.active = 1.0 if names is None else routed / float(config.get(names.count) or routed)
        """Fraction of the experts that a token meets."""

    def forward(
        self, tokens: float, times: float = 1.0, *, half: str = "", pruned: bool = False
    ) -> list[Work]:
        """Run all blocks: 2·weights·tokens, attention maps 4·length·width·tokens, 36·hidden + 8·ffn
        numbers through memory per token, and hidden states from the host to a GPU and back.

        Args:
            tokens: of all windows.
            times: number of passes.
            half: a kind of site, to run only the halves of blocks that hold it.
            pruned: run the pruned model.
        """
        plan, hidden, layers = self.plan, self.plan.dense.hidden, self.plan.dense.layers
        itemsize, dtype = self.compute.forward.itemsize, self.compute.forward_name
        shapes = plan.pruned_shapes if pruned else plan.model.shapes
        weights = ffn = attention = 0.0
        for site in (site for site in self.sites if half in ("", site.kind)):
            met = self.active if site.routed else 1.0
            weights += met * sum(shapes[name].numel() for name in site.tensors if name in shapes)
            width = plan.widths.of(site) * site.columns_per_unit if pruned else site.columns
            attention += width * (site.value is not None)
            ffn += width * met * (site.value is None)
        batches = max(1.0, tokens / self.batch)
        rows, maps = tokens / batches, 4.0 * plan.seq_len * attention * tokens
        traffic = (36.0 * hidden * layers + 8.0 * ffn) * tokens * itemsize
        copied = 2.0 * hidden * layers * tokens * itemsize * (self.compute.device != "cpu")
        return [
            Work("product", 2.0 * weights * tokens, (rows * hidden**2) ** (1 / 3), times, dtype),
            Work("product", maps, (64.0 * plan.seq_len**2) ** (1 / 3), times, dtype),
            Work("elementwise", traffic, 3.0 * rows * hidden * itemsize, times),
            Work("call", 110.0 * layers * batches, 1.0, times),
            Work("link", copied, 1.0, times),
        ]

    @property
    def batch(self) -> int:
        """Tokens that are run at once."""
        plan = self.plan
        windows = plan.recipe.calibration.windows if plan.recipe.reconstruction.sequential else None
        return batch_size(plan.seq_len, windows) * plan.seq_len

    def sampling(self) -> list[Work]:
        """Sample windows: every token, 2·weights, reads all weights, and keys and values before it.

        The embedding is not multiplied.
        """
        plan, windows = self.plan, self.plan.recipe.calibration.written
        hidden, layers = plan.dense.hidden, plan.dense.layers
        rows = min(self.compute.at_once, windows)
        steps = -(-windows // self.compute.at_once) * float(plan.seq_len)
        embedding = 0 if plan.model.tied else plan.model.shapes[plan.model.layout.embedding].numel()
        weights = self.active * (plan.parameters_before - embedding)
        read = weights + 3.0 * plan.seq_len * hidden * rows * layers
        edge, dtype = (rows * hidden**2) ** (1 / 3), self.compute.forward_name
        return [
            Work("product", 2.0 * weights * rows, edge, steps, dtype),
            Work("elementwise", read * self.compute.forward.itemsize, 2.0**20, steps),
            Work("call", 200.0 * layers + 900.0, 1.0, steps),
        ]

    def loading(self) -> list[Work]:
        """Convert all weights to the forward dtype, and copy them to a GPU."""
        stored = float(self.plan.parameters_before * self.compute.stored.itemsize)
        copied = stored * (self.compute.device != "cpu")
        return [Work("elementwise", 2 * stored, 2.0**24), Work("link", copied)]

    def dense_pass(self, times: float = 1.0) -> list[Work]:
        """Run the dense model over all windows, and sum the statistics of every site once."""
        tokens = float(self.plan.tokens)
        steps = self.forward(tokens, times)
        for (d, routed), count in Counter((s.columns, s.routed) for s in self.sites).items():
            met = tokens * (self.active if routed else 1.0)
            steps += work.statistics(d, met, max(1.0, tokens / self.batch), count)
        return steps

    def solving(self, site_kind: str) -> list[Work]:
        """Select units and compensate, at all sites of one kind."""
        pruning, method = self.plan.recipe.pruning, self.plan.recipe.method
        options = {**CoecOptions().record(), **method.defaults, **pruning.options}
        selects = self.plan.recipe.kept is None and pruning.selection == "obs"
        steps: list[Work] = []
        for size, count in self._sizes(site_kind):
            site = work.errors(size) + (work.elimination(size) if selects else [])
            if size.k == size.d and not self.plan.recipe.reconstruction.propagate:
                pass  # nothing is removed
            elif method.name in ("coec", "auto"):
                descent = work.usual_descent(size, self.effort)
                # Among candidates auto tries three descents, and the best one again.
                tried = 4 if method.name == "auto" else 1
                site += work.coec(size, descent, self.compute, options) * tried
            elif method.name in ("least-squares", "ridge-to-slice"):
                site += work.ridge(size)
            elif method.name == "rcpu":
                site += work.rcpu(size, self.compute.device)
            steps += [replace(step, times=step.times * count) for step in site]
        return steps

    def allocating(self) -> list[Work]:
        """Run a dense pass of its own and score units; for errors also eliminate, solve, and run
        models side by side: of each earlier site two through a block, of its own sites three.
        """
        by_error = self.plan.recipe.pruning.allocation == "error"
        steps = [*self.loading(), *self.dense_pass()]
        for size, count in self._sizes():
            site = work.errors(size) + (work.elimination(size) if by_error else [])
            steps += [replace(step, times=step.times * count) for step in site]
        if by_error:
            count, layers = len(self.sites), self.plan.dense.layers
            tokens = float(tried_tokens(self.plan))
            for site_kind in self.site_kinds:
                steps += self.solving(site_kind)
            steps += self.forward(tokens, count * (layers + 1) / layers + 2)
            steps += self._head(tokens, 1.0 + 2 * count)
        return steps

    def reconstruction(self) -> Iterator[tuple[str, list[Work], tuple[str, ...]]]:
        """Yield name, work and purposes of every part of running both models side by side.

        The dense blocks run for the targets, and once more where each half is measured.
        """
        plan, settings = self.plan, self.plan.recipe.reconstruction
        share, samples = plan.recipe.calibration.held_out, plan.recipe.calibration.samples
        held_out = max(1, round(share * samples)) * plan.seq_len if share else 0
        passes = self.loading() * 2 + self.dense_pass(2.0)
        passes += self.forward(plan.tokens, 2.0, pruned=True)
        yield "passes", passes, _STREAM
        for site_kind in self.site_kinds:
            yield f"solving {site_kind}", self.solving(site_kind), _SOLVE
            if settings.reconstruct:
                yield f"fitting {site_kind}", self.fitting(site_kind, held_out), _FIT
        head = self._head(held_out or plan.tokens, 2.0 + settings.final_norm)
        yield "predicting", head, _PREDICT

    def fitting(self, site_kind: str, held_out: int) -> list[Work]:
        """Fit the halves of all blocks by Gauss–Newton; a way back counts as a way forward.

        A step tries 1.3 lengths over all windows, and takes two gradients (five passes over the
        fitted windows); an iteration takes 11/3 passes over a share of them, in attention 4. An m×n
        matrix takes the Gram of its inputs, 2n²·tokens, eigenpairs of that (the last an inverse,
        n³), and 4mn² per iteration (the last 2mn²). Attention takes one step.
        """
        settings, tokens = self.plan.recipe.reconstruction, float(self.plan.tokens - held_out)
        sites = [site for site in self.sites if site.kind == site_kind]
        attends = sites[0].value is not None
        steps = min(settings.reconstruct, 1) if attends else settings.reconstruct
        iterations, passes = steps * settings.cg_iterations, 4 if attends else 11 / 3
        share = settings.curvature_share
        fits = self.forward(tokens + held_out, 1 + 1.3 * steps, half=site_kind, pruned=True)
        fits += self.forward(tokens, 5.0 * steps, half=site_kind, pruned=True)
        fits += self.forward(tokens * share, passes * iterations, half=site_kind, pruned=True)
        matrices = Counter(m for site in sites for m in fitted_matrices(self.plan, site))
        for (m, n, last), count in matrices.items():
            times, repeats = float(steps * count), float(iterations * count)
            inverse = work.product(n, n, n / 2, times, "float32")
            fits += [
                work.product(n, tokens, n, times, "float32"),
                inverse if last else work.eigenpairs(n, times, "float32"),
                work.product(m, n, n, (times + repeats) * (1 if last else 2), "float32"),
                Work("elementwise", 56.0 * m * n, 4.0 * m * n, repeats),
            ]
        return [*fits, Work("call", 60.0 * len(sites), 1.0, iterations)]

    def writing(self) -> list[Work]:
        """Convert and write every weight, and each block once before."""
        size = 6.0 * self.plan.parameters_after * self.compute.written.itemsize
        return [Work("elementwise", size, 2.0**24), Work("call", 3000.0 * self.plan.dense.layers)]

    def _sizes(self, site_kind: str = "") -> Iterable[tuple[work.SiteSize, int]]:
        """Pair the distinct sizes of sites, of one kind or all, with the number of such sites."""
        shapes, widths = self.plan.model.shapes, self.plan.widths
        return Counter(
            work.SiteSize(int(shapes[site.weight][0]), site.columns,
                          widths.of(site) * site.columns_per_unit, site.units,
                          site.value is not None)
            for site in self.sites if site_kind in ("", site.kind)
        ).items()  # fmt: skip

    def _head(self, tokens: float, models: float) -> list[Work]:
        """Compare logits of models with the dense one's: 4·hidden·vocabulary·tokens for each."""
        hidden, logits = self.plan.dense.hidden, self.plan.model.vocabulary * tokens
        return [
            Work("product", 4.0 * hidden * logits, hidden, models, self.compute.forward_name),
            Work("elementwise", 88.0 * logits, 2.0**26, models),
            Work("call", 90.0 * max(1.0, logits / 2**24), 1.0, models),
        ]
