"""Outputs at a URL of any file system that fsspec knows, such as s3:// and gs://.

A model is made in a folder of this machine, with a journal, as ever; when it is whole it is copied
to its place, the configuration last, without which no program takes it for a model.
"""

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coec.errors import OutputError, first_line
from coec.models.files import cache_folder

URL = re.compile(r"[a-z][a-z0-9+.-]+://?")
"""How a URL begins; with one slash where it was taken for a path."""
CONFIG, REPORT = "config.json", "coec.json"
PROBE = ".coec-writable"


def is_url(out: str | Path) -> bool:
    """Whether an output is meant to be at a URL."""
    return URL.match(str(out)) is not None


@dataclass(frozen=True)
class Remote:
    """A place for a model; made by `at`.

    Attributes:
        url: as it was asked for.
        files: its file system.
        root: the folder there.
        staged: the folder of this machine where the model is made first.
    """

    url: str
    files: Any
    root: str
    staged: Path

    @classmethod
    def at(cls, url: str, *, force: bool) -> "Remote":
        """Checks that a model can be written there.

        Args:
            url: of the folder to make.
            force: replace a model that coec wrote there.

        Raises:
            OutputError: it cannot.
        """
        from fsspec.core import url_to_fs

        try:
            files, root = url_to_fs(url)
            there = files.ls(root, detail=False) if files.exists(root) else []
        except ImportError as error:
            raise OutputError(f"'{url}' needs a package that is not installed: {error}") from error
        except Exception as error:  # file systems raise what they like
            raise OutputError(f"'{url}' cannot be used: {first_line(error)}") from error
        remote = cls(url, files, root.rstrip("/"), _staged(url))
        if there and not force:
            raise OutputError(
                f"'{url}' is not empty; choose another place, or pass force=True to replace the "
                "model that it holds"
            )
        if there and not files.exists(f"{remote.root}/{REPORT}"):
            raise OutputError(
                f"'{url}' has no {REPORT}: only a model that coec wrote is replaced; remove it "
                "yourself, or choose another place"
            )
        remote._check_writable()
        if remote.staged.is_dir():  # it was copied, and the run was killed then
            shutil.rmtree(remote.staged)
        return remote

    def put(self, folder: Path) -> None:
        """Copies a whole model there; what else was in the place goes.

        Raises:
            OutputError: the place refuses; the model is still in the folder.
        """
        names = sorted(
            (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()),
            key=lambda name: (name == CONFIG, name),
        )
        try:
            if self.files.exists(f"{self.root}/{CONFIG}"):  # it is no model until it is whole
                self.files.rm_file(f"{self.root}/{CONFIG}")
            for name in names:
                self.files.makedirs(f"{self.root}/{name}".rpartition("/")[0], exist_ok=True)
                self.files.put_file(str(folder / name), f"{self.root}/{name}")
            for path in self.files.find(self.root):
                if path.removeprefix(self.root).strip("/") not in names:
                    self.files.rm_file(path)
        except Exception as error:
            raise OutputError(
                f"'{self.url}' could not be written: {first_line(error)}; the same command goes "
                f"on from '{self.staged}.partial'"
            ) from error

    def _check_writable(self) -> None:
        probe = f"{self.root}/{PROBE}"
        try:
            self.files.makedirs(self.root, exist_ok=True)
            self.files.pipe_file(probe, b"")
            self.files.rm_file(probe)
        except Exception as error:
            raise OutputError(f"'{self.url}' cannot be written: {first_line(error)}") from error


def _staged(url: str) -> Path:
    """One folder for every URL: the same command finds what it had begun."""
    name = re.sub(r"[^\w.-]", "-", url.rstrip("/").rpartition("/")[2])[:40] or "model"
    return cache_folder() / "outputs" / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
