"""The tokens that stay if a vocabulary is cut: those that a text needs most, closed under merges.

Byte pair encoding begins with characters and merges the pair that is first in a list, again and
again. If all tokens stay that appear while a token is made, and all merges between tokens that
stay, then every text whose tokens all stay is tokenised as before: the merge that comes first in
the whole list is in the shorter one too, so both take the same steps.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from coec import parallel
from coec.config.recipe import Recipe
from coec.errors import ModelError, OptionError
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.files import JsonDict, parse_json
from coec.models.folder import GENERATION_CONFIG, tokenizer_classes
from coec.models.renumbering import (
    BYTES,
    TOKENIZER,
    Renumbering,
    in_order,
    named_ids,
    pairs,
)
from coec.text.chats import encode
from coec.text.sources import mixture
from coec.text.tokens import Extent, load_tokenizer, source_of
from coec.text.windows import source_digest, text_stream

_COUNTED = 2**24
"""Tokens of a text that are counted, at most: 0.1 GB of ids."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
_CHAT = [
    {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"}, {"role": "user", "content": "u"},
]  # fmt: skip


@dataclass(frozen=True)
class Merges:
    """Byte pair encoding of a tokenizer.json.

    Attributes:
        vocab: ids by token.
        ranks: places of the merges.
    """

    vocab: Mapping[str, int]
    ranks: Mapping[tuple[str, str], int]

    @classmethod
    def of(cls, content: JsonDict) -> "Merges":
        """Read the merges of a tokenizer.json."""
        model = content["model"]
        ranks = {pair: rank for rank, pair in enumerate(pairs(model["merges"]))}
        return cls(model["vocab"], ranks)

    def made_of(self, token: str) -> set[int]:
        """Return the ids of all tokens that appear while merging makes a token, with its own; its
        own alone if no merges make it.
        """
        pieces = list(token)
        seen = set(pieces)
        while len(pieces) > 1:
            rank, at = min(
                (self.ranks.get(pair, len(self.ranks)), at)
                for at, pair in enumerate(pairwise(pieces))
            )
            if rank == len(self.ranks):
                return {self.vocab[token]}
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
            seen.add(pieces[at])
        return {self.vocab[piece] for piece in seen}

    def closed(self, ids: Iterable[int]) -> set[int]:
        """Return ids, with all that their tokens are made of."""
        tokens, given = {number: token for token, number in self.vocab.items()}, set(ids)
        return given.union(*(self.made_of(tokens[number]) for number in given & tokens.keys()))

    def chosen(
        self, counts: Float[Tensor, " v"], staying: Iterable[int], size: int
    ) -> Int[Tensor, " n"]:
        """Return at most `size` ids, ascending: those that must stay, and then the most frequent,
        each with what it is made of; of equally frequent ones the lower id.
        """
        kept, tokens = set(staying), {number: token for token, number in self.vocab.items()}
        for number in counts.argsort(descending=True, stable=True).tolist():
            if number not in kept and number in tokens:
                needed = self.made_of(tokens[number]) - kept
                kept |= needed if len(kept) + len(needed) <= size else set()
        return torch.tensor(sorted(kept))


@dataclass(frozen=True, eq=False)
class VocabularyText:
    """The text that decides which tokens stay, checked.

    Attributes:
        dense: the model.
        recipe: says which text, and how many tokens.
        source: the text, as it is read.
        merges: of the tokenizer; None if all tokens stay.
        staying: ids that stay whatever the text is, closed under merges.
    """

    dense: Dense
    recipe: Recipe
    source: Any
    merges: Merges | None
    staying: frozenset[int]

    @classmethod
    def read(cls, dense: Dense, recipe: Recipe) -> "VocabularyText":
        """Check the tokenizer.

        Raises:
            CoecError: it is none whose vocabulary can be cut, or more tokens must stay, or there
                are no more than the recipe keeps.
        """
        text = recipe.calibration if recipe.vocabulary_text is None else recipe.vocabulary_text
        source, size = source_of(text, recipe.text_column), recipe.vocabulary
        if size is None:
            return cls(dense, recipe, source, None, frozenset())
        content = _read_bpe(dense.folder)
        merges = Merges.of(content)
        staying = merges.closed(_staying(dense, content))
        count = len(staying | set(merges.vocab.values()))
        if not len(staying) <= size < count:
            bound = "less than" if size >= count else "at least"
            raise OptionError(
                f"vocabulary must be {bound} {count if size >= count else len(staying):,} for this "
                f"tokenizer, got {size:,}: of its {count:,} tokens {len(staying):,} must stay "
                "(special tokens, bytes, and tokens of chat templates)"
            )
        return cls(dense, recipe, source, merges, frozenset(staying))

    @property
    def identity(self) -> JsonDict:
        """Facts on which the choice depends, JSON-ready."""
        return {} if self.merges is None else {"vocabulary_text": source_digest(self.source)}

    def renumbering(
        self, once: Callable[..., tuple[Any, JsonDict]], progress: Progress | None
    ) -> Renumbering | None:
        """Return the ids that stay, which `once` keeps; None if the vocabulary stays as it is."""
        cut, padded = self.recipe.vocabulary, self.recipe.pad_vocabulary
        before = self.dense.vocabulary
        if cut is None:
            return None if padded is None else Renumbering(torch.arange(before), before, padded)

        def make() -> tuple[dict[str, Tensor], JsonDict]:
            return {"kept": parallel.lead(self._choose, progress)}, {}

        kept = once("vocabulary", make)[0]["kept"]
        return Renumbering(kept, before, padded or cut)

    def _choose(self, progress: Progress | None) -> Int[Tensor, " n"]:
        """Return the ids that stay by their counts; in a mixture, by the shares of its texts."""
        recipe, counts = self.recipe, torch.zeros(self.dense.vocabulary, dtype=torch.float64)
        for source, share in mixture(self.source):
            ids = text_stream(
                self.dense, source, recipe.text_column, Extent(_COUNTED), trust_remote_code=False,
                progress=progress,
            ).ids.flatten()  # fmt: skip
            counts += share * torch.bincount(ids, minlength=len(counts)) / len(ids)
        assert self.merges is not None
        assert recipe.vocabulary is not None
        return self.merges.chosen(counts, self.staying, recipe.vocabulary)


def _staying(dense: Dense, content: JsonDict) -> set[int]:
    """Return the ids of special tokens, bytes and chat templates, and those in configurations."""
    model, named = content["model"], named_ids(dense.config)
    symbols = {*(BYTES if model.get("byte_fallback") else ByteLevel.alphabet())}
    symbols.add(model.get("unk_token"))
    staying = {number for token, number in model["vocab"].items() if token in symbols}
    staying |= {token["id"] for token in content["added_tokens"]}
    if (path := dense.folder / GENERATION_CONFIG).is_file():
        named |= named_ids(parse_json(path))
    # Tokens in other files alone get the ids after those of tokenizer.json
    tokenizer = load_tokenizer(dense.folder)
    named |= {n for token, n in tokenizer.get_vocab().items() if token not in model["vocab"]}
    staying |= {number for number in named if 0 <= number < dense.vocabulary}
    return staying | set(_template_ids(tokenizer))


def _read_bpe(folder: Path) -> JsonDict:
    """Read tokenizer.json; raises ModelError unless it is byte pair encoding over bytes."""
    refused = partial("vocabulary cannot be cut in '{}': {}; leave it out".format, folder)
    if tokenizer_classes(folder):
        raise ModelError(refused("its tokenizer has Python code of its own"))
    if not (folder / TOKENIZER).is_file():
        raise ModelError(refused(f"it has no {TOKENIZER}"))
    try:
        content = parse_json(folder / TOKENIZER)
        model, kind = content["model"], content["model"]["type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"'{folder / TOKENIZER}' cannot be read: {error!r:.120}") from error
    if kind != "BPE":
        raise ModelError(refused(f"its tokenizer is {kind}, and only BPE is cut"))
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise ModelError(refused(f"the {key} of its tokenizer is {model[key]!r}"))
    # A character without a token is written in bytes, or it would be lost.
    steps = in_order(content.get("normalizer"), "normalizers")
    steps += in_order(content.get("pre_tokenizer"), "pretokenizers")
    in_bytes = any(step["type"] == "ByteLevel" for step in steps)
    if not in_bytes and not (model.get("byte_fallback") and model["vocab"].keys() >= BYTES):
        raise ModelError(refused("its tokenizer has no tokens for bytes"))
    return content


def _template_ids(tokenizer: Any) -> Iterable[int]:
    """Yield the ids that chat templates put around messages, in several kinds of chats."""
    templates = tokenizer.chat_template or {}
    templates = templates if isinstance(templates, dict) else {"": templates}
    for template in templates.values():
        for chat in (_CHAT, _CHAT[1:], _CHAT[:2], _CHAT[1:2]):
            for options in ({}, {"tools": [_TOOL]}, {"add_generation_prompt": True}):
                try:
                    text = tokenizer.apply_chat_template(
                        chat, chat_template=template, tokenize=False, **options
                    )
                except Exception:  # a template is a program, and may refuse a kind of chat
                    continue
                yield from encode(tokenizer, text, special=False).tolist()
