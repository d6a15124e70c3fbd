"""The one door through which models are opened: checked first, then read.

Whatever is pruned, calibrated on, evaluated or compared comes through here, so that all of it is
made of the same tensors, and what one part of the package refuses no other accepts.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from coec.errors import ModelError
from coec.models.architectures import architecture_of
from coec.models.description import (
    Description,
    compute_buffers,
    described,
    find_model,
    read_config,
)
from coec.models.experts import stacked
from coec.models.files import FLOAT_DTYPES, opened, parse_json
from coec.models.layout import BlockLayout
from coec.models.raw_checkpoint import LAYER, Header, headers_of
from coec.models.shape import Shape

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OUTSIDE, OUTER = "", "embedding, final norm or head"
"""What stands for the weights outside of all blocks, and their name."""
SAMPLED = 2**16
"""Bytes of every tensor that `Dense.fingerprint` reads."""
PARAMETER = re.compile(r"(model|lm_head)\..*(weight|bias)")
"""Names of tensors that would change what a model computes, if its configuration knew them."""


@dataclass(frozen=True, eq=False)
class Dense(Description):
    """An opened model: its files are whole, and hold what its configuration says.

    Weights are read once, when their turn comes: whether they are finite is seen then, and what
    they are is noted for `digest`. What is wrong with many of them, `fingerprint` sees before.

    Attributes:
        name: as it was asked for.
        folder: where its files are, absolute.
        files: tensor name → file name.
        stamps: size and time of every file when it was opened; a file that changes later is
            refused.
        dtype: of the weights; where they are mixed, the narrowest that holds them all.
        notes: what is unusual about it, one sentence each.
        hashes: of the tensors read so far, by name: dtype, shape and SHA-256 of the content.
        expected: what weights have to be, as `expect` has it.
    """

    name: str
    folder: Path
    files: dict[str, str]
    stamps: dict[str, tuple[int, int]]
    dtype: torch.dtype
    notes: tuple[str, ...]
    hashes: dict[str, str] = field(default_factory=dict, repr=False)
    expected: list[tuple[str, str, str]] = field(default_factory=list, repr=False)

    @classmethod
    def open(cls, model: "str | Path | Dense") -> "Dense":
        """Reads configuration, index and every file's header; values are read later.

        Raises:
            ModelError: the model is not there, damaged, quantised or not supported.
        """
        if isinstance(model, Dense):
            return model
        folder = find_model(model)
        config = read_config(folder)
        headers = headers_of(folder)
        _check_layers(folder, headers, config)
        facts = described(config)
        notes: list[str] = []
        if facts["tied"] and _has_own_head(folder, headers):
            facts = described({**config, "tie_word_embeddings": False})
            notes.append(
                f"{HEAD} is kept apart from the embedding: config.json says that they are one, "
                "the weights differ"
            )
        dtype = _check(folder, headers, facts["shapes"])
        if {headers[name].kind for name in facts["shapes"]} == {"F16", "BF16"}:
            notes.append(
                "some weights are float16, others bfloat16: what is written is float32, which "
                "holds both, unless the setting dtype says another"
            )
        _generation_config(folder)
        files = {name: headers[name].file for name in facts["shapes"]}
        stamps = {file: _stamp(folder / file) for file in sorted(set(files.values()))}
        return cls(**facts, name=str(model), folder=folder.absolute(), files=files, stamps=stamps,
                   dtype=dtype, notes=tuple(notes))  # fmt: skip

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU in its stored dtype; raises ModelError if it is not finite."""
        return self._noted(self.files[name], [name])[name]

    def tensors(self, block: BlockLayout) -> dict[str, Tensor]:
        """All tensors of a block, by their full names.

        Raises:
            ModelError: one of them is not finite, or not what is expected.
        """
        found: dict[str, Tensor] = {}
        for file, names in self._names_by_file().items():
            own = [name for name in names if name.startswith(block.prefix)]
            found |= self._noted(file, own) if own else {}
        self._compare(block.prefix)
        return {name: found[name] for name in self.files if name in found}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the configuration and of a sample of every weight: little is read.

        Tells one model from another before work; `digest` vouches for every number. Tensors of up
        to SAMPLED bytes are in it as a whole, of others four pieces.

        Raises:
            ModelError: a number that is seen is not finite.
        """
        hashes: dict[str, str] = {}
        for file, names in self._names_by_file().items():
            for name, tensor in self._read(file, names).items():
                hashes[name] = _hashed(_finite(_sample(tensor), name, file), tuple(tensor.shape))
        return self._with_config(hashes)

    @property
    def digest(self) -> str:
        """SHA-256 of the configuration and of every weight: what tells one model from another.

        The files' names and cuts play no part. Reads what was not read yet.

        Raises:
            ModelError: a weight is not finite.
        """
        for file, names in self._names_by_file().items():
            for name in names:
                if name not in self.hashes:
                    self._noted(file, [name])
        return self._with_config(self.hashes)

    def check_values(self) -> None:
        """Raises ModelError naming the first weight that is not finite; reads all of them."""
        _ = self.digest

    def digests_of(self, blocks: Iterable[BlockLayout]) -> dict[str, str]:
        """SHA-256 of the weights of blocks, by prefix; and, by OUTSIDE, of those outside of all.

        Reads what was not read yet.
        """
        return {part: self._digest(part) for part in (OUTSIDE, *(block.prefix for block in blocks))}

    def expect(self, earlier: Iterable[tuple[Mapping[str, str], str]]) -> None:
        """From now on weights are compared, when they are read, with what they were earlier.

        Args:
            earlier: digests as in `digests_of`, and the words that follow when others are found.

        Raises:
            ModelError: those outside of all blocks, which are read now, are others.
        """
        self.expected[:] = [
            (part, digest, advice) for known, advice in earlier for part, digest in known.items()
        ]
        self._compare(OUTSIDE)

    def check_unchanged(self) -> None:
        """Reads what was not read yet of what is expected; raises ModelError where it is other."""
        for part in sorted({part for part, _, _ in self.expected}):
            self._compare(part)

    def _compare(self, part: str) -> None:
        for known, digest, advice in self.expected:
            if known == part and self._digest(part) != digest:
                raise ModelError(
                    f"'{self.name}' was changed ({part.strip('.') or OUTER}) since {advice}"
                )

    def _digest(self, part: str) -> str:
        """SHA-256 of the weights of a block, or of those outside of all blocks."""
        names = self._parts[part]
        for name in names:
            if name not in self.hashes:
                self.tensor(name)
        return hashlib.sha256(
            "\n".join(f"{n} {self.hashes[n]}" for n in names).encode()
        ).hexdigest()

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        """The names of tensors, by the prefix of their block."""
        parts: dict[str, list[str]] = {block.prefix: [] for block in self.layout.blocks}
        prefixes = tuple(parts)
        for name in sorted(self.files):
            inside = name.startswith(prefixes)
            prefix = next((p for p in prefixes if name.startswith(p)), "") if inside else OUTSIDE
            parts.setdefault(prefix, []).append(name)
        return parts

    def _with_config(self, hashes: dict[str, str]) -> str:
        """One digest of the configuration and of what is known of every tensor."""
        config = json.dumps(self.config, sort_keys=True)
        lines = [f"{name} {hashes[name]}" for name in sorted(hashes)]
        content = [hashlib.sha256(config.encode()).hexdigest(), *lines]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()

    def network(
        self, device: torch.device, dtype: torch.dtype, *, noted: bool = False
    ) -> PreTrainedModel:
        """The model in memory, made of exactly the tensors that were checked.

        transformers' own loader would pick the files itself, and fill with random numbers what it
        does not find there.

        Args:
            device: where.
            dtype: of its weights.
            noted: whether `hashes` has them then, which takes time.

        Raises:
            ModelError: a weight is not finite, or this release of transformers has others.
        """
        model: Any = self.skeleton(dtype)
        compute_buffers(model, torch.device("cpu"))
        state = {
            # no map of a file that may go
            name: _finite(tensor, name, file).to(device, dtype, copy=True)
            for file, names in self._names_by_file().items()
            for name, tensor in (self._noted if noted else self._read)(file, names).items()
        }
        state = stacked(state, self.architecture.blocks.experts)
        model.load_state_dict(state, assign=True, strict=not self.tied)
        if self.tied:
            model.tie_weights()
        left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
        if left:
            raise ModelError(f"this release of transformers has a weight {left[0]} of its own")
        model.generation_config = _generation_config(self.folder) or model.generation_config
        return model.to(device).eval()

    def _names_by_file(self) -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = {}
        for name, file in sorted(self.files.items()):
            by_file.setdefault(file, []).append(name)
        return by_file

    def _noted(self, file: str, names: list[str]) -> dict[str, Tensor]:
        """Tensors of one file, found to be finite and noted."""
        found = self._read(file, names)
        for name, tensor in found.items():
            if name not in self.hashes:
                _finite(tensor, name, file)
                self.hashes[name] = _hashed(tensor, tuple(tensor.shape))
        return found

    def _read(self, file: str, names: list[str]) -> dict[str, Tensor]:
        """Tensors of one file; raises ModelError if it is no longer the one that was checked."""
        path = self.folder / file
        with opened(path) as content:
            if _stamp(path) != self.stamps[file]:
                raise ModelError(f"'{path}' was changed while it was in use: run again")
            return {name: content.get_tensor(name) for name in names}


def _generation_config(folder: Path) -> GenerationConfig | None:
    """Raises ModelError where the file is there and bad: it would travel with every output."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_dict(parse_json(path))
    except Exception as error:  # the class raises what it likes
        reason = " ".join(str(error).split())
        raise ModelError(f"'{path}' cannot be used: {reason}; mend or remove it") from error


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _check_layers(folder: Path, headers: dict[str, Header], config: dict[str, Any]) -> None:
    """The files hold as many layers as the configuration says; known before any is built."""
    architecture_of(config)
    layers = Shape.of(config).layers
    first: dict[int, str] = {}
    for name in headers:
        if found := LAYER.match(name):
            first.setdefault(int(found[1]), name)
    beyond = next((name for number, name in sorted(first.items()) if number >= layers), None)
    if beyond:
        raise ModelError(
            f"'{folder}' holds more layers than the {layers} in config.json "
            f"(first: {beyond}); mend num_hidden_layers"
        )
    if first and (missing := next((n for n in range(layers) if n not in first), None)) is not None:
        raise ModelError(
            f"'{folder}' lacks layer {missing} of the {layers} in config.json; download it again, "
            "or mend num_hidden_layers"
        )


def _has_own_head(folder: Path, headers: dict[str, Header]) -> bool:
    """Whether a head is stored that is not the embedding, although both are said to be one.

    A copy in a narrower dtype is none of its own.
    """
    if HEAD not in headers or EMBEDDING not in headers:
        return False
    one, two = (_stored(folder / headers[name].file, name) for name in (HEAD, EMBEDDING))
    if one.shape != two.shape:
        return True
    narrow = min(one.dtype, two.dtype, key=lambda dtype: dtype.itemsize)
    return not torch.equal(one.to(narrow), two.to(narrow))


def _stored(path: Path, name: str) -> Tensor:
    with opened(path) as file:
        return file.get_tensor(name)


def _check(
    folder: Path, headers: dict[str, Header], expected: dict[str, torch.Size]
) -> torch.dtype:
    """Every expected tensor is there, of its shape, and float; returns what holds all of them."""
    missing = [name for name in expected if name not in headers]
    if missing:
        raise ModelError(
            f"'{folder}' lacks {len(missing)} of {len(expected)} tensors "
            f"(first: {missing[0]}); download it again"
        )
    for name, header in headers.items():
        where = f"{name} in '{header.file}'"
        if name not in expected:
            if PARAMETER.fullmatch(name) and name != HEAD:
                raise ModelError(
                    f"{where} has no place in a model of this config.json: it would be dropped; "
                    "mend the configuration (a bias has a flag there), or the files"
                )
            continue
        if header.kind not in FLOAT_DTYPES:
            raise ModelError(
                f"{where} is {header.kind}: the weights are quantised; pruning needs float weights"
            )
        if header.shape != tuple(expected[name]):
            raise ModelError(
                f"{where} has shape {header.shape}, config.json says {tuple(expected[name])}"
            )
    dtypes = {FLOAT_DTYPES[headers[name].kind] for name in expected}
    return functools.reduce(torch.promote_types, sorted(dtypes, key=str))


def _sample(tensor: Tensor) -> Tensor:
    """Some of a tensor's numbers, always the same: all of a small one."""
    flat = tensor.reshape(-1)
    pieces, size = 4, SAMPLED // 4 // tensor.dtype.itemsize
    if len(flat) <= pieces * size:
        return flat
    starts = (n * (len(flat) - size) // (pieces - 1) for n in range(pieces))
    return torch.cat([flat[start : start + size] for start in starts])


def _hashed(tensor: Tensor, shape: tuple[int, ...]) -> str:
    """Dtype, shape and SHA-256 of a tensor's bytes."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {shape} {hashlib.sha256(raw.data).hexdigest()}"


def _finite(tensor: Tensor, name: str, file: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise ModelError(f"{name} in '{file}' holds NaN or Inf: the checkpoint is damaged")
    return tensor
