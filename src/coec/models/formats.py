"""The stock format that a pruned model is written in, chosen before any work (docs/FORMATS.md).

transformers ≥ 5.4 refuses a Llama whose hidden size is not a multiple of its head count, at save
and at load, whatever `head_dim` says. The same weights under another model type compute the same
function, so the checkpoint is relabelled. Candidates are tried in order; the first that can
express the pruned shape and its biases, and whose configuration class accepts it, is used. Programs
that load a checkpoint as it is, and their limits, are data in `loaders.toml`.
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig

from coec.errors import OptionError, last_line
from coec.models import non_uniform
from coec.models.architectures import ARCHITECTURES, ATTENTION, MLP, Architecture, packaged
from coec.models.description import LAYER
from coec.models.files import JsonDict, decoded
from coec.models.layout import BLOCK_WIDTHS, EXPERT_COUNTS, Shape, Site

YES, UNKNOWN = "yes", "not known"
TARGETS = {"hf": "transformers", "vllm": "vLLM", "llama.cpp": "llama.cpp"}
"""Loader of every value of the setting `target`."""
_LAYERS = "num_hidden_layers"
_BY_BLOCK = ("layer_types", "no_rope_layers")
"""Lists with an entry for every block that a class derives from numbers where they are absent."""
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_INDICES, _STEP = "mlp_only_layers", "decoder_sparse_step"
"""Blocks without experts: so many of the first, these, and all but every so many."""
_WITH_EXPERTS, _LAST = "moe_layers", "moe_layer_end_index"
"""Blocks with experts: these, and none after this one; -1 is the last."""


@dataclass(frozen=True)
class Traits:
    """The properties of a stored checkpoint that loaders disagree on.

    `biased` names the sites whose consumer has a bias; `fewer_blocks` tells that some are left out.
    """

    model_type: str
    config: JsonDict
    sizes: Shape
    biased: frozenset[str]
    fewer_blocks: bool = False


def slides(config: JsonDict) -> bool:
    """True if any layer of a raw configuration sees less than the longest text."""
    window, layers = config.get("sliding_window"), config.get("layer_types")
    if window is None or not config.get("use_sliding_window", True):
        return False
    if isinstance(layers, list) and "sliding_attention" not in layers:
        return False
    if layers is None and (config.get("max_window_layers") or 0) >= config["num_hidden_layers"]:
        return False  # Qwen's window begins at this layer
    # A window as long as the model's positions hides nothing.
    positions = config.get("max_position_embeddings")
    return not isinstance(positions, int) or window < positions


def _heads_differ(sizes: Shape) -> bool:
    blocks = map(sizes.at, range(sizes.layers))
    return len({(block.kv_heads, block.group) for block in blocks}) > 1


_CONDITIONS: Mapping[str, Callable[[Traits], bool]] = {
    "fewer_heads": lambda traits: traits.sizes.heads * traits.sizes.head_dim != traits.sizes.hidden,
    "output_bias": lambda traits: ATTENTION.name in traits.biased,
    "down_bias": lambda traits: MLP.name in traits.biased,
    "new_biases": lambda traits: bool(traits.biased),
    "sliding": lambda traits: slides(traits.config),
    "non_uniform": lambda traits: BLOCK_WIDTHS in traits.config,
    "non_uniform_heads": lambda traits: _heads_differ(traits.sizes),
    "odd_channels": lambda traits: not non_uniform.whole_multiples(traits.sizes),
    "odd_experts": lambda traits: bool((traits.sizes.expert_ffn or traits.sizes.ffn) % 32),
    "kinds_moved": lambda traits: (
        traits.fewer_blocks
        and any(len(set(kinds)) > 1 for kinds in _kinds(_resolved(traits.config)).values())
    ),
    "llama3_positions": lambda traits: any(
        isinstance(form := traits.config.get(key), dict) and form.get("rope_type") == "llama3"
        for key in ("rope_scaling", "rope_parameters")
    ),
}


@dataclass(frozen=True)
class Incompatibility:
    """A case in which a loader does not do as transformers does.

    It holds for some model types (None for all), under a condition (None for always).
    """

    verdict: str
    types: tuple[str, ...] | None = None
    when: str | None = None


@dataclass(frozen=True)
class Loader:
    """A program that loads checkpoints.

    Attributes:
        checked: the versions, and how they were checked.
        types: the model types that were tried; None for all. Of others nothing is known.
        exceptions: the first that holds gives the verdict.
    """

    name: str
    checked: str
    types: tuple[str, ...] | None = None
    exceptions: tuple[Incompatibility, ...] = ()

    @classmethod
    def of(cls, table: JsonDict) -> "Loader":
        """Read a table of `loaders.toml`."""
        cases = tuple(Incompatibility(**case) for case in table.get("exceptions", ()))
        return cls(**table | {"exceptions": cases})

    def verdict(self, traits: Traits) -> str:
        """`yes`, or what to know before loading the checkpoint."""
        for case in self.exceptions:
            of_type = case.types is None or traits.model_type in case.types
            if of_type and (case.when is None or _CONDITIONS[case.when](traits)):
                return case.verdict
        return YES if self.types is None or traits.model_type in self.types else UNKNOWN


LOADERS = {table["name"]: Loader.of(table) for table in packaged("loaders.toml")["loaders"]}


@dataclass(frozen=True)
class OutputFormat:
    """The format of the pruned checkpoint: its complete config.json, and what to know of it.

    Attributes:
        relabelled: why the model type changed; None if it did not.
        loads_in: loader → `yes` or what to know.
        code: the Python code that goes with it, if no stock class builds the model.
    """

    config: JsonDict
    relabelled: str | None
    loads_in: dict[str, str]
    code: str | None = None

    @property
    def model_type(self) -> str:
        """The model type written; for widths by block in our own format, the stock type."""
        nas = non_uniform.BLOCK_CONFIGS in self.config
        return non_uniform.NAS if nas else str(self.config["model_type"])


def choose_format(
    config: JsonDict,
    pruned: Shape,
    architecture: Architecture,
    *,
    biased: frozenset[str] = frozenset(),
    target: str = "hf",
    relabel: bool = True,
    fewer_blocks: bool = False,
) -> OutputFormat:
    """Choose the first candidate format that expresses the pruned model.

    Args:
        config: the dense model's raw configuration.
        pruned: the pruned sizes.
        architecture: that of the dense model.
        biased: the sites whose consumer will have a bias, from the dense model or the compensation.
        target: the loader that has to load the checkpoint as it is, by its name in `TARGETS`;
            transformers always does.
        relabel: whether another model type will do.
        fewer_blocks: whether blocks are left out.

    Raises:
        OptionError: no stock format can hold the result, or none that the target loads.
    """
    # Sizes × model types, in order of preference → first that expresses, that its class accepts and
    # that the target loads; every refusal is kept for the error.
    loader = LOADERS[TARGETS[target]]
    refusals: list[str] = []
    types = architecture.written_as if relabel else (architecture.model_type,)
    all_sizes = [pruned] if architecture.inferred else _written_sizes(config, pruned)
    own_code = not pruned.uniform and not architecture.by_block
    nas = target == "vllm" and not pruned.uniform
    checked = target != "hf" and not nas  # how the loader treats Nemotron-NAS is known
    if nas:
        refusals = [f"not {config['model_type']}: all its blocks have one width"]
        types, all_sizes = (non_uniform.NAS_STOCK,), [pruned]
    for sizes, model_type in itertools.product(all_sizes, types):
        target_type = (
            architecture if model_type == architecture.model_type else ARCHITECTURES[model_type]
        )
        # Architecture → configuration → its class → target, each asked if the previous ones agree
        refusal = _nas_refusal(config, sizes) if nas else None
        refusal = refusal or _refusal(config, target_type, sizes, biased)
        new = {} if refusal else _rewritten(config, target_type, sizes, biased, nas=nas)
        refusal = refusal or _class_refusal(new)
        stored_type = non_uniform.NAS if nas else model_type
        traits = Traits(stored_type, new, sizes, biased, fewer_blocks)
        if refusal is None and checked and (verdict := loader.verdict(traits)) != YES:
            refusal = f"{loader.name}: {verdict}"
        if refusal is None:
            name = target_type.class_name
            code = non_uniform.code(model_type, name, nas=nas) if own_code else None
            relabelled = "; ".join(refusals) if traits.model_type != config["model_type"] else None
            loads_in = {name: loader.verdict(traits) for name, loader in LOADERS.items()}
            return OutputFormat(new, relabelled, loads_in, code)
        refusals.append(f"not {traits.model_type}: {refusal}")
    raise _no_format(target, "; ".join(refusals))


def _no_format(target: str, refusals: str) -> OptionError:
    if target == "hf":
        return OptionError(
            f"no stock format can hold this pruned model ({refusals}); choose another sparsity "
            "(attention_sparsity = 0 keeps all heads), or a compensation without a bias"
        )
    export = ", and write the result with coec export" if target == "llama.cpp" else ""
    return OptionError(
        f"no stock format can hold this pruned model so that {TARGETS[target]} loads it "
        f"({refusals}); leave out target{export}"
    )


def _written_sizes(config: JsonDict, pruned: Shape) -> list[Shape]:
    """The sizes that the configuration may be written with.

    If widths differ by block, the common widths describe no block. They are the widths of the
    widest block, which servers count by, or of the dense model, which no class refuses.
    """
    if pruned.uniform:
        return [pruned]
    dense = Shape.of(config)
    return [pruned, replace(pruned, kv_heads=dense.kv_heads, group=dense.group, ffn=dense.ffn)]


def _nas_refusal(config: JsonDict, pruned: Shape) -> str | None:
    """Say why Nemotron-NAS cannot express the model."""
    listed = ARCHITECTURES.get(config["model_type"])
    if listed is None or non_uniform.NAS_STOCK not in listed.written_as:
        return f"it computes what a Llama does, and {config['model_type']} something else"
    if slides(config):
        return "it has no sliding window"
    return "it has as many heads in every block" if _heads_differ(pruned) else None


def _refusal(
    config: JsonDict, target: Architecture, pruned: Shape, biased: frozenset[str]
) -> str | None:
    """Say why the target cannot express the model, in any release of transformers."""
    for site in target.blocks.sites:
        if site.name in biased and site.name not in target.bias_flags:
            return f"it has no bias on {site.consumer.rpartition('.')[2]}"
    if target.model_type != config["model_type"] and slides(config):
        return "it has no sliding window"
    return target.refuses(config, pruned)


def _class_refusal(config: JsonDict) -> str | None:
    try:
        _resolved(config)
    except Exception as error:  # configuration classes may raise anything
        return last_line(error)
    return None


def _rewritten(
    config: JsonDict, target: Architecture, pruned: Shape, biased: frozenset[str], *, nas: bool
) -> JsonDict:
    """The raw configuration with the pruned sizes, under the target's model type."""
    relabelled = target.model_type != config["model_type"]
    # Later keys win: the dense configuration, the pruned sizes, widths by block, bias flags.
    removed = {"_name_or_path", "auto_map", BLOCK_WIDTHS, non_uniform.BLOCK_CONFIGS}
    dropped = removed.union(target.foreign if relabelled else ())
    keys = (pruned, target.model_type, target.class_name)
    stock = pruned.uniform or target.by_block
    by_block = {} if stock else non_uniform.config_keys(*keys, nas=nas)
    return {
        **{key: value for key, value in config.items() if key not in dropped},
        "model_type": target.model_type,
        "architectures": [target.class_name],
        **({} if target.attention_kept else {"head_dim": pruned.head_dim}),
        **{key: pruned.experts for key in EXPERT_COUNTS if type(config.get(key)) is int},
        **target.sizes(pruned),
        **by_block,
        **{flag: True for site, flag in target.bias_flags.items() if flag and site in biased},
        **(target.added(pruned) if relabelled else {}),
    }


_K_BLOCK, _BLOCK = 256, 32
"""Weights of a row that K-quants store together, and Q5_0 and Q8_0 do, which stand in for them
where they divide the row; F16 stands in where not even these do."""


def stand_in(site: Site, units: int) -> str | None:
    """State llama.cpp's types instead of K-quants; None if the dense width is no better.

    Args:
        site: the kind of site, and `units` the number that it keeps.
    """
    columns = units * site.columns_per_unit
    if site.routed or site.columns % _K_BLOCK or columns % _K_BLOCK == 0:
        return None
    stored_as = "F16" if columns % _BLOCK else "Q5_0 and Q8_0"
    module = site.consumer.rpartition(".")[2]
    advice = "; multiple_of = 256 rounds up" if site.value is None else ""
    slow = "" if columns % 8 == 0 else ", and matrix units of GPUs want multiples of 8 at least"
    return (
        f"{module} reads {columns:,} columns, no multiple of {_K_BLOCK}: llama.cpp stores it as "
        f"{stored_as} in the place of K-quants{slow}{advice}"
    )


def without_blocks(config: JsonDict, dropped: Collection[int]) -> JsonDict:
    """Return a raw configuration with fewer blocks; lists with an entry for each lose theirs.

    What follows from the number of a block is listed, or counted anew: it would be another's.
    Raises OptionError where the class takes no list.
    """
    if not dropped:
        return config
    resolved = _resolved(config)
    layers = resolved.num_hidden_layers
    stay = [index for index in range(layers) if index not in dropped]

    def shortened(value: Any) -> Any:
        whole = isinstance(value, list) and len(value) == layers
        return [value[index] for index in stay] if whole else value

    kinds = _kinds(resolved)
    given = {key: value for key, value in kinds.items() if not _is_derived(resolved, key)}
    short = {key: shortened(value) for key, value in (config | given).items()}
    short |= {_LAYERS: len(stay)} if _LAYERS in config else {}
    for key in _FIRST:
        if isinstance(first := getattr(resolved, key, None), int):
            short[key] = sum(index < first for index in stay)
    if (last := getattr(resolved, _LAST, -1)) != -1:
        short[_LAST] = sum(index <= last for index in stay) - 1
    if (numbers := getattr(resolved, _WITH_EXPERTS, None)) is not None:
        short[_WITH_EXPERTS] = [number for number, index in enumerate(stay) if index in numbers]
    if (step := config.get(_STEP, 1)) > 1 or config.get(_INDICES):
        dense = {index for index in range(layers) if (index + 1) % step}.union(
            config.get(_INDICES) or ()
        )
        short[_INDICES] = [number for number, index in enumerate(stay) if index in dense]
        short[_STEP] = 1
    if _kinds(_resolved(short)) != {key: shortened(value) for key, value in kinds.items()}:
        raise OptionError(
            f"drop_blocks is not supported for {config['model_type']}: the kinds of its blocks "
            "follow from their numbers; leave it out"
        )
    return short


def _kinds(resolved: Any) -> dict[str, list[Any]]:
    """Return the lists of `_BY_BLOCK` as the class has them, given or derived; none it lacks."""
    return {key: value for key in _BY_BLOCK if (value := getattr(resolved, key, None))}


def _is_derived(resolved: Any, key: str) -> bool:
    """Return whether a class computes the value of a key, and takes no other."""
    own = getattr(type(resolved), resolved.attribute_map.get(key, key), None)
    return isinstance(own, property) and own.fset is None


def _resolved(config: JsonDict) -> Any:
    """Return a configuration as its class completes it; the code of a folder plays no part."""
    plain = {key: value for key, value in decoded(config).items() if key != "auto_map"}
    return AutoConfig.for_model(**plain)


def renumbered(name: str, dropped: Collection[int]) -> str | None:
    """Return the name of a tensor where blocks before it are left out; None for one of these."""
    match = LAYER.match(name)
    if match is None:
        return name
    index = int(match[1])
    before = sum(other < index for other in dropped)
    return None if index in dropped else f"model.layers.{index - before}.{name[match.end() :]}"
