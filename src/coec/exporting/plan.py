"""All that a GGUF file will hold, known before a byte of it is written."""

from dataclasses import dataclass

from coec.exporting.dtypes import STORED
from coec.exporting.hyperparameters import Hyperparameters
from coec.exporting.targets import Target, check_known, choose_target
from coec.exporting.tensors import KINDS, Entry, entries, named
from coec.exporting.tokenizer import Written, tokenizer_of
from coec.models.dense import Dense

TURNED = ("attn_q", "attn_k")
"""What rotary positions turn."""
METADATA = 2**20
"""Bytes set aside for what a file holds besides tensors and tokens."""


@dataclass(frozen=True)
class Plan:
    """What is written.

    Attributes:
        model: whose weights.
        facts: its sizes and constants.
        target: llama.cpp's architecture.
        entries: its tensors, in their order.
        tokenizer: None where it is left out.
        dtype: of matrices.
    """

    model: Dense
    facts: Hyperparameters
    target: Target
    entries: tuple[Entry, ...]
    tokenizer: Written | None
    dtype: str

    @classmethod
    def of(
        cls, model: Dense, dtype: str | None, context: int | None, *, with_tokenizer: bool
    ) -> "Plan":
        """Raises CoecError for what llama.cpp would not compute as transformers does."""
        check_known(model.architecture.model_type)
        facts = Hyperparameters.of(model, context)
        target = choose_target(facts, model.shapes)
        heads = dict(zip(TURNED, (facts.heads, facts.kv_heads))) if target.interleaved else {}
        chosen = dtype or STORED[str(model.dtype).removeprefix("torch.")]
        names = named(model, target.name)
        tokenizer = tokenizer_of(model) if with_tokenizer else None
        return cls(model, facts, target, entries(model, names, chosen, heads), tokenizer, chosen)

    @property
    def fallback(self) -> tuple[Entry, ...]:
        """Matrices that are not of the dtype asked for."""
        kind = KINDS[self.dtype]
        return tuple(e for e in self.entries if len(e.shape) > 1 and e.kind != kind)

    @property
    def fallback_bytes(self) -> int:
        """How much larger they are than their numbers would be in that dtype."""
        kind = KINDS[self.dtype]
        return sum(entry.size - entry.size_as(kind) for entry in self.fallback)

    @property
    def size(self) -> int:
        """Bytes of the file, rounded up."""
        tokens = self.tokenizer.tokens if self.tokenizer else ()
        described = sum(4 * len(token) + 24 for token in tokens)
        return METADATA + described + sum(entry.size for entry in self.entries)
