"""Token ids numbered anew: rows of embedding and head, files of the tokenizer, configurations.

The ids that stay keep their order, and a tokenizer.json with fewer tokens and merges makes the same
tokens of every text whose tokens all stay (`coec.text.kept_tokens` chooses them).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from coec.models.files import JsonDict, parse_json, write_json
from coec.models.folder import GENERATION_CONFIG, TOKENIZER_CONFIG

VOCABULARY = "vocabulary"
"""What records call the number of tokens, and files the ids that stay."""
TOKENIZER = "tokenizer.json"
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""Tokens of bytes, which SentencePiece puts in the place of a character without a token."""
_ADDED = "added_tokens_decoder"
"""Key of tokenizer_config.json with a description of every added token by its id."""
_TABLES, _MERGES = ("vocab.json", "added_tokens.json"), "merges.txt"
"""Files with the ids of tokens, and that of the merges, which tokenizer.json has too."""
LEFT_OUT = ("tokenizer.model*", "tekken.json", "*.tiktoken")
"""Patterns of files with a tokenizer in other formats, which keep the dense ids: left out."""
_IDS = re.compile(r"_token_ids?$|^(begin_)?suppress_tokens$|^bad_words_ids$|^sequence_bias$")
"""Keys of a configuration whose values are token ids."""


@dataclass(frozen=True, eq=False)
class Renumbering:
    """The token ids that stay, and their new numbers.

    Attributes:
        kept: ids of the dense model, ascending; the new number of an id is its place.
        before: number of ids of the dense model.
        size: number of new ids; the last ones have no token.
    """

    kept: Int[Tensor, " n"]
    before: int
    size: int

    @cached_property
    def new(self) -> dict[int, int]:
        """The new number of every id that stays."""
        return {old: number for number, old in enumerate(self.kept.tolist())}

    @property
    def all_stay(self) -> bool:
        """True if ids are only added."""
        return len(self.kept) == self.before

    def rows(self, tensor: Shaped[Tensor, "v *row"]) -> Shaped[Tensor, "w *row"]:
        """Return the rows of the new ids of an embedding or a head.

        An id without a token has the mean row. Its logit is the mean of the others, so by Jensen's
        inequality its probability is at most `1 / n`. A row of zeros would have the logit 0, which
        128 times cost a real model 0.05 nats per token (docs/lab/LOG.md).
        """
        rows = tensor[self.kept.to(tensor.device)]
        mean = rows.mean(dim=0, keepdim=True, dtype=torch.float64).to(rows.dtype)
        return torch.cat([rows, mean.expand(self.size - len(rows), *rows.shape[1:])])

    def config(self, config: Mapping[str, Any]) -> JsonDict:
        """Return a configuration of a model, or of its generation, with the new ids."""
        size = {"vocab_size": self.size} if "vocab_size" in config else {}
        ids = {key: self._renumbered(value) for key, value in config.items() if _IDS.search(key)}
        return {**config, **ids, **size}

    def cut(self, network: Any) -> None:
        """Give a network of the dense model in memory the new ids: it predicts these alone."""
        for module in (network.get_input_embeddings(), network.get_output_embeddings()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                rows = self.rows(parameter.detach())
                setattr(module, name, nn.Parameter(rows, parameter.requires_grad))
        network.get_input_embeddings().padding_idx = None  # an old id
        for config in (network.config, network.generation_config):
            for name in filter(_IDS.search, list(vars(config))):
                setattr(config, name, self._renumbered(getattr(config, name)))
        network.config.vocab_size = self.size
        network.tie_weights()

    def write(self, folder: Path) -> None:
        """Write the files of a tokenizer and of generation anew in a folder that has the dense
        model's.
        """
        if self.all_stay:
            return
        for pattern in LEFT_OUT:
            for path in folder.glob(pattern):
                path.unlink()
        changes = {
            TOKENIZER: self.tokenizer,
            **dict.fromkeys(_TABLES, self._table),
            TOKENIZER_CONFIG: self._tokenizer_config,
            GENERATION_CONFIG: self.config,
        }
        for name, change in changes.items():
            if (path := folder / name).is_file():
                write_json(path, change(parse_json(path)))
        if (path := folder / _MERGES).is_file():
            merges = pairs(parse_json(folder / TOKENIZER)["model"]["merges"])
            lines = ["#version: 0.2", *map(" ".join, merges), ""]
            path.write_text("\n".join(lines), encoding="utf-8")

    def tokenizer(self, content: JsonDict) -> JsonDict:
        """Return the content of a tokenizer.json with the tokens that stay, and their merges."""
        model, vocab = content["model"], self._table(content["model"]["vocab"])
        merges = [
            merge
            for merge, (first, second) in zip(model["merges"], pairs(model["merges"]), strict=True)
            if first in vocab and second in vocab and first + second in vocab
        ]
        added = [token | {"id": self.new[token["id"]]} for token in content["added_tokens"]]
        if padding := content.get("padding"):
            padding = padding | {"pad_id": self._renumbered(padding["pad_id"])}
        return content | {
            "model": model | {"vocab": vocab, "merges": merges},
            "added_tokens": added,
            "post_processor": self._post_processor(content.get("post_processor")),
            "padding": padding,
        }

    def _post_processor(self, step: JsonDict | None) -> JsonDict | None:
        """Return a step of tokenizer.json that puts special tokens around a text."""
        if step is None:
            return None
        changed = dict(step)
        if "processors" in step:
            changed["processors"] = [self._post_processor(inner) for inner in step["processors"]]
        if isinstance(tokens := step.get("special_tokens"), dict):
            changed["special_tokens"] = {
                name: entry | {"ids": self._renumbered(entry["ids"])}
                for name, entry in tokens.items()
            }
        for key in ("sep", "cls"):
            if key in step:
                changed[key] = [step[key][0], self._renumbered(step[key][1])]
        return changed

    def _table(self, ids: Mapping[str, int]) -> dict[str, int]:
        return {token: self.new[number] for token, number in ids.items() if number in self.new}

    def _tokenizer_config(self, config: JsonDict) -> JsonDict:
        added = config.get(_ADDED, {})
        renumbered = {
            str(self.new[int(number)]): token
            for number, token in added.items()
            if int(number) in self.new
        }
        return config | ({_ADDED: renumbered} if added else {})

    def _renumbered(self, ids: Any) -> Any:
        """Return an id, or lists of them, in new numbers; anything else, such as -1, as it is."""
        if isinstance(ids, list):
            return [self._renumbered(each) for each in ids]
        return self.new.get(ids, ids) if type(ids) is int else ids


def pairs(merges: Iterable[list[str] | str]) -> tuple[tuple[str, str], ...]:
    """Read the merges of a tokenizer.json, in either of its two forms."""
    split = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
    return tuple((first, second) for first, second in split)


def named_ids(config: Mapping[str, Any]) -> set[int]:
    """Return all token ids that a configuration names."""

    def flat(value: Any) -> set[int]:
        if isinstance(value, list):
            return set().union(*map(flat, value))
        return {value} if type(value) is int else set()

    return set().union(*(flat(value) for key, value in config.items() if _IDS.search(key)))


def in_order(entry: JsonDict | None, key: str) -> list[JsonDict]:
    """List the steps of a normalizer or pre-tokenizer, of which there may be several or none."""
    if entry is None:
        return []
    if key not in entry:
        return [entry]
    return [step for inner in entry[key] for step in in_order(inner, key)]
