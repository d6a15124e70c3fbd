"""Outputs at a URL of any file system that fsspec knows, such as s3:// and gs://.

A model is first made in a folder of this machine, with a journal. Once whole, it is copied to its
place; the configuration is copied last, since without it no program takes the files for a model.
The journal notes every file that arrived there, so that an interrupted copy continues.
"""

import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coec.errors import OutputError, first_line
from coec.execution.journal import Journal, unfinished
from coec.execution.output import check_model_only, is_url, partial_of, path_of
from coec.models.files import MAX_JSON, JsonDict, cache_folder
from coec.models.folder import JUDGED, foreign_name

_CONFIG, _REPORT = "config.json", "coec.json"
_PROBE = ".coec-writable"
_UPLOADING = "uploading"
"""Note of the beginning of a copy: its files, and the files that were there before."""
_STAMPS = (
    "ETag", "etag", "md5Hash", "content_md5", "mtime", "modified", "LastModified", "last_modified",
    "updated", "modify", "created",
)  # fmt: skip
"""Facts of a file that change with its content, the surest first."""

Listing = dict[str, JsonDict]
"""Facts of every remote file, by its path inside the place."""


@dataclass(frozen=True)
class Remote:
    """A place for a model beyond this machine's folders; made by `destination`.

    Attributes:
        url: the place, as the user gave it.
        files: its file system.
        root: the folder there.
        staged: the folder of this machine where the model is made first.
        model: the folder of the dense model, which must not be in the place.
    """

    url: str
    files: Any
    root: str
    staged: Path
    model: Path

    def check(self, journal: Journal, force: bool) -> None:
        """Raise OutputError unless the place is free, replaceable, or holds our own copy."""
        with self._translated("used"):
            self._replaceable(self._listing(), journal, force)

    def whole(self, journal: Journal) -> bool:
        """True if an earlier run had made the model, and all of it is here or there."""
        if _UPLOADING not in journal:
            return False
        files = _files(journal)
        if all(name in journal for name in files):
            return True
        with self._translated("used"):  # the run was killed while it tidied up
            listing = self._listing()
            if not all(_arrived(journal, name, files[name], listing) for name in files):
                return False
            self.files.get_file(f"{self.root}/{_REPORT}", str(journal.new / _REPORT))
        return True

    def put(self, journal: Journal, force: bool) -> None:
        """Copy the whole model of a journal there, and remove other files from the place.

        Files that arrived before, and have not changed since, are not copied again. Raises
        OutputError where the place refuses, or holds files of no model; our copy here is kept.
        """
        with self._translated("written"):
            listing = self._listing()
            replaceable = self._replaceable(listing, journal, force)
            if not self.whole(journal):
                journal.note(_UPLOADING, files=journal.recorded(), there=sorted(replaceable))
            files = _files(journal)
            missing = {name for name in files if not _arrived(journal, name, files[name], listing)}
            if not missing:
                return
            if _CONFIG in listing:  # it is no model until it is whole
                self.files.rm_file(f"{self.root}/{_CONFIG}")
            for name in sorted(missing - {_CONFIG}):
                self._copy(journal, name, *files[name])
            for old in (replaceable & listing.keys()) - files.keys():
                self.files.rm_file(f"{self.root}/{old}")
            self._copy(journal, _CONFIG, *files[_CONFIG])

    def _copy(self, journal: Journal, name: str, size: int, digest: str) -> None:
        path = f"{self.root}/{name}"
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.files.put_file(str(journal.new / name), path)
        self.files.invalidate_cache()
        info = self.files.info(path)
        if info["size"] != size:
            raise OSError(f"'{name}' has {info['size']} bytes there, {size} here")
        journal.note(f"{_UPLOADING} {name}", sha256=digest, stamp=_stamp(info))

    def _listing(self) -> Listing:
        self.files.invalidate_cache()
        if self.files.isfile(self.root):
            raise OutputError(f"'{self.url}' is a file; the output must be a folder")
        if not self.files.exists(self.root):
            return {}
        root = self.root.strip("/")
        names = {
            path.strip("/").removeprefix(root).strip("/"): info
            for path, info in self.files.find(self.root, detail=True).items()
        }
        return {name: info for name, info in names.items() if name not in ("", _PROBE)}

    def _replaceable(self, names: Iterable[str], journal: Journal | None, force: bool) -> set[str]:
        """Names of the files there, all of which may go; raises OutputError otherwise."""
        names = set(names)
        if journal is not None and _UPLOADING in journal:
            begun = journal.facts(_UPLOADING)
            expected = {*begun["files"], *begun["there"]}
            if strange := sorted(names - expected):
                raise OutputError(
                    f"'{self.url}' holds '{strange[0]}', which appeared while the model was "
                    "copied there: move it away, and give the same command again"
                )
            return expected
        if names:
            check_model_only(self.url, force, lambda: self._foreign(names))
        return names

    def _foreign(self, names: set[str]) -> str | None:
        """Say what there does not belong to a model that coec wrote; None if nothing."""
        if _REPORT not in names:
            return f"has no {_REPORT}"
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                if "/" not in name and (name == _REPORT or name.endswith(JUDGED)):
                    path = f"{self.root}/{name}"
                    if self.files.info(path)["size"] <= MAX_JSON:
                        self.files.get_file(path, str(Path(folder) / name))
            report, dense = Path(folder) / _REPORT, self.model / _REPORT
            if report.is_file() and dense.is_file() and report.read_bytes() == dense.read_bytes():
                return f"holds the model '{self.model}', of which it would be made"
            return foreign_name(names, Path(folder))

    @contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        """Turn any error of the file system into an OutputError that names the kept work."""
        try:
            yield
        except OutputError:
            raise
        except Exception as error:  # file systems may raise anything
            advice = ""
            if unfinished(self.staged):
                advice = f"; the same command goes on from '{partial_of(self.staged)}'"
            raise OutputError(
                f"'{self.url}' cannot be {verb}: {first_line(error)}{advice}"
            ) from error

    def check_usable(self, *, force: bool, restart: bool) -> None:
        """Raise OutputError unless a model can be written there."""
        with self._translated("used"):
            listing = self._listing()
            if restart or not unfinished(self.staged):  # else the journal knows the files there
                self._replaceable(listing, None, force)
        with self._translated("written"):
            probe = f"{self.root}/{_PROBE}"
            self.files.makedirs(self.root, exist_ok=True)
            self.files.pipe_file(probe, b"")
            self.files.rm_file(probe)


def destination(
    out: str | Path, model: Path, *, force: bool, restart: bool = False
) -> Path | Remote:
    """Resolve an output: a folder of this machine, given by path or URL, or a remote place.

    Raises OutputError where no model can be written to that URL, or none beside the folder `model`.
    """
    if not is_url(out):
        return path_of(out)
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    url = str(out)
    if "://" not in url:  # a Path has only one slash left
        url = re.sub(":/", ":///" if url.startswith(("file:", "local:")) else "://", url, count=1)
    try:
        files, root = url_to_fs(url)
    except ImportError as error:
        raise OutputError(f"'{url}' needs a package that is not installed: {error}") from error
    except Exception as error:  # file systems may raise anything
        raise OutputError(f"'{url}' cannot be used: {first_line(error)}") from error
    if isinstance(files, LocalFileSystem):
        return Path(root)
    if isinstance(files, MemoryFileSystem):
        raise OutputError(
            f"'{url}' is in the memory of this process, and would be gone with it: give a folder, "
            "or the URL of a server"
        )
    remote = Remote(url, files, root.rstrip("/"), _staged(url), model)
    remote.check_usable(force=force, restart=restart)
    return remote


def _arrived(
    journal: Journal, name: str, size_and_digest: tuple[int, str], listing: Listing
) -> bool:
    if (key := f"{_UPLOADING} {name}") not in journal or name not in listing:
        return False
    note, (size, digest), info = journal.facts(key), size_and_digest, listing[name]
    return note["sha256"] == digest and info["size"] == size and note["stamp"] == _stamp(info)


def _files(journal: Journal) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file of the model that is copied."""
    return {name: (size, sha) for name, (size, sha) in journal.facts(_UPLOADING)["files"].items()}


def _stamp(info: JsonDict) -> str:
    """Fact that changes where somebody else writes a file; empty if the file system has none."""
    return next((str(info[name]) for name in _STAMPS if info.get(name) is not None), "")


def _staged(url: str) -> Path:
    """Folder of a URL, so that a command continues its earlier run."""
    url = url.rstrip("/")
    name = re.sub(r"[^\w.-]", "-", url.rpartition("/")[2])[:40] or "model"
    return cache_folder() / "outputs" / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
