"""Checkpoints on disk: read tensor by tensor, checked before work, written by shards, atomically.

The only module that knows file names.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coec.errors import ModelError, OutputError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD = "2GB"
CARRIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "NOTICE",
)
"""Files copied unchanged from the dense model when it has them."""

LAYER = re.compile(r"model\.layers\.(\d+)\.")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


def find_model(model: str | Path, *, weights: bool = True) -> Path:
    """The local folder of a model: a folder, or a hub name that is downloaded (or cached).

    Raises:
        ModelError: no such folder, and no such hub model can be had.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".json" and not weights:
        return path
    name = str(model)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"no model at '{name}': give a folder with config.json and safetensors weights, "
            "or a hub name such as 'org/model'"
        )
    patterns = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "LICENSE*", "NOTICE*"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns + ["*.safetensors"] * weights))
    except Exception as error:  # the hub's client raises many kinds; one line is enough
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"'{name}' is no local folder and could not be downloaded: {reason}"
        ) from error


def read_config(model: Path) -> dict[str, Any]:
    """The raw config.json of a model folder (or the file itself)."""
    path = model if model.is_file() else model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"no config.json in '{model}': it is not a model folder") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"'{path}' is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror}") from error
    if not isinstance(config, dict):
        raise ModelError(f"'{path}' holds no JSON object")
    return config


def skeleton(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The transformers model of a raw configuration on the meta device: shapes, no memory.

    Raises:
        ModelError: the installed transformers does not accept the configuration.
    """
    try:
        resolved = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(resolved, dtype=dtype)
    except Exception as error:  # configuration classes raise what they like
        reason = str(error).strip().splitlines()[-1].strip()
        raise ModelError(f"transformers does not accept this config.json: {reason}") from error
    return model.eval()


def parameter_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Names and shapes of what a checkpoint stores: the state, a tied output head left out."""
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return {
        name: tensor.shape
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


@dataclass(frozen=True)
class Checkpoint:
    """A dense model's safetensors files.

    Attributes:
        folder: where they are.
        config: the raw config.json.
        files: tensor name → file name.
    """

    folder: Path
    config: dict[str, Any]
    files: dict[str, str]

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads config and index, and every file's header.

        Raises:
            ModelError: a file is missing or truncated.
        """
        config = read_config(folder)
        if (folder / INDEX).is_file():
            try:
                index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
                names = sorted(set(index["weight_map"].values()))
                if not all(isinstance(name, str) for name in names):
                    raise TypeError("a file name is no text")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(f"'{folder / INDEX}' is damaged: {error!r}") from error
        elif (folder / WEIGHTS).is_file():
            names = [WEIGHTS]
        else:
            other = next(iter(sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))), None)
            hint = (
                f"; '{other.name}' is a pickle: convert it with "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
                if other
                else ""
            )
            raise ModelError(f"no safetensors weights in '{folder}'{hint}")
        files: dict[str, str] = {}
        for name in names:
            with _opened(folder / name) as file:
                files |= dict.fromkeys(file.keys(), name)
        return cls(folder, config, files)

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU in its stored dtype."""
        with _opened(self.folder / self.files[name]) as file:
            return file.get_tensor(name)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose name starts with `prefix`, which is taken off."""
        return {
            name.removeprefix(prefix): self.tensor(name)
            for name in self.files
            if name.startswith(prefix)
        }

    def check(self, expected: dict[str, torch.Size]) -> torch.dtype:
        """Every expected tensor is there, of its shape, float and finite; returns their dtype.

        With mixed dtypes the widest is returned. Reads every weight once.

        Raises:
            ModelError: naming the first tensor that is not, and its file.
        """
        missing = [name for name in expected if name not in self.files]
        if missing:
            raise ModelError(
                f"'{self.folder}' lacks {len(missing)} of {len(expected)} tensors "
                f"(first: {missing[0]}); download it again"
            )
        layers = 1 + max(int(found[1]) for name in expected if (found := LAYER.match(name)))
        beyond = [n for n in self.files if (found := LAYER.match(n)) and int(found[1]) >= layers]
        if beyond:
            raise ModelError(
                f"'{self.folder}' holds more layers than the {layers} in config.json "
                f"(first: {beyond[0]}); mend num_hidden_layers"
            )
        dtypes = set()
        for file_name in sorted(set(self.files.values())):
            with _opened(self.folder / file_name) as file:
                for name in file.keys():
                    if name in expected:
                        dtypes.add(_check_tensor(file, name, expected[name], file_name))
        return max(dtypes, key=lambda dtype: (dtype.itemsize, dtype == torch.bfloat16))


def _check_tensor(file: Any, name: str, shape: torch.Size, file_name: str) -> torch.dtype:
    stored = file.get_slice(name)
    kind = stored.get_dtype()
    if kind not in FLOAT_DTYPES:
        raise ModelError(
            f"{name} in '{file_name}' is {kind}: the weights are quantised; "
            "pruning needs float weights"
        )
    if tuple(stored.get_shape()) != tuple(shape):
        raise ModelError(
            f"{name} in '{file_name}' has shape {tuple(stored.get_shape())}, "
            f"config.json says {tuple(shape)}"
        )
    if not torch.isfinite(file.get_tensor(name)).all():
        raise ModelError(f"{name} in '{file_name}' holds NaN or Inf: the checkpoint is damaged")
    return FLOAT_DTYPES[kind]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of one safetensors file.

    Raises:
        ModelError: the file is missing or damaged.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        if path.exists():  # what safetensors says of a file that it may not open, too
            raise ModelError(f"shard '{path}' cannot be read: no permission") from error
        raise ModelError(f"shard '{path.name}' is missing from '{path.parent}'") from error
    except OSError as error:
        raise ModelError(f"shard '{path}' cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ModelError(
            f"shard '{path.name}' is truncated or damaged ({error}); download it again"
        ) from error


@dataclass(eq=False)
class ShardWriter:
    """Writes tensors into shards planned beforehand, each as soon as it is complete.

    Attributes:
        folder: where to write.
        shapes: every tensor's name and shape.
        dtype: of every tensor.
    """

    folder: Path
    shapes: dict[str, torch.Size]
    dtype: torch.dtype
    _pending: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        state = {
            name: torch.empty(shape, dtype=self.dtype, device="meta")
            for name, shape in self.shapes.items()
        }
        self._split = split_torch_state_dict_into_shards(state, max_shard_size=MAX_SHARD)
        self._left = {f: set(names) for f, names in self._split.filename_to_tensors.items()}

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Takes finished tensors; a shard whose last tensor came is written and forgotten."""
        for name, tensor in tensors.items():
            if tensor.shape != self.shapes[name] or tensor.dtype != self.dtype:
                raise AssertionError(
                    f"{name}: planned {self.shapes[name]} {self.dtype}, "
                    f"got {tensor.shape} {tensor.dtype}"
                )
            file_name = self._split.tensor_to_filename[name]
            self._pending.setdefault(file_name, {})[name] = tensor.contiguous()
            self._left[file_name].remove(name)
            if not self._left[file_name]:
                shard = dict(sorted(self._pending.pop(file_name).items()))
                save_file(shard, self.folder / file_name, metadata={"format": "pt"})
                del self._left[file_name]

    def finish(self) -> None:
        """Writes the index; every planned tensor must have come."""
        if self._left:
            raise AssertionError(f"tensors never written: {self._left}")
        if self._split.is_sharded:
            index = {
                "metadata": self._split.metadata,
                "weight_map": dict(sorted(self._split.tensor_to_filename.items())),
            }
            write_json(self.folder / INDEX, index)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON as transformers does: indented, keys as given."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_output(out: Path, model: Path, force: bool) -> None:
    """Raises OutputError when `out` cannot become a new model folder."""
    target, source = out.resolve(), model.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise OutputError(
            f"the output '{out}' and the model '{model}' lie inside each other; "
            "choose a folder beside the model"
        )
    if out.exists() and not out.is_dir():
        raise OutputError(f"'{out}' is a file; the output must be a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise OutputError(f"'{out}' is not empty; choose another folder or pass force=True")
    if out.is_dir() and force and any(out.iterdir()) and not (out / "config.json").is_file():
        raise OutputError(
            f"'{out}' holds something that is no model (no config.json): force=True replaces only "
            "models; remove it yourself"
        )
    parent = next(p for p in target.parents if p.exists())
    if not parent.is_dir():
        raise OutputError(f"'{parent}' is not a folder, so '{out}' cannot be made in it")


def check_space(out: Path, needed: int) -> None:
    """Raises OutputError when the disk has less than `needed` bytes free."""
    parent = next(p for p in [out.resolve(), *out.resolve().parents] if p.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OutputError(
            f"not enough disk space for '{out}': {needed / 1e9:.2f} GB needed, "
            f"{free / 1e9:.2f} GB free"
        )


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A temporary sibling that becomes `out` in one rename when the block ends well.

    On any error, interrupts included, it is removed and an existing `out` stays as it was.
    """
    out = out.resolve()
    made = [parent for parent in out.parents if not parent.exists()]
    temporary = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        yield temporary
        temporary.chmod(0o755)
        _replace(temporary, out)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"could not write '{out}': {error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()


def _replace(new: Path, out: Path) -> None:
    """Renames `new` to `out`; what was there is removed only after that has worked."""
    if not out.exists():
        new.rename(out)
        return
    old = out.with_name(new.name.replace(".partial-", ".old-"))
    out.rename(old)
    try:
        new.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)
