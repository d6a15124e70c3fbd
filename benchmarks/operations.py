"""How many floating-point operations each phase takes, and the time that would be at peak.

    python -m benchmarks.operations [--model Llama-3.1-70B] [--rounds 2] [--steps 30]

The counts are those of `coec.planning.operations`, which plans are made of. A floor is operations
divided by the measured rate of a matrix product: no phase can be faster without doing less.
"""

import argparse
from dataclasses import dataclass

from coec.planning import operations
from coec.planning.forecast import readable

DATA_SHEET = {
    "H100 or H200 SXM, data sheet": {
        "float64": 67e12, "float32": 67e12, "TF32": 494e12, "bfloat16": 989e12,
    }
}  # fmt: skip
"""Operations per second from the maker's data sheet (float64 on tensor cores, float32 off them,
TF32 and bfloat16 without sparsity), the same for both: not measurements."""

BLOCK_PARAMETERS = {"Llama-3.1-8B": 218_103_808, "Llama-3.1-70B": 855_638_016}
"""Entries of one block's seven weight matrices."""


@dataclass(frozen=True)
class Site(operations.Consumer):
    """A consumer, in so many blocks of the model."""

    blocks: int = 1

    def scaled(self, factor: float) -> "Site":
        """The same site with every width multiplied by `factor`."""
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
    planes = operations.product(site.b, site.b, site.k)
    return [
        Phase("Gram accumulation", operations.gram(site, tokens), dtype="float32"),
        Phase("tempering", operations.tempering(site)),
        Phase("eigenbasis of Gxx", operations.eigenbasis(site)),
        Phase("SVD of the slice", operations.factors(site)),
        Phase("left rotation", operations.left_rotation(site), rounds + 1),
        Phase("rescale", operations.rescale(site), rounds + 1),
        Phase("joint step", operations.joint_step(site), steps),
        Phase("its preconditioner", operations.preconditioner(site) + planes, steps, "TF32"),
        Phase("assembly", operations.assembly(site)),
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
    from benchmarks.record import matmul_rate, one_thread

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
