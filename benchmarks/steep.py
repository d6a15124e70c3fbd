"""Narrow solves of steep problems against float64: true errors side by side.

    python -m benchmarks.steep [--method least-squares] [--seed 1] [--models]

Problems: power laws i^-1 to i^-4, in the channels' basis and in a random one; channels that are
1e2 to 1e4 times as large as the others, their weights as much smaller or not; half a token to 16
tokens for every channel; with and without alignment; and the real Grams of three trained models,
as they are and with two such channels. Every error is the untempered relative error of the weight
that comes out, in float64. A problem passes where the narrow error is at most 1.05 times the other,
or where the slice came out and an event says so. With `--models`, stories260K with two channels of
every MLP enlarged (the function is unchanged) is pruned in both, and its perplexity measured.
With `--decompose D ...` nothing but eigendecompositions of that size is timed, in both dtypes.
"""

import argparse
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import coec
from benchmarks import record
from benchmarks.instances import SHARED, TEXTS, sites
from coec.compensation import relative_errors
from coec.linalg.decompose import eigh
from coec.types import Gram, KeptSet, SiteResult

WORSE = 1.05
"""How much larger than float64's a narrow error may be."""
SIZES = (1e2, 1e3, 1e4)
TOKENS = (0.5, 1, 2, 4, 8, 16)
CHANNELS, OUTPUTS, KEPT, VALUES = 96, 48, 67, 16


@dataclass(frozen=True, eq=False)
class Problem:
    """One matrix to compensate: a family to sum up by, and what `coec.compensate` takes."""

    family: str
    name: str
    weight: Tensor
    gram: Gram
    kept: Tensor
    value: Tensor | None = None


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for every family and, last, what failed; writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--method", default="coec", choices=("coec", "least-squares", "rcpu"))
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic problems")
    parser.add_argument("--models", action="store_true", help="prune enlarged models too")
    parser.add_argument("--decompose", nargs="+", type=int, metavar="D")
    chosen = parser.parse_args(arguments)
    if chosen.decompose:
        decompositions(chosen.decompose, arguments)
        return
    print(f"Steep problems, {chosen.method}. {record.header()}\n", flush=True)
    options: dict[str, Any] = {"ridge": 0.0} if chosen.method == "least-squares" else {}
    problems = itertools.chain(synthetic(chosen.seed), real(chosen.shared))
    rows = [measure(problem, chosen.method, options) for problem in problems]
    print(f"{'family':<36}{'n':>5}{'worst':>9}{'slices':>8}{'again':>7}{'negative':>10}{'fail':>6}")
    families = defaultdict(list)
    for row in rows:
        families[row["family"]].append(row)
    for family, members in families.items():
        ratios = [row["ratio"] for row in members if not row["slice"]]
        print(
            f"{family:<36}{len(members):>5}{max(ratios, default=0):>9.4f}"
            f"{sum(row['slice'] for row in members):>8}{sum(row['again'] for row in members):>7}"
            f"{sum(row['negative'] for row in members):>10}"
            f"{sum(not row['passes'] for row in members):>6}",
            flush=True,
        )
    failed = [row for row in rows if not row["passes"]]
    print(f"\n{len(rows)} problems, {len(failed)} fail")
    for row in failed[:20]:
        print({name: row[name] for name in ("family", "name", "slice_error", "wide", "narrow")})
    found: dict[str, Any] = {"rows": rows}
    if chosen.models:
        found["models"] = list(enlarged(chosen.shared))
    record.save(f"steep-{chosen.method}", arguments, found)


def measure(problem: Problem, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Errors of the slice and of both solves, in float64."""
    wide, _ = solved(problem, torch.float64, method, options)
    narrow, diagnostics = solved(problem, torch.float32, method, options)
    kept = KeptSet(problem.kept, problem.weight.shape[1])
    slice_error, _ = relative_errors(
        problem.weight, problem.gram, kept, SiteResult(problem.weight[:, problem.kept])
    )
    is_slice = narrow == slice_error and bool(diagnostics["events"])
    floor = 1e-13  # of a difference in float64
    ratio = (narrow + floor) / (wide + floor)
    said = [*diagnostics.get("errors_per_round", []), diagnostics["error_after"]]
    negative = min(said) < -1e-5
    return {
        "family": problem.family,
        "name": problem.name,
        "slice_error": slice_error,
        "wide": wide,
        "narrow": narrow,
        "ratio": ratio,
        "slice": is_slice,
        "again": any("float64" in event for event in diagnostics["events"]),
        "negative": negative,
        "passes": not negative and (ratio <= WORSE or is_slice),
    }


def solved(
    problem: Problem, dtype: torch.dtype, method: str, options: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    """The true error of one solve, and its diagnostics."""
    result = coec.compensate(
        problem.weight,
        problem.gram,
        problem.kept,
        method=method,
        value_weight=problem.value,
        solve_dtype=dtype,
        **options,
    )
    kept = KeptSet(problem.kept, problem.weight.shape[1])
    wide = SiteResult(result.weight.double())
    return relative_errors(problem.weight, problem.gram, kept, wide)[1], result.diagnostics


def synthetic(first: int = 0) -> Iterator[Problem]:
    """Yield power laws and large channels, of seeds from 2000 times this one on."""
    for number, (power, tokens, turned, aligned) in enumerate(
        itertools.product((1, 2, 3, 4), TOKENS, (False, True), (False, True))
    ):
        scales = torch.arange(1, CHANNELS + 1, dtype=torch.float64) ** (-power / 2)
        family = f"i^-{power}, {'random' if turned else 'own'} basis"
        seed = 2000 * first + number
        yield make(family, seed, scales, tokens, turned=turned, aligned=aligned)
    for number, (size, tokens, compensated, aligned, decay) in enumerate(
        itertools.product(SIZES, TOKENS, (True, False), (False, True), (0.5, 2))
    ):
        scales = torch.arange(1, CHANNELS + 1, dtype=torch.float64) ** (-decay / 2)
        yield make(
            f"channels × {size:g}, {'as in a model' if compensated else 'weights alike'}",
            2000 * first + 1000 + number, scales, tokens, turned=True, aligned=aligned, large=size,
            compensated=compensated,
        )  # fmt: skip


def make(
    family: str,
    seed: int,
    scales: Tensor,
    tokens: float,
    *,
    turned: bool,
    aligned: bool,
    large: float = 1.0,
    compensated: bool = False,
) -> Problem:
    """A problem of inputs with these scales; two channels `large` times as large."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = max(2, int(tokens * CHANNELS))
    X = scales[:, None] * normal(CHANNELS, count)
    if turned:
        X = torch.linalg.qr(normal(CHANNELS, CHANNELS))[0] @ X
    W = normal(OUTPUTS, CHANNELS)
    if large != 1:
        X[[3, 40]] *= large
        if compensated:
            W[:, [3, 40]] /= large
    kept = torch.randperm(CHANNELS, generator=generator)
    kept = torch.cat([torch.tensor([3, 40]), kept[(kept != 3) & (kept != 40)]])[:KEPT]
    value = normal(KEPT, VALUES) if aligned else None
    gram = Gram(X @ X.T, X.sum(dim=1), count)
    name = f"tokens {tokens:g}{', aligned' if aligned else ''}, seed {seed}"
    return Problem(family, name, W, gram, kept.sort().values, value)


def real(shared: Path) -> Iterator[Problem]:
    """Sites of the trained models, as they are and with two large channels."""
    for model in TEXTS:
        for site in sites(shared, model):
            kept = site.kept.indices
            problem = Problem(model, site.name, site.weight.double(), site.gram, kept, site.value)
            yield problem
            for size in SIZES[1:]:
                yield replace(_with_large_channels(problem, size), family=f"{model} × {size:g}")


def _with_large_channels(problem: Problem, size: float) -> Problem:
    """Two kept channels `size` times as large, their weights as much smaller."""
    scale = torch.ones(len(problem.gram.x), dtype=torch.float64)
    scale[problem.kept[[1, 5]]] = size
    gram = problem.gram
    scaled = replace(
        gram,
        xx=gram.xx * scale * scale[:, None],
        x=gram.x * scale,
        centred=None if gram.centred is None else gram.centred * scale.square(),
    )
    return replace(problem, weight=problem.weight / scale, gram=scaled)


def decompositions(sizes: list[int], arguments: list[str] | None) -> None:
    """Print seconds of an eigendecomposition in float64 beside those in float32."""
    print(f"Eigendecompositions. {record.header()}\n")
    print(f"{'d':<8}{'float64':>10}{'float32':>10}{'ratio':>8}")
    rows = []
    for d in sizes:
        inputs = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        inputs *= torch.arange(1, d + 1, dtype=torch.float64)[:, None] ** -0.5
        gram, seconds = inputs @ inputs.T, {}
        del inputs
        for dtype in (torch.float64, torch.float32):
            A = gram.to(dtype)
            began = record.clock()
            eigh(A)
            seconds[str(dtype).removeprefix("torch.")] = record.clock() - began
        rows.append({"d": d, **seconds})
        wide, narrow = seconds["float64"], seconds["float32"]
        print(f"{d:<8}{wide:>10.2f}{narrow:>10.2f}{wide / narrow:>8.2f}", flush=True)
        record.save("steep-decompositions", arguments, {"rows": rows})


def enlarged(shared: Path) -> Iterator[dict[str, Any]]:
    """Perplexities of enlarged models pruned by 30 %, in float64 and narrow."""
    model, text = shared / "models" / "stories260K", shared / "data" / "tinystories"
    print(f"\n{'channels ×':<12}{'float64':>10}{'float32':>10}{'ratio':>8}")
    for size in (1.0, *SIZES[1:]):
        with tempfile.TemporaryDirectory() as folder:
            dense = enlarge(model, Path(folder) / "dense", size)
            perplexity = {
                dtype: _perplexity(dense, Path(folder) / dtype, text, dtype)
                for dtype in ("float64", "float32")
            }
        ratio = perplexity["float32"] / perplexity["float64"]
        print(
            f"{size:<12g}{perplexity['float64']:>10.3f}{perplexity['float32']:>10.3f}{ratio:>8.4f}",
            flush=True,
        )
        yield {"size": size, **perplexity, "ratio": ratio}


def enlarge(model: Path, out: Path, size: float) -> Path:
    """The same function with two channels of every MLP `size` times as large."""
    out.mkdir()
    for path in model.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("up_proj.weight"):
            tensor[[3, 7]] *= size
        if name.endswith("down_proj.weight"):
            tensor[:, [3, 7]] /= size
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def _perplexity(dense: Path, out: Path, text: Path, dtype: Any) -> float:
    coec.prune(
        dense, out, calibration=str(text / "train.txt"), sparsity=0.3, samples=32, seq_len=256,
        solve_dtype=dtype, preset="paper",
    )  # fmt: skip
    return float(
        coec.perplexity(out, str(text / "test.txt"), seq_len=256, max_windows=100).perplexity
    )


if __name__ == "__main__":
    main()
