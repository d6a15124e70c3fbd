"""Commands and Python of the documents run as they stand, on small models under their names.

Left out are those that need a server, a cluster, a second machine or hours; `--flag`s and links of
all are checked in test_docs.py. `make chains` runs the Python that needs quantisers.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_models as tm
from coec.config import recipe, recovery
from coec.text import sources

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *(f"docs/{name}.md" for name in (
    "INSTALL", "GUIDE", "TUTORIAL", "EXTEND", "QUANTISE", "RECOVER", "SERVE", "EVALUATION",
    "lab/SCALE",
))]  # fmt: skip
PYTHON = ["README.md", "docs/GUIDE.md", "docs/EXTEND.md",
          pytest.param("docs/QUANTISE.md", marks=pytest.mark.chains)]  # fmt: skip
"""Pages with Python; that of docs/SERVE.md is for programs that are not installed here."""
DENSE = ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "MODEL", "DENSE",
         "Llama-3.1-8B-Instruct", "dense", "model", "a", "b", "OTHER")  # fmt: skip
PRUNED = ("PRUNED", "pruned", "QUANTISED", "Llama-3.1-8B-70")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
CHATS = ("chats.jsonl", "test-chats.jsonl")
WRITES = {"prune": 1, "recover": 2, "export": 1}
"""Place of the output among the arguments."""
SHORTER = {"20M": "2k", "60": "0.01", "2048": "32", "16GB": "400KB", "8192": "64"}
"""Budgets of trainings in tokens and minutes, lengths of windows, and memory."""
ELSEWHERE = re.compile(r"\.\./shared|--drop-blocks|-vocabulary")
"""Run by tests of models with more blocks, or more tokens."""


def blocks(page, language):
    """What stands between the fences of a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(page):
    """Commands of `coec` in the shell blocks of a page, as lists of arguments."""
    lines = (
        line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()
    )
    here = (line for line in lines if not ELSEWHERE.search(line))
    found = (shlex.split(line, comments=True) for line in here)
    return [words[1:] for words in found if words[:1] == ["coec"]]


@pytest.fixture
def place(tmp_path, monkeypatch, run):
    """A folder with what the documents name: dense and pruned models, texts."""
    monkeypatch.chdir(tmp_path)
    network = tm.tiny("llama", torch.float32, intermediate_size=1024, max_position_embeddings=32)
    first = tm.save(network, tmp_path / DENSE[0])
    tokenizer = json.loads((first / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["th"] = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["merges"] = [["t", "h"]]  # llama.cpp wants one
    (first / "tokenizer.json").write_text(json.dumps(tokenizer))
    (first / "chat_template.jinja").write_text(TEMPLATE)
    text = Path(tm.text_file(tmp_path / "my-text.txt", 20_000)).read_text()
    for name in DENSE[1:]:
        shutil.copytree(first, tmp_path / name)
    made = run("prune", first, PRUNED[0], "--calibration", "my-text.txt", "--preset", "fast")
    assert made[0] == 0, made[2]
    for name in PRUNED[1:]:
        shutil.copytree(tmp_path / PRUNED[0], tmp_path / name)
    for name in ("train.txt", "test.txt", "text.txt"):
        (tmp_path / name).write_text(text)
    for name, begin in zip(CHATS, (0, 10_000), strict=True):
        said = [text[n : n + 50] for n in range(begin, begin + 10_000, 50)]
        chats = ({"messages": [{"role": "user", "content": words}]} for words in said)
        (tmp_path / name).write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    own = [block for block in blocks("docs/EXTEND.md", "python") if "\ndef " in f"\n{block}"]
    (tmp_path / "mine.py").write_text("\n".join(own))
    np.save("tokens.npy", np.random.default_rng(0).integers(2, tm.VOCABULARY, 20_000))
    prompts = [{"prompt": f"w{n % 90} w{n % 7}"} for n in range(400)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (tmp_path / "units.json").write_text('{"layers.0.mlp": [0, 2, 5], "layers.1.mlp": [1, 3, 4]}')
    monkeypatch.setattr(sources, "_read_named", lambda *arguments: iter([text]))
    monkeypatch.setattr(recovery, "DEFAULT_TOKENS", 2048)
    monkeypatch.setitem(recipe.PRESETS["balanced"][1], "reconstruct", 1)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page, place, run):
    found = commands(page)
    assert found
    for words in found:
        words = [SHORTER.get(word, word) for word in words]
        named = [word for word in words[1:] if not word.startswith("-")]
        if words[0] in WRITES and "--dry-run" not in words and len(named) > WRITES[words[0]]:
            out = place / named[WRITES[words[0]]]
            if out.is_dir() and out.name not in DENSE:
                shutil.rmtree(out)
        status, _, said = run(*words)
        assert status == 0, f"coec {shlex.join(words)}: {said[-400:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON)
def test_the_python_of_a_page_runs(page, place):
    found = blocks(page, "python")
    assert found
    names = {}
    for block in found:
        if "llmcompressor" in block or "vllm" in block:  # in environments of their own
            continue
        if '"./pruned", sparsity' in block:
            shutil.rmtree(place / "pruned")
        exec(compile(block, page, "exec"), names)
