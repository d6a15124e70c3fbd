"""Digests of the weights that many runs write, to see whether a change of the code changes any bit.

python tools/digests.py FILE [--only WORD] [--shared ../shared]

The file is written where there is none, and compared with where there is. Trained models, tiny
random ones of every architecture, presets, selections, allocations, statistics, a Ray cluster and a
run that goes on after it was stopped. Digests are of one machine and its libraries alone.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import coec  # noqa: E402
import tiny_models as tm  # noqa: E402

WIKI, STORIES = "wikitext-2/valid.raw.txt", "tinystories/train.txt"
SHORT: dict[str, Any] = {"preset": "paper", "sparsity": 0.3, "samples": 24, "seq_len": 64}
BEST: dict[str, Any] = {"preset": "best", "reconstruct": 1}
PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "fast": {"preset": "fast"}, "best": BEST}
RANDOM: dict[str, Any] = {"sparsity": 0.3, "samples": 16, "seq_len": 32}
CASES: dict[str, dict[str, Any]] = {
    "float32": {"solve_dtype": "float32"},
    "unguarded": {"guard": False},
    "few": {"samples": 4},
    "many": {"samples": 128},
    "self": {"calibration": "self"},
    "adaptive": {"allocation": "adaptive", "non_uniform": True},
    "error": {"allocation": "error", "non_uniform": True, "preset": "fast"},
    "error, best": {"allocation": "error", "non_uniform": True, **BEST},
    "propagate": {"preset": "fast", "propagate": True},
    "coec, propagate": {"propagate": True, "token_weights": "residual"},
    "budget": {"budget_parameters": 0.8},
    "multiple": {"multiple_of": 8},
    "no alignment": {"lambda_a": 0.0},
    "bfloat16": {"dtype": "bfloat16"},
    "kv all": {"preset": "fast", "kv_groups": "all"},
    "own shares": {"attention_sparsity": 0.0, "mlp_sparsity": 0.5},
}  # fmt: skip
TRAINED: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{
        f"{model}, {preset}": (model, text, {**SHORT, **settings})
        for model, text in (
            ("stories260K", STORIES), ("babyllama-1M", STORIES), ("wt2-llama", WIKI)
        )
        for preset, settings in PRESETS.items()
    },
    **{
        f"stories260K, {selection}": ("stories260K", STORIES, {**SHORT, "selection": selection})
        for selection in ("wanda-sp", "flap", "obs", "magnitude", "random")
    },
    **{
        f"stories260K, {name}": ("stories260K", STORIES, {**SHORT, "compensation": name})
        for name in ("rcpu", "bias", "least-squares", "ridge-to-slice", "none")
    },
    **{
        f"stories260K, {name}": ("stories260K", STORIES, {**SHORT, **settings})
        for name, settings in CASES.items()
    },
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
        for name, run in runs(chosen.shared, Path(scratch)).items():
            if chosen.only not in name:
                continue
            try:
                digests[name] = digest(run())
            except coec.CoecError:
                digests[name] = "refused"
            verdict = "" if known is None else "same" if known[name] == digests[name] else "CHANGED"
            if verdict == "CHANGED":
                changed.append(name)
            print(f"{name:<40}{digests[name][:16]}  {verdict}", flush=True)
    if known is None:
        chosen.file.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{len(digests)} runs, {len(changed)} changed")
    sys.exit(1 if changed else 0)


def digest(folder: Path) -> str:
    """SHA-256 of every tensor that a checkpoint stores, by name, dtype and shape."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def runs(shared: Path, scratch: Path) -> dict[str, Callable[[], Path]]:
    """Return every run by its name; called, each makes a checkpoint and returns its folder."""
    tokens = tm.token_file(scratch / "tokens.npy")

    def trained(name: str) -> Path:
        model, text, settings = TRAINED[name]
        settings = {"calibration": str(shared / "data" / text), **settings}
        return pruned(scratch, name, shared / "models" / model, settings)

    def demo(settings: dict[str, Any]) -> Path:
        settings = {"calibration": "self", **SHORT, **settings}
        return pruned(scratch, f"demo {settings}", ROOT / "src/coec/demo/model", settings)

    def tiny(variant: str, preset: str) -> Path:
        folder = scratch / "random" / variant
        if not folder.exists():
            tm.save(tm.tiny(variant, torch.float32), folder)
        settings = {"calibration": tokens, **RANDOM, "preset": preset}
        if preset == "best":
            settings |= BEST
        return pruned(scratch, f"{variant} {preset}", folder, settings)

    def bind(function: Callable[..., Path], *arguments: Any) -> Callable[[], Path]:
        return lambda: function(*arguments)

    found = {name: bind(trained, name) for name in TRAINED}
    found["demo, paper"] = bind(demo, {})
    found["demo, best"] = bind(demo, {**BEST, "kv_groups": "uniform"})
    for variant in tm.VARIANTS:
        for preset in ("paper", "fast", "best"):
            found[f"random {variant}, {preset}"] = bind(tiny, variant, preset)
    model, text = shared / "models/stories260K", str(shared / "data" / STORIES)
    short = {"calibration": text, **SHORT}
    found["statistics, paper"] = bind(from_statistics, scratch, model, short, {})
    found["resumed, paper"] = bind(resumed, scratch, model, short)
    found["resumed, best"] = bind(resumed, scratch, model, {**short, **BEST})
    ray = {"executor": "ray", "workers": 2}
    found["Ray, paper"] = bind(pruned, scratch, "ray paper", model, {**short, **ray})
    found["Ray, best"] = bind(pruned, scratch, "ray best", model, {**short, **BEST, **ray})
    return found


def pruned(scratch: Path, name: str, model: Path, settings: dict[str, Any]) -> Path:
    """Prune a model and return the folder."""
    out = scratch / hashlib.sha256(name.encode()).hexdigest()[:16]
    coec.prune(model, out, **settings)
    return out


def from_statistics(
    scratch: Path, model: Path, settings: dict[str, Any], others: dict[str, Any]
) -> Path:
    """Prune a model by statistics that were collected before."""
    settings = dict(settings)
    chosen = {name: settings.pop(name) for name in ("preset", "sparsity")}
    coec.collect(model, scratch / "statistics", **settings)
    out = scratch / "from statistics"
    coec.prune(model, out, statistics=scratch / "statistics", **chosen, **others)
    return out


def resumed(scratch: Path, model: Path, settings: dict[str, Any]) -> Path:
    """Prune a model in two runs, of which the first ends after two blocks."""
    out = scratch / f"resumed {settings['preset']}"

    def stop(phase: str, done: int, total: int) -> None:
        if phase in ("solving", "reconstruction", "reconstructing") and done == 2:
            raise KeyboardInterrupt

    try:
        coec.prune(model, out, progress=stop, **settings)
    except KeyboardInterrupt:
        coec.prune(model, out, **settings)
        return out
    raise AssertionError("it was not stopped")


if __name__ == "__main__":
    main()
