"""Speed and size of a model in llama.cpp, dense and with 30 % removed.

    PYTHONPATH=.venv-gguf .venv/bin/python -m benchmarks.gguf_speed [--dtype q8_0] [--q4-k-m]

Random Llamas of the sizes that pruning leaves: the time of a product does not depend on its
numbers. `make gguf` builds llama-cpp-python. One thread, seconds of CPU time: other work on the
machine does not count. `--q4-k-m` lets llama.cpp quantise the files before. Rates are the best of
`--repeats` runs, which take turns.
"""

import argparse
import ctypes
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import torch
from transformers import AutoModelForCausalLM, MistralConfig

import coec

HIDDEN, LAYERS, HEAD_DIM, GROUP, VOCABULARY = 768, 12, 64, 2, 32_000
PROMPT, NEW = 256, 32
"""Tokens read at once, and tokens written one by one."""


@dataclass(frozen=True)
class Size:
    """What pruning leaves.

    Attributes:
        name: how it came about.
        kv_heads: KV groups.
        ffn: intermediate channels.
    """

    name: str
    kv_heads: int
    ffn: int


SIZES = (
    Size("dense", 6, 2816),
    Size("30 %", 5, 1972),  # the paper's rule: ⌈0.7 n⌉
    Size("30 %, multiple of 32", 5, 1984),
    Size("30 %, multiple of 256", 5, 2048),
)


def written(size: Size, folder: Path, dtype: str) -> coec.Export:
    """A random model of one size as a GGUF file; llama.cpp computes a Mistral as a Llama."""
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=size.ffn,
        num_attention_heads=GROUP * size.kv_heads, num_key_value_heads=size.kv_heads,
        head_dim=HEAD_DIM, vocab_size=VOCABULARY, max_position_embeddings=1024,
        sliding_window=None,
    )  # fmt: skip
    place = folder / f"{size.kv_heads}-{size.ffn}"
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return coec.export(place, f"{place}.gguf", dtype=dtype, no_tokenizer=True)


def quantised(path: str) -> str:
    """A file of Q4_K_M beside one of f16, which goes."""
    made = path.replace(".gguf", "-q4-k-m.gguf")
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    if llama_cpp.llama_model_quantize(path.encode(), made.encode(), ctypes.byref(how)):
        raise RuntimeError(f"llama.cpp could not quantise {path}")
    Path(path).unlink()
    return made


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


def main() -> None:
    """Prints a row for every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="q8_0")
    parser.add_argument("--q4-k-m", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    silent: Any = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    versions = [f"{name} {version(name)}" for name in ("llama_cpp_python", "gguf")]
    kind = "Q4_K_M" if asked.q4_k_m else asked.dtype
    print(f"{', '.join(versions)}; {kind}, one thread")
    with tempfile.TemporaryDirectory() as folder:
        dtype = "f16" if asked.q4_k_m else asked.dtype
        files = [written(size, Path(folder), dtype) for size in SIZES]
        paths = [quantised(file.path) if asked.q4_k_m else file.path for file in files]
        runners = [Runner(path) for path in paths]
        rounds = [[runner.rates() for runner in runners] for _ in range(asked.repeats)]
        print("| model | parameters | MB | in f16 | reads tok/s | writes tok/s |")
        print("|---|---|---|---|---|---|")
        for place, (size, file, path) in enumerate(zip(SIZES, files, paths)):
            read, write = (max(one[place][kind] for one in rounds) for kind in (0, 1))
            print(
                f"| {size.name}, ffn {size.ffn} | {file.parameters / 1e6:.1f} M "
                f"| {Path(path).stat().st_size / 1e6:.1f} | {len(file.fallback)} "
                f"| {read:.0f} | {write:.1f} |"
            )


if __name__ == "__main__":
    main()
