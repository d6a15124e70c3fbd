"""Digests of the weights that many runs write, to see whether a change of the code changes any bit.

python tools/digests.py FILE [--only WORD] [--shared ../shared]

FILE is written if it does not exist, and compared with otherwise. The runs prune trained models,
tiny random ones of every architecture, with presets, selections, compensations and options, and
resume after an interrupt. Digests are of one machine and its libraries.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import coec  # noqa: E402
import tiny_models as tm  # noqa: E402
from coec.models.architectures import ARCHITECTURES  # noqa: E402

Settings = dict[str, Any]
WIKI, STORIES = "data/wikitext-2/valid.raw.txt", "data/tinystories/train.txt"
MODELS = {"stories260K": STORIES, "babyllama-1M": STORIES, "wt2-llama": WIKI}
TRAINED: Settings = {"preset": "paper", "sparsity": 0.3, "samples": 24, "seq_len": 64}
RANDOM: Settings = {"sparsity": 0.3, "samples": 16, "seq_len": 32}
BALANCED: Settings = {"preset": "balanced", "reconstruct": 1}
PRESETS: dict[str, Settings] = {
    "paper": {"preset": "paper"},
    "fast": {"preset": "fast", "attention_sparsity": 0.3},
    "balanced": BALANCED | {"attention_sparsity": 0.3},
}
CASES: dict[str, Settings] = {
    **{f"selection {name}": {"selection": name}
       for name in ("wanda-sp", "flap", "obs", "magnitude", "random")},
    **{f"compensation {name}": {"compensation": name}
       for name in ("rcpu", "bias", "least-squares", "ridge-to-slice", "none")},
    "gradient": {"solver": "gradient"},
    "left": {"rotation": "left"},
    "right, full": {"rotation": "right", "parameterization": "full"},
    "rescale fixed": {"rescale": "fixed"},
    "no alignment": {"lambda_a": 0.0},
    "no tempering": {"alpha": 1.0},
    "ridge": {"compensation": "least-squares", "ridge": 0.1},
    "many": {"samples": 128},
    "self": {"calibration": "self"},
    "propagate": {"propagate": True},
    "budget": {"budget": "0.8"},
    "multiple": {"multiple_of": "8"},
    "two GPUs": {"tensor_parallel": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "own attention share": {"attention_sparsity": 0.5},
    "by block, paper": {"by_block": True},
    "by block, fast": {"by_block": True, "preset": "fast", "attention_sparsity": 0.3},
    "by block, balanced": {"by_block": True, "attention_sparsity": 0.3, **BALANCED},
    "no attention, fast": {"preset": "fast", "attention_sparsity": 0.0},
    "no attention, balanced": {"attention_sparsity": 0.0, **BALANCED},
    "trained, dense inputs": BALANCED | {"propagate": False, "attention_sparsity": 0.3},
    "without blocks": {"preset": "fast", "attention_sparsity": 0.0, "drop_blocks": 1},
}  # fmt: skip


def main() -> None:
    """Write the digests, or compare them; exit 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="runs whose name has this word")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    chosen = parser.parse_args()
    known = json.loads(chosen.file.read_text()) if chosen.file.exists() else None
    digests, changed = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        for name, (model, settings) in runs(chosen.shared, Path(scratch)).items():
            if chosen.only not in name:
                continue
            out = Path(scratch) / "out"
            digests[name] = digest(model, out, settings, stopped="resumed" in name)
            verdict = "" if known is None else "same" if known[name] == digests[name] else "CHANGED"
            if verdict == "CHANGED":
                changed.append(name)
            print(f"{name:<40}{digests[name][:16]}  {verdict}", flush=True)
    if known is None:
        chosen.file.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{len(digests)} runs, {len(changed)} changed")
    sys.exit(1 if changed else 0)


def runs(shared: Path, scratch: Path) -> dict[str, tuple[Path, Settings]]:
    """Return the model and the settings of every run, by its name."""

    def trained(model: str, settings: Settings) -> tuple[Path, Settings]:
        text = {"calibration": str(shared / MODELS[model])}
        settings = text | TRAINED | settings
        if "budget" in settings:
            del settings["sparsity"]
        return shared / "models" / model, settings

    table = {
        f"{model}, {preset}": trained(model, settings)
        for model in MODELS
        for preset, settings in PRESETS.items()
    }
    table |= {name: trained("stories260K", settings) for name, settings in CASES.items()}
    table |= {f"resumed, {n}": trained("stories260K", PRESETS[n]) for n in ("paper", "balanced")}
    tokens = tm.token_file(scratch / "tokens.npy")
    for variant in tm.VARIANTS:
        folder = tm.save(tm.tiny(variant, torch.float32), scratch / "random" / variant)
        kept = ARCHITECTURES[tm.raw_config(variant)["model_type"]].attention_kept
        for preset in ("paper", "fast"):
            settings = {"calibration": tokens, "preset": preset, **RANDOM}
            if preset == "fast" and not kept:
                settings["attention_sparsity"] = 0.3
            table[f"random {variant}, {preset}"] = folder, settings
    return table


def digest(model: Path, out: Path, settings: Settings, *, stopped: bool) -> str:
    """Return the SHA-256 of all tensors that a run writes, by name, dtype and shape.

    A run that is to be `stopped` ends after two blocks and is resumed.
    """

    def stop(phase: str, done: int, total: int) -> None:
        if phase.startswith(("solving", "reconstructing")) and done == 2:
            raise KeyboardInterrupt

    try:
        try:
            coec.prune(model, out, force=True, progress=stop if stopped else None, **settings)
        except KeyboardInterrupt:
            coec.prune(model, out, force=True, **settings)
    except coec.CoecError as error:
        return f"refused: {type(error).__name__}"
    total = hashlib.sha256()
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
