"""Small tokenizers of every kind that a GGUF file can hold, as folders of a model have them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from coec.exporting.vocabulary import BYTES, LLAMA_3, QWEN_2, SEED, SPACE, TEKKEN

TEXT = [
    "it's I'LL they're DON'T 12345 67890  multiple   spaces\t\ttabs\n\nnewlines\r\n",
    "naïve café ÉCOLE Straße 日本語 русский Ελληνικά x=1; if(a!=b){return;}",
    "the cat sat on a mat and looked at the moon for a long, long while.",
] * 20
SIZE = 400
"""Of the models: more ids than any tokenizer here has."""
TOOL = 380
"""The id of a token that was added to a byte-level tokenizer; it has as many others."""


def _split(expression: str) -> list:
    return [Split(Regex(expression), "isolated"), ByteLevel(False, use_regex=False)]


CUTS = {
    "gpt-2": [ByteLevel(add_prefix_space=False)],
    "refact": [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
    "llama-bpe": _split(LLAMA_3),
    "smaug-bpe": _split(LLAMA_3),
    "qwen2": _split(QWEN_2),
    "tekken": _split(TEKKEN),
    "seed-coder": _split(SEED.replace(r"[^\r\n\p{L}", "[^\r\n\\p{L}")),
}
"""How text is cut, by llama.cpp's names."""


def save_bytes(folder: Path, name: str = "gpt-2", **config) -> Path:
    """Byte-level BPE, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer = Sequence(CUTS[name])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOOL,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return _save(tokenizer.to_str(), folder, config)


def pieces(**changes) -> dict:
    """A tokenizer.json of SentencePiece's kind: every pair that makes a token is a merge."""
    words = ["th", "the", f"{SPACE}the", "he", f"{SPACE}t", f"{SPACE}th"]
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = [*special, *sorted(BYTES), SPACE, *"abcdefghijklmnopqrstuvwxyzé", *words]
    known = set(vocabulary)
    merges = [
        [word[:at], word[at:]]
        for word in words
        for at in range(1, len(word))
        if {word[:at], word[at:]} <= known
    ]
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
            for number, token in enumerate(special)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        ]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing", "single": [start, text], "pair": [start, text, text],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": None,
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
            "vocab": {token: number for number, token in enumerate(vocabulary)}, "merges": merges,
        },
        **changes,
    }  # fmt: skip


def metaspace(scheme: str) -> dict:
    """The same text before merging, in the other way to say it."""
    step = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    return {"normalizer": None, "pre_tokenizer": step}


def save_pieces(folder: Path, content: dict | None = None, **config) -> Path:
    """One of `pieces`."""
    return _save(json.dumps(content or pieces()), folder, {"unk_token": "<unk>", **config})


def _save(content: str, folder: Path, config: dict) -> Path:
    (folder / "tokenizer.json").write_text(content)
    named = {"bos_token": "<s>", "eos_token": "</s>"} | config
    written = {"tokenizer_class": "PreTrainedTokenizerFast"} | named
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder
