"""Files of a model folder besides configuration and weights: which are copied, and may be there."""

import hashlib
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from coec.errors import ModelError
from coec.models.files import parse_json, sha256
from coec.models.non_uniform import FILE as CODE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER = (
    *TOKENIZER_FILES,
    TOKENIZER_CONFIG,
    "tokenizer.model*",
    "tekken.json",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_LICENCES = (
    "LICENSE*",
    "LICENCE*",
    "COPYING*",
    "NOTICE*",
    "USE_POLICY*",
    "ACCEPTABLE_USE*",
    "THIRD_PARTY*",
    "THIRD-PARTY*",
)
"""Files that a licence may demand to pass on, in any case and with any suffix."""
_CARRIED = (*_TOKENIZER, *_LICENCES, "generation_config.json")
"""Patterns of the files that are copied unchanged from the dense model."""
DOWNLOADED = (
    "*.json", "*.jinja", "*.py", "*.tiktoken", "tokenizer.model*", "merges.txt", "README.md",
    *_LICENCES,
)  # fmt: skip
"""Patterns of the files that are downloaded from the hub besides weights. Code runs only if it is
trusted; the card names the licence."""
NOT_DOWNLOADED = ("*/*", "consolidated*")
"""Patterns of the same weights in other formats, which are not downloaded."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
_RECORDS = ("config.json", "README.md", "coec.json", CODE)
_LITTER = (".gitattributes", ".DS_Store", ".README.md.partial")
"""Files that the hub and file managers put in any folder."""
_HUB_MODEL = "models--"
"""Prefix of the folders in the hub's cache, where models are links into `blobs`."""
_HUB_CACHE = ".cache/huggingface"
"""Folder in which the hub's client notes its downloads."""
JUDGED = ("config.json", ".py")
"""Suffixes of the files whose content says which other files a model may hold."""
_IMPORT = re.compile(r"^\s*(?:from|import)\s+\.(\w+)", re.MULTILINE)
_FOLDERS = {
    "coec": ("kept.safetensors",),
    "additional_chat_templates": ("*.jinja",),
}
"""Folders inside a model, and the patterns of their files."""


def tokenizer_classes(folder: Path) -> list[str]:
    """Names of the classes of a tokenizer with code of its own, from its configuration."""
    try:
        config = parse_json(folder / TOKENIZER_CONFIG)
    except (OSError, ValueError):
        return []
    names = config.get("auto_map") if isinstance(config, dict) else None
    if isinstance(names, dict):
        names = names.get("AutoTokenizer")
    if isinstance(names, str):
        names = [names]
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def tokenizer_code(folder: Path) -> set[str]:
    """Names of a tokenizer's Python files, and of the files that they import."""
    modules = [name.split(".")[0] for name in tokenizer_classes(folder) if "--" not in name]
    names: set[str] = set()
    while modules:
        name = f"{modules.pop()}.py"
        if name in names or Path(name).name != name or not (folder / name).is_file():
            continue
        names.add(name)
        modules += _IMPORT.findall((folder / name).read_text(encoding="utf-8", errors="replace"))
    return names


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of all files of a model's tokenizer, which determines the windows of a text.

    Raises:
        ModelError: a file cannot be read.
    """
    content = hashlib.sha256()
    for path in tokenizer_files(folder):
        try:
            content.update(f"{path.name} {sha256(path)}\n".encode())
        except OSError as error:
            raise ModelError(f"'{path}' cannot be read: {error.strerror}") from error
    return content.hexdigest()


def tokenizer_files(folder: Path) -> list[Path]:
    """List all files of a model's tokenizer; empty if it has none."""
    code = tokenizer_code(folder)
    return [
        path for path in sorted(folder.iterdir())
        if path.is_file() and (path.name in code or _known(path.name, _TOKENIZER))
    ]  # fmt: skip


def carry_files(source: Path, target: Path) -> None:
    """Copy the files of a model besides configuration and weights.

    Copies have the mode of a new file, without permissions for others that the original lacks.

    Raises:
        ModelError: as `carried_files`.
    """
    for path in carried_files(source):
        copy = target / path.name
        shutil.copyfile(path, copy)
        copy.chmod(stat.S_IMODE(copy.stat().st_mode) & (path.stat().st_mode | stat.S_IRWXU))


def carried_files(folder: Path) -> list[Path]:
    """The files that `carry_files` copies.

    Raises:
        ModelError: one is a link out of the model, perhaps to a private file.
    """
    code = tokenizer_code(folder)
    files = [
        path for path in sorted(folder.iterdir())
        if path.is_file() and (path.name in code or _known(path.name, _CARRIED))
    ]  # fmt: skip
    for path in files:
        place = path.resolve()
        blob = place.parent.name == "blobs" and place.parts[-3].startswith(_HUB_MODEL)
        if not (place.is_relative_to(folder.resolve()) or place.name == path.name or blob):
            raise ModelError(
                f"'{path}' is a link to '{place}', which would be copied into the output under "
                "another name: put the file itself there, or remove the link"
            )
    return files


def foreign_entry(folder: Path) -> str | None:
    """Say what in a folder does not belong to a model; None if it is a model and nothing else."""
    names = list(_entries(folder))
    return foreign_name(names, folder) or incomplete(names, folder)


def foreign_name(names: Iterable[str], folder: Path) -> str | None:
    """Name the first file that neither coec nor `save_pretrained` writes into a model.

    Args:
        names: paths inside the model; with a slash at the end if it is no file.
        folder: holds the files that JUDGED names.
    """
    ours = (*_CARRIED, *_WEIGHTS, *_RECORDS, *_LITTER, *tokenizer_code(folder))
    for name in sorted(names):
        parent, _, last = name.rpartition("/")
        patterns = _FOLDERS.get(parent, ()) if parent else ours
        if not last or not _known(last, patterns):
            return f"holds '{name}'"
    return None


def incomplete(names: Iterable[str], folder: Path) -> str | None:
    """Say what files lack to be a model; None if they are complete."""
    if not any(_known(name, _WEIGHTS) for name in names):
        return "holds no weights"
    try:
        config = parse_json(folder / "config.json")
    except (OSError, ValueError):
        return "holds no config.json that can be read"
    described = isinstance(config, dict) and "model_type" in config
    return None if described else "holds a config.json that is of no model"


def _entries(folder: Path) -> Iterator[str]:
    """Yield the paths in a folder; with a slash at the end if one is no file."""
    for path in sorted(folder.iterdir()):
        if _is_hub_cache(path):
            continue
        inside = [path]
        if path.name in _FOLDERS and path.is_dir() and not path.is_symlink():
            inside = sorted(path.iterdir())
        for entry in inside:
            yield entry.relative_to(folder).as_posix() + ("" if entry.is_file() else "/")


def _is_hub_cache(path: Path) -> bool:
    cache = Path(_HUB_CACHE)
    if path.name != str(cache.parent) or path.is_symlink() or not path.is_dir():
        return False
    return [inside.name for inside in path.iterdir()] == [cache.name]


def _known(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)
