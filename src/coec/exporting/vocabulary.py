"""How text becomes ids, in the words of a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Vocabulary:
    """One of llama.cpp's ways to tokenise.

    Attributes:
        model: its name for it.
        pre: its name for how text is cut before.
        merges: pairs in the order in which they are merged, where those decide.
        scores: of tokens, where those decide.
        types: of tokens that are not normal ones.
        space_prefix: whether a space is put before a text, where the kind asks.
        notes: what it does in another way than the model's own, one sentence each.
    """

    model: str
    pre: str
    merges: tuple[tuple[str, str], ...] | None = None
    scores: Mapping[str, float] | None = None
    types: Mapping[str, int] = field(default_factory=dict)
    space_prefix: bool | None = None
    notes: tuple[str, ...] = ()


class UnknownTokenizerError(Exception):
    """Why no kind of llama.cpp's tokenizers gives the same ids."""


def pairs(merges: list[list[str] | str]) -> tuple[tuple[str, str], ...]:
    """The merges of a tokenizer.json, in whichever of its two forms."""
    split = [one.split(" ", 1) if isinstance(one, str) else one for one in merges]
    return tuple((left, right) for left, right in split)


def sequential(part: dict | None, key: str) -> list[dict]:
    """The steps of a normalizer or pre-tokenizer, of which there may be several or none."""
    if part is None:
        return []
    return [step for one in part[key] for step in sequential(one, key)] if key in part else [part]
