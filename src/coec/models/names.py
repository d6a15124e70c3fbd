"""Names of a model's tensors: in files, in the model that runs, and in this package.

This package has one matrix for every projection of every expert, a row for every output. The model
that runs may have one parameter for all experts of a block, transposed or interleaved, and files
may have either, under other names. How files become the model that runs is known to transformers;
its conversions are asked, and no table of names is kept here.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from coec.errors import ModelError
from coec.models.files import Header, Piece

loading: Any
try:  # transformers 4.57 has no conversions, and `Description.of` refuses models that need them
    loading = importlib.import_module("transformers.core_model_loading")
except ImportError:
    loading = None

LAYERS = "model.layers."
"""Start of the names of all tensors in layers."""
_PARAMETERS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""Parameters of all experts in the model that runs, and the projections in them."""
_NUMBER = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Stack:
    """Parameter of all experts, made of one tensor each: experts × (rows of its parts) × columns.

    Attributes:
        names: every expert's tensors, expert by expert.
        parts: number of tensors of an expert.
        transposed: rows are the last dimension.
        interleaved: rows of the parts alternate; otherwise each part follows the one before it.
    """

    names: tuple[str, ...]
    parts: int = 1
    transposed: bool = False
    interleaved: bool = False

    def pieces(self, shape: Sequence[int]) -> dict[str, Piece]:
        """Return where every expert's tensors are in a parameter of this shape."""
        rows = shape[2 if self.transposed else 1] // self.parts
        pieces = {}
        for number, name in enumerate(self.names):
            expert, part = divmod(number, self.parts)
            inside = slice(part * rows, (part + 1) * rows)
            inside = slice(part, None, self.parts) if self.interleaved else inside
            pieces[name] = Piece(expert, inside, self.transposed)
        return pieces

    def build(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the parameter, of the experts whose tensors are given."""
        present = [tensors[name] for name in self.names if name in tensors]
        starts = range(0, len(present), self.parts)
        experts = (present[start : start + self.parts] for start in starts)
        if self.interleaved:
            whole = [torch.stack(parts, dim=1).flatten(0, 1) for parts in experts]
        else:
            whole = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in experts]
        return torch.stack([e.T for e in whole] if self.transposed else whole)


@dataclass(frozen=True)
class Concatenation:
    """Parameter that is made of several tensors of files, one below the other.

    Attributes:
        names: the tensors.
        rows: number of rows of each.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]

    def build(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the parameter."""
        return torch.cat([tensors[name] for name in self.names])


Source = str | Stack | Concatenation
"""The same tensor in this package, or how a tensor is made of several."""


@dataclass(frozen=True, eq=False)
class Names:
    """Names of the tensors of one model; all are the same if `running` is empty.

    Attributes:
        running: source of every tensor of the model that runs.
        written: source of every tensor of the files that are written.
    """

    running: Mapping[str, Source] = field(default_factory=dict)
    written: Mapping[str, Source] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, layers: str, rows: Mapping[str, tuple[int, ...]]) -> "Names":
        """Ask transformers about a model on the meta device.

        Args:
            model: the skeleton.
            layers: the path of its layers, with a dot at the end.
            rows: of the parts of concatenations, as `rows_in` returns them; parts without are
                equal.

        Raises:
            ModelError: a conversion does more than to rename, split and concatenate.
        """
        state, place = model.state_dict(), placer(model)
        stacks = _stacks(model, layers)
        files: dict[str, list[tuple[int | None, str]]] = {}
        for stored in loading.revert_weight_conversion(model, dict(state)):
            name, part = place(stored)
            files.setdefault(name, []).append((part, stored))
        running: dict[str, Source] = {}
        written: dict[str, Source] = {}
        for name in state:
            source: str | Stack = stacks.get(name) or _canonical(name, layers)
            stored_in = sorted(files.get(name, [(None, name)]), key=lambda entry: entry[0] or 0)
            if [part for part, _ in stored_in] == [None]:
                running[name] = written[stored_in[0][1]] = source
            elif isinstance(source, Stack):
                running[name] = source
                written |= {file: _of_expert(source, file, part) for part, file in stored_in}
            else:
                module, _, kind = source.rpartition(".")
                parts = [f"{module}.{number}.{kind}" for number in range(len(stored_in))]
                sizes = rows.get(_in_block(parts[0]), ())
                if sum(sizes) != len(state[name]):
                    sizes = tuple(map(len, state[name].chunk(len(parts))))
                running[name] = Concatenation(tuple(parts), sizes)
                written |= {file: part for (_, file), part in zip(stored_in, parts, strict=True)}
        return cls(running, written)

    def in_model(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors as the model that runs has them; of some layers, or of some experts."""
        return _built(self.running, tensors) if self.running else dict(tensors)

    def in_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors as files have them."""
        return _built(self.written, tensors) if self.written else dict(tensors)

    def from_model(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Split the state of a model that runs: the inverse of `in_model`."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in state.items():
            tensors |= split(self.running.get(name, name), tensor)
        return tensors

    def rows_in(self, headers: Mapping[str, Header]) -> dict[str, tuple[int, ...]]:
        """Return the rows of the parts of concatenations, by the first part's name in its block.

        Args:
            headers: by names of this package.
        """
        return {
            _in_block(source.names[0]): tuple(headers[name].shape[0] for name in source.names)
            for source in self.running.values()
            if isinstance(source, Concatenation)
            and all(name in headers and headers[name].shape for name in source.names)
        }

    def of_headers(self, headers: Mapping[str, Header], place: "Place") -> dict[str, Header]:
        """Return the headers of files by names of this package, those of all experts apart.

        Args:
            headers: of all tensors, by their names in files.
            place: says where tensors belong whose names are not those that are written.

        Raises:
            ModelError: a tensor is in the files twice.
        """
        found: dict[str, Header] = {}
        for stored, header in headers.items():
            for name, one in self._of_header(stored, header, place):
                if name in found:
                    raise ModelError(
                        f"{found[name].stored} and {stored} of the files both hold {name}: loaders "
                        "differ in which they read"
                    )
                found[name] = one
        return found

    def _of_header(
        self, stored: str, header: Header, place: "Place"
    ) -> Iterable[tuple[str, Header]]:
        source = self.written.get(stored)
        if source is None:
            name, part = place(stored)
            source = self.running.get(name, stored)
            if isinstance(source, Stack) and part is not None:
                source = _of_expert(source, stored, part)
        if isinstance(source, str):
            return [(source, header)]
        if isinstance(source, Concatenation) or len(header.shape) < 2:
            return [(stored, header)]  # unknown: refused with all tensors that have no place
        pieces = source.pieces(header.shape)
        return [
            (name, replace(header, shape=piece.shape(header.shape), piece=piece))
            for name, piece in pieces.items()
        ]


def split(source: Source, tensor: Tensor) -> dict[str, Tensor]:
    """Split a tensor into what it is made of, by name."""
    if isinstance(source, str):
        return {source: tensor}
    if isinstance(source, Stack):
        pieces = source.pieces(tensor.shape)
        return {name: piece.of(tensor).contiguous() for name, piece in pieces.items()}
    return dict(zip(source.names, tensor.split(source.rows), strict=True))


def build(source: Source, read: Callable[[str], Tensor]) -> Tensor:
    """Return a tensor of what it is made of, which is read by name."""
    if isinstance(source, str):
        return read(source)
    return source.build({name: read(name) for name in source.names})


def _built(sources: Mapping[str, Source], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    built = {}
    for name, source in sources.items():
        if isinstance(source, str):
            if source in tensors:
                built[name] = tensors[source]
        elif not tensors.keys().isdisjoint(source.names):
            built[name] = source.build(tensors)
    return built


def _in_block(name: str) -> str:
    return name.removeprefix(LAYERS).partition(".")[2]


def _canonical(name: str, layers: str) -> str:
    return LAYERS + name.removeprefix(layers) if name.startswith(layers) else name


def _of_expert(stack: Stack, stored: str, part: int | None) -> str:
    """Return the tensor of an expert that files have by itself; its name has the number."""
    number = _NUMBER.search(stored)
    if number is None or part is None:
        raise ModelError(f"{stored} is converted in a way that is not supported")
    return stack.names[int(number[1]) * stack.parts + part]


def _stacks(model: nn.Module, layers: str) -> dict[str, Stack]:
    """Return the parameters of all experts of a model, by their names."""
    stacks = {}
    for path, module in model.named_modules():
        if not is_stack(module):
            continue
        prefix, transposed = _canonical(path, layers), is_transposed(module)
        for name, parameter in module.named_parameters(recurse=False):
            projection = name.removesuffix("_bias")
            if projection not in _PARAMETERS:
                continue
            parts, kind = _PARAMETERS[projection], "weight" if name == projection else "bias"
            names = (f"{prefix}.{n}.{p}.{kind}" for n in range(len(parameter)) for p in parts)
            interleaved = len(parts) > 1 and alternates(module)
            is_weight = parameter.ndim == 3
            stacks[f"{path}.{name}"] = Stack(
                tuple(names), len(parts), transposed and is_weight, interleaved
            )
    return stacks


def is_stack(module: nn.Module) -> bool:
    """Return whether a module has a parameter of all experts for each of their projections."""
    down = dict(module.named_parameters(recurse=False)).get("down_proj")
    return down is not None and down.ndim == 3


def is_transposed(experts: Any) -> bool:
    """Return whether the parameters of all experts have rows in their last dimension."""
    declared = getattr(experts, "is_transposed", None)
    if declared is not None or not hasattr(experts, "gate_up_proj"):
        return bool(declared)
    # Experts × hidden × 2 channels, or experts × 2 channels × hidden
    return bool(experts.down_proj.shape[2] * 2 != experts.gate_up_proj.shape[1])


def alternates(experts: Any) -> bool:
    """Return whether rows of the gate and of the up projection alternate, by the module's gate."""
    gate: Callable[[Tensor], Tensor] | None = getattr(experts, "_apply_gate", None)
    if gate is None:
        return False
    with torch.device("cpu"), torch.enable_grad():
        inputs = torch.linspace(0.1, 0.8, 8).requires_grad_()
        (derivative,) = torch.autograd.grad(gate(inputs[None])[0, 0], inputs)
    return bool(derivative[1] != 0)


Place = Callable[[str], tuple[str, int | None]]
"""Name of a tensor in files → its name in the model that runs, and which part of that it is if
several are concatenated."""


def placer(model: Any) -> Place:
    """Return where a model's tensors belong, by the conversions that transformers loads it with."""
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    known = mapping.get_model_conversion_mapping(model)
    renamings = [entry for entry in known if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in known if isinstance(entry, loading.WeightConverter)]
    parts = {
        pattern: part
        for converter in converters
        for part, pattern in enumerate(converter.source_patterns)
    }
    base, state = model.base_model_prefix, model.state_dict()

    def place(stored: str) -> tuple[str, int | None]:
        name, pattern = loading.rename_source_key(stored, renamings, converters, base, state)
        return name, None if pattern is None else parts[pattern]

    return place
