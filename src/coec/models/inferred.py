"""MLPs of a decoder that has no table of its own, inferred from its class (METHODS §1).

The class is built without memory, then anew with half of one size of the configuration. The tensors
that become smaller, and how, tell which projections that size belongs to: an MLP, experts or shared
experts. What mixes tokens keeps its shape, so it plays no part.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from coec.errors import ModelError, first_line
from coec.models.architectures import Experts, SitePattern
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


@dataclass(frozen=True)
class Inferred:
    """The MLPs of a decoder.

    Attributes:
        sites: their patterns.
        widths: field of `Shape` → configuration key with the number of channels.
        by_block: keys of these whose values are lists, with a number for every block.
        bias: configuration key that gives the projections of its MLP a bias, empty if they have
            one in any case; None without one.
        experts: its experts, if it has any.
    """

    sites: tuple[SitePattern, ...]
    widths: Mapping[str, str] = field(default_factory=dict)
    by_block: tuple[str, ...] = ()
    bias: str | None = None
    experts: Experts | None = None


@dataclass(frozen=True)
class _Change:
    """A tensor that another size makes smaller: along one dimension, by the same factor."""

    layer: int
    module: str
    parameter: str
    dim: int


def infer(config: JsonDict, model: Any, layers: str, build: Build) -> Inferred:
    """Find the MLPs of a model.

    Args:
        config: its raw configuration.
        model: the model on the meta device.
        layers: the path of its layers, with a dot at the end.
        build: builds it with another configuration.

    Raises:
        ModelError: no size of the configuration belongs to MLPs alone, with the reason.
    """
    found: dict[tuple[str, str], tuple[SitePattern, str]] = {}
    reasons: list[str] = []
    sizes = list(_sizes(config, model))
    for likely in (True, False):
        for key, value in sizes:
            if bool(_LIKELY.search(key)) is not likely:
                continue
            changes = _changes(model, layers, build, config, key, value)
            try:
                for pattern in _sites(model, layers, changes):
                    found.setdefault((pattern.name, pattern.consumer), (pattern, key))
            except ModelError as error:
                reasons.append(str(error))
        if found or reasons:  # what other sizes belong to is no MLP
            break
    if not found:
        why = reasons[0] if reasons else "no size in its configuration belongs to an MLP alone"
        raise ModelError(f"model type '{config['model_type']}' has no channels to remove: {why}")
    widths = _slots(found.values())
    fields = {key: name for name, key in widths.items()}
    sites = tuple(
        replace(pattern, counted_by=fields[key])
        for pattern, key in sorted(found.values(), key=lambda entry: _ORDER.index(entry[0].name))
    )
    routed = [site for site in sites if "{}" in site.consumer]
    lists = tuple(key for key, value in sizes if key in fields and isinstance(value, list))
    return Inferred(
        sites, widths, lists, _bias(config, model, build, sites, layers),
        _experts(config, model, layers, build, routed[0]) if routed else None,
    )  # fmt: skip


def _sizes(config: JsonDict, model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a configuration that may be sizes of an MLP."""
    for key, value in _given(config, model).items():
        numbers = value if isinstance(value, list) else [value]
        if numbers and all(type(n) is int and n >= _FEWEST for n in numbers):
            yield key, value


def _given(config: JsonDict, model: Any) -> JsonDict:
    """Return a configuration with the defaults of its class; its own keys come first."""
    return config | {k: v for k, v in model.config.to_dict().items() if k not in config}


def _halved(value: Any) -> Any:
    return [n // 2 for n in value] if isinstance(value, list) else value // 2


def _state(build: Build, config: JsonDict) -> dict[str, Tensor]:
    """Return the tensors of a model with another configuration; none where its class refuses."""
    try:
        state: dict[str, Tensor] = build(config).state_dict()
    except ModelError:
        return {}
    return state


def _changes(
    model: Any, layers: str, build: Build, config: JsonDict, key: str, value: Any
) -> list[_Change]:
    """Return what half of a size changes; nothing if it is not the size of single dimensions of
    tensors in layers.
    """
    before, smaller = model.state_dict(), _state(build, {**config, key: _halved(value)})
    if before.keys() != smaller.keys():
        return []
    changes = []
    for name, tensor in before.items():
        new = smaller[name]
        if tensor.shape == new.shape:
            continue
        dims = [d for d in range(tensor.ndim) if tensor.shape[d] != new.shape[d]]
        factors = {tensor.shape[d] / new.shape[d] for d in dims}
        if len(dims) != 1 or not name.startswith(layers) or factors - _factors(value):
            return []
        number, _, inside = name.removeprefix(layers).partition(".")
        module, _, parameter = inside.rpartition(".")
        changes.append(_Change(int(number), module, parameter, dims[0]))
    return changes


def _factors(value: Any) -> set[float]:
    numbers = value if isinstance(value, list) else [value]
    return {n / (n // 2) for n in numbers}


def _sites(model: Any, layers: str, changes: list[_Change]) -> Iterator[SitePattern]:
    """Yield the patterns of sites that explain all changes; raises ModelError if none do."""
    # Tensors by their layer and the module that holds the projections
    groups: dict[tuple[int, str], list[_Change]] = {}
    for change in changes:
        stacked = is_stack(_module(model, layers, change))
        parent = change.module if stacked else change.module.rpartition(".")[0]
        groups.setdefault((change.layer, parent), []).append(change)
    patterns: dict[int, dict[str, SitePattern]] = {}
    for (layer, parent), group in groups.items():
        of = _module(model, layers, group[0])
        if is_stack(of):
            pattern = _of_stack(parent, of)
        else:
            pattern = _of_linears(model, layers, parent, group)
        kinds = patterns.setdefault(layer, {})
        if pattern.name in kinds:
            raise ModelError(f"a layer has two modules of one size ({parent})")
        kinds[pattern.name] = pattern
    yield from dict.fromkeys(p for kinds in patterns.values() for p in kinds.values())


def _module(model: Any, layers: str, change: _Change) -> Any:
    return model.get_submodule(f"{layers}{change.layer}.{change.module}".rstrip("."))


def _of_stack(module: str, experts: Any) -> SitePattern:
    """Return the site of every expert in a module with parameters of all."""
    gated = hasattr(experts, "gate_up_proj")
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    producers = tuple(f"{module}.{{}}.{name}" for name in names)
    return _pattern("expert", producers, f"{module}.{{}}.down_proj")


def _of_linears(model: Any, layers: str, parent: str, group: list[_Change]) -> SitePattern:
    """Return the site of an MLP; raises ModelError unless its change is one of linear layers."""
    consumers, producers, columns = [], [], 0
    for change in group:
        linear = _module(model, layers, change)
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
    mlp = model.get_submodule(f"{layers}{group[0].layer}.{parent}".rstrip("."))
    if parent and _compares(mlp, pattern, columns):
        raise ModelError(f"{parent} compares channels with each other before {consumers[0]}")
    return pattern


class _Gives(nn.Module):
    """Stand-in for a projection that returns given numbers."""

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, _: Tensor) -> Tensor:
        return self.numbers


class _Notes(nn.Module):
    """Stand-in for a projection that notes its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.inputs = inputs
        return inputs


def _compares(mlp: nn.Module, pattern: SitePattern, columns: int) -> bool:
    """Return whether an MLP computes some of its channels from others, such as by a mean over all.

    The projections are stand-ins; half of the channels must come out as they do among all. Raises
    ModelError if it is called with more than hidden states.
    """
    numbers = torch.randn(2, columns, generator=torch.Generator().manual_seed(0))

    def read(size: int) -> Tensor:
        copied, noting = copy.deepcopy(mlp), _Notes()
        for number, module in enumerate(pattern.producers):
            rows = numbers if pattern.projections == 2 else numbers[number % 2 : number % 2 + 1]
            given = _Gives(rows[:, :size].reshape(1, 1, -1))
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


def _slots(found: Any) -> dict[str, str]:
    """Assign a field of `Shape` to every configuration key."""
    widths: dict[str, str] = {}
    for pattern, key in found:
        if key in widths.values():
            continue
        wanted = "ffn" if key == "intermediate_size" else _SLOTS[pattern.name]
        free = [slot for slot in (wanted, *_SLOTS.values()) if slot not in widths]
        widths[free[0]] = key
    return widths


def _bias(
    config: JsonDict, model: Any, build: Build, sites: tuple[SitePattern, ...], layers: str
) -> str | None:
    """Return the configuration key that gives the consumers of MLPs a bias; None without one.

    It is empty if they have one in any case.
    """
    consumers = {site.consumer for site in sites if site.name == "mlp"}
    if any(name.endswith(f".{c}.bias") for name in model.state_dict() for c in consumers):
        return ""
    given = _given(config, model)
    for key in (key for key, value in given.items() if "bias" in key and value is False):
        added = _state(build, {**config, key: True}).keys() - model.state_dict().keys()
        inside = {name.removeprefix(layers).partition(".")[2] for name in added}
        if consumers and {f"{consumer}.bias" for consumer in consumers} <= inside:
            return str(key)
    return None


def _experts(config: JsonDict, model: Any, layers: str, build: Build, site: SitePattern) -> Experts:
    """Return the experts of a model, with the tensors that have a dimension of their number."""
    module = site.consumer.partition(".{}")[0]
    count = next(
        len(of.down_proj) for name, of in model.named_modules() if name.endswith(f".{module}")
    )
    given = _given(config, model)
    keys = (
        key for key in given
        if _COUNTS.search(key) and not _NOT_COUNTS.search(key)
        and given[key] in (count, [count] * len(model.get_submodule(layers[:-1])))
    )  # fmt: skip
    before = model.state_dict()
    for key in keys:
        fewer = _state(build, {**config, key: _halved(given[key])})
        router: dict[str, int] = {}
        for name, tensor in before.items():
            if name not in fewer or tensor.shape == fewer[name].shape:
                continue
            inside = name.removeprefix(layers).partition(".")[2]
            if not inside.startswith(f"{module}."):
                router[inside] = list(tensor.shape).index(count)
        if router:
            return Experts(module, key, isinstance(given[key], list), tuple(router.items()))
    return Experts(module)


def chosen_experts(config: Any) -> int:
    """Return how many experts every token goes to; 0 if the configuration does not say."""
    for key in ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k"):
        value = getattr(config, key, None)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int):
            return value
    return 0
