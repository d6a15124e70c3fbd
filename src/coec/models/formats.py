"""The stock format that a pruned model is written in, chosen before any work (docs/FORMATS.md).

transformers ≥ 5.4 refuses a Llama whose hidden size is not a multiple of its head count, at save
and at load, whatever `head_dim` says. The same weights under another model type compute the same
function, so the checkpoint is relabelled. Candidates are tried in order; the first that can
express the pruned shape and its biases, and whose configuration class accepts it, is used.
"""

import copy
import itertools
from dataclasses import dataclass, replace

from transformers import AutoConfig

from coec.errors import OptionError
from coec.models import non_uniform
from coec.models.architectures import ARCHITECTURES, Architecture
from coec.models.files import JsonDict
from coec.models.loaders import LOADERS, TARGETS, YES, Traits, loads_in, slides
from coec.models.shape import BLOCK_WIDTHS, Shape


@dataclass(frozen=True)
class OutputFormat:
    """The format of the pruned checkpoint.

    Attributes:
        config: the complete config.json.
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
        """The model type written."""
        return str(self.config["model_type"])


def choose_format(
    config: JsonDict,
    pruned: Shape,
    *,
    biased: frozenset[str] = frozenset(),
    target: str = "hf",
) -> OutputFormat:
    """Choose the first candidate format that expresses the pruned model.

    Args:
        config: the dense model's raw configuration.
        pruned: the sizes after pruning.
        biased: the sites whose consumer will have a bias, from the dense model or the compensation.
        target: the loader that has to load the checkpoint as it is, by its name in `TARGETS`;
            transformers always does.

    Raises:
        OptionError: no stock format can hold the result, or none that the target loads.
    """
    loader = LOADERS[TARGETS[target]]
    refusals: list[str] = []
    types = ARCHITECTURES[config["model_type"]].written_as
    for sizes, model_type in itertools.product(_written_sizes(config, pruned), types):
        architecture = ARCHITECTURES[model_type]
        refusal = _refusal(config, architecture, sizes, biased)
        new = {} if refusal else _rewritten(config, architecture, sizes, biased)
        refusal = refusal or _class_refusal(new)
        traits = Traits(model_type, new, sizes, biased)
        if refusal is None and target != "hf" and (verdict := loader.verdict(traits)) != YES:
            refusal = f"{loader.name}: {verdict}"
        if refusal is None:
            code = None
            if not pruned.uniform:
                code = non_uniform.code(model_type, architecture.class_name)
            relabelled = "; ".join(refusals) if model_type != config["model_type"] else None
            return OutputFormat(new, relabelled, loads_in(traits), code)
        refusals.append(f"not {model_type}: {refusal}")
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

    If widths differ by block, the common ones describe no block. They are those of the widest
    block, which servers count by, or those of the dense model, which no class refuses.
    """
    if pruned.uniform:
        return [pruned]
    dense = Shape.of(config)
    return [pruned, replace(pruned, kv_heads=dense.kv_heads, ffn=dense.ffn)]


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
    """Say why the installed transformers does not accept a configuration; None if it does."""
    try:
        AutoConfig.for_model(**copy.deepcopy(config))  # it changes its arguments
    except Exception as error:  # configuration classes may raise anything
        return (str(error).strip().splitlines() or [repr(error)])[-1].strip()
    return None


def _rewritten(
    config: JsonDict, target: Architecture, pruned: Shape, biased: frozenset[str]
) -> JsonDict:
    """The raw configuration with the pruned sizes, under the target's model type."""
    relabelled = target.model_type != config["model_type"]
    dropped = {"_name_or_path", "auto_map", BLOCK_WIDTHS, *(target.foreign if relabelled else ())}
    by_block: JsonDict = {}
    if not pruned.uniform:
        by_block = non_uniform.config_keys(pruned, target.model_type, target.class_name)
    return {
        **{key: value for key, value in config.items() if key not in dropped},
        "model_type": target.model_type,
        "architectures": [target.class_name],
        "head_dim": pruned.head_dim,
        **pruned.keys(),
        **by_block,
        **{flag: True for site, flag in target.bias_flags.items() if site in biased},
        **(target.added(pruned) if relabelled else {}),
    }
