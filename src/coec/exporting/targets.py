"""llama.cpp's architectures, as values: what each computes, and which model types it may hold.

Every cell of these tables was decided by running llama.cpp on a random model and comparing logits
(docs/FORMATS.md); a model that no target computes is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from coec.errors import ModelError
from coec.exporting.hyperparameters import Hyperparameters
from coec.exporting.rotary import FACTORS


@dataclass(frozen=True)
class Target:
    """An architecture of llama.cpp.

    Attributes:
        name: its name in a GGUF file.
        interleaved: whether it turns neighbouring rows of queries and keys, where transformers
            turns a row and the one half a head further on: the rows are then stored in its order.
        biases: projections that may have one.
        factors: whether it reads a factor for every rotary frequency.
        multipliers: whether it multiplies embeddings, attention, residuals and logits.
        by_block: whether blocks may have widths of their own.
    """

    name: str
    interleaved: bool
    biases: frozenset[str]
    factors: bool = False
    multipliers: bool = False
    by_block: bool = False

    def refusal(self, model: Hyperparameters, tensors: Iterable[str]) -> str | None:
        """Why it does not compute a model of these tensors; None if it does."""
        if not (model.uniform or self.by_block):
            return "its blocks are all of one width"
        if model.multipliers and not self.multipliers:
            return f"it has no {', '.join(model.multipliers)}"
        if model.rotary.kind == FACTORS and not self.factors:
            return "it reads no factors of rotary frequencies (rope_type llama3)"
        for name in tensors:
            module, _, kind = name.rpartition(".")
            if kind == "bias" and module.rpartition(".")[2] not in self.biases:
                return f"it has no {name}"
        return None


EVERY = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
LLAMA = Target("llama", interleaved=True, biases=EVERY, factors=True)
GRANITE = Target("granite", interleaved=True, biases=EVERY, factors=True, multipliers=True)
DECI = Target("deci", interleaved=True, biases=EVERY, factors=True, by_block=True)
QWEN3 = Target("qwen3", interleaved=False, biases=frozenset())

TARGETS: dict[str, tuple[Target, ...]] = {
    "llama": (LLAMA, DECI),
    "mistral": (LLAMA, DECI),
    "qwen2": (LLAMA, DECI),  # llama.cpp's own qwen2 takes heads for as wide as the hidden states
    "qwen3": (QWEN3,),  # the only one with norms of queries and keys
    "granite": (LLAMA, GRANITE, DECI),  # a pruned Llama with biases is stored as Granite
    "seed_oss": (LLAMA, DECI),  # llama.cpp's own has no biases but those of q, k and v
}
"""Model type → the architectures that may hold it, the first that does."""


def check_known(model_type: str) -> None:
    """Raises ModelError for a model type that was not run in llama.cpp."""
    if model_type not in TARGETS:
        raise ModelError(
            f"model type '{model_type}' is none that coec export writes: none of llama.cpp's "
            f"architectures is known to compute it; written are {', '.join(TARGETS)}"
        )


def choose_target(model: Hyperparameters, tensors: Iterable[str]) -> Target:
    """The first of llama.cpp's architectures that computes the model.

    Raises:
        ModelError: none does.
    """
    refusals: list[str] = []
    for target in TARGETS[model.model_type]:
        refusal = target.refusal(model, tensors)
        if refusal is None:
            return target
        refusals.append(f"not {target.name}: {refusal}")
    raise ModelError(f"no architecture of llama.cpp computes this model ({'; '.join(refusals)})")
