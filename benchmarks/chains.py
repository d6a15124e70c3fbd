"""What quantisers make of pruned models: bytes, perplexity and KL to the dense model.

    python -m benchmarks.chains FOLDER prune
    PYTHONPATH=.venv-chains python -m benchmarks.chains FOLDER none int8 int4 nf4
    /path/to/python -m benchmarks.chains FOLDER W4A16 FP8_DYNAMIC
    python -m benchmarks.chains FOLDER table

`prune` writes a trained model and a random one that is wide enough for groups of 128, both pruned
by 30 % in three ways. The quantisers are torchao's and bitsandbytes' (`make chains` installs them)
and llm-compressor's, in an environment of its own that has this package too. What a quantiser
refuses is kept as it says it. `table` is what docs/QUANTISE.md has.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, TorchAoConfig

import coec
from benchmarks import record
from benchmarks.instances import SHARED

TRAINED, RANDOM = "wt2-llama", "random"
WIDTHS = {TRAINED: 64, RANDOM: 128}
"""What channels are rounded to. The trained model has 192 columns, and no groups of 128."""
TEXT = SHARED / "data/wikitext-2"
SEQ_LEN, WINDOWS, SAMPLES, RANDOM_SIZES = 256, 40, 64, {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
PATH = record.RESULTS / "chains.json"


def ways(model: str) -> dict[str, dict[str, Any]]:
    """How a model is pruned; all KV groups stay."""
    multiple = str(WIDTHS[model])
    return {
        "no multiple": {"multiple_of": "1"},
        f"multiples of {multiple}": {"multiple_of": multiple},
        f"by block, of {multiple}": {
            "multiple_of": multiple, "allocation": "error", "non_uniform": True,
        },
    }  # fmt: skip


def prune(folder: Path) -> None:
    """Write the dense models, and what is left of them."""
    trained = SHARED / "models" / TRAINED
    shutil.copytree(trained, folder / TRAINED)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(
        LlamaConfig(**LlamaConfig.from_pretrained(trained).to_dict() | RANDOM_SIZES)
    )
    network.save_pretrained(folder / RANDOM)
    for file in trained.glob("tokenizer*"):
        shutil.copy(file, folder / RANDOM)
    for model in WIDTHS:
        for way, settings in ways(model).items():
            coec.prune(
                folder / model, _place(folder, model, way), preset="fast", propagate=False,
                sparsity=0.3, attention_sparsity=0, calibration=str(TEXT / "valid.raw.txt"),
                samples=SAMPLES, seq_len=SEQ_LEN, **settings,
            )  # fmt: skip


def _place(folder: Path, model: str, way: str) -> Path:
    return folder / f"{model}-{way.replace(',', '').replace(' ', '-')}"


def quantised(source: Path, out: Path, quantiser: str) -> None:
    """Write a quantised model, with the files that its tokenizer and its code are in."""
    if quantiser in ("W4A16", "FP8_DYNAMIC"):
        _compressed(source, out, quantiser)
    else:
        AutoModelForCausalLM.from_pretrained(
            source, quantization_config=_configs()[quantiser](), trust_remote_code=True,
            dtype=torch.float32,
        ).save_pretrained(out)  # fmt: skip
    for file in source.iterdir():
        if file.suffix == ".py" or "tokenizer" in file.name:
            shutil.copy(file, out)


def _configs() -> dict[str, Callable[[], Any]]:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    int4: Any = vars(torch)["int4"]  # which its stubs lack
    groups = IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(128))
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return {
        "int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
        "int4": lambda: TorchAoConfig(groups),
        "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, **nf4),
    }


def _compressed(source: Path, out: Path, scheme: str) -> None:
    """By llm-compressor: GPTQ on the calibration text, or float8 without one."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoTokenizer

    text = (TEXT / "valid.raw.txt").read_text(encoding="utf-8")[:400_000]
    ids = torch.tensor(AutoTokenizer.from_pretrained(source)(text)["input_ids"])
    ids = ids[: SAMPLES * SEQ_LEN].view(SAMPLES, SEQ_LEN)
    windows = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    modifier = GPTQModifier if scheme.startswith("W") else QuantizationModifier
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, trust_remote_code=True
    )
    oneshot(
        model=model, dataset=Dataset.from_dict(windows), max_seq_length=SEQ_LEN,
        recipe=modifier(targets="Linear", scheme=scheme, ignore=["lm_head"]),
        num_calibration_samples=SAMPLES, output_dir=str(out), trust_remote_code_model=True,
    )  # fmt: skip


def measure(folder: Path, quantisers: list[str]) -> None:
    """A row for every pruning and quantiser; earlier ones of these quantisers go."""
    content = json.loads(PATH.read_text()) if PATH.is_file() else {"rows": []}
    rows = [row for row in content["rows"] if row["quantiser"] not in quantisers]
    for model in WIDTHS:
        for way in ways(model):
            source = _place(folder, model, way)
            for quantiser in quantisers:
                out = source if quantiser == "none" else source.with_name(f"{source.name}-q")
                row: dict[str, Any] = {"model": model, "way": way, "quantiser": quantiser}
                try:
                    if out != source:
                        shutil.rmtree(out, ignore_errors=True)
                        quantised(source, out, quantiser)
                    found = coec.perplexity(
                        out, TEXT / "test.raw.txt", baseline=folder / model, seq_len=SEQ_LEN,
                        max_windows=WINDOWS, via="transformers", device="cpu",
                        trust_remote_code=True,
                    )  # fmt: skip
                    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
                    row |= {"bytes": size, "perplexity": found.perplexity, "kl": found.kl}
                except Exception as error:  # what a quantiser says, whatever its class
                    row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                rows.append(row)
                print(row, flush=True)
    versions = content.get("versions", {}) | record.versions()
    PATH.write_text(json.dumps({"versions": versions, "rows": rows}, indent=2) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each pruning: MB and KL, or a dash where a quantiser refuses."""
    names = list(dict.fromkeys(row["quantiser"] for row in rows))
    lines = [f"| model | channels | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for model in WIDTHS:
        for way in ways(model):
            cells = [
                f"{row['bytes'] / 1e6:.1f} MB, {row['kl']:.4f}" if "kl" in row else "–"
                for name in names
                for row in rows
                if (row["model"], row["way"], row["quantiser"]) == (model, way, name)
            ]
            lines.append(f"| {model} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Prune, measure or print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", nargs="+", help="prune, table, or quantisers")
    chosen = parser.parse_args(arguments)
    if chosen.what == ["prune"]:
        prune(chosen.folder)
    elif chosen.what == ["table"]:
        print(table(json.loads(PATH.read_text())["rows"]))
    else:
        measure(chosen.folder, chosen.what)


if __name__ == "__main__":
    main()
