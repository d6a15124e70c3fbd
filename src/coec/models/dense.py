"""Open models: the one place where a model's files are checked and its weights read.

Everything that is pruned, calibrated on, evaluated or compared is opened here, so that all of it
uses the same tensors, and a model that one part of the package refuses no other part accepts.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from coec.devices import dtype_name, is_finite
from coec.errors import ModelError, first_line
from coec.models import multimodal
from coec.models.architectures import WIDE
from coec.models.calls import compute_buffers, decoder_of
from coec.models.description import LAYER, Description, language_model
from coec.models.files import Header, JsonDict, opened, parse_json, read_headers
from coec.models.folder import GENERATION_CONFIG, find_model, read_config
from coec.models.headers import (
    check_headers,
    check_layers,
    drafts_of,
    has_separate_head,
    ignored_by,
)
from coec.models.layout import BlockLayout
from coec.models.multimodal import Around
from coec.models.names import placer
from coec.models.quantised import with_scales
from coec.models.surgery import dtype_of

OUTSIDE = ""
"""Stands for the weights outside of all blocks, instead of a block's prefix."""
_SAMPLED = 2**16
"""Bytes of every tensor that `Dense.fingerprint` reads."""


@dataclass(frozen=True, eq=False)
class Dense(Description):
    """An opened model: its files are complete, and agree with its configuration.

    Weights are read when they are needed; only then it is known whether they are finite, and their
    digests are noted. `fingerprint` checks a sample of them before work.

    Attributes:
        name: the model, as the user gave it.
        files: tensor name → file name in the folder.
        stored: tensor name → its header, of those in `carried` too.
        carried: tensors of a multimodal model around it, by name.
        stamps: size and time of every file when it was opened.
        dtype: dtype of the weights; the narrowest that holds all if they are mixed.
        notes: unusual facts about the model, one sentence each.
        hashes: dtype, shape and SHA-256 of the tensors read so far, by name.
        expected: prefix and digest that weights must have, and since when; set by `expect`.
    """

    name: str
    folder: Path
    files: dict[str, str]
    stored: dict[str, Header]
    carried: dict[str, Header]
    stamps: dict[str, tuple[int, int]]
    dtype: torch.dtype
    notes: tuple[str, ...]
    hashes: dict[str, str] = field(default_factory=dict, repr=False)
    expected: list[tuple[str, str, str]] = field(default_factory=list, repr=False)

    @classmethod
    def open(cls, model: "str | Path | Dense") -> "Dense":
        """Read configuration, index and every file's header; values are read later.

        Raises:
            ModelError: the model is missing, damaged, quantised or not supported.
        """
        if isinstance(model, Dense):
            return model
        folder = find_model(model)
        config = read_config(folder)
        headers = with_scales(read_headers(folder), config)
        notes: list[str] = []
        carried: dict[str, Header] = {}
        if around := multimodal.around(config, headers):
            config = language_model(config)
            headers, carried = around.split(headers)
            notes.append(
                f"this is the language model inside {around.name}: pruning carries its other "
                f"{len(carried)} tensors over as they are, a GGUF file leaves them out; programs "
                "were tried with language models alone"
            )
        described, headers = _described(folder, config, headers, notes)
        if not described.names.running:
            notes += _renamed(described, headers, around)
        dtype = check_headers(folder, headers, described.shapes)
        mix = {headers[name].dtype for name in described.shapes if not name.endswith(WIDE)}
        if len(mix) > 1:
            notes.append(
                f"weights are stored as {' and '.join(sorted(mix))}: what is written is "
                f"{dtype_name(dtype)}, which holds all of them, unless dtype says another"
            )
        # Read here only so that a bad one is refused before work.
        _generation_config(folder)
        stored = {name: headers[name] for name in described.shapes}
        files = {name: header.file for name, header in stored.items()}
        stored |= carried
        read_from = {file for header in stored.values() for file in header.files}
        stamps = {file: _stamp(folder / file) for file in sorted(read_from)}
        return cls(
            **vars(described) | {"around": around}, name=str(model), folder=folder.absolute(),
            files=files, stored=stored, carried=carried, stamps=stamps, dtype=dtype,
            notes=tuple(notes),
        )  # fmt: skip

    def tensor(self, name: str) -> Tensor:
        """Read a finite tensor, on the CPU in its stored dtype; raises ModelError for any other."""
        return self._noted(self.files[name], [name])[name]

    def around_it(self, name: str) -> Tensor:
        """Read a tensor of the multimodal model around it, as it is stored."""
        return self._read(self.carried[name].file, [name])[name]

    def outside_tensors(self) -> dict[str, Tensor]:
        """Read the tensors that are in no block, but for the head."""
        return {name: self.tensor(name) for name in self.outside}

    def tensors(self, block: BlockLayout) -> dict[str, Tensor]:
        """Read all tensors of a block, compared with the expected ones; keys are full names."""
        read: dict[str, Tensor] = {}
        for file, names in self._names_by_file.items():
            in_block = [name for name in names if name.startswith(block.prefix)]
            read |= self._noted(file, in_block) if in_block else {}
        self._compare(block.prefix)
        return {name: read[name] for name in self.files if name in read}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the configuration and of a sample of every weight; little is read.

        It identifies a model before work; `digest` covers every number. Tensors of up to _SAMPLED
        bytes enter completely, larger ones by four pieces. Raises ModelError if a sampled number is
        not finite.
        """
        # Every file is opened once.
        hashes: dict[str, str] = {}
        for file, names in self._names_by_file.items():
            for name, tensor in self._read(file, names).items():
                hashes[name] = _hashed(_finite(_sample(tensor), name, file), tuple(tensor.shape))
        return self._with_config(hashes)

    @property
    def digest(self) -> str:
        """SHA-256 of the configuration and of every weight; file names and shards play no part.

        Reads weights that were not read yet; raises ModelError if one is not finite.
        """
        # Read file by file, from beginning to end; the digest itself is in the order of names.
        by_file = sorted(self.files, key=lambda name: (self.files[name], name))
        return self._with_config({name: self._hash(name) for name in by_file})

    def check_values(self) -> None:
        """Read all weights, and raise ModelError naming the first that is not finite."""
        _ = self.digest

    def digests_of(self, blocks: Iterable[BlockLayout]) -> dict[str, str]:
        """SHA-256 of the weights of blocks, by prefix; and by OUTSIDE of those outside of all.

        Reads weights that were not read yet.
        """
        return {p: self._digest(p) for p in (OUTSIDE, *(block.prefix for block in blocks))}

    def expect(self, earlier: Iterable[tuple[Mapping[str, str], str]]) -> None:
        """Compare weights, whenever they are read from now on, with earlier digests.

        Args:
            earlier: digests as `digests_of` gives them, and the words that follow in the error.
        """
        self.expected[:] = [
            (prefix, digest, since)
            for digests, since in earlier
            for prefix, digest in digests.items()
        ]
        self._compare(OUTSIDE)

    def check_unchanged(self) -> None:
        """Read the expected weights that were not read yet; raise ModelError if they differ."""
        for prefix in sorted({prefix for prefix, _, _ in self.expected}):
            self._compare(prefix)

    def _compare(self, prefix: str) -> None:
        for expected_prefix, digest, since in self.expected:
            if expected_prefix == prefix and self._digest(prefix) != digest:
                place = prefix.strip(".") or "embedding, final norm or head"
                raise ModelError(f"'{self.name}' was changed ({place}) since {since}")

    def _digest(self, prefix: str) -> str:
        return _joined(f"{name} {self._hash(name)}" for name in self._names_by_prefix[prefix])

    def _hash(self, name: str) -> str:
        if name not in self.hashes:
            self.tensor(name)
        return self.hashes[name]

    @cached_property
    def _names_by_prefix(self) -> dict[str, list[str]]:
        """Names of tensors, by the prefix of their block, or OUTSIDE."""
        names: dict[str, list[str]] = {}
        for name in sorted(self.files):
            in_block = LAYER.match(name)
            names.setdefault(in_block[0] if in_block else OUTSIDE, []).append(name)
        return names

    def _with_config(self, hashes: Mapping[str, str]) -> str:
        config = json.dumps(self.config, sort_keys=True)
        lines = (f"{name} {hashes[name]}" for name in sorted(hashes))
        return _joined([hashlib.sha256(config.encode()).hexdigest(), *lines])

    def network(
        self, device: torch.device, dtype: torch.dtype, *, noted: bool = False
    ) -> PreTrainedModel:
        """Build the model in memory from exactly the tensors that were checked.

        transformers' own loader would choose the files itself, and fill missing weights with random
        numbers.

        Args:
            noted: also compute `hashes`, which takes time, and compare the expected weights.
        """
        # Skeleton on no device → buffers → tensors, checked → nothing may be left without values
        model: Any = self.skeleton(dtype)
        _, decoder = decoder_of(model)
        compute_buffers(decoder, torch.device("cpu"))
        read = self._noted if noted else self._read
        state = {
            # copied, since a mapped file may go
            name: _finite(tensor, name, file).to(device, dtype_of(name, dtype), copy=True)
            for file, names in self._names_by_file.items()
            for name, tensor in read(file, names).items()
        }
        if noted:
            self.check_unchanged()
        state = self.names.in_model(state)
        model.load_state_dict(state, assign=True, strict=not self.tied)
        if self.tied:
            model.tie_weights()
        missing = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
        if missing:
            raise ModelError(f"this release of transformers has a weight {missing[0]} of its own")
        model.generation_config = _generation_config(self.folder) or model.generation_config
        return model.to(device).eval()

    @cached_property
    def _names_by_file(self) -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = {}
        for name, file in sorted(self.files.items()):
            by_file.setdefault(file, []).append(name)
        return by_file

    def _noted(self, file: str, names: list[str]) -> dict[str, Tensor]:
        """Read tensors of one file, check that they are finite, and note their hashes."""
        read = self._read(file, names)
        for name, tensor in read.items():
            if name not in self.hashes:
                _finite(tensor, name, file)
                self.hashes[name] = _hashed(tensor, tuple(tensor.shape))
        return read

    def _read(self, file: str, names: list[str]) -> dict[str, Tensor]:
        """Read tensors of one file; raises ModelError if the file changed since it was opened."""
        path = self.folder / file
        with opened(path) as content:
            # Compared once it is open: a file that took its place before that has another stamp.
            if _stamp(path) != self.stamps[file]:
                raise ModelError(f"'{path}' was changed while it was in use: run again")
            return {name: self.stored[name].read(content, self.folder) for name in names}


def _described(
    folder: Path, config: JsonDict, headers: dict[str, Header], notes: list[str]
) -> tuple[Description, dict[str, Header]]:
    """Describe a model; return its headers by the names of this package, and add notes."""
    # Description → headers without draft layers → a separate head, if the weights have one
    described = Description.of(config)
    drafts = drafts_of(headers, config)
    if described.names.running:
        network = described.skeleton()
        headers = described.names.of_headers(headers, placer(network))
        drafts |= ignored_by(network, headers.keys() - described.shapes.keys())
        if parts := described.names.rows_in(headers):
            described = Description.of(config, replace(described.architecture, parts=parts))
    if drafts:
        headers = {name: header for name, header in headers.items() if name not in drafts}
        notes.append(
            f"{len(drafts)} tensors that draft further tokens ({min(drafts)}, …) are left out: "
            "what is written is for servers without such drafts"
        )
    check_layers(folder, headers, described.shape.layers)
    if described.released:
        notes.append(f"weights in {described.released} are read as bfloat16")
    if described.tied and has_separate_head(folder, headers, described.layout):
        untied = {**config, "tie_word_embeddings": False}
        described = Description.of(untied, described.architecture)
        notes.append(
            f"{described.layout.head} is kept apart from the embedding: config.json says that "
            "they are one, the weights differ"
        )
    return described, headers


def _renamed(
    described: Description, headers: Mapping[str, Header], around: Around | None
) -> Iterator[str]:
    """Yield a note if the names in files are not those that transformers writes."""
    stored_as = around.stored if around else str
    present = [name for name in described.shapes if name in headers]
    if renamed := [s for n in present if (s := headers[n].stored) != stored_as(n)]:
        yield (
            f"{len(renamed)} tensors have other names than transformers writes, such as "
            f"{renamed[0]}: the result has transformers' names"
        )


def _generation_config(folder: Path) -> GenerationConfig | None:
    """Read the file if there is one; raises ModelError for a bad one, which outputs would copy."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_dict(parse_json(path))
    except Exception as error:  # the class may raise anything
        raise ModelError(
            f"'{path}' cannot be used: {first_line(error)}; mend or remove it"
        ) from error


def _joined(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _sample(tensor: Tensor) -> Tensor:
    """A fixed sample of a tensor's numbers; all of a small one."""
    flat = tensor.reshape(-1)
    pieces, size = 4, _SAMPLED // 4 // tensor.dtype.itemsize
    if len(flat) <= pieces * size:
        return flat
    # Four pieces, evenly spaced from the first number to the last.
    starts = (n * (len(flat) - size) // (pieces - 1) for n in range(pieces))
    return torch.cat([flat[start : start + size] for start in starts])


def _hashed(tensor: Tensor, shape: tuple[int, ...]) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {shape} {hashlib.sha256(raw.data).hexdigest()}"


def _finite(tensor: Tensor, name: str, file: str) -> Tensor:
    if not is_finite(tensor):
        raise ModelError(f"{name} in '{file}' holds NaN or Inf: the checkpoint is damaged")
    return tensor


class Prefetcher:
    """Reads the blocks of a model in order, each while the block before it is computed.

    The context manager waits for its thread. At most two blocks are in memory; `last` is the index
    of the last one to read.
    """

    def __init__(self, dense: Dense, last: int) -> None:
        self._dense, self._last = dense, last
        self._thread = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[dict[str, Tensor]]] | None = None

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def tensors(self, block: BlockLayout) -> dict[str, Tensor]:
        """Read a block like `Dense.tensors`, and begin to read the block after it."""
        index, future = self._next or (-1, None)
        # Blocks asked for out of order are read here and now.
        read = future.result() if future and index == block.index else self._dense.tensors(block)
        self._next = None
        if block.index < self._last:
            following = self._dense.layout.blocks[block.index + 1]
            self._next = (following.index, self._thread.submit(self._dense.tensors, following))
        return read
