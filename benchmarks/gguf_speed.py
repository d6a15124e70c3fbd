"""Speed along a curve of widths: llama.cpp beside `coec analyze`, pruned beside dense.

    PYTHONPATH=.venv-gguf .venv/bin/python -m benchmarks.gguf_speed [--kinds f16 q8_0 Q4_K_M]

A random Llama of 148 M parameters, whose weights are many times the caches, and random models of
the sizes that removing 10 to 50 % of it leaves, as they come and as multiples of 256: the time of a
product does not depend on its numbers. `coec analyze` runs what was really pruned of it,
uncompensated. `make gguf` builds llama-cpp-python. One thread on one core; every repeat runs the
dense model and a pruned one, in turns, and the ratio is taken within it: other work on the machine
slows both. llama.cpp's rates are per second of CPU time, those of `coec analyze` per second on the
clock, as it measures.
"""

import argparse
import ctypes
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import coec
from benchmarks import record
from benchmarks.gguf_tables import ANALYZE, FFN, KV_HEADS, NEW, PROMPT, described
from coec.evaluation.efficiency import Rates
from coec.evaluation.settings import Workload
from coec.models.description import Description
from coec.planning import Plan
from coec.config.recipe import Recipe

HIDDEN, LAYERS, GROUP, HEAD_DIM, VOCABULARY = 768, 12, 2, 64, 32_000
K_QUANTS = "Q4_K_M"


@dataclass(frozen=True)
class Pruned:
    """A pruned model and where it is.

    Attributes:
        removed: per cent of channels and of KV groups.
        align: what the channels left are a multiple of.
        folder: a checkpoint of these sizes.
        ffn, kv_heads: what is left in a block.
        parameters: ratio to the dense model's, which `coec analyze` gives, and says of operations.
    """

    removed: int
    align: int
    folder: str
    ffn: int
    kv_heads: int
    parameters: float


@dataclass(frozen=True)
class Measured:
    """A program's rates of a dense and a pruned model.

    Attributes:
        program: llama.cpp's kind of file, or `ANALYZE`.
        removed, align: which pruned model.
        megabytes: of the two files; none for `ANALYZE`.
        read, write: tokens per second.
    """

    program: str
    removed: int
    align: int
    megabytes: tuple[float, float] | None
    read: Rates
    write: Rates


def main(arguments: list[str] | None = None) -> None:
    """Prints rows as they are measured, then the tables; writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kinds", nargs="*", default=["f16", "q8_0", K_QUANTS])
    parser.add_argument("--removed", nargs="+", type=int, default=[10, 20, 30, 40, 50])
    parser.add_argument("--align", nargs="+", type=int, default=[1, 256])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--analyze", nargs="*", type=int, default=[30], help="per cent")
    asked = parser.parse_args(arguments)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    silent: Any = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    with tempfile.TemporaryDirectory() as place:
        models = made(Path(place), asked.removed, asked.align)
        found: list[Measured] = []
        for kind in asked.kinds:
            found += in_llama_cpp(Path(place), models, kind, asked.repeats)
            saved(arguments, models, found)
        chosen = [model for model in models if model.removed in asked.analyze]
        found += analyzed(Path(place), chosen, asked.repeats)
        content = saved(arguments, models, found)
    print("\n\n".join(described(content)))


def saved(
    arguments: list[str] | None, models: list[Pruned], found: list[Measured]
) -> dict[str, Any]:
    """What has been measured, in `results/gguf_speed.json`; other programs' rows there stay."""
    packages = {name: version(name) for name in ("llama_cpp_python", "gguf")}
    old, new = record.load("gguf_speed"), [asdict(row) for row in found]
    programs = {row["program"] for row in new}
    sizes = {(one["removed"], one["align"]): one for one in old.get("models", [])} | {
        (one.removed, one.align): {**asdict(one), "folder": ""} for one in models
    }
    content = {
        "packages": packages,
        "models": [sizes[key] for key in sorted(sizes)],
        "rows": [*(row for row in old.get("rows", []) if row["program"] not in programs), *new],
    }
    record.save("gguf_speed", arguments, content)
    return content


def made(place: Path, removed: list[int], align: list[int]) -> list[Pruned]:
    """The dense model as `dense`, and random ones of the sizes and types that pruning plans."""
    config = LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=FFN, head_dim=HEAD_DIM,
        num_attention_heads=GROUP * KV_HEADS, num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    dense = random_model(place / "dense", config)
    models = []
    for percent in removed:
        for multiple in align:
            out = place / f"{percent}-{multiple}"
            recipe = Recipe(sparsity=percent / 100, multiple_of=str(multiple))
            plan = Plan.of(Description.read(dense), recipe)
            random_model(out, AutoConfig.for_model(**plan.output.config))
            shape = Description.read(out).shape
            ratio = coec.efficiency(dense, out).as_dict()["ratio"]["parameters"]
            models.append(Pruned(percent, multiple, str(out), shape.ffn, shape.kv_heads, ratio))
            print(f"made {models[-1]}", flush=True)
    return models


def random_model(folder: Path, config: Any) -> Path:
    """Write a model of a configuration with random weights in float16; return its folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.float16).save_pretrained(folder)
    return folder


def in_llama_cpp(place: Path, models: list[Pruned], kind: str, repeats: int) -> list[Measured]:
    """Rows of one kind of file."""
    paths = [
        written(folder, kind) for folder in [str(place / "dense"), *(m.folder for m in models)]
    ]
    sizes = [Path(path).stat().st_size / 1e6 for path in paths]
    dense = Runner(paths[0])
    rows = []
    for model, path, size in zip(models, paths[1:], sizes[1:]):
        pruned = Runner(path)
        read, write = paired(dense, pruned, repeats)
        rows.append(Measured(kind, model.removed, model.align, (sizes[0], size), read, write))
        print(rows[-1], flush=True)
        pruned.close()
    dense.close()
    for path in paths:
        Path(path).unlink()
    return rows


def written(folder: str, kind: str) -> str:
    """A checkpoint as a file; of Q4_K_M by llama.cpp's own quantisation of one in f16."""
    dtype = "f16" if kind == K_QUANTS else kind
    path = str(coec.export(folder, f"{folder}-{dtype}.gguf", dtype=dtype, no_tokenizer=True).path)
    if kind != K_QUANTS:
        return path
    quantised = f"{folder}-{kind}.gguf"
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    if llama_cpp.llama_model_quantize(path.encode(), quantised.encode(), ctypes.byref(how)):
        raise RuntimeError(f"llama.cpp could not quantise {path}")
    Path(path).unlink()
    return quantised


def paired(dense: "Runner", pruned: "Runner", repeats: int) -> tuple[Rates, Rates]:
    """Rates of reading and writing; both models run in every repeat, the first one in turns."""
    rates: dict[Runner, list[tuple[float, float]]] = {dense: [], pruned: []}
    for repeat in range(repeats + 1):
        for runner in (dense, pruned) if repeat % 2 else (pruned, dense):
            once = runner.rates()
            if repeat:  # the first is nobody's: pages are read, caches are warmed
                rates[runner].append(once)
    reading, writing = ([[one[at] for one in rates[r]] for r in (dense, pruned)] for at in (0, 1))
    return Rates.of(*reading), Rates.of(*writing)


class Runner:
    """A file, loaded, with llama.cpp's defaults but for the one thread."""

    def __init__(self, path: str):
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = PROMPT + NEW
        settings.n_threads = settings.n_threads_batch = 1
        self.context = llama_cpp.llama_init_from_model(self.model, settings)

    def close(self) -> None:
        """Gives its memory back."""
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def rates(self) -> tuple[float, float]:
        """Tokens per second, read at once and written one by one."""
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)
        began = time.process_time()
        self._run(PROMPT)
        read = time.process_time()
        for _ in range(NEW):
            self._run(1)
        done = time.process_time()
        return PROMPT / (read - began), NEW / (done - read)

    def _run(self, count: int) -> None:
        ids = (llama_cpp.llama_token * count)(*[place % VOCABULARY for place in range(count)])
        failed = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(ids, count))
        if failed:
            raise RuntimeError(f"llama_decode failed: {failed}")


def analyzed(place: Path, models: list[Pruned], repeats: int) -> list[Measured]:
    """What `coec analyze` measures in transformers of the dense model, really pruned."""
    np.save(place / "ids.npy", np.random.default_rng(0).integers(0, VOCABULARY, size=(4, 64)))
    statistics = coec.collect(
        place / "dense", place / "statistics", calibration=place / "ids.npy", samples=4, seq_len=64
    )
    load = Workload(prompt_tokens=PROMPT, new_tokens=NEW, repeats=repeats)
    rows = []
    for model in models:
        coec.prune(
            place / "dense", f"{model.folder}-pruned", statistics=statistics,
            sparsity=model.removed / 100, multiple_of=str(model.align), preset="paper",
            selection="magnitude", compensation="none",
        )  # fmt: skip
        speed = coec.speed(place / "dense", f"{model.folder}-pruned", load=load, device="cpu")
        rows.append(
            Measured(ANALYZE, model.removed, model.align, None, speed.prefill, speed.decode)
        )
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
