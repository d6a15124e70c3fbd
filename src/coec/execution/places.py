"""Checks of an output's place before any work: what is there, and how much room there is."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from coec.errors import OutputError
from coec.models.folder import foreign_entry

_URL = re.compile(r"[a-z][a-z0-9+.-]+://?")
"""Start of a URL; only one slash is left of it where it was read as a path."""


def check_file(out: Path, magic: bytes, force: bool) -> None:
    """Raise OutputError when `out` cannot become a new file.

    Args:
        magic: the bytes that files of the format begin with.
        force: whether such a file may be replaced.
    """
    target = resolved(out)
    if not target.parent.is_dir():
        raise OutputError(f"'{target.parent}' is not a folder, so '{out}' cannot be made in it")
    if target.is_dir():
        raise OutputError(f"'{out}' is a folder; the output must be a file in it")
    if not target.exists():
        return
    if not force:
        raise OutputError(f"'{out}' exists; choose another name, or pass force=True to replace it")
    if not target.is_file() or not _begins_with(target, magic):
        raise OutputError(
            f"'{out}' is no {magic.decode()} file: only such a file is replaced; remove it "
            "yourself, or choose another name"
        )


def _begins_with(path: Path, magic: bytes) -> bool:
    """True if a file is empty or begins with these bytes."""
    with path.open("rb") as file:
        return file.read(len(magic)) in (b"", magic)


def check_space(out: Path, needed: int) -> None:
    """Raise OutputError when the disk has less than `needed` bytes free."""
    free = free_space(out)
    if free < needed:
        raise OutputError(
            f"not enough disk space for '{out}': {needed / 1e9:.2f} GB needed, "
            f"{free / 1e9:.2f} GB free; choose a folder on another disk"
        )


def free_space(out: Path) -> int:
    """Free bytes on the disk of an output that need not exist yet."""
    return shutil.disk_usage(nearest(resolved(out))).free


def check_replaceable(out: Path, force: bool) -> None:
    """Raise OutputError unless `out` is free, or `force` may replace what it holds."""
    if out.is_dir() and any(out.iterdir()):
        check_model_only(out, force, lambda: foreign_entry(out))


def check_model_only(out: str | Path, force: bool, foreign: Callable[[], str | None]) -> None:
    """Raise OutputError unless the content of a place may be replaced.

    Args:
        out: the place, which is not empty.
        force: whether a model there may be replaced.
        foreign: says what in the place does not belong to a model; None if nothing.
    """
    if not force:
        raise OutputError(
            f"'{out}' is not empty; choose another folder, or pass force=True to replace the "
            "model that it holds"
        )
    if reason := foreign():
        raise OutputError(
            f"'{out}' {reason}: only a folder that holds a model and nothing else is replaced; "
            "remove it yourself, or choose another"
        )


def is_url(out: str | Path) -> bool:
    """True if an output is meant to be at a URL."""
    return _URL.match(str(out)) is not None


def resolved(path: Path) -> Path:
    """Resolve links; raises OutputError for a path that no file system holds."""
    if is_url(path):
        raise OutputError(f"'{path}' is a URL, and only `coec prune` writes models there")
    try:
        place = path.resolve()
        place.exists()
        return place
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no name of a file
        reason = getattr(error, "strerror", None) or str(error)[:80]
        raise OutputError(f"'{str(path)[:200]}' is no place for an output: {reason}") from error


def nearest(path: Path) -> Path:
    """The path itself, or its first parent that exists."""
    return next(p for p in [path, *path.parents] if p.exists())


def partial_of(out: Path) -> Path:
    """The folder in which an output is prepared."""
    return out.with_name(f"{out.name}.partial")
