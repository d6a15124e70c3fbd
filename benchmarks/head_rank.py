"""Values and outputs reduced inside the heads, against dropping KV groups, at equal parameters.

    python -m benchmarks.head_rank [--models wt2-llama] [--removed 0.125 0.25] [--windows 400]

Rank r removes `(1 − r/head_dim)/2` of a block's attention parameters, and of its KV cache; a group
of n removes 1/n of both. Groups go where the error is least, but none a second time before every
block has lost one, and between counts the logarithm of the perplexity is interpolated. What is made
has the dense shapes, with zeros. With 30 % of the MLP's channels gone as well, a third way keeps
attention whole and removes as many parameters from the MLPs.
"""

import argparse
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import coec
from benchmarks import record
from benchmarks.checkpoints import FILES, SAMPLES, SEQ_LEN, SPARSITY, TEXTS, evaluated_on
from benchmarks.heads import reduced
from benchmarks.instances import SHARED
from coec.calibration.windows import Windows
from coec.models.dense import Dense
from coec.models.layout import Site
from coec.models.surgery import value_rows
from coec.selection import column_scores, keep_highest, kept_count, resolve, unit_scores
from coec.settings import Calibration, Runtime
from coec.streaming.dense_stream import DenseStream, Measured
from coec.streaming.passes import Backend

DROPPED = {"rcpu, coec": ("rcpu", "coec"), "obs, ridge": ("obs", "ridge-to-slice")}
"""Selection and compensation of units that go."""
RANKED = {
    "slice": ("none", False),
    "coec": ("coec", False),
    "ridge": ("ridge-to-slice", False),
    "fitted, ridge": ("ridge-to-slice", True),
}
"""Compensation of what is left of the heads, and whether its basis is fitted."""
BESIDE_MLP = ("ridge", "fitted, ridge")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One share of the attention parameters removed.

    Attributes:
        removed: of the attention parameters.
        mlp: whether 30 % of the channels are gone too.
        perplexity: by what was done.
        ratio: the best of the ranks over the best of dropping groups.
    """

    model: str
    removed: float
    rank: int
    mlp: bool
    perplexity: dict[str, float]
    ratio: float


def main(arguments: list[str] | None = None) -> None:
    """Prints a table per model, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--models", nargs="+", choices=TEXTS, default=list(TEXTS))
    shares = [0.125, 1 / 6, 0.25, 0.3, 0.46]
    parser.add_argument("--removed", nargs="+", type=float, default=shares)
    parser.add_argument("--windows", type=int, default=400)
    chosen = parser.parse_args(arguments)
    print(f"Head rank. {record.header()}", flush=True)
    transformers.utils.logging.disable_progress_bar()
    found: list[Row] = []
    for name in chosen.models:
        study = Study.of(chosen.shared / "models" / name, chosen.shared, chosen.windows)
        print(f"\n{name}, dense {study.perplexity({}):.3f}", flush=True)
        for mlp in (False, True):
            half = [measure(study, share, mlp=mlp) for share in chosen.removed]
            print(f"\n{describe(half)}", flush=True)
            found += half
        old = record.load("head_rank").get("rows", [])
        rows = record.merged(old, [asdict(row) for row in found], "model")
        record.save("head_rank", arguments, {"rows": rows})


@dataclass(frozen=True, eq=False)
class Study:
    """One model, measured once.

    Attributes:
        blocks: every block with the statistics of its sites.
        windows: of the test text.
    """

    dense: Dense
    blocks: tuple[Measured, ...]
    windows: Windows

    @classmethod
    def of(cls, folder: Path, shared: Path, windows: int) -> "Study":
        """Runs the dense model over its calibration windows."""
        dense = Dense.open(folder)
        text = shared / "data" / TEXTS[folder.name] / FILES[TEXTS[folder.name]][0]
        how = Calibration(source=text, samples=SAMPLES, seq_len=SEQ_LEN)
        ids = Backend().dense_pass(dense, how, Runtime(device="cpu")).draw().ids
        stream = DenseStream(dense, ids, device=torch.device("cpu"), dtype=torch.float32)
        return cls(dense, tuple(stream.blocks()), evaluated_on(dense, shared, windows))

    def perplexity(self, changed: Mapping[str, Tensor]) -> float:
        """Of the dense model with some tensors in the place of its own."""
        network: Any = self.dense.network(torch.device("cpu"), torch.float32)
        parameters = dict(network.named_parameters())
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            for name, tensor in changed.items():
                parameters[name].copy_(tensor)
            network.save_pretrained(folder)
            return coec.perplexity(folder, self.windows).perplexity


def measure(study: Study, share: float, *, mlp: bool) -> Row:
    """All that removes about one share of the attention parameters, which the rank rounds."""
    shape = study.dense.shape
    rank = max(1, round(shape.head_dim * (1 - 2 * share)))
    removed = (1 - rank / shape.head_dim) / 2
    keep = kept_count(shape.ffn, SPARSITY) if mlp else shape.ffn
    found = {f"drop {how}": dropping(study, removed, keep, how) for how in DROPPED}
    best = min(found.values())
    if mlp:
        fewer = keep - round(removed * attention_parameters(study) / (3 * shape.hidden))
        found["channels instead"] = study.perplexity(channels(study, fewer, "obs, ridge"))
    for how in BESIDE_MLP if mlp else RANKED:
        changed = ranked(study, rank, how) | channels(study, keep, "obs, ridge")
        found[f"rank {how}"] = study.perplexity(changed)
    ranks = min(value for name, value in found.items() if name.startswith("rank"))
    return Row(Path(study.dense.name).name, removed, rank, mlp, found, ranks / best)


def dropping(study: Study, removed: float, keep: int, how: str) -> float:
    """The perplexity with so many groups gone, interpolated between whole numbers of them."""
    exact = removed * len(study.blocks) * study.dense.shape.kv_heads
    low, high = math.floor(exact + 1e-9), math.ceil(exact - 1e-9)
    below, above = (math.log(dropped(study, count, keep, how)) for count in (low, high))
    return math.exp(below + (exact - low) * (above - below))


@cache
def dropped(study: Study, count: int, keep: int, how: str) -> float:
    """The perplexity with so many groups gone in all blocks together, and `keep` channels left."""
    return study.perplexity(groups(study, count, how) | channels(study, keep, how))


def groups(study: Study, count: int, how: str) -> Tensors:
    """The attention outputs with so many groups gone: where one more raises the error least."""
    least, further = divmod(count, len(study.blocks))
    left = study.dense.shape.kv_heads - least
    cuts = [cut(block, "attention", left, how) for block in study.blocks]
    if further:
        more = [cut(block, "attention", left - 1, how) for block in study.blocks]
        costs = [after[1] - before[1] for before, after in zip(cuts, more)]
        for index in sorted(range(len(cuts)), key=costs.__getitem__)[:further]:
            cuts[index] = more[index]
    return {name: tensor for tensors, _ in cuts for name, tensor in tensors.items()}


def channels(study: Study, keep: int, how: str) -> Tensors:
    """The outputs of the MLPs with so many channels."""
    cuts = [cut(block, "mlp", keep, how) for block in study.blocks]
    return {name: tensor for tensors, _ in cuts for name, tensor in tensors.items()}


@cache
def cut(block: Measured, kind: str, keep: int, how: str) -> tuple[Tensors, float]:
    """One consumer with zeros where units went, and its relative error."""
    selection, method = DROPPED[how]
    site = site_of(block, kind)
    gram, weight = block.grams[kind], block.tensors[site.weight]
    if keep == site.units:
        return {site.weight: weight}, 0.0
    scores = column_scores(
        resolve(selection), weight.double(), gram, units=site.units, keep=keep, seed=0
    )
    units = keep_highest(unit_scores(scores, site.units), keep)
    value = value_rows(block.tensors, site, units)
    columns = site.kept_columns(units)
    result = coec.compensate(weight, gram, columns, method=method, value_weight=value)
    padded = torch.zeros_like(weight)
    padded[:, columns.indices] = result.weight.to(weight)
    return {site.weight: padded}, result.diagnostics["error_after"]


@cache
def ranked(study: Study, rank: int, how: str) -> Tensors:
    """Values and outputs of every block at a rank, in the dense shapes."""
    changed: Tensors = {}
    for block in study.blocks:
        site = site_of(block, "attention")
        method, fitted = RANKED[how]
        changed |= reduced(block.tensors, site, block.grams[site.name], rank, method, fitted=fitted)
    return changed


def site_of(block: Measured, kind: str) -> Site:
    """One of a block's sites."""
    return next(site for site in block.block.sites if site.name == kind)


def attention_parameters(study: Study) -> int:
    """Of one block; all have as many."""
    block = study.blocks[0]
    tensors = site_of(block, "attention").tensors
    return sum(tensor.numel() for name, tensor in block.tensors.items() if name in tensors)


def describe(rows: list[Row]) -> str:
    """A table."""
    names = list(rows[0].perplexity)
    what = "removed of attention" + (" besides 30 % of the MLP" if rows[0].mlp else "")
    lines = [
        [f"{row.removed:.1%}", str(row.rank), *(f"{row.perplexity[name]:.3f}" for name in names),
         f"{row.ratio:.3f}"]
        for row in rows
    ]  # fmt: skip
    return record.table([what, "rank", *names, "best rank / best drop"], lines)


if __name__ == "__main__":
    main()
