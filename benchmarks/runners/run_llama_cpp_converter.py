"""llama.cpp by its own converter: the folder that has `convert_hf_to_gguf.py` is `LLAMA_CPP`.

The converter knows tokenizers by a digest of what they make of a text, and no tokenizer of a random
model is among them: the part that writes vocabularies is left out, as it is for files without one.
`LLAMA_CPP_NO_MTP=1` asks for its `--no-mtp`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from each import every_folder
from run_llama_cpp import computed

SOURCE = Path(os.environ["LLAMA_CPP"])
sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]
import torch
from conversion import (
    ModelBase,
    ModelType,
    get_model_architecture,
    get_model_class,
)
from gguf import LlamaFileType


def run(folder: Path, ids: np.ndarray, start: np.ndarray, steps: int) -> dict[str, Any]:
    """Converted to float32."""
    file = folder.with_name(f"{folder.name}-converted.gguf")
    parameters = ModelBase.load_hparams(folder, False)
    kind: Any = get_model_class(get_model_architecture(parameters, ModelType.TEXT))
    kind.no_mtp = "LLAMA_CPP_NO_MTP" in os.environ
    with torch.inference_mode():
        model = kind(folder, LlamaFileType.ALL_F32, file)
        model.set_vocab = lambda: _no_vocabulary(model, parameters["vocab_size"])
        model.write()
    try:
        return computed(file, ids, start, steps)
    finally:
        file.unlink(missing_ok=True)


def _no_vocabulary(model: Any, size: int) -> None:
    model.gguf_writer.add_tokenizer_model("no_vocab")
    model.gguf_writer.add_vocab_size(size)


if __name__ == "__main__":
    every_folder(run, ["llama-cpp-python"])
