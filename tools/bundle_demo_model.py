"""Makes the demo's bundled model from a trained checkpoint: bfloat16, a tokenizer any 4.57+ loads.

python tools/bundle_demo_model.py ../shared/models/wt2-llama src/coec/demo/model
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CARRIED = ("generation_config.json", "tokenizer.json")


def bundle(source: Path, target: Path) -> None:
    """Writes `target` anew; every weight is rounded once, to the nearest bfloat16."""
    target.mkdir(parents=True, exist_ok=True)
    weights = load_file(source / "model.safetensors")
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(rounded, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    write(target / "config.json", config | {"dtype": "bfloat16"})
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    # transformers 5 writes a class name that 4.x does not know; this one both know.
    write(
        target / "tokenizer_config.json",
        tokenizer | {"tokenizer_class": "PreTrainedTokenizerFast"},
    )
    for name in CARRIED:
        shutil.copyfile(source / name, target / name)


def write(path: Path, content: object) -> None:
    """JSON, indented, with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    bundle(Path(sys.argv[1]), Path(sys.argv[2]))
