"""Which files of a model folder are whose: what travels unchanged, and what a model may hold."""

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
TOKENIZER = (
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
LICENCES = (
    "LICENSE*",
    "LICENCE*",
    "COPYING*",
    "NOTICE*",
    "USE_POLICY*",
    "ACCEPTABLE_USE*",
    "THIRD_PARTY*",
    "THIRD-PARTY*",
)
"""What a licence may demand to be passed on, whatever its letters' case or its suffix."""
CARRIED = (*TOKENIZER, *LICENCES, "generation_config.json")
"""Files copied unchanged from the dense model, by pattern."""
DOWNLOADED = (
    "*.json", "*.jinja", "*.py", "*.tiktoken", "tokenizer.model*", "merges.txt", "README.md",
    *LICENCES,
)  # fmt: skip
"""What is downloaded of a model on the hub, besides weights. Code runs only where it is
trusted; the card names the licence."""
NOT_DOWNLOADED = ("*/*", "consolidated*")
"""What is left there: the same weights in other formats, in folders or by their makers' names."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
RECORDS = ("config.json", "README.md", "coec.json", CODE)
LITTER = (".gitattributes", ".DS_Store", ".README.md.partial")
"""Files that the hub and file managers put in any folder."""
HUB_MODEL = "models--"
"""How the folders of models begin in the hub's cache, where models are links into `blobs`."""
HUB_CACHE = ".cache/huggingface"
"""Where the hub's client notes what it downloaded into a folder."""
JUDGED = ("config.json", ".py")
"""How the names of those files end whose content says what else a model may hold."""
IMPORT = re.compile(r"^\s*(?:from|import)\s+\.(\w+)", re.MULTILINE)
FOLDERS = {
    "coec": ("kept.safetensors",),
    "additional_chat_templates": ("*.jinja",),
}
"""Folders inside a model, and what they hold."""


def tokenizer_classes(folder: Path) -> list[str]:
    """The classes of a tokenizer that brings its own code, as its configuration names them."""
    try:
        config = parse_json(folder / TOKENIZER_CONFIG)
    except (OSError, ValueError):
        return []
    named = config.get("auto_map") if isinstance(config, dict) else None
    if isinstance(named, dict):
        named = named.get("AutoTokenizer")
    if isinstance(named, str):
        named = [named]
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def tokenizer_code(folder: Path) -> set[str]:
    """Names of the Python files that a tokenizer brings, and of those that they import."""
    modules = [name.split(".")[0] for name in tokenizer_classes(folder) if "--" not in name]
    found: set[str] = set()
    while modules:
        name = f"{modules.pop()}.py"
        if name in found or Path(name).name != name or not (folder / name).is_file():
            continue
        found.add(name)
        modules += IMPORT.findall((folder / name).read_text(encoding="utf-8", errors="replace"))
    return found


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of all that makes a model's tokenizer: from one text, another makes other windows.

    Raises:
        ModelError: a file of it cannot be read.
    """
    content = hashlib.sha256()
    for path in tokenizer_files(folder):
        try:
            content.update(f"{path.name} {sha256(path)}\n".encode())
        except OSError as error:
            raise ModelError(f"'{path}' cannot be read: {error.strerror}") from error
    return content.hexdigest()


def tokenizer_files(folder: Path) -> list[Path]:
    """All that makes a model's tokenizer; nothing where it has none."""
    code = tokenizer_code(folder)
    return [
        path for path in sorted(folder.iterdir())
        if path.is_file() and (path.name in code or _known(path.name, TOKENIZER))
    ]  # fmt: skip


def carry_files(source: Path, target: Path) -> None:
    """Copies what belongs to a model besides configuration and weights.

    Copies have the mode of a new file, but nobody else may read or write them who could not the
    original.

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
        ModelError: one is a link out of the model, to what may be nobody else's business.
    """
    code = tokenizer_code(folder)
    files = [
        path for path in sorted(folder.iterdir())
        if path.is_file() and (path.name in code or _known(path.name, CARRIED))
    ]  # fmt: skip
    for path in files:
        place = path.resolve()
        blob = place.parent.name == "blobs" and place.parts[-3].startswith(HUB_MODEL)
        if not (place.is_relative_to(folder.resolve()) or place.name == path.name or blob):
            raise ModelError(
                f"'{path}' is a link to '{place}', which would be copied into the output under "
                "another name: put the file itself there, or remove the link"
            )
    return files


def foreign_entry(folder: Path) -> str | None:
    """What in a folder neither coec nor `save_pretrained` writes; None where it is a model."""
    names = list(_entries(folder))
    return foreign_name(names, folder) or incomplete(names, folder)


def foreign_name(names: Iterable[str], folder: Path) -> str | None:
    """The first file that neither coec nor `save_pretrained` writes into a model, in words.

    Args:
        names: of the files, inside the model; with a slash at the end where one is no file.
        folder: holds those that JUDGED names.
    """
    ours = (*CARRIED, *WEIGHTS, *RECORDS, *LITTER, *tokenizer_code(folder))
    for name in sorted(names):
        holder, _, last = name.rpartition("/")
        known = FOLDERS.get(holder, ()) if holder else ours
        if not last or not _known(last, known):
            return f"holds '{name}'"
    return None


def incomplete(names: Iterable[str], folder: Path) -> str | None:
    """What files lack to be a model, in words: that nothing else is there says nothing."""
    if not any(_known(name, WEIGHTS) for name in names):
        return "holds no weights"
    try:
        config = parse_json(folder / "config.json")
    except (OSError, ValueError):
        return "holds no config.json that can be read"
    described = isinstance(config, dict) and "model_type" in config
    return None if described else "holds a config.json that is of no model"


def _entries(folder: Path) -> Iterator[str]:
    """What a folder holds, by path; with a slash at the end where that is no file."""
    for path in sorted(folder.iterdir()):
        if _is_hub_cache(path):
            continue
        inside = [path]
        if path.name in FOLDERS and path.is_dir() and not path.is_symlink():
            inside = sorted(path.iterdir())
        for one in inside:
            yield one.relative_to(folder).as_posix() + ("" if one.is_file() else "/")


def _is_hub_cache(path: Path) -> bool:
    holder = Path(HUB_CACHE)
    if path.name != str(holder.parent) or path.is_symlink() or not path.is_dir():
        return False
    return [inside.name for inside in path.iterdir()] == [holder.name]


def _known(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)
