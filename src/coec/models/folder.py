"""Model folders: found or downloaded, configuration read, files other than weights copied."""

import hashlib
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import snapshot_download

from coec.errors import ModelError, first_line
from coec.models import non_uniform
from coec.models.files import JsonDict, check_fetched, check_merged, parse_json, sha256
from coec.models.layout import BLOCK_WIDTHS

CONFIG = "config.json"
REPORT = "coec.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER_CONFIG = "tokenizer_config.json"
_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_TOKENIZER = (
    *TOKENIZER_FILES, TOKENIZER_CONFIG, *_CHAT_TEMPLATES, "tokenizer.model*", "tekken.json",
    "*.tiktoken", "special_tokens_map.json", "added_tokens.json", "merges.txt",
)  # fmt: skip
_LICENCES = (
    "LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*", "ACCEPTABLE_USE*",
    "THIRD_PARTY*", "THIRD-PARTY*",
)  # fmt: skip
"""Files that a licence may demand to pass on, in any case and with any suffix."""
_PROCESSORS = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files that say how images and such become the inputs of a multimodal model."""
_CARRIED = (*_TOKENIZER, *_LICENCES, *_PROCESSORS, GENERATION_CONFIG)
"""Patterns of the files that are copied unchanged from the dense model."""
_DOWNLOADED = (
    "*.json", "*.jinja", "*.py", "*.tiktoken", "tokenizer.model*", "merges.txt", "README.md",
    *_LICENCES,
)  # fmt: skip
"""Patterns of the files that are downloaded from the hub in addition to weights. Code runs only if
it is trusted; the card names the licence."""
_NOT_DOWNLOADED = ["*/*.safetensors", "*/*.json", "*/*.py", "*/*.tiktoken", "consolidated*"]
"""Patterns of the same weights in other formats, which are not downloaded; chat templates may lie
in a folder."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
_LITTER = (".gitattributes", ".DS_Store", ".README.md.partial")
"""Files that the hub and file managers put in any folder."""
_OWN = (*_CARRIED, *_WEIGHTS, *_LITTER, CONFIG, "README.md", REPORT, non_uniform.FILE)
_IMPORT = re.compile(r"^\s*(?:from|import)\s+\.(\w+)", re.MULTILINE)
_TEMPLATES = "additional_chat_templates"
_FOLDERS = {"coec": ("kept.safetensors",), _TEMPLATES: ("*.jinja",)}
"""Folders inside a model, and the patterns of their files."""
_GGUF = (
    "'{}' is a GGUF file, which no weights can be pruned in: give the folder with config.json and "
    "safetensors that it was made from"
)


def find_model(model: str | Path, *, weights: bool = True) -> Path:
    """Find the local folder of a model, or download a hub name into the cache.

    Without `weights` a configuration alone is accepted. Raises ModelError if there is none.
    """
    if not isinstance(model, str | Path):
        raise ModelError(
            f"the model is a {type(model).__name__}: give its folder or hub name, from which "
            "weights are read a block at a time (or save it first: model.save_pretrained(FOLDER))"
        )
    # An existing folder → a file, refused with its kind → a hub name
    path, name = Path(model), _short(str(model))
    try:
        if path.is_dir() or (path.is_file() and path.suffix == ".json" and not weights):
            return path
        exists = path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a loop of links
        raise ModelError(f"'{name}' is no model folder: {_reason(error)}") from error
    if exists:
        check_fetched(path)
        if path.suffix == ".gguf":
            raise ModelError(_GGUF.format(name))
        raise ModelError(
            f"no model at '{name}', a file: give the folder with config.json and safetensors "
            "weights"
        )
    if name.startswith((".", "/", "~")) or str(model).count("/") != 1:
        raise ModelError(
            f"no model at '{name}': give a folder with config.json and safetensors "
            "weights, or a hub name such as 'org/model'"
        )
    try:
        patterns = [*_DOWNLOADED, *["*.safetensors"] * weights]
        return Path(
            snapshot_download(str(model), allow_patterns=patterns, ignore_patterns=_NOT_DOWNLOADED)
        )
    except Exception as error:  # the hub's client may raise anything
        raise ModelError(
            f"'{name}' is no local folder and could not be downloaded: {_reason(error)}"
        ) from error


def read_config(model: Path) -> JsonDict:
    """Read the raw config.json of a model folder (or the file itself).

    Raises ModelError where there is none.
    """
    try:
        path = model if model.is_file() else model / CONFIG
        config = parse_json(path, infinite=True)
    except FileNotFoundError as error:
        check_merged(model)
        if gguf := next(iter(sorted(model.glob("*.gguf"))), None):
            raise ModelError(_GGUF.format(gguf)) from error
        raise ModelError(f"no {CONFIG} in '{model}': it is not a model folder") from error
    except ValueError as error:
        raise ModelError(f"'{path}' is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror}") from error
    if not isinstance(config, dict):
        raise ModelError(f"'{path}' holds no JSON object")
    return non_uniform.as_read(config) if BLOCK_WIDTHS in config else config


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)


def _short(name: str) -> str:
    """Shorten a name for printing: impossible names would fill the screen."""
    return name if len(name) <= 200 else f"{name[:200]}…"


def tokenizer_classes(folder: Path) -> list[str]:
    """Names of the classes of a tokenizer with custom code, from its configuration."""
    try:
        config = parse_json(folder / TOKENIZER_CONFIG)
    except (OSError, ValueError):
        return []
    # One name, a list of them, or either under the name of the class that loads tokenizers
    names = config.get("auto_map") if isinstance(config, dict) else None
    names = names.get("AutoTokenizer") if isinstance(names, dict) else names
    names = names if isinstance(names, list) else [names]
    return [name for name in names if isinstance(name, str)]


def _tokenizer_code(folder: Path) -> set[str]:
    """Names of a tokenizer's Python files, and of the files that they import."""
    # Each file's own imports are followed; a name with "--" is code of another hub repository.
    modules = [name.split(".")[0] for name in tokenizer_classes(folder) if "--" not in name]
    names: set[str] = set()
    while modules:
        name = f"{modules.pop()}.py"
        if name in names or Path(name).name != name or not (folder / name).is_file():
            continue
        names.add(name)
        modules += _IMPORT.findall((folder / name).read_text(encoding="utf-8", errors="replace"))
    return names


def tokenizer_files(folder: Path) -> list[Path]:
    """List all files of a model's tokenizer; empty if it has none."""
    return _files(folder, _TOKENIZER)


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of all files of a model's tokenizer, which determines the windows of a text."""
    content = hashlib.sha256()
    for path in tokenizer_files(folder):
        try:
            content.update(f"{path.name} {sha256(path)}\n".encode())
        except OSError as error:
            raise ModelError(f"'{path}' cannot be read: {error.strerror}") from error
    return content.hexdigest()


def has_chat_template(folder: Path) -> bool:
    """True if a model's tokenizer renders chats."""
    if any((folder / name).is_file() for name in _CHAT_TEMPLATES):
        return True
    path = folder / TOKENIZER_CONFIG
    return path.is_file() and b'"chat_template"' in path.read_bytes()


def generation_digest(folder: Path) -> str | None:
    """SHA-256 of a model's settings of generation, which determine its answers; None for none."""
    path = folder / GENERATION_CONFIG
    return sha256(path) if path.is_file() else None


def carry_files(source: Path, target: Path) -> None:
    """Copy the files of a model other than configuration and weights.

    Copies have the mode of a new file, without permissions for others that the original lacks.
    """
    for path in carried_files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
        copy.chmod(stat.S_IMODE(copy.stat().st_mode) & (path.stat().st_mode | stat.S_IRWXU))


def carried_files(folder: Path) -> list[Path]:
    """List the files that `carry_files` copies; raises ModelError for a link out of the model."""
    templates = sorted(folder.glob(f"{_TEMPLATES}/{_FOLDERS[_TEMPLATES][0]}"))
    files = [*_files(folder, _CARRIED), *templates]
    for path in files:
        place = path.resolve()
        # In the hub's cache models are folders of links into `blobs`.
        blob = place.parent.name == "blobs" and place.parts[-3].startswith("models--")
        if not (place.is_relative_to(folder.resolve()) or place.name == path.name or blob):
            raise ModelError(
                f"'{path}' is a link to '{place}', which would be copied into the output under "
                "another name: put the file itself there, or remove the link"
            )
    return files


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """List the files of a folder that fit patterns, and the files of a tokenizer's code."""
    code = _tokenizer_code(folder)
    return [
        path for path in sorted(folder.iterdir())
        if path.is_file() and (path.name in code or _fits(path.name, patterns))
    ]  # fmt: skip


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)


def foreign_entry(folder: Path) -> str | None:
    """Name the first file that neither coec nor `save_pretrained` writes into a model.

    If there is no such file but the files are no model, state the missing part instead. None if
    they are a model and nothing else is there.
    """
    # Files that are not a model's, then whether the rest are a model
    names = sorted(_entries(folder))
    patterns = (*_OWN, *_tokenizer_code(folder))
    for name in names:
        parent, _, last = name.rpartition("/")
        if not last or not _fits(last, _FOLDERS.get(parent, ()) if parent else patterns):
            return f"holds '{name}'"
    if not any(_fits(name, _WEIGHTS) for name in names):
        return "holds no weights"
    try:
        config = parse_json(folder / CONFIG)
    except (OSError, ValueError):
        return "holds no config.json that can be read"
    described = isinstance(config, dict) and "model_type" in config
    return None if described else "holds a config.json that is of no model"


def _entries(folder: Path) -> Iterator[str]:
    """Yield the paths in a folder; with a slash at the end if one is no file.

    Leaves out `.cache/huggingface`, where the hub's client notes its downloads.
    """
    for path in sorted(folder.iterdir()):
        plain = path.is_dir() and not path.is_symlink()
        if plain and path.name == ".cache" and [p.name for p in path.iterdir()] == ["huggingface"]:
            continue
        for entry in sorted(path.iterdir()) if plain and path.name in _FOLDERS else [path]:
            yield entry.relative_to(folder).as_posix() + ("" if entry.is_file() else "/")
