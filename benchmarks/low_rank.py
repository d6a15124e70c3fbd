"""Low rank against narrower blocks, at equal stored parameters: perplexity, KL and CPU seconds.

    python -m benchmarks.low_rank [--models wt2-llama] [--sparsity 0.3] [--presets fast best]
    python -m benchmarks.low_rank --sparsity 0.3 --variants prune "prune, by error" --presets

Every linear layer of a block becomes a product `A B` of rank r, an m×n matrix stored as r of its
rows and the others as combinations of these: `r (m + n) − r²` parameters. All of them together have
as many as the same layers after pruning at that sparsity with uniform widths, or a few less. Layers
are solved on the inputs that the low-rank model has (docs/METHODS.md §8): `W*` is the least-squares
map to the target, `L Lᵀ` the Gram of the inputs, and `A B L` the truncated SVD of `W* L`. What is
evaluated are the products, in the dense shapes; of `prune` and `prune, by error` it is what `coec
prune --low-rank` writes, with the windows of `best`. Ratios are of the KL, to the last preset.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import coec
from benchmarks import record
from benchmarks.checkpoints import FILES, SAMPLES, SEQ_LEN, TEXTS, evaluated_on
from benchmarks.factors import CPU, DTYPE, Streams, Variant
from benchmarks.instances import SHARED
from coec.allocation.ranks import largest_rank, ranks_by_cost, stored, uniform_ranks
from coec.calibration.windows import Windows, hold_out
from coec.evaluation.perplexity import Perplexity
from coec.models.dense import Dense
from coec.planning import Plan
from coec.planning.recipe import Recipe
from coec.settings import Calibration, Runtime
from coec.streaming.passes import Backend

ABLATED = 8
"""Windows on which the costs of truncations are measured."""
MEASURED = (0.0, 0.1, 0.25, 0.45, 0.65, 0.85)
"""Shares of a matrix's parameters at which they are measured; 0 is rank 1."""
WRITTEN = {"prune": "uniform", "prune, by error": "error"}
"""Ways that `coec prune` has, and their allocations."""
VARIANTS = {
    "closed form": Variant(),
    "hidden states": Variant(hidden=True),
    "by error": Variant(hidden=True, by_error=True),
    "fitted": Variant(hidden=True, steps=3),
    "fitted, by error": Variant(hidden=True, by_error=True, steps=3),
}


@dataclass(frozen=True)
class Row:
    """One compressed model; `parameters` are those that its blocks' linear layers store."""

    model: str
    sparsity: float
    way: str
    parameters: int
    perplexity: float
    kl: float
    seconds: float


def main(arguments: list[str] | None = None) -> None:
    """Prints a line per compressed model, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.2, 0.3, 0.5])
    ways = [*WRITTEN, *VARIANTS]
    parser.add_argument("--variants", nargs="*", choices=ways, default=ways)
    parser.add_argument("--presets", nargs="*", default=["fast"])
    parser.add_argument("--windows", type=int, default=400)
    chosen = parser.parse_args(arguments)
    print(f"Low rank. {record.header()}", flush=True)
    transformers.utils.logging.disable_progress_bar()
    rows: list[Row] = []
    for model in chosen.models:
        study = Study.of(chosen.shared / "models" / model, chosen.shared, chosen.windows)
        for sparsity in chosen.sparsity:
            presets = [(p, by_block) for p in chosen.presets for by_block in (False, True)]
            made = (study.pruned(sparsity, preset, by_block=b) for preset, b in presets)
            rows += _printed(made)
            kl = rows[-1].kl if presets else float("nan")
            made = (
                study.written(sparsity, name) if name in WRITTEN else study.low_rank(sparsity, name)
                for name in chosen.variants
            )
            rows += _printed(made, kl)
            old = record.load("low_rank").get("rows", [])
            record.save("low_rank", arguments, {"rows": _merged(old, rows)})


@dataclass(frozen=True, eq=False)
class Study:
    """One model, its windows of calibration and its windows of the test text."""

    dense: Dense
    text: Path
    fit: Tensor
    held: Tensor
    test: Windows

    @classmethod
    def of(cls, folder: Path, shared: Path, windows: int) -> "Study":
        """The windows that `best` fits and holds out, those that the model writes included."""
        dense = Dense.open(folder)
        text = shared / "data" / TEXTS[folder.name] / FILES[TEXTS[folder.name]][0]
        how = Calibration(
            source=text, samples=SAMPLES, seq_len=SEQ_LEN, holdout=0.125, self_samples=1.0
        )
        drawn = Backend().dense_pass(dense, how, Runtime(device="cpu")).draw()
        fitted, held = hold_out(drawn, how.held_out, how.seed)
        assert held is not None  # an eighth is
        return cls(dense, text, fitted, held, evaluated_on(dense, shared, windows))

    def pruned(self, sparsity: float, preset: str, *, by_block: bool) -> Row:
        """What a preset makes of the model."""
        name = f"{preset}, by block" if by_block else preset
        return self._made(sparsity, name, preset=preset, sparsity=sparsity, non_uniform=by_block)

    def written(self, sparsity: float, name: str) -> Row:
        """What `coec prune` writes of low rank, with as many parameters as pruning leaves."""
        outside = self.dense.parameters - linear_parameters(self.dense)
        return self._made(
            sparsity, name, preset="best", low_rank=True, allocation=WRITTEN[name],
            budget_parameters=outside + budget_at(self.dense, sparsity),
        )  # fmt: skip

    def _made(self, at: float, name: str, /, **settings: Any) -> Row:
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            coec.prune(
                self.dense.folder, f"{folder}/out", calibration=str(self.text), samples=SAMPLES,
                seq_len=SEQ_LEN, device="cpu", **settings,
            )  # fmt: skip
            seconds = time.process_time() - began
            result = coec.perplexity(f"{folder}/out", self.test, baseline=self.dense)
        whole = sum(p.numel() for p in self.dense.network(CPU, DTYPE).parameters())
        kept = linear_parameters(self.dense) - whole + result.parameters
        return self._row(at, name, kept, result, seconds)

    def low_rank(self, sparsity: float, name: str) -> Row:
        """What a variant makes of the model."""
        variant, budget = VARIANTS[name], budget_at(self.dense, sparsity)
        shapes = self.dense.matrices
        before = self._curves.seconds if variant.by_error else 0.0
        began = time.process_time()
        if variant.by_error:
            ranks = ranks_by_cost(shapes, budget, self._curves.costs)
        else:
            ranks = uniform_ranks(shapes, budget)
        streams = Streams(self.dense, self.fit, self.held, variant)
        for block in self.dense.layout.blocks:
            streams.solve(block, ranks, replace=True)
        tensors = streams.products() | (streams.end() if variant.steps else {})
        seconds = before + time.process_time() - began
        kept = sum(stored(shape, ranks[n]) for n, shape in shapes.items())
        return self._row(sparsity, name, kept, self.evaluated(tensors), seconds)

    @cached_property
    def _curves(self) -> "Curves":
        """The costs of truncations, which no sparsity changes."""
        began = time.process_time()
        survey = Streams(self.dense, self.fit, self.held, Variant(hidden=True))
        ranks = {name: min(shape) for name, shape in self.dense.matrices.items()}
        for block in self.dense.layout.blocks:
            survey.solve(block, ranks, replace=False)
        curves = costs(self.dense, self.fit[:ABLATED], survey)
        return Curves(curves, time.process_time() - began)

    def evaluated(self, tensors: Mapping[str, Tensor]) -> Perplexity:
        """How well the dense model predicts with some tensors in the place of its own."""
        network: Any = self.dense.network(CPU, DTYPE)
        own = dict(network.named_parameters())
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
            network.save_pretrained(folder)
            return coec.perplexity(folder, self.test, baseline=self.dense)

    def _row(
        self, sparsity: float, name: str, kept: int, result: Perplexity, seconds: float
    ) -> Row:
        assert result.kl is not None
        model = Path(self.dense.name).name
        return Row(model, sparsity, name, kept, result.perplexity, result.kl, seconds)


@dataclass(frozen=True, eq=False)
class Curves:
    """What every weight's truncation to rank 1, 2, … costs, and the CPU seconds it took to know."""

    costs: dict[str, Tensor]
    seconds: float


def budget_at(dense: Dense, sparsity: float) -> int:
    """Parameters that pruning leaves of the blocks' linear layers, with uniform widths."""
    plan = Plan.of(dense, Recipe(sparsity=sparsity))
    return linear_parameters(dense) - plan.widths.removed(dense.layout, dense.shapes)


def linear_parameters(dense: Dense) -> int:
    """Parameters of the blocks' linear layers."""
    return sum(shape.numel() for shape in dense.matrices.values())


@torch.no_grad()
def costs(dense: Dense, ids: Tensor, survey: "Streams") -> dict[str, Tensor]:
    """What every weight's truncation to rank 1, 2, … alone costs in KL to the dense model.

    It is measured at the ranks that keep `MEASURED` of the parameters, and is linear in the squared
    error between these.
    """
    network: Any = dense.network(CPU, DTYPE)
    tensors = dict(network.named_parameters())

    def predictions() -> Tensor:
        return network(input_ids=ids, use_cache=False).logits.log_softmax(dim=-1)

    expected = predictions()
    curves = {}
    for name, factors in survey.layers.items():
        B, A = (cast(Tensor, factor.weight) for factor in factors.children())
        squares = survey.spectra[name].square().numpy()
        errors = [*squares[::-1].cumsum()[::-1][1:].tolist(), 0.0]
        full = tensors[name].clone()
        points = {0.0: 0.0}
        for share in MEASURED:
            rank = largest_rank(full.shape, share)
            tensors[name].copy_(A[:, :rank] @ B[:rank])
            kl = F.kl_div(predictions(), expected, log_target=True, reduction="sum")
            points[errors[rank - 1]] = float(kl) / ids.numel()
        tensors[name].copy_(full)
        known = sorted(points.items())
        levels = np.maximum.accumulate([cost for _, cost in known])
        curves[name] = torch.from_numpy(np.interp(errors, [e for e, _ in known], levels))
    return curves


def _printed(rows: Iterable[Row], kl: float = float("nan")) -> list[Row]:
    """The rows, each printed as soon as it is there."""
    done = []
    for row in rows:
        print(
            f"{row.model:<14}{row.sparsity:>5}  {row.way:<24}{row.parameters:>10,}"
            f"{row.perplexity:>9.3f}{row.kl:>9.4f}{row.kl / kl:>7.2f}{row.seconds:>8.1f} s",
            flush=True,
        )
        done.append(row)
    return done


def _merged(old: list[dict[str, Any]], rows: list[Row]) -> list[dict[str, Any]]:
    new = [asdict(row) for row in rows]
    keys = ("model", "sparsity", "way")
    replaced = {tuple(row[key] for key in keys) for row in new}
    return [*(row for row in old if tuple(row[key] for key in keys) not in replaced), *new]


if __name__ == "__main__":
    main()
