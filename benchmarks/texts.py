"""What to calibrate an instruct model on: WikiText-2, its own answers, or half of each.

    python -m benchmarks.texts [--rows "fast, answers"] [--shared ../shared]

SmolLM2-135M-Instruct answers 260 questions, an even share of them from each of ARC-Easy,
ARC-Challenge, OpenBookQA and BoolQ, drawn with seed 0 among questions that are understood without
choices or a passage. Answers are at most 256 tokens, in float32, by the model's chat template and
its generation_config.json, which names no sampling: they are greedy. The first 200 chats
calibrate. Of the other 60 judge those whose answer has an end, since the model repeats itself in
many that have none. Both are files of `messages` in the cache, next to the model. Every row removes
30 % of the units, calibrated on 64 windows of 512 tokens, in float32, with equal sizes as in
benchmarks.real. The KL to the dense model is of windows of 512 tokens of ten evenly spaced excerpts
of WikiText-2 test and TinyStories test, 40,000 characters each, and of the chats that judge. The
accuracy is lm-evaluation-harness' acc_norm on 200 questions each of ARC-Easy and OpenBookQA that
the model has not answered. Rows are kept in benchmarks/results/texts.json.
"""

import argparse
import json
import random
import re
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

import coec
from benchmarks import record
from benchmarks.instances import SHARED
from benchmarks.real import EQUAL
from benchmarks.real import ROWS as SETTINGS
from benchmarks.real_model import CACHE, NAME, folder
from benchmarks.vocabulary import JUDGES, excerpts

PRESETS = "fast", "fast, by block", "balanced", "balanced, by block"
TEXTS = "WikiText-2", "answers", "half of each"
DENSE = "dense"
ROWS = {f"{preset}, {text}": (preset, text) for preset, text in product(PRESETS, TEXTS)}
CHATS = {"answers": 200, "other answers": 60}
"""Files of chats in the cache, and their numbers of questions, as many of every source."""
TASKS = {"arc_easy": 200, "openbookqa": 200}
"""Tasks, and their numbers of questions."""
SOURCES = {
    "arc_easy": "question",
    "arc_challenge": "question",
    "openbookqa": "question_stem",
    "boolq": "question",
}
"""Files of questions, and their columns."""
_OF_CHOICES = re.compile(r"\b(which|following|these|statement|diagram)\b", re.IGNORECASE)
"""Words of questions that are not understood without their choices."""
_ANSWER, _BATCH = 256, 16


def main(arguments: list[str] | None = None) -> None:
    """Make the chats and rows that are missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = [DENSE, *ROWS]
    parser.add_argument("--rows", nargs="*", choices=names, default=names, metavar="ROW")
    parser.add_argument("--shared", type=Path, default=SHARED)
    chosen = parser.parse_args(arguments)
    data = chosen.shared / "data"
    write_chats(data)
    rows = record.load("texts").get("rows", [])
    for name in chosen.rows:
        if name not in {row["row"] for row in rows}:
            rows.append({"row": name, **measured(folder(), ROWS.get(name), data)})
            record.save("texts", arguments, {"rows": rows})
            print(rows[-1], flush=True)
    judges, order = [*JUDGES, "other answers"], [DENSE, *ROWS]
    lines = [
        [row["row"], f"{row['removed']:.1%}", *(f"{row[text]:.3f}" for text in judges)]
        + [f"{row[task]:.1%}" for task in TASKS]
        for row in sorted(rows, key=lambda row: order.index(row["row"]))
    ]
    print(record.table(["", "removed", *judges, *TASKS], lines))


def measured(model: Path, settings: tuple[str, str] | None, data: Path) -> dict[str, Any]:
    """Return the fraction of parameters removed, the KL to the dense model by text, and accuracy.

    Args:
        model: folder of the dense model.
        settings: preset and text of the calibration; None for the dense model.
        data: folder of texts and questions.
    """
    if settings is None:
        zeros = dict.fromkeys(["removed", *JUDGES, "other answers"], 0.0)
        return zeros | accuracy(model, data)
    preset, text = settings
    texts = {"WikiText-2": data / "wikitext-2/valid.raw.txt", "answers": chats("answers")}
    halves = ",".join(f"{path}=1" for path in texts.values())
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        report = coec.prune(
            model, out := Path(work) / "model", sparsity=0.3, samples=64, seq_len=512,
            calibration=str(texts.get(text, halves)), **SETTINGS[preset] | EQUAL,
        )  # fmt: skip
        numbers: dict[str, Any] = {"removed": report.plan["removed"]["parameters"]}
        judges: dict[str, Any] = {name: excerpts(data / path) for name, path in JUDGES.items()}
        for name, judge in (judges | {"other answers": chats("other answers")}).items():
            result = coec.perplexity(out, judge, baseline=model, seq_len=512, dtype="float32")
            numbers[name] = result.kl
        return numbers | accuracy(out, data)


def accuracy(model: Path, data: Path) -> dict[str, float]:
    """Return the accuracy of a model by task, on the first questions that it has not answered."""
    asked, tasks, samples = set(questions(data, sum(CHATS.values()))), [], {}
    known = TaskManager().task_index
    for name, count in TASKS.items():
        lines = (file := data / f"tasks/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)[SOURCES[name]].strip() for line in lines]
        samples[name] = [number for number, text in enumerate(texts) if text not in asked][:count]
        source = {"data_files": {"test": str(file.resolve())}}
        splits = {"training_split": None, "validation_split": None}
        tasks.append(
            yaml.safe_load(known[name].yaml_path.read_text())
            | {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": source, **splits}
        )
    loaded = HFLM(  # widths by block are custom code
        pretrained=str(model), dtype="float32", device="cpu", batch_size=16, trust_remote_code=True
    )
    found = lm_eval.simple_evaluate(
        loaded, tasks=tasks, num_fewshot=0, samples=samples, log_samples=False, bootstrap_iters=0
    )["results"]  # fmt: skip
    return {name: found[name]["acc_norm,none"] for name in TASKS}


def chats(name: str) -> Path:
    """Return the file of chats of a name."""
    return CACHE / f"{NAME}-{name.replace(' ', '-')}.jsonl"


def write_chats(data: Path) -> None:
    """Let the dense model answer all questions, if a file of chats is missing."""
    if all(chats(name).is_file() for name in CHATS):
        return
    asked = iter(questions(data, sum(CHATS.values())))
    model = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
    for name, count in CHATS.items():
        made = answered(model, [next(asked) for _ in range(count)])
        chosen = [chat for chat, ended in made if ended or name == "answers"]
        lines = [json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chosen]
        (partial := chats(name).with_suffix(".partial")).write_text("".join(lines), "utf-8")
        partial.rename(chats(name))


def questions(data: Path, count: int) -> list[str]:
    """Draw questions, in turn of every source, each once."""
    draw, drawn = random.Random(0), []
    for name, column in SOURCES.items():
        lines = (data / f"tasks/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = dict.fromkeys(json.loads(line)[column].strip() for line in lines)
        if name == "boolq":  # written in lower case, without a mark
            texts = dict.fromkeys(f"{text[0].upper()}{text[1:].rstrip('?')}?" for text in texts)
        whole = [text for text in texts if text.endswith("?") and not _OF_CHOICES.search(text)]
        drawn.append(draw.sample(whole, count // len(SOURCES)))
    return [text for texts in zip(*drawn, strict=True) for text in texts]


@torch.no_grad()
def answered(model: Any, asked: list[str]) -> Iterator[tuple[list[dict[str, str]], bool]]:
    """Yield the chat of every question with the model's answer, and whether the answer ends."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder(), padding_side="left")
    for first in range(0, len(asked), _BATCH):
        turns = [[{"role": "user", "content": text}] for text in asked[first : first + _BATCH]]
        batch = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**batch, max_new_tokens=_ANSWER)[:, batch["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
        ends = (ids == model.generation_config.eos_token_id).any(dim=1).tolist()
        for turn, answer, ended in zip(turns, answers, ends, strict=True):
            yield [*turn, {"role": "assistant", "content": answer.strip()}], ended


if __name__ == "__main__":
    main()
