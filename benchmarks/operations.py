"""How many floating-point operations each phase takes, and the time that would be at peak.

    python -m benchmarks.operations [--model Llama-3.1-70B] [--rounds 2] [--steps 30]

A multiplication and an addition are two operations. Decompositions are counted by their
divide-and-conquer algorithms with full accumulation of vectors, leading order, nothing deflated.
Elementwise work is left out beside products. A floor is operations divided by the measured rate of
a matrix product: no phase can be faster without doing less.
"""

import argparse
from dataclasses import dataclass

from benchmarks.record import matmul_rate, one_thread, readable

DATA_SHEET = {
    "H100 or H200 SXM, data sheet": {
        "float64": 67e12, "float32": 67e12, "TF32": 494e12, "bfloat16": 989e12,
    }
}  # fmt: skip
"""Operations per second from the maker's data sheet (float64 on tensor cores, float32 off them,
TF32 and bfloat16 without sparsity), the same for both: not measurements."""

BLOCK_PARAMETERS = {"Llama-3.1-8B": 218_103_808, "Llama-3.1-70B": 855_638_016}
"""Entries of one block's seven weight matrices."""


GCV_POINTS = 120
"""Grid of the rescale (METHODS §5.3)."""


@dataclass(frozen=True)
class Site:
    """Sizes of one consumer, in a number of blocks of the model.

    Attributes:
        name: in tables.
        m: its outputs.
        d: its inputs.
        k: the inputs that are kept.
        blocks: number of blocks.
    """

    name: str
    m: int
    d: int
    k: int
    blocks: int = 1

    @property
    def b(self) -> int:
        """Rank of the frame, `min(m, k)`."""
        return min(self.m, self.k)

    def scaled(self, factor: float) -> "Site":
        """Multiply every width by `factor`."""
        m, d, k = (max(2, round(n * factor)) for n in (self.m, self.d, self.k))
        return Site(self.name, m, d, min(k, d - 1), self.blocks)


MODELS = {
    "Llama-3.1-8B": (
        Site("down_proj", 4096, 14336, 10036, 32),
        Site("o_proj", 4096, 4096, 3072, 32),
    ),
    "Llama-3.1-70B": (
        Site("down_proj", 8192, 28672, 20071, 80),
        Site("o_proj", 8192, 8192, 6144, 80),
    ),
}
"""At 30 %: `⌈0.7 n⌉` channels and `⌈0.7 · 8⌉ = 6` KV groups stay."""


def product(m: int, n: int, k: int) -> float:
    """Multiply `m×n` by `n×k`."""
    return 2.0 * m * n * k


def eigh(n: int) -> float:
    """Find all eigenpairs: tridiagonalise 4/3, divide and conquer 4/3, back 2 (times n³)."""
    return 14 / 3 * n**3


def thin_svd(m: int, n: int) -> float:
    """Decompose an m×n matrix through a QR factorisation of the long side.

    For m ≥ n: QR 2mn² − 2n³/3, bidiagonalise 8n³/3, divide and conquer 8n³/3, both sides back 4n³,
    and Q applied 4mn² − 2n³.
    """
    m, n = max(m, n), min(m, n)
    return 6.0 * m * n**2 + 20 / 3 * n**3


def cholesky(n: int) -> float:
    """Factorise an n×n matrix."""
    return n**3 / 3


def inverse(n: int) -> float:
    """Invert an n×n positive definite matrix by its Cholesky factor."""
    return cholesky(n) + 2 / 3 * n**3


def elimination(site: Site, panel: int = 128) -> float:
    """Greedy elimination of d − k columns, without the inverse it starts from; leading order.

    `WᵀW`, three rank-one updates of a triangle for every column that goes, on the columns that are
    left, and the three rows that it takes to form in a panel half filled.
    """
    m, d, k = site.m, site.d, site.k
    return m * d**2 + 3 * (d**3 - k**3) / 3 + 3 * panel * (d**2 - k**2) / 2


def triangular_solve(n: int, columns: int) -> float:
    """Solve with an n×n triangle for a number of columns."""
    return float(n) ** 2 * columns


def gram(site: Site, tokens: int) -> float:
    """Sum `Σ x xᵀ` as a full product."""
    return product(site.d, tokens, site.d)


def tempering(site: Site) -> float:
    """Eigenpairs of G, and with `G^α = F Fᵀ` the products `F_K F_Kᵀ`, `W₀ F`, `(W₀ F) F_Kᵀ`."""
    m, d, k = site.m, site.d, site.k
    return eigh(d) + product(k, d, k) + product(m, d, d) + product(m, d, k)


def eigenbasis(site: Site) -> float:
    """Eigenpairs of Gxx, and `Gyx E`."""
    return eigh(site.k) + product(site.m, site.k, site.k)


def factors(site: Site) -> float:
    """The one thin SVD of the slice, and R in the eigenbasis."""
    return thin_svd(site.m, site.k) + product(site.b, site.k, site.k)


def polar(m: int, b: int, steps: int = 6) -> float:
    """The polar factor of an m×b matrix by QDWH: `XᵀX`, Cholesky, two triangular solves a step."""
    step = product(b, m, b) + cholesky(b) + 2 * triangular_solve(b, m)
    return steps * step + 2 * product(m, b, b)


def left_rotation(site: Site) -> float:
    """`Gyx Rᵀ diag(s)` and its polar factor."""
    return product(site.m, site.k, site.b) + polar(site.m, site.b)


def rescale(site: Site) -> float:
    """`Uᵀ Gyx`, elementwise sums with R, and the grid of λ."""
    m, b, k = site.m, site.b, site.k
    return product(b, m, k) + 5.0 * b * k + 6.0 * GCV_POINTS * b


def right_problem(site: Site) -> float:
    """`C = diag(s) Uᵀ Gyx`."""
    return product(site.b, site.m, site.k)


def tangent(site: Site) -> float:
    """`Z − sym(Z Rᵀ) R`: two products."""
    return 2 * product(site.b, site.k, site.b)


def lower_gram(b: int, k: int, strip: int = 256) -> float:
    """Compute the lower triangle of a Gram of b rows, in strips."""
    ends = [*range(strip, b, strip), b]
    return sum(product(end - start, k, end) for start, end in zip([0, *ends], ends))


def retraction(site: Site) -> float:
    """The lower triangle of `(R + ξ)(R + ξ)ᵀ`, its Cholesky factor, a triangular solve."""
    b, k = site.b, site.k
    return lower_gram(b, k) + cholesky(b) + triangular_solve(b, k)


def preconditioner(site: Site, cg_iterations: float = 4.0) -> float:
    """Precondition a step: the inner solve's two, and two products per iteration.

    Where the left factor follows, one more for the planes.
    """
    return (2 + 2 * cg_iterations) * product(site.b, site.k, site.b)


def conjugate_step(site: Site, trials: float = 1.4) -> float:
    """Take a step of the `conjugate` right solve, without its preconditioner.

    Two tangents (gradient, direction), `trials` retractions.
    """
    return 2 * tangent(site) + trials * retraction(site)


def joint_step(site: Site, trials: float = 1.4) -> float:
    """Take a step of `joint`: `conjugate`, U at every trial, the right problem at the end."""
    return conjugate_step(site, trials) + trials * left_rotation(site) + right_problem(site)


def assembly(site: Site) -> float:
    """`Ŵ = U diag(s) (R Eᵀ)`."""
    return product(site.b, site.k, site.k) + product(site.m, site.b, site.k)


@dataclass(frozen=True)
class Phase:
    """What one phase of one matrix takes.

    Attributes:
        name: in tables.
        operations: of one execution.
        times: how often it is executed.
        dtype: whose rate bounds it.
    """

    name: str
    operations: float
    times: int = 1
    dtype: str = "float64"

    @property
    def total(self) -> float:
        """Operations of all executions."""
        return self.times * self.operations


def phases(site: Site, tokens: int, rounds: int, steps: int) -> list[Phase]:
    """Every phase of one matrix; `steps` steps of `joint` in all, over `rounds` rounds."""
    planes = product(site.b, site.b, site.k)
    return [
        Phase("Gram accumulation", gram(site, tokens), dtype="float32"),
        Phase("tempering", tempering(site)),
        Phase("eigenbasis of Gxx", eigenbasis(site)),
        Phase("SVD of the slice", factors(site)),
        Phase("left rotation", left_rotation(site), rounds + 1),
        Phase("rescale", rescale(site), rounds + 1),
        Phase("joint step", joint_step(site), steps),
        Phase("its preconditioner", preconditioner(site) + planes, steps, "TF32"),
        Phase("assembly", assembly(site)),
    ]


Rates = dict[str, dict[str, float]]
"""Operations per second by machine and dtype."""


def table(model: str, tokens: int, rounds: int, steps: int, rates: Rates) -> str:
    """Markdown: operations of one block and of the whole model, and the time at every rate."""
    columns = ["phase", "site", "operations", "times", "dtype", "whole model", *rates]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    totals = dict.fromkeys(rates, 0.0)
    everything = 0.0
    for site in MODELS[model]:
        for phase in phases(site, tokens, rounds, steps):
            whole = phase.total * site.blocks
            everything += whole
            times = {name: whole / rate[phase.dtype] for name, rate in rates.items()}
            totals = {name: totals[name] + times[name] for name in rates}
            lines.append(_row(
                [phase.name, site.name, f"{phase.operations:.2e}", str(phase.times), phase.dtype],
                whole, times,
            ))  # fmt: skip
    lines.append(_row(["all", "", "", "", ""], everything, totals))
    forward = 2.0 * BLOCK_PARAMETERS[model] * tokens
    whole = forward * MODELS[model][0].blocks
    passes = {name: whole / rate.get("bfloat16", rate["float32"]) for name, rate in rates.items()}
    cells = ["dense forward pass, linear layers", "block", f"{forward:.2e}", "1", "stored"]
    lines.append(_row(cells, whole, passes))
    return "\n".join(lines)


def _row(cells: list[str], operations: float, times: dict[str, float]) -> str:
    durations = [readable(time) for time in times.values()]
    return f"| {' | '.join([*cells, f'{operations:.2e}', *durations])} |"


def main() -> None:
    """Prints the floor table of a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=MODELS, default="Llama-3.1-8B")
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--rounds", type=int, default=2, help="of the loop, per matrix")
    parser.add_argument("--steps", type=int, default=30, help="of all joint solves, per matrix")
    chosen = parser.parse_args()
    here = {dtype: matmul_rate("cpu", dtype) for dtype in ("float64", "float32")}
    here["TF32"] = here["float32"]
    rates: Rates = {"here, one thread" if one_thread() else "here": here, **DATA_SHEET}
    print(f"{chosen.model}, 30 %, {chosen.tokens:,} tokens, {chosen.rounds} rounds and "
          f"{chosen.steps} joint steps per matrix. Here: "
          + ", ".join(f"{here[dtype] / 1e9:.0f} G/s in {dtype}" for dtype in ("float64", "float32"))
          + ". Data sheet: "
          + ", ".join(f"{rate / 1e12:.0f} T/s in {dtype}"
                      for dtype, rate in next(iter(DATA_SHEET.values())).items())
          + ".\n")  # fmt: skip
    print(table(chosen.model, chosen.tokens, chosen.rounds, chosen.steps, rates))


if __name__ == "__main__":
    main()
