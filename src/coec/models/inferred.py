"""MLPs of a decoder that has no table of its own, inferred from its class (METHODS §1).

The class is built without memory, then anew with half of one size of the configuration. The tensors
that become smaller, and how, tell which projections that size belongs to: an MLP, experts or shared
experts. What mixes tokens keeps its shape, so it plays no part.
"""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from coec.errors import ModelError, first_line
from coec.models.architectures import MLP, Architecture, BlockPattern, Experts, SitePattern
from coec.models.files import JsonDict
from coec.models.names import is_stack

Build = Callable[[JsonDict], Any]
"""A configuration → the model on the meta device; raises ModelError where the class refuses."""
_LIKELY = re.compile(r"inter|ff|mlp|inner|expert|moe")
"""Part of the names of most sizes that belong to MLPs; others are tried if these give nothing."""
_GATES = ("gate_proj", "w1", "gate")
"""Usual names of the projection that an activation follows; the up projection comes last."""
_SLOTS = {"mlp": "ffn", "expert": "expert_ffn", "shared": "shared_ffn"}
"""Field of `Shape` that counts the channels of a kind of site."""
_ORDER = ("mlp", "shared", "expert")
"""Order of the sites of a block."""
_COUNTS = re.compile(r"expert")
_NOT_COUNTS = re.compile(r"per_tok|topk|top_k|shared|size|dim|group|capacity")
_FEWEST = 8
"""Channels below which no size is taken for one of an MLP."""


@dataclass(frozen=True, eq=False)
class _Decoder:
    """A model on the meta device, and its class.

    Attributes:
        config: its raw configuration.
        model: the model.
        layers: the path of its layers, with a dot at the end.
        build: builds it with another configuration.
    """

    config: JsonDict
    model: Any
    layers: str
    build: Build

    @property
    def given(self) -> JsonDict:
        """The configuration with the defaults of its class; its own keys come first."""
        return self.config | self.model.config.to_dict() | self.config

    def state_with(self, key: str, value: Any) -> dict[str, Tensor]:
        """Return the tensors with another value of a key; none where the class refuses it."""
        try:
            state: dict[str, Tensor] = self.build({**self.config, key: value}).state_dict()
        except ModelError:
            return {}
        return state

    def module(self, layer: int, path: str) -> Any:
        """Return a module of a layer, or the layer itself."""
        return self.model.get_submodule(f"{self.layers}{layer}.{path}".rstrip("."))

    def inside(self, name: str) -> str:
        """Return the name of a tensor relative to its layer."""
        return name.removeprefix(self.layers).partition(".")[2]


@dataclass(frozen=True)
class _Change:
    """A tensor that another size makes smaller: along one dimension, by the same factor."""

    layer: int
    module: str
    parameter: str
    dim: int


def infer(
    architecture: Architecture, config: JsonDict, model: Any, layers: str, build: Build
) -> Architecture:
    """Return an architecture with the MLPs and experts of a model.

    Args:
        architecture: that of its type, with the sites of attention alone.
        config: its raw configuration.
        model: the model on the meta device.
        layers: the path of its layers, with a dot at the end.
        build: builds it with another configuration.

    Raises:
        ModelError: no size of the configuration belongs to MLPs alone, with the reason.
    """
    decoder = _Decoder(config, model, layers, build)
    found: dict[tuple[str, str], tuple[SitePattern, str]] = {}
    reasons: list[str] = []
    sizes = {key: value for key, value in decoder.given.items() if _may_be_channels(value)}
    for likely in (True, False):
        for key in (key for key in sizes if bool(_LIKELY.search(key)) is likely):
            try:
                for pattern in _sites(decoder, _changes(decoder, key, sizes[key])):
                    found.setdefault((pattern.name, pattern.consumer), (pattern, key))
            except ModelError as error:
                reasons.append(str(error))
        if found or reasons:  # what other sizes belong to is no MLP
            break
    if not found:
        why = reasons[0] if reasons else "no size in its configuration belongs to an MLP alone"
        raise ModelError(f"model type '{config['model_type']}' has no channels to remove: {why}")
    fields = _fields(list(found.values()))
    sites = tuple(
        replace(pattern, counted_by=fields[key])
        for pattern, key in sorted(found.values(), key=lambda entry: _ORDER.index(entry[0].name))
    )
    routed = next((site for site in sites if "{}" in site.consumer), None)
    experts = None if routed is None else _experts(decoder, routed)
    flag = _bias(decoder, {site.consumer for site in sites if site.name == MLP.name})
    return replace(
        architecture,
        blocks=BlockPattern((*architecture.blocks.sites, *sites), experts),
        widths={name: key for key, name in fields.items()},
        by_block=tuple(key for key in sizes if key in fields and isinstance(sizes[key], list)),
        bias_flags={**architecture.bias_flags, **({} if flag is None else {MLP.name: flag})},
    )


def _numbers(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _may_be_channels(value: Any) -> bool:
    numbers = _numbers(value)
    return bool(numbers) and all(type(n) is int and n >= _FEWEST for n in numbers)


def _halved(value: Any) -> Any:
    return [n // 2 for n in value] if isinstance(value, list) else value // 2


def _changes(decoder: _Decoder, key: str, value: Any) -> list[_Change]:
    """Return what half of a size changes; nothing if it is not the size of single dimensions of
    tensors in layers.
    """
    before, smaller = decoder.model.state_dict(), decoder.state_with(key, _halved(value))
    if before.keys() != smaller.keys():
        return []
    expected = {n / (n // 2) for n in _numbers(value)}
    changes = []
    for name, tensor in before.items():
        new = smaller[name]
        if tensor.shape == new.shape:
            continue
        dims = [d for d in range(tensor.ndim) if tensor.shape[d] != new.shape[d]]
        factors = {tensor.shape[d] / new.shape[d] for d in dims}
        if len(dims) != 1 or not name.startswith(decoder.layers) or factors - expected:
            return []
        number, _, inside = name.removeprefix(decoder.layers).partition(".")
        module, _, parameter = inside.rpartition(".")
        changes.append(_Change(int(number), module, parameter, dims[0]))
    return changes


def _sites(decoder: _Decoder, changes: list[_Change]) -> Iterator[SitePattern]:
    """Yield the patterns of sites that explain all changes; raises ModelError if none do."""
    # Tensors by their layer and the module that holds the projections
    groups: dict[tuple[int, str], list[_Change]] = {}
    for change in changes:
        stacked = is_stack(decoder.module(change.layer, change.module))
        parent = change.module if stacked else change.module.rpartition(".")[0]
        groups.setdefault((change.layer, parent), []).append(change)
    patterns: dict[int, dict[str, SitePattern]] = {}
    for (layer, parent), group in groups.items():
        module = decoder.module(layer, group[0].module)
        if is_stack(module):  # a site for every expert
            gated = hasattr(module, "gate_up_proj")
            names = ("gate_proj", "up_proj") if gated else ("up_proj",)
            producers = tuple(f"{parent}.{{}}.{name}" for name in names)
            pattern = _pattern("expert", producers, f"{parent}.{{}}.down_proj")
        else:
            pattern = _of_linears(decoder, parent, group)
        kinds = patterns.setdefault(layer, {})
        if pattern.name in kinds:
            raise ModelError(f"a layer has two modules of one size ({parent})")
        kinds[pattern.name] = pattern
    yield from dict.fromkeys(p for kinds in patterns.values() for p in kinds.values())


def _of_linears(decoder: _Decoder, parent: str, group: list[_Change]) -> SitePattern:
    """Return the site of an MLP; raises ModelError unless its change is one of linear layers."""
    consumers, producers, columns = [], [], 0
    for change in group:
        linear = decoder.module(change.layer, change.module)
        if not isinstance(linear, nn.Linear):
            raise ModelError(
                f"{change.module}.{change.parameter} has numbers for every channel and is no "
                "linear layer"
            )
        if change.parameter == "weight" and change.dim == 1:
            consumers.append(change.module)
            columns = linear.in_features
        elif change.parameter == "weight":
            producers.append((change.module, linear.out_features))
    if len(consumers) != 1 or not producers:
        raise ModelError(f"{parent} has no single projection that reads its channels")
    rows = {size for _, size in producers}
    fused = rows == {2 * columns} and len(producers) == 1
    if rows != {columns} and not fused:
        raise ModelError(f"the projections in {parent} do not have as many rows as channels")
    order = sorted(producers, key=lambda entry: entry[0].rpartition(".")[2] not in _GATES)
    name = "shared" if "shared" in parent else "mlp"
    pattern = _pattern(name, tuple(m for m, _ in order), consumers[0], 2 if fused else 1)
    if parent and _compares(decoder.module(group[0].layer, parent), pattern, columns):
        raise ModelError(f"{parent} compares channels with each other before {consumers[0]}")
    return pattern


class _StandIn(nn.Module):
    """Stand-in for a projection that notes its inputs, and returns given numbers or them."""

    def __init__(self, numbers: Tensor | None = None) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, inputs: Tensor) -> Tensor:
        self.inputs = inputs
        return inputs if self.numbers is None else self.numbers


def _compares(mlp: nn.Module, pattern: SitePattern, columns: int) -> bool:
    """Return whether an MLP computes some of its channels from others, such as by a mean over all.

    The projections are stand-ins; half of the channels must come out as they do among all. Raises
    ModelError if it is called with more than hidden states.
    """
    numbers = torch.randn(2, columns, generator=torch.Generator().manual_seed(0))

    def read(size: int) -> Tensor:
        copied, noting = copy.deepcopy(mlp), _StandIn()
        for number, module in enumerate(pattern.producers):
            rows = numbers if pattern.projections == 2 else numbers[number % 2 : number % 2 + 1]
            given = _StandIn(rows[:, :size].reshape(1, 1, -1))
            setattr(copied, module.rpartition(".")[2], given)
        setattr(copied, pattern.consumer.rpartition(".")[2], noting)
        copied.to_empty(device="cpu")
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.data.fill_(0.5)
        copied(torch.zeros(1, 1, 1))
        return noting.inputs

    try:
        whole, half = read(columns), read(columns // 2)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ModelError(
            f"a {type(mlp).__name__} cannot be run on hidden states alone ({first_line(error)})"
        ) from error
    return not torch.allclose(whole[..., : columns // 2], half, atol=1e-5)


def _pattern(
    name: str, producers: tuple[str, ...], consumer: str, projections: int = 1
) -> SitePattern:
    return SitePattern(
        name, "intermediate channel", "", producers, consumer, projections=projections
    )


def _fields(found: list[tuple[SitePattern, str]]) -> dict[str, str]:
    """Assign a field of `Shape` to every configuration key."""
    fields: dict[str, str] = {}
    for pattern, key in found:
        if key not in fields:
            usual = "ffn" if key == "intermediate_size" else _SLOTS[pattern.name]
            free = (slot for slot in (usual, *_SLOTS.values()) if slot not in fields.values())
            fields[key] = next(free)
    return fields


def _bias(decoder: _Decoder, consumers: set[str]) -> str | None:
    """Return the configuration key that gives the consumers of MLPs a bias; None without one.

    It is empty if they have one in any case.
    """
    before = decoder.model.state_dict()
    biases = {f"{consumer}.bias" for consumer in consumers}
    if any(name.endswith(f".{bias}") for name in before for bias in biases):
        return ""
    for key, value in decoder.given.items():
        if biases and "bias" in key and value is False:
            added = decoder.state_with(key, True).keys() - before.keys()
            if biases <= set(map(decoder.inside, added)):
                return str(key)
    return None


def _experts(decoder: _Decoder, site: SitePattern) -> Experts:
    """Return the experts of a model, with the tensors that have a dimension of their number."""
    module = site.consumer.partition(".{}")[0]
    before, given = decoder.model.state_dict(), decoder.given
    count = next(
        len(experts.down_proj)
        for name, experts in decoder.model.named_modules()
        if name.endswith(f".{module}")
    )
    blocks = len(decoder.model.get_submodule(decoder.layers[:-1]))
    for key, value in given.items():
        named = _COUNTS.search(key) and not _NOT_COUNTS.search(key)
        if not named or value not in (count, [count] * blocks):
            continue
        fewer = decoder.state_with(key, _halved(value))
        router = {
            decoder.inside(name): list(tensor.shape).index(count)
            for name, tensor in before.items()
            if name in fewer and tensor.shape != fewer[name].shape
            and not decoder.inside(name).startswith(f"{module}.")
        }  # fmt: skip
        if router:
            return Experts(module, key, isinstance(value, list), tuple(router.items()))
    return Experts(module)


def chosen_experts(config: Any) -> int:
    """Return how many experts every token goes to; 0 if the configuration does not say."""
    for key in ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k"):
        value = getattr(config, key, None)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int):
            return value
    return 0
