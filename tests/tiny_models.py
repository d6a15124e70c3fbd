"""Random models of two blocks, and what goes with them; no network."""

import copy
import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM

from coec.models.dense import Dense
from coec.types import KeptSet

_TABLES = tomllib.loads(Path(__file__).with_name("tiny_models.toml").read_text(encoding="utf-8"))
BASE, VARIANTS = _TABLES["base"], _TABLES["variants"]
VARIANTS["mistral"]["sliding_window"] = None  # which TOML cannot say
UNUSUAL = {name: (changes.pop("variant"), changes) for name, changes in _TABLES["unusual"].items()}
HIDDEN, FFN = BASE["hidden_size"], BASE["intermediate_size"]
VOCABULARY, POSITIONS = BASE["vocab_size"], BASE["max_position_embeddings"]

USUAL = ("llama", "gemma2", "phi3", "mixtral")
"""Those that every run of the tests takes; the others take `make slow`."""


def raw_config(variant: str = "llama", **changes) -> dict:
    """A configuration as config.json has it."""
    # Configuration classes change the dictionaries they are given.
    return copy.deepcopy({**BASE, **VARIANTS[variant], **changes})


def tiny(variant: str = "llama", dtype: torch.dtype = torch.float64, **changes):
    """A random model; biases and norms are random too, since zeros and ones hide mistakes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**raw_config(variant, **changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    return model.to(dtype)


def save(model, folder: Path, *, tokenizer: bool = True) -> Path:
    """The model as a folder, with a byte-level tokenizer unless told otherwise."""
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def edit_config(folder: Path, *dropped: str, **changes) -> dict:
    """Other values in the config.json of a folder, and none for some keys; returns what was."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kept = {key: value for key, value in config.items() if key not in dropped}
    path.write_text(json.dumps(kept | changes))
    return config


def edit_weights(folder: Path, change) -> Path:
    """Other tensors in the file of weights of a folder: changed in place, or all that are given."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    made = change(tensors)
    save_file(made if isinstance(made, dict) else tensors, path, {"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token per byte, ids from 2; 0 and 1 are the start and end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {symbol: i + 2 for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def begin_texts(folder: Path) -> Path:
    """Have the tokenizer of a folder put its start before a text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def token_file(path: Path, rows: int = 24, length: int = 32) -> str:
    """Random token ids as .npy, rows of one length."""
    ids = np.random.default_rng(0).integers(2, VOCABULARY, size=(rows, length))
    np.save(path, ids)
    return str(path)


def text_file(path: Path, characters: int = 4000) -> str:
    """Some text with as many byte tokens as characters."""
    words = "the cat sat on a mat and looked at the moon for a long while. "
    path.write_text((words * (characters // len(words) + 1))[:characters])
    return str(path)


@torch.no_grad()
def logits(model, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Logits on fixed random tokens, or on those given."""
    if ids is None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(2, VOCABULARY, (3, 24), generator=generator)
    if hasattr(model.config, "num_experts") or hasattr(model.config, "n_routed_experts"):
        model.set_experts_implementation("eager")  # all at once they run in float32 at most
    return model(input_ids=ids, use_cache=False).logits


def load(folder: Path, dtype: torch.dtype | None = None, **options):
    """What a user does with a written checkpoint."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", **options).eval()


def same_weights(one: Path, other: Path) -> bool:
    """Two folders hold the same file of weights, to the byte."""
    mine, theirs = ((folder / "model.safetensors").read_bytes() for folder in (one, other))
    return mine == theirs


def check_use(loaded, folder: Path) -> None:
    """A model of code beside its weights generates with a cache, and is saved and loaded again."""
    start = torch.tensor([[3, 4, 5]])
    cached, plain = (
        loaded.generate(start, max_new_tokens=8, do_sample=False, use_cache=cache)
        for cache in (True, False)
    )
    assert torch.equal(cached, plain)
    loaded.save_pretrained(folder)
    again = load(folder, torch.float64, trust_remote_code=True)
    assert torch.equal(logits(again), logits(loaded))


def masked(dense, out):
    """The dense model with the written consumers spread back over all columns, zeros elsewhere."""
    kept, written = load_file(out / "coec/kept.safetensors"), Dense.open(out)
    with torch.no_grad():
        recipe = json.loads((out / "coec.json").read_text())["recipe"]
        counted = recipe.get("attention_units", "groups")
        model = Dense.open(dense.config._name_or_path).counted_in(counted)
        for site in model.layout.sites:
            weight = consumer(dense, site)
            units = KeptSet(kept[site.key], site.units)
            spread = torch.zeros_like(weight)
            spread[:, site.kept_columns(units).indices] = written.tensor(site.weight).to(weight)
            weight.copy_(spread)
            if site.bias in written.files:
                module = dense.get_submodule(site.consumer)
                module.bias = torch.nn.Parameter(written.tensor(site.bias).to(weight))
    return dense


def consumer(model, site) -> torch.Tensor:
    """The weight of a site's consumer in a model."""
    if site.routed:
        block, number = model.model.layers[site.block], int(site.name.removeprefix("expert."))
        return block.mlp.experts.down_proj[number]
    return model.get_submodule(site.consumer).weight


def readable(folder: Path, copy: Path) -> Path:
    """A copy whose tokenizer class both transformers 4.57 and 5 know; the weights are the same."""
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    path = copy / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return copy
