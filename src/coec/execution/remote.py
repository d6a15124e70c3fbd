"""Outputs at a URL of any file system that fsspec knows, such as s3:// and gs://.

A model is made in a folder of this machine, with a journal, as ever; when it is whole it is copied
to its place, the configuration last, without which no program takes it for a model. The journal
has every file that arrived there, so that a copy that was cut off goes on with the others.
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
from coec.execution.output import check_judged, is_url, partial_of
from coec.models.companion_files import JUDGED, foreign_name, incomplete
from coec.models.files import MAX_JSON, cache_folder

CONFIG, REPORT = "config.json", "coec.json"
PROBE = ".coec-writable"
UPLOADING = "uploading"
"""The note of a journal that the copy has begun: which files it has, and what was there before."""
STAMPS = (
    "ETag", "etag", "md5Hash", "content_md5", "mtime", "modified", "LastModified", "last_modified",
    "updated", "modify", "created",
)  # fmt: skip
"""What file systems say of a file that changes with its content, the surest first."""


@dataclass(frozen=True)
class Remote:
    """A place for a model beyond this machine's folders; made by `destination`.

    Attributes:
        url: as it was asked for.
        files: its file system.
        root: the folder there.
        staged: the folder of this machine where the model is made first.
        model: the folder of the dense model, which must not be what is in the place.
    """

    url: str
    files: Any
    root: str
    staged: Path
    model: Path

    def check(self, done: Journal, force: bool) -> None:
        """Raises OutputError unless the place is free, may be replaced, or holds our own copy."""
        with self._reached("used"):
            self._judged(self._listing(), done, force)

    def whole(self, done: Journal) -> bool:
        """Whether an earlier run had made the model, and all of it is here or there."""
        if UPLOADING not in done:
            return False
        files = _files(done)
        if all(name in done for name in files):
            return True
        with self._reached("used"):  # it was killed while it tidied up
            listing = self._listing()
            if not all(_arrived(done, name, files[name], listing) for name in files):
                return False
            self.files.get_file(self._path(REPORT), str(done.new / REPORT))
        return True

    def put(self, done: Journal, force: bool) -> None:
        """Copies the whole model of a journal there; what else was in the place goes.

        Files that arrived before, and are still what they were, are not copied again.

        Raises:
            OutputError: the place refuses, or holds what is nobody's model; ours is kept.
        """
        with self._reached("written"):
            listing = self._listing()
            there = self._judged(listing, done, force)
            if not self.whole(done):
                done.note(UPLOADING, files=done.recorded(), there=sorted(there))
            files = _files(done)
            missing = [name for name in files if not _arrived(done, name, files[name], listing)]
            if missing and CONFIG in listing:  # it is no model until it is whole
                self.files.rm_file(self._path(CONFIG))
            copied = sorted({*missing, CONFIG} if missing else (), key=lambda n: (n == CONFIG, n))
            for name in copied:
                if name == CONFIG:  # what is left of another model goes before it
                    for old in (there & listing.keys()) - files.keys():
                        self.files.rm_file(self._path(old))
                self._copy(done, name, *files[name])

    def _copy(self, done: Journal, name: str, size: int, digest: str) -> None:
        path = self._path(name)
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.files.put_file(str(done.new / name), path)
        self.files.invalidate_cache()
        info = self.files.info(path)
        if info["size"] != size:
            raise OSError(f"'{name}' has {info['size']} bytes there, {size} here")
        done.note(_noted(name), sha256=digest, stamp=_stamp(info))

    def _listing(self) -> dict[str, dict[str, Any]]:
        """What is known of every file there, by its path inside the place."""
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
        return {name: info for name, info in names.items() if name not in ("", PROBE)}

    def _judged(self, names: Iterable[str], done: Journal | None, force: bool) -> set[str]:
        """The files there, all of which may go; raises OutputError otherwise."""
        names = set(names)
        if done is not None and UPLOADING in done:
            begun = done.facts(UPLOADING)
            known = {*begun["files"], *begun["there"]}
            if strange := sorted(names - known):
                raise OutputError(
                    f"'{self.url}' holds '{strange[0]}', which appeared while the model was "
                    "copied there: move it away, and give the same command again"
                )
            return known
        if names:
            check_judged(self.url, force, lambda: self._foreign(names))
        return names

    def _foreign(self, names: set[str]) -> str | None:
        """As `foreign_entry` of a folder, which must be a model that coec wrote besides."""
        if REPORT not in names:
            return f"has no {REPORT}"
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                if "/" not in name and (name == REPORT or name.endswith(JUDGED)):
                    path = self._path(name)
                    if self.files.info(path)["size"] <= MAX_JSON:
                        self.files.get_file(path, str(Path(folder) / name))
            report, other = Path(folder) / REPORT, self.model / REPORT
            if report.is_file() and other.is_file() and report.read_bytes() == other.read_bytes():
                return f"holds the model '{self.model}', of which it would be made"
            return foreign_name(names, Path(folder)) or incomplete(names, Path(folder))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    @contextmanager
    def _reached(self, what: str) -> Iterator[None]:
        """Errors of the file system as ours, with what the same command would go on from."""
        try:
            yield
        except OutputError:
            raise
        except Exception as error:  # file systems raise what they like
            kept = ""
            if unfinished(self.staged):
                kept = f"; the same command goes on from '{partial_of(self.staged)}'"
            raise OutputError(
                f"'{self.url}' cannot be {what}: {first_line(error)}{kept}"
            ) from error

    def _check_writable(self) -> None:
        probe = self._path(PROBE)
        self.files.makedirs(self.root, exist_ok=True)
        self.files.pipe_file(probe, b"")
        self.files.rm_file(probe)


def destination(
    out: str | Path, model: Path, *, force: bool, restart: bool = False
) -> Path | Remote:
    """Where a model is to be made: a folder of this machine, also by its URL, or a place beyond.

    Args:
        out: a path or a URL.
        model: the folder of the dense model.
        force: replace a model that coec wrote there.
        restart: what an earlier run had copied there is not gone on with.

    Raises:
        OutputError: no model can be written to that URL.
    """
    if not is_url(out):
        return Path(out)
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    url = str(out)
    if "://" not in url:  # it was taken for a path, which has no two slashes
        url = re.sub(":/", ":///" if url.startswith(("file:", "local:")) else "://", url, count=1)
    try:
        files, root = url_to_fs(url)
    except ImportError as error:
        raise OutputError(f"'{url}' needs a package that is not installed: {error}") from error
    except Exception as error:  # file systems raise what they like
        raise OutputError(f"'{url}' cannot be used: {first_line(error)}") from error
    if isinstance(files, LocalFileSystem):
        return Path(root)
    if isinstance(files, MemoryFileSystem):
        raise OutputError(
            f"'{url}' is in the memory of this process, and would be gone with it: give a folder, "
            "or the URL of a server"
        )
    remote = Remote(url, files, root.rstrip("/"), _staged(url), model)
    with remote._reached("used"):
        listing = remote._listing()
        if restart or not unfinished(remote.staged):  # else the journal tells what is there
            remote._judged(listing, None, force)
    with remote._reached("written"):
        remote._check_writable()
    return remote


def _arrived(
    done: Journal, name: str, known: tuple[int, str], listing: dict[str, dict[str, Any]]
) -> bool:
    """Whether a file was copied, and what is there is still what was there then."""
    if _noted(name) not in done or name not in listing:
        return False
    note, (size, digest), info = done.facts(_noted(name)), known, listing[name]
    return note["sha256"] == digest and info["size"] == size and note["stamp"] == _stamp(info)


def _files(done: Journal) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file of the model that is copied."""
    return {name: (size, sha) for name, (size, sha) in done.facts(UPLOADING)["files"].items()}


def _noted(name: str) -> str:
    """The note of a journal that a file has arrived."""
    return f"{UPLOADING} {name}"


def _stamp(info: dict[str, Any]) -> str:
    """What changes where somebody else writes a file; empty where its file system says nothing."""
    return next((str(info[name]) for name in STAMPS if info.get(name) is not None), "")


def _staged(url: str) -> Path:
    """One folder for every URL: the same command finds what it had begun."""
    url = url.rstrip("/")
    name = re.sub(r"[^\w.-]", "-", url.rpartition("/")[2])[:40] or "model"
    return cache_folder() / "outputs" / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
