"""Low rank against narrower blocks, at equal stored parameters: perplexity, KL and CPU seconds.

    python -m benchmarks.low_rank [--models wt2-llama] [--sparsity 0.3] [--presets fast best]

Every linear layer of a block becomes a product `A B` of rank r, an m×n matrix stored as r of its
rows and the others as combinations of these: `r (m + n) − r²` parameters. All of them together have
as many as the same layers after pruning at that sparsity with uniform widths, or a few less. The
models are those that `coec prune --low-rank` writes (docs/METHODS.md §11), with the windows of
`best`. Ratios are of the KL, to the last preset.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import coec
from benchmarks import record
from benchmarks.checkpoints import FILES, SAMPLES, SEQ_LEN, TEXTS, evaluated_on
from benchmarks.instances import SHARED
from coec.calibration.windows import Windows
from coec.evaluation.perplexity import Perplexity
from coec.models.dense import Dense
from coec.planning import Plan
from coec.planning.recipe import Recipe

WRITTEN = {"prune": "uniform", "prune, by error": "error"}
"""Ways that `coec prune` has, and their allocations."""


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
    parser.add_argument("--variants", nargs="*", choices=WRITTEN, default=[*WRITTEN])
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
            rows += _printed((study.written(sparsity, name) for name in chosen.variants), kl)
            old = record.load("low_rank").get("rows", [])
            record.save("low_rank", arguments, {"rows": _merged(old, rows)})


@dataclass(frozen=True, eq=False)
class Study:
    """One model, its calibration text and its windows of the test text."""

    dense: Dense
    text: Path
    test: Windows

    @classmethod
    def of(cls, folder: Path, shared: Path, windows: int) -> "Study":
        """Open the model and its texts."""
        dense = Dense.open(folder)
        text = shared / "data" / TEXTS[folder.name] / FILES[TEXTS[folder.name]][0]
        return cls(dense, text, evaluated_on(dense, shared, windows))

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
        whole = sum(
            p.numel() for p in self.dense.network(torch.device("cpu"), torch.float32).parameters()
        )
        kept = linear_parameters(self.dense) - whole + result.parameters
        return self._row(at, name, kept, result, seconds)

    def _row(
        self, sparsity: float, name: str, kept: int, result: Perplexity, seconds: float
    ) -> Row:
        assert result.kl is not None
        model = Path(self.dense.name).name
        return Row(model, sparsity, name, kept, result.perplexity, result.kl, seconds)


def budget_at(dense: Dense, sparsity: float) -> int:
    """Parameters that pruning leaves of the blocks' linear layers, with uniform widths."""
    plan = Plan.of(dense, Recipe(sparsity=sparsity))
    return linear_parameters(dense) - plan.widths.removed(dense.layout, dense.shapes)


def linear_parameters(dense: Dense) -> int:
    """Parameters of the blocks' linear layers."""
    return sum(shape.numel() for shape in dense.matrices.values())


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
