"""Which stock format a pruned model is written in, decided before any work (docs/FORMATS.md).

transformers ≥ 5.4 refuses a Llama whose hidden size is not a multiple of its head count, at save
and at load, whatever `head_dim` says. The same weights under another model type compute the same
function, so the checkpoint is relabelled. Candidates are tried in order; the first that can
express the pruned shape and its biases, and whose configuration class accepts it, is used.
"""

import copy
import itertools
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig

from coec.errors import OptionError
from coec.models import non_uniform
from coec.models.architectures import ARCHITECTURES, Architecture
from coec.models.loaders import TARGETS, YES, Stored, loads_in, slides, verdict
from coec.models.shape import BLOCK_WIDTHS, Shape


@dataclass(frozen=True)
class OutputFormat:
    """The format of the pruned checkpoint.

    Attributes:
        config: the whole config.json.
        relabelled: whether the model type changed, and why.
        loads_in: loader → `yes` or what to know.
        code: the Python code that goes with it, where no stock class builds the model.
    """

    config: dict[str, Any]
    relabelled: str | None
    loads_in: dict[str, str]
    code: str | None = None

    @property
    def model_type(self) -> str:
        """The model type written."""
        return str(self.config["model_type"])


def choose_format(
    config: dict[str, Any],
    pruned: Shape,
    *,
    biased: frozenset[str] = frozenset(),
    target: str = "hf",
) -> OutputFormat:
    """The first candidate format that expresses the pruned model.

    Args:
        config: the dense model's raw configuration.
        pruned: its sizes afterwards.
        biased: the sites whose consumer will have a bias, its own or the compensation's.
        target: the loader that has to load it as it is, as `TARGETS` names them; transformers
            always does.

    Raises:
        OptionError: no stock format can hold the result, or none that the target loads.
    """
    refusals: list[str] = []
    types = ARCHITECTURES[config["model_type"]].written_as
    for sizes, model_type in itertools.product(_written_with(config, pruned), types):
        architecture = ARCHITECTURES[model_type]
        refusal = _refusal(config, architecture, sizes, biased)
        if refusal is None:
            new = _rewritten(config, architecture, sizes, biased)
            try:
                AutoConfig.for_model(**copy.deepcopy(new))  # it changes what it is given
            except Exception as error:  # whatever a configuration class raises is its refusal
                refusal = (str(error).strip().splitlines() or [repr(error)])[-1].strip()
        if refusal is None:
            stored = Stored(new, sizes, biased)
            found = verdict(TARGETS[target], model_type, stored)
            if target == "hf" or found == YES:
                code = (
                    None
                    if pruned.uniform
                    else non_uniform.code(model_type, architecture.class_name)
                )
                loads = loads_in(model_type, stored)
                relabelled = "; ".join(refusals) if model_type != config["model_type"] else None
                return OutputFormat(new, relabelled, loads, code)
            refusal = f"{TARGETS[target]}: {found}"
        refusals.append(f"not {model_type}: {refusal}")
    advice = (
        "choose another sparsity (attention_sparsity = 0 keeps all heads), or a compensation "
        "without a bias"
    )
    if target == "hf":
        raise OptionError(
            f"no stock format can hold this pruned model ({'; '.join(refusals)}); {advice}"
        )
    raise OptionError(
        f"no stock format can hold this pruned model so that {TARGETS[target]} loads it "
        f"({'; '.join(refusals)}); leave out target"
        + (", and write the result with coec export" if target == "llama.cpp" else "")
    )


def _written_with(config: dict[str, Any], pruned: Shape) -> list[Shape]:
    """The sizes that the configuration may be written with.

    Where widths differ by block those that are common to all say nothing about any block: they are
    of the widest one, which servers count by, or the dense model's, which no class refuses.
    """
    if pruned.uniform:
        return [pruned]
    dense = Shape.of(config)
    return [pruned, replace(pruned, kv_heads=dense.kv_heads, ffn=dense.ffn)]


def _refusal(
    config: dict[str, Any], target: Architecture, pruned: Shape, biased: frozenset[str]
) -> str | None:
    """Why the target cannot express the model, whatever the installed transformers says."""
    for site in target.blocks.sites:
        if site.name in biased and site.name not in target.bias_flags:
            return f"it has no bias on {site.consumer.rpartition('.')[2]}"
    if target.model_type != config["model_type"] and slides(config):
        return "it has no sliding window"
    return target.refuses(config, pruned)


def _rewritten(
    config: dict[str, Any], target: Architecture, pruned: Shape, biased: frozenset[str]
) -> dict[str, Any]:
    """The raw configuration with the pruned sizes, under the target's model type."""
    relabelled = target.model_type != config["model_type"]
    left = {"_name_or_path", "auto_map", BLOCK_WIDTHS, *(target.foreign if relabelled else ())}
    return {
        **{key: value for key, value in config.items() if key not in left},
        "model_type": target.model_type,
        "architectures": [target.class_name],
        "head_dim": pruned.head_dim,
        **pruned.keys(),
        **(
            {}
            if pruned.uniform
            else non_uniform.config_keys(pruned, target.model_type, target.class_name)
        ),
        **{flag: True for site, flag in target.bias_flags.items() if site in biased},
        **(target.added(pruned) if relabelled else {}),
    }
