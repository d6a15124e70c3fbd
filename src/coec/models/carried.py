"""Which files of a model folder are whose: what travels unchanged, and what a model may hold."""

import shutil
from fnmatch import fnmatch
from pathlib import Path

from coec.models.files import parse_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER = (
    *TOKENIZER_FILES,
    "tokenizer_config.json",
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
DOWNLOADED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", *LICENCES)
"""What is downloaded of a model on the hub, besides weights."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
RECORDS = ("config.json", "README.md", "coec.json")
FOLDERS = {
    "coec": ("kept.safetensors",),
    "additional_chat_templates": ("*.jinja",),
}
"""Folders inside a model, and what they hold."""


def carry_files(source: Path, target: Path) -> None:
    """Copies what belongs to a model besides configuration and weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and _known(path.name, CARRIED):
            shutil.copyfile(path, target / path.name)  # with the mode of a new file


def foreign_entry(folder: Path) -> str | None:
    """What in a folder neither coec nor `save_pretrained` writes; None where it is a model.

    Without a model's configuration and weights, that nothing else is there says nothing.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (path.is_symlink() or path.name not in FOLDERS):
            return f"holds '{path.name}/'"
        inside = [path]
        if path.is_dir():
            inside = sorted(path.iterdir())
        for file in inside:
            known = (*CARRIED, *WEIGHTS, *RECORDS) if file is path else FOLDERS[path.name]
            if not file.is_file() or not _known(file.name, known):
                return f"holds '{file.relative_to(folder)}'"
    if not any(_known(path.name, WEIGHTS) for path in folder.iterdir()):
        return "holds no weights"
    try:
        config = parse_json(folder / "config.json")
    except (OSError, ValueError):
        return "holds no config.json that can be read"
    described = isinstance(config, dict) and "model_type" in config
    return None if described else "holds a config.json that is of no model"


def _known(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for pattern in patterns)
