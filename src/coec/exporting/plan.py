"""The content of a GGUF file, planned before a byte of it is written."""

from dataclasses import dataclass

from coec.exporting.dtypes import DEFAULT_DTYPES
from coec.exporting.hyperparameters import Hyperparameters
from coec.exporting.targets import ExportTarget, check_known, choose_target
from coec.exporting.tensors import GGUF_TYPES, Entry, entries, gguf_names
from coec.exporting.tokenizer import GgufTokenizer, tokenizer_of
from coec.models.dense import Dense

_ROTATED = ("attn_q", "attn_k")
"""Matrices whose outputs rotary positions turn."""
_METADATA = 2**20
"""Bytes set aside for everything in a file besides tensors and tokens."""


@dataclass(frozen=True)
class ExportPlan:
    """Content of one GGUF file.

    Attributes:
        model: with the weights.
        facts: its sizes and constants.
        target: llama.cpp's architecture.
        entries: its tensors, in their order.
        tokenizer: None where it is left out.
        dtype: of matrices.
    """

    model: Dense
    facts: Hyperparameters
    target: ExportTarget
    entries: tuple[Entry, ...]
    tokenizer: GgufTokenizer | None
    dtype: str

    @classmethod
    def of(
        cls, model: Dense, dtype: str | None, context: int | None, *, with_tokenizer: bool
    ) -> "ExportPlan":
        """Plan a file; raises CoecError where llama.cpp would compute another model."""
        check_known(model.architecture.model_type)
        facts = Hyperparameters.of(model, context)
        target = choose_target(facts, model.shapes)
        heads = dict(zip(_ROTATED, (facts.heads, facts.kv_heads))) if target.interleaved else {}
        chosen = dtype or DEFAULT_DTYPES[str(model.dtype).removeprefix("torch.")]
        names = gguf_names(model, target.name)
        tokenizer = tokenizer_of(model) if with_tokenizer else None
        return cls(model, facts, target, entries(model, names, chosen, heads), tokenizer, chosen)

    @property
    def fallback(self) -> tuple[Entry, ...]:
        """Matrices that do not have the chosen dtype."""
        chosen = GGUF_TYPES[self.dtype]
        return tuple(e for e in self.entries if len(e.shape) > 1 and e.gguf_type != chosen)

    @property
    def fallback_bytes(self) -> int:
        """Difference in bytes to matrices of the chosen dtype."""
        chosen = GGUF_TYPES[self.dtype]
        return sum(entry.size - entry.size_as(chosen) for entry in self.fallback)

    @property
    def size(self) -> int:
        """Size of the file in bytes, rounded up."""
        tokens = self.tokenizer.tokens if self.tokenizer else ()
        described = sum(4 * len(token) + 24 for token in tokens)
        return _METADATA + described + sum(entry.size for entry in self.entries)
