"""Runs fuzz cases in this process, one after another; a line of JSON before and after each.

`python tests/fuzz/worker.py FIRST LAST` from the project's folder; one case: `worker.py 17 18`.
A case is its number: the same everywhere, on every run.
"""

import json
import math
import os
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from mutations import spoil
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

import coec
import tiny_models as tm
from coec.cli.flags import Flag, read_config
from coec.config.recipe import Recipe
from coec.errors import CoecError
from coec.planning.kept import KEPT
from prunings import interrupt

MEMORY = 12 * 2**30
"""Address space of the worker: what asks for absurd sizes fails, and does not drown the machine."""
SMALL = {"preset": "paper", "samples": 8, "seq_len": 16, "compensation": "none"}
NAMES = ("preset", "sparsity", "selection", "alpha", "seed", "rotation")
RECIPE = {name: Flag(name, str, "", functions=name == "selection") for name in NAMES}
"""What a file of settings may name."""


def originals(root: Path) -> None:
    """Good inputs of every kind, from which cases take what they spoil."""
    model = tm.tiny("llama", torch.float32)
    dense = tm.save(model, root / "dense")
    model.save_pretrained(root / "sharded", max_shard_size="20KB")
    tm.write_tokenizer(root / "sharded")
    tm.token_file(root / "tokens.npy", rows=8, length=16)
    save_file({"input_ids": torch.arange(2, 130)}, root / "tokens.safetensors")
    tm.text_file(root / "text.txt", 400)
    rows = [{"text": "the cat sat on a mat. " * 3, "id": i} for i in range(8)]
    (root / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / "text.parquet")
    tokens = str(root / "tokens.npy")
    coec.prune(dense, root / "pruned", calibration=tokens, **SMALL)
    unfinished(root, dense, tokens)
    (root / "recipe.toml").write_text(
        'preset = "paper"\nsparsity = 0.3\nselection = "flap"\nalpha = 0.8\nseed = 1\n'
        'rotation = "left"\n'
    )


def measured(model: Path, text: Path) -> None:
    """Perplexity is a finite number."""
    result = coec.perplexity(model, str(text), seq_len=16, max_windows=2)
    assert 0 < result.perplexity < math.inf, result


def pruned(here: Path, model: Path, **changes: Any) -> None:
    """The output is whole, loads, and is finite; or there is none."""
    out = here / "out"
    try:
        coec.prune(model, out, **({"calibration": str(here / "tokens.npy")} | SMALL | changes))
    except CoecError as error:
        assert not out.exists(), "a refused run left an output"
        if getattr(error, "__notes__", None):  # finished blocks stay, and the error says so
            shutil.rmtree(here / "out.partial")
        raise
    finally:
        assert not list(here.glob("out*partial*")), "something half-written is left"
    for path in out.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert not tensor.is_floating_point() or torch.isfinite(tensor).all(), name
    assert json.loads((out / "coec.json").read_text())["sites"]
    # Weights of 1e38 are finite, and may overflow where calibration does not look: at the end.
    if not tm.logits(tm.load(out)).isfinite().all():
        assert not tm.logits(tm.load(model)).isfinite().all(), "the written model is not finite"


def unfinished(root: Path, dense: Path, tokens: str) -> None:
    """A run that was ended before its second block; and what it would have given."""
    coec.prune(dense, root / "whole", calibration=tokens, **SMALL)
    interrupt(pytest.MonkeyPatch(), coec.prune, dense, root / "out", calibration=tokens, **SMALL)


def journal_files(here: Path) -> list[Path]:
    """The journal more often than the pieces that it vouches for."""
    pieces = [path for path in (here / "out.partial").rglob("*") if path.is_file()]
    return [here / "out.partial/journal.jsonl"] * len(pieces) + sorted(pieces)


def resumed(here: Path) -> None:
    """What is given is what an undisturbed run gives; what is refused may be begun anew."""
    asked = {"calibration": str(here / "tokens.npy")} | SMALL
    try:
        coec.prune(here / "dense", here / "out", **asked)
    except CoecError:
        coec.prune(here / "dense", here / "out", restart=True, **asked)
        same(here)
        raise
    same(here)


def same(here: Path) -> None:
    assert not (here / "out.partial").exists(), "something half-written is left"
    out, whole = (
        {p.name: p for p in (here / n).rglob("*") if p.is_file()} for n in ("out", "whole")
    )
    assert out.keys() == whole.keys()
    for name in out.keys() - {"coec.json", "README.md"}:  # which name the text's place
        assert out[name].read_bytes() == whole[name].read_bytes(), f"another {name}"
    reports = [json.loads(path["coec.json"].read_text()) for path in (out, whole)]
    errors = [[site["error_after"] for site in report["sites"]] for report in reports]
    assert errors[0] == errors[1], "another report"


def model_files(here: Path) -> list[Path]:
    return [here / "dense" / name for name in ("config.json", "model.safetensors")]


def shards(here: Path) -> list[Path]:
    return [here / "sharded/model.safetensors.index.json", *here.glob("sharded/*.safetensors")]


def tokenizer_files(here: Path) -> list[Path]:
    return [here / "dense" / name for name in ("tokenizer.json", "tokenizer_config.json")]


Case = tuple[tuple[str, ...], Callable[[Path], list[Path]], Callable[[Path], Any]]
"""Folders and files that are copied, which of them may be spoiled, and what is done with them."""

CASES: dict[str, Case] = {
    "prune": (("dense", "tokens.npy"), model_files, lambda p: pruned(p, p / "dense")),
    "eval": (
        ("dense", "tokens.npy"), model_files, lambda p: measured(p / "dense", p / "tokens.npy"),
    ),
    "plan": (
        ("dense",), lambda p: [p / "dense/config.json"],
        lambda p: coec.plan(p / "dense/config.json").record(),
    ),
    "prune sharded": (("sharded", "tokens.npy"), shards, lambda p: pruned(p, p / "sharded")),
    "eval sharded": (
        ("sharded", "tokens.npy"), shards, lambda p: measured(p / "sharded", p / "tokens.npy"),
    ),
    "tokenizer": (
        ("dense", "text.txt"), tokenizer_files, lambda p: measured(p / "dense", p / "text.txt"),
    ),
    "journal": (("dense", "tokens.npy", "whole", "out.partial"), journal_files, resumed),
    "kept set": (
        ("dense", "tokens.npy", "pruned"),
        lambda p: [p / "pruned" / KEPT, p / "pruned/coec.json"],
        lambda p: pruned(p, p / "dense", kept=p / "pruned"),
    ),
    "record": (
        ("pruned", "tokens.npy"), lambda p: [p / "pruned/coec.json"],
        lambda p: measured(p / "pruned", p / "tokens.npy"),
    ),
    "recipe": (
        ("recipe.toml",), lambda p: [p / "recipe.toml"],
        lambda p: Recipe(**read_config(p / "recipe.toml", RECIPE)).record(),
    ),
    **{
        name: (
            ("dense", name), lambda p, name=name: [p / name],
            lambda p, name=name: measured(p / "dense", p / name),
        )
        for name in ("tokens.npy", "tokens.safetensors", "text.txt", "text.jsonl", "text.parquet")
    },
}  # fmt: skip


def run(number: int, originals_at: Path) -> dict[str, Any]:
    """One case: what was spoiled how, and what is wrong with what came of it, if anything."""
    draw = Random(number)
    name = draw.choice(list(CASES))
    copied, choose, act = CASES[name]
    with tempfile.TemporaryDirectory(prefix="coec-fuzz-") as scratch:
        here = Path(scratch)
        for one in copied:
            source = originals_at / one
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, here / one)
        target = draw.choice(choose(here))
        how = spoil(target, draw)
        told = {"case": number, "what": name, "file": target.name, "how": how, "wrong": None}
        try:
            act(here)
            told["end"] = "right"
        except CoecError as error:
            told["end"] = "refused"
            if "\n" in str(error) or not str(error).strip():
                told["wrong"] = f"a message of several lines or none: {str(error)!r:.500}"
        except BaseException as error:
            told["end"] = "wrong"
            frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            ours = [frame for frame in frames if "/coec/" in frame]
            told["wrong"] = f"{type(error).__name__}: {error!s:.300} at {ours[-1:] or frames[-1:]}"
        return told


def main(first: int, last: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    with tempfile.TemporaryDirectory(prefix="coec-fuzz-originals-") as root:
        originals(Path(root))
        for number in range(first, last):
            print(json.dumps({"begin": number}), flush=True)
            print(json.dumps(run(number, Path(root))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
