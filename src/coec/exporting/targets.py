"""llama.cpp's architectures as values, and the model types that each may hold.

Every cell of these tables was decided by running llama.cpp on a random model and comparing logits
(docs/FORMATS.md); a model that no target computes is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from coec.errors import ModelError
from coec.exporting.hyperparameters import FACTORS, Hyperparameters
from coec.models.description import Description


@dataclass(frozen=True)
class ExportTarget:
    """An architecture of llama.cpp.

    Attributes:
        interleaved: True where it turns neighbouring rows of queries and keys, while transformers
            turns a row and the one half a head further on: the rows are then stored in its order.
        biases: projections that may have one.
        factors: True where it reads a factor for every rotary frequency.
        multipliers: True where it multiplies embeddings, attention, residuals and logits.
        by_block: True where every block may have widths of its own.
    """

    name: str
    interleaved: bool
    biases: frozenset[str]
    factors: bool = False
    multipliers: bool = False
    by_block: bool = False

    def refusal(self, model: Hyperparameters, tensors: Iterable[str]) -> str | None:
        """Reason why it does not compute a model of these tensors; None where it does."""
        if not (model.uniform or self.by_block):
            return "its blocks are all of one width"
        if model.multipliers and not self.multipliers:
            return f"it has no {', '.join(model.multipliers)}"
        if model.rotary.scaling == FACTORS and not self.factors:
            return "it reads no factors of rotary frequencies (rope_type llama3)"
        for name in tensors:
            module, _, suffix = name.rpartition(".")
            if suffix == "bias" and module.rpartition(".")[2] not in self.biases:
                return f"it has no {name}"
        return None


_ALL = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
_LLAMA = ExportTarget("llama", interleaved=True, biases=_ALL, factors=True)
_GRANITE = ExportTarget("granite", interleaved=True, biases=_ALL, factors=True, multipliers=True)
_DECI = ExportTarget("deci", interleaved=True, biases=_ALL, factors=True, by_block=True)
_QWEN3 = ExportTarget("qwen3", interleaved=False, biases=frozenset())

TARGETS: dict[str, tuple[ExportTarget, ...]] = {
    "llama": (_LLAMA, _DECI),
    "mistral": (_LLAMA, _DECI),
    "qwen2": (_LLAMA, _DECI),  # llama.cpp's own qwen2 takes heads for as wide as the hidden states
    "qwen3": (_QWEN3,),  # the only one with norms of queries and keys
    "granite": (_LLAMA, _GRANITE, _DECI),  # a pruned Llama with biases is stored as Granite
    "seed_oss": (_LLAMA, _DECI),  # llama.cpp's own has no biases but those of q, k and v
}
"""Architectures that may hold a model type; the first that does is taken."""


def check_known(model_type: str) -> None:
    """Raises ModelError for a model type that was not run in llama.cpp."""
    if model_type not in TARGETS:
        raise ModelError(
            f"model type '{model_type}' is none that coec export writes: none of llama.cpp's "
            f"architectures is known to compute it; written are {', '.join(TARGETS)}"
        )


def choose_target(model: Description, facts: Hyperparameters) -> ExportTarget:
    """Choose llama.cpp's first architecture that computes the model, or raise ModelError."""
    refusals: list[str] = []
    for target in TARGETS[model.architecture.model_type]:
        refusal = target.refusal(facts, model.shapes)
        if refusal is None:
            return target
        refusals.append(f"not {target.name}: {refusal}")
    raise ModelError(f"no architecture of llama.cpp computes this model ({'; '.join(refusals)})")
