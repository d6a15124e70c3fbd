"""Checkpoints that other programs pruned, beside the presets: perplexity at equal size.

    python -m benchmarks.checkpoints PEERS [--shared ../shared] [--windows 400]

PEERS has a folder `PEER/MODEL/SEED` for every checkpoint, in transformers' format, pruned by the
peer's own code with the windows that this package draws from the calibration text under that seed
(`benchmarks.checkpoints --tokens FOLDER` writes them). A format that cannot hold what a peer made
holds the dense shapes with the same function; a `coec-peer.json` beside the weights then says how
many `parameters` there really are, and for every peer its `version` and the `seconds` it took.
The presets' numbers are those of `benchmarks.presets`, on the first 400 windows, as `--windows` is.
Ratios are to `paper`, seed by seed.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import coec
from benchmarks import record
from benchmarks.instances import SHARED
from coec.text.windows import Windows
from coec.evaluation.perplexity import evaluation_windows
from coec.models.dense import Dense
from coec.settings import Calibration, Runtime
from coec.streaming.passes import Backend

STORIES, WIKI = "tinystories", "wikitext-2"
TEXTS = {"stories260K": STORIES, "babyllama-1M": STORIES, "wt2-llama": WIKI}
FILES = {STORIES: ("train.txt", "test.txt"), WIKI: ("valid.raw.txt", "test.raw.txt")}
"""Of calibration and of evaluation."""
SAMPLES, SEQ_LEN, SPARSITY = 64, 256, 0.3
BASELINE = "paper"
NOTE = "coec-peer.json"


@dataclass(frozen=True)
class Measured:
    """One checkpoint.

    Attributes:
        parameters: that the model really has; None for a preset's, as many as the peers'.
        kl, agreement: with the dense model; None where they were not asked for.
        seconds: that pruning took, as whoever ran it says; None where nobody does.
    """

    method: str
    version: str
    model: str
    seed: int
    parameters: int | None
    perplexity: float
    kl: float | None
    agreement: float | None
    seconds: float | None


def main(arguments: list[str] | None = None) -> None:
    """Prints a table per model, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("peers", type=Path, nargs="?")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--distance", action="store_true", help="KL and agreement: twice the time")
    parser.add_argument("--tokens", type=Path, help="write the calibration windows there, and end")
    chosen = parser.parse_args(arguments)
    if chosen.tokens:
        write_tokens(chosen.tokens, chosen.shared, chosen.seeds)
        return
    if chosen.peers is None:
        parser.error("give the peers' folder")
    print(f"Checkpoints. {record.header()}\n", flush=True)
    found = ours(chosen.seeds)
    for model in TEXTS:
        if any(one.model == model for one in found):
            dense = Dense.open(chosen.shared / "models" / model)
            found += theirs(
                chosen.peers, dense, chosen.seeds, chosen.shared, chosen.windows,
                distance=chosen.distance,
            )  # fmt: skip
        print(f"{describe(found, model)}\n", flush=True)
    record.save("checkpoints", arguments, {"rows": [vars(one) for one in found]})


def write_tokens(folder: Path, shared: Path, seeds: list[int]) -> None:
    """The calibration windows of every model and seed, as `MODEL-SEED.pt`, int64."""
    folder.mkdir(parents=True, exist_ok=True)
    for model, text in TEXTS.items():
        dense = Dense.open(shared / "models" / model)
        for seed in seeds:
            how = Calibration(
                source=shared / "data" / text / FILES[text][0], samples=SAMPLES, seq_len=SEQ_LEN,
                seed=seed,
            )  # fmt: skip
            ids = Backend().dense_pass(dense, how, Runtime(device="cpu")).draw().ids
            torch.save(ids, folder / f"{model}-{seed}.pt")


def ours(seeds: list[int]) -> list[Measured]:
    """The presets' rows of `benchmarks.presets`, uniform widths."""
    return [
        Measured(
            row["preset"], coec.__version__, row["model"], row["seed"], None, row["perplexity"],
            row["kl"], None, row["cpu"],
        )
        for row in record.load("presets")["rows"]
        if row["preset"] in (BASELINE, "fast", "best") and not row["by_block"]
        if row["sparsity"] == SPARSITY and row["seed"] in seeds
    ]  # fmt: skip


def theirs(
    peers: Path, dense: Dense, seeds: list[int], shared: Path, windows: int, *, distance: bool
) -> list[Measured]:
    """The peers' checkpoints of one model, measured as ours are."""
    model = Path(dense.name).name
    cut = evaluated_on(dense, shared, windows)
    found = []
    for folder in sorted(f for seed in seeds for f in peers.glob(f"*/{model}/{seed}")):
        result = coec.perplexity(folder, cut, baseline=dense if distance else None)
        said = note(folder)
        found.append(
            Measured(
                folder.parts[-3], str(said.get("version", "")), model, int(folder.name),
                int(said.get("parameters", result.parameters)), result.perplexity, result.kl,
                result.agreement, said.get("seconds"),
            )
        )  # fmt: skip
    return found


def evaluated_on(dense: Dense, shared: Path, windows: int) -> Windows:
    """The first windows of a model's test text."""
    text = TEXTS[Path(dense.name).name]
    path = shared / "data" / text / FILES[text][1]
    return evaluation_windows(dense, path, seq_len=SEQ_LEN, max_windows=windows)


def note(folder: Path) -> dict[str, Any]:
    """What whoever made a checkpoint says of it."""
    path = folder / NOTE
    said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return said


def describe(found: list[Measured], model: str) -> str:
    """A line per method: perplexity by seed, the mean ratio to `paper`, KL, agreement, size."""
    rows = [one for one in found if one.model == model]
    base = {one.seed: one for one in rows if one.method == BASELINE}
    lines = [f"{model}: perplexity by seed, ratio to paper, KL, same top token, parameters, s"]
    for method in dict.fromkeys(one.method for one in rows):
        own = sorted((one for one in rows if one.method == method), key=lambda one: one.seed)
        ratios = [one.perplexity / base[one.seed].perplexity for one in own if one.seed in base]
        ratio = f"{sum(ratios) / len(ratios):.3f}" if ratios else "–"
        by_seed = "  ".join(f"{one.perplexity:7.3f}" for one in own)
        kl, same, seconds = (_mean(own, name) for name in ("kl", "agreement", "seconds"))
        lines.append(
            f"  {method:<24} {by_seed}  {ratio}  {_shown(kl, '.3f')}  {_shown(same, '.1%')}  "
            f"{_shown(own[0].parameters, ',')}  {_shown(seconds, '.0f')}"
        )
    return "\n".join(lines)


def _mean(rows: list[Measured], name: str) -> float | None:
    """Over the rows that have it; None where none has."""
    known = [value for row in rows if (value := getattr(row, name)) is not None]
    return sum(known) / len(known) if known else None


def _shown(value: float | None, how: str) -> str:
    return "–" if value is None else format(value, how)


if __name__ == "__main__":
    main()
