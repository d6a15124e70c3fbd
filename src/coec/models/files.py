"""JSON and safetensors files: read with limits, written with the usual mode."""

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from coec.errors import ModelError

JsonDict = dict[str, Any]
"""An object of JSON, free in form."""
Kept = tuple[Mapping[str, Tensor], JsonDict]
"""Tensors and facts that a journal keeps together."""
MAX_JSON = 2**26
"""Size limit of a configuration, index or report: 64 MiB."""
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Dtypes that a weight may be stored in, by safetensors' names."""
INDEX = "model.safetensors.index.json"
_WEIGHTS, _SHARDS = "model.safetensors", "model-*-of-*.safetensors"
_LFS = b"version https://git-lfs.github.com/spec/"
"""Start of a pointer to a file that git-LFS has not fetched."""
_MERGE = (
    "merge it first (PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(FOLDER)), "
    "and give that folder"
)
_ADAPTED = "base_model.model."
"""Prefix of the names in a model that PEFT still wraps."""
_WRAPPED = re.compile(r"^(_orig_mod\.|module\.)+")
"""What torch.compile and parallel wrappers put before the names in a model."""


def parse_json(path: Path, *, distinct: bool = False, infinite: bool = False) -> Any:
    """Read a JSON file from any source.

    Args:
        distinct: refuse an object that names a key twice; otherwise the last one counts.
        infinite: accept `Infinity`, which configurations of transformers have.

    Raises:
        OSError: the file cannot be read, or is no file.
        ValueError: it is not JSON, holds a number that is not finite, or is absurdly large or deep.
        ModelError: git-LFS has not fetched it.
    """
    check_fetched(path)
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "not a regular file")  # a pipe would be waited for
    if status.st_size > MAX_JSON:
        raise ValueError(f"it is larger than {MAX_JSON / 2**20:.0f} MiB")
    try:
        return json.loads(
            path.read_text(encoding="utf-8"),
            parse_float=_finite,
            parse_constant=lambda name: (
                math.inf if infinite and name == "Infinity" else _finite(name)
            ),
            object_pairs_hook=_distinct if distinct else None,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def decoded(config: Any) -> Any:
    """Return a configuration with the floats that transformers writes as `{"__float__": …}`."""
    if isinstance(config, dict):
        if config.keys() == {"__float__"}:
            return float(config["__float__"])
        return {key: decoded(value) for key, value in config.items()}
    return [decoded(value) for value in config] if isinstance(config, list) else config


def _distinct(pairs: list[tuple[str, Any]]) -> JsonDict:
    content: JsonDict = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"it names {key[:80]!r} twice")
        content[key] = value
    return content


def _finite(number: str) -> float:
    """Parse a float of JSON text; refuses `1e400`, `NaN` and `Infinity`."""
    value = float(number)
    if value - value != 0:
        raise ValueError(f"the number {number[:20]} is not finite: write a finite one")
    return value


def check_fetched(path: Path) -> None:
    """Raise ModelError for a pointer to a file that git-LFS has not fetched."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return
        with path.open("rb") as file:
            begins = file.read(len(_LFS))
    except OSError:
        return  # reading it will say why
    if begins == _LFS:
        raise ModelError(
            f"'{path}' is a pointer of git-LFS, not the file itself: run `git lfs pull` in its "
            "folder, or download it again"
        )


def check_merged(folder: Path) -> None:
    """Raise ModelError for a PEFT adapter, which holds only changes of a model."""
    path = folder / "adapter_config.json"
    if not path.is_file() or any(folder.glob("model*.safetensors*")):
        return
    try:
        base = parse_json(path).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = "an unknown model"
    raise ModelError(f"'{folder}' is a PEFT adapter of '{base!s:.200}': {_MERGE}")


def write_json(path: Path, content: Any) -> None:
    """Write JSON as transformers does: indented, keys in the given order."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the mode of any new file (safetensors' default is 0600)."""
    # The mode that the process gives any new file, before safetensors takes another.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)


def sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_in(folder: Path) -> JsonDict:
    """Return the SHA-256 of every file below a folder, by its path there; None for a pipe, or
    another entry that is no file and must not be read.
    """
    entries = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {
        path.relative_to(folder).as_posix(): sha256(path) if path.is_file() else None
        for path in entries
    }


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file tensor by tensor; raises ModelError if it is damaged."""
    if not path.exists():
        raise ModelError(f"shard '{path.name}' is missing from '{path.parent}'")
    if not path.is_file() or not os.access(path, os.R_OK):
        reason = "permission denied" if path.is_file() else "it is no file"
        raise ModelError(f"shard '{path.name}' in '{path.parent}' cannot be read: {reason}")
    check_fetched(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"shard '{path.name}' is truncated or damaged ({error}); download it again"
        ) from error


def read_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor of a safetensors file, on the CPU in its stored dtype."""
    with opened(path) as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file; raises ModelError if it is missing or damaged."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


@dataclass(frozen=True)
class Piece:
    """Place of an expert's projection in a tensor of all experts.

    Attributes:
        expert: number of the expert.
        rows: rows of the projection among its rows.
        transposed: rows are the last dimension of the tensor.
    """

    expert: int
    rows: slice
    transposed: bool = False

    def of(self, whole: Any) -> Tensor:
        """Take the projection out of the tensor, or out of a slice of an open file."""
        one: Tensor = whole[self.expert]
        return (one.T if self.transposed else one)[self.rows]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return its shape, of the shape of the tensor."""
        return tuple(self.of(torch.empty(whole, device="meta")).shape)

    def read(self, whole: Any) -> Tensor:
        """Read it from an open file, where `whole` is a slice."""
        if not self.transposed and self.rows.step is None:
            part: Tensor = whole[self.expert, self.rows]
            return part
        return self.of(whole).contiguous()


@dataclass(frozen=True)
class Header:
    """A tensor as its safetensors file declares it; the dtype by its name there.

    `stored` is the tensor's name there, with the prefix of a wrapper. `piece` is the place in that
    tensor if this one is a part of it.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    stored: str
    piece: Piece | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that it is read from."""
        return (self.file,)

    def read(self, content: Any, folder: Path) -> Tensor:
        """Read the tensor from its open file; what else it needs from other files of the folder."""
        if self.piece is not None:
            return self.piece.read(content.get_slice(self.stored))
        tensor: Tensor = content.get_tensor(self.stored)
        return tensor


def read_headers(folder: Path) -> dict[str, Header]:
    """Read the header of every tensor, by its name without what wrappers put before it.

    Raises ModelError where loaders would differ.
    """
    # Every file of the index is opened once, and agrees with it.
    index, files = _weight_files(folder)
    headers: dict[str, Header] = {}
    for file_name in files:
        with opened(folder / file_name) as file:
            for whole in file.keys():
                name = _WRAPPED.sub("", whole)
                if name in headers:
                    raise ModelError(
                        f"{name} is in both '{headers[name].file}' and '{file_name}' of "
                        f"'{folder}': loaders differ in which they read"
                    )
                if name.startswith(_ADAPTED):
                    raise ModelError(
                        f"tensors in '{folder / file_name}' are named {_ADAPTED}…, as PEFT saves a "
                        f"model that it still wraps: {_MERGE}"
                    )
                stored = file.get_slice(whole)
                shape = tuple(stored.get_shape())
                headers[name] = Header(file_name, stored.get_dtype(), shape, whole)
    for whole, file_name in index.items():
        name = _WRAPPED.sub("", whole)
        if name in headers and headers[name].file != file_name:
            raise ModelError(
                f"'{folder / INDEX}' is damaged: {name} is in '{headers[name].file}', "
                f"not in '{file_name}'"
            )
    return headers


def _weight_files(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Read the index, tensor name → file name, empty if there is none; and list the files."""
    check_merged(folder)
    path, single = folder / INDEX, (folder / _WEIGHTS).exists()
    if not path.exists():
        shards = sorted(shard.name for shard in folder.glob(_SHARDS))
        if files := [_WEIGHTS] if single else shards:
            return {}, files
        hint = ""
        if pickles := sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth")):
            hint = (
                f"; '{pickles[0].name}' is a pickle: convert it with "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        raise ModelError(f"no safetensors weights in '{folder}'{hint}")
    try:
        weight_map: dict[str, str] = parse_json(path)["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map names no tensor")
        for name in set(weight_map.values()):
            if not isinstance(name, str) or Path(name).name != name or not name.strip("."):
                raise ValueError(f"{str(name)[:80]!r} is no file of this folder")
            if len(name.encode()) > 255 or "\0" in name:
                raise ValueError("a file name is longer than file names are")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"'{path}' is damaged: {' '.join(str(error).split())}") from error
    if single and set(weight_map.values()) != {_WEIGHTS}:
        raise ModelError(
            f"'{folder}' holds both {_WEIGHTS} and {INDEX}, which names "
            f"'{min(weight_map.values())}': loaders differ in which they read; remove the one "
            "that is out of date"
        )
    return weight_map, sorted(set(weight_map.values()))
