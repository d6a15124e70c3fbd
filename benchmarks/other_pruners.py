"""Other programs' pruning, compensated: perplexity of theirs, and of ours with their units.

    python -m benchmarks.other_pruners PEERS [--peers flap-uniform osscar] [--best wt2-llama]

PEERS is a folder as `benchmarks.checkpoints` reads it, `PEER/MODEL/SEED` with what a
`coec-peer.json` there says of versions. Every checkpoint is measured, then the dense model is
pruned to its units by the preset `paper` (`coec compensate`), for the models in `--best` by `best`
too, and that is measured. Where units cannot be told, or no format holds the widths, the line says
why.
"""

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coec
from benchmarks import record
from benchmarks.checkpoints import FILES, SAMPLES, SEQ_LEN, TEXTS, evaluated_on, note
from benchmarks.instances import SHARED
from coec.text.windows import Windows
from coec.errors import CoecError
from coec.models.dense import Dense

PRESETS: dict[str, dict[str, Any]] = {"coec": {"preset": "paper"}, "best": {"preset": "best"}}


@dataclass(frozen=True)
class Mended:
    """One checkpoint of another program, before and after.

    Attributes:
        parameters: that it says that it has, and those of ours.
        perplexity: by who made it; none where units could not be told.
        refused: why.
    """

    peer: str
    version: str
    model: str
    seed: int
    parameters: tuple[int, int | None]
    perplexity: dict[str, float]
    refused: str | None = None


def main(arguments: list[str] | None = None) -> None:
    """Prints a line per checkpoint, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, metavar="PEERS")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--peers", nargs="+", help="of PEERS; all where it is left out")
    parser.add_argument("--best", nargs="+", default=[], metavar="MODEL", help="by the preset too")
    chosen = parser.parse_args(arguments)
    print(f"Other programs' pruning, compensated. {record.header()}\n", flush=True)
    found = []
    for model in TEXTS:
        dense = Dense.open(chosen.shared / "models" / model)
        windows = evaluated_on(dense, chosen.shared, chosen.windows)
        presets = ["coec", "best"] if model in chosen.best else ["coec"]
        for folder in checkpoints(chosen.folder, model, chosen.seeds, chosen.peers):
            found.append(mended(dense, folder, windows, chosen.shared, presets))
            print(describe(found[-1]), flush=True)
    record.save("other_pruners", arguments, {"rows": [asdict(one) for one in found]})


def checkpoints(folder: Path, model: str, seeds: list[int], peers: list[str] | None) -> list[Path]:
    """The checkpoints of one model, by peer and seed."""
    names = peers or sorted(path.name for path in folder.iterdir())
    return [
        path
        for name in names
        for seed in seeds
        if (path := folder / name / model / str(seed)).is_dir()
    ]


def mended(
    dense: Dense, folder: Path, windows: Windows, shared: Path, presets: list[str]
) -> Mended:
    """A checkpoint measured as it is, and compensated."""
    peer, model, seed = folder.parts[-3:]
    said, theirs = note(folder), coec.perplexity(folder, windows)
    found, ours, refused = {"theirs": theirs.perplexity}, None, None
    try:
        for name in presets:
            with tempfile.TemporaryDirectory() as place:
                report = coec.compensate_pruned(
                    dense, folder, Path(place) / "out", samples=SAMPLES, seq_len=SEQ_LEN,
                    calibration=shared / "data" / TEXTS[model] / FILES[TEXTS[model]][0],
                    seed=int(seed), **PRESETS[name],
                )  # fmt: skip
                ours = report.plan["parameters"]["after"]
                found[name] = coec.perplexity(report.out, windows).perplexity
    except CoecError as error:
        refused = str(error)
    count = int(said.get("parameters", theirs.parameters))
    version = " ".join(str(said[key]) for key in ("version", "commit") if key in said)
    return Mended(peer, version, model, int(seed), (count, ours), found, refused)


def describe(one: Mended) -> str:
    """A line."""
    shown = "  ".join(f"{name} {value:.3f}" for name, value in one.perplexity.items())
    theirs, ours = one.parameters
    sizes = f"{theirs:,} parameters" if ours in (theirs, None) else f"{theirs:,} → {ours:,}"
    why = f"  refused: {one.refused}" if one.refused else ""
    return f"{one.model} {one.seed} {one.peer:<14} {shown}  {sizes}  ({one.version}){why}"


if __name__ == "__main__":
    main()
