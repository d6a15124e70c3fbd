"""Ways in which text becomes ids, in the terms of a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""Object of a tokenizer.json."""


@dataclass(frozen=True)
class Vocabulary:
    """Way to tokenise that llama.cpp has.

    Attributes:
        model: llama.cpp's name for it.
        pre: llama.cpp's name for the way in which text is cut before.
        merges: pairs in the order in which they are merged, where those decide.
        scores: of tokens, where those decide.
        types: of tokens that are not normal ones.
        space_prefix: True where a space is put before a text; None where the kind has no choice.
        notes: differences from the model's own tokenizer, one sentence each.
    """

    model: str
    pre: str
    merges: tuple[tuple[str, str], ...] | None = None
    scores: Mapping[str, float] | None = None
    types: Mapping[str, int] = field(default_factory=dict)
    space_prefix: bool | None = None
    notes: tuple[str, ...] = ()


class UnknownTokenizerError(Exception):
    """Raised with the reason why no tokenizer of llama.cpp gives the same ids."""


def pairs(merges: list[list[str] | str]) -> tuple[tuple[str, str], ...]:
    """Read the merges of a tokenizer.json, in either of its two forms."""
    split = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
    return tuple((first, second) for first, second in split)


def in_order(entry: JsonObject | None, key: str) -> list[JsonObject]:
    """List the steps of a normalizer or pre-tokenizer, of which there may be several or none."""
    if entry is None:
        return []
    if key not in entry:
        return [entry]
    return [step for inner in entry[key] for step in in_order(inner, key)]
