"""The problems that are timed: sites of a trained model, and synthetic ones of any size."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coec.types import Gram, KeptSet

SHARED = Path("../shared")
TRAINED = "wt2-llama"
TEXTS = {
    "wt2-llama": "wikitext-2/valid.raw.txt",
    "babyllama-1M": "tinystories/train.txt",
    "stories260K": "tinystories/train.txt",
}
"""The small trained models, and what each is calibrated on."""
GRAM_DECAY = 1.0
WEIGHT_DECAY = 0.5


@dataclass(frozen=True, eq=False)
class Instance:
    """One matrix to compensate.

    Attributes:
        name: in tables.
        weight: `W₀`, m×d.
        gram: statistics, not tempered.
        kept: which columns stay.
        value: the pruned value projection's rows, one per kept column, at attention sites.
    """

    name: str
    weight: Tensor
    gram: Gram
    kept: KeptSet
    value: Tensor | None = None


def synthetic(m: int, d: int, *, sparsity: float = 0.3, seed: int = 0) -> Instance:
    """Power laws: the Gram's i-th eigenvalue is `i^-1`, the weight's i-th singular value `i^-½`.

    Both have random singular vectors, independent of each other. The kept columns are random.
    """
    generator = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int, columns: int) -> Tensor:
        A = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(A).Q

    def power_law(n: int, decay: float) -> Tensor:
        return torch.arange(1, n + 1, dtype=torch.float64) ** -decay

    E, r = orthonormal(d, d), min(m, d)
    G = (E * power_law(d, GRAM_DECAY)) @ E.T
    W = (orthonormal(m, r) * power_law(r, WEIGHT_DECAY)) @ orthonormal(d, r).T
    kept = torch.randperm(d, generator=generator)[: round((1 - sparsity) * d)].sort().values
    gram = Gram((G + G.T) / 2, torch.zeros(d, dtype=torch.float64), d)
    return Instance(f"synthetic {m}×{d}", W, gram, KeptSet(kept, d))


def trained(shared: Path, site: str, *, block: int = 2, sparsity: float = 0.3) -> Instance:
    """A site (`mlp` or `attention`) of the small Llama trained on WikiText-2; see `sites`."""
    found = (
        one for one in sites(shared, sparsity=sparsity) if one.name.endswith(f"{block} {site}")
    )
    return next(found)


def sites(shared: Path, model: str = TRAINED, *, sparsity: float = 0.3) -> Iterator[Instance]:
    """Every site of a trained model that loses units, with its real Gram, block by block.

    Statistics of 64 windows of 256 tokens of the model's own calibration text; selection `rcpu`.
    """
    from coec.config.recipe import Recipe
    from coec.methods.selection import keep_highest, rcpu, unit_scores
    from coec.models.dense import Dense
    from coec.models.surgery import value_rows
    from coec.planning.plan import Plan
    from coec.streams.streams import Streams
    from coec.text.tokens import load_tokenizer, read_stream
    from coec.text.windows import sample_windows

    folder = shared / "models" / model
    checkpoint = Dense.open(folder)
    plan = Plan.of(checkpoint, Recipe(preset="paper", sparsity=sparsity))
    text = str(shared / "data" / TEXTS[model])
    stream = read_stream(text, lambda: load_tokenizer(folder), split="train")
    windows = sample_windows(stream, samples=64, seq_len=256, seed=0)
    streams = Streams(plan, checkpoint, windows.ids, pruned=False)
    for block in checkpoint.layout.blocks:
        tensors, sums = streams.measure(block)
        assert sums is not None
        for site in block.sites:
            gram = sums.pop(site.name).gram()
            weight = tensors[site.weight].to(gram.xx)
            scores = unit_scores(rcpu(weight, gram), site.units)
            units = keep_highest(scores, plan.widths.of(site))
            value = value_rows(tensors, site, units)
            value = None if value is None else value.to(gram.xx)
            name = f"{model} block {block.index} {site.name}"
            yield Instance(name, weight, gram, site.kept_columns(units), value)
