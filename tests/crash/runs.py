"""What is run and ended: commands on a trained model, and what must be the same in the end."""

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

RUNS = int(os.environ.get("COEC_CRASH_RUNS", "100"))
"""How many runs of each command are killed at random moments."""

HOW = ("--calibration", "text.txt", "--samples", "6", "--seq-len", "48")
PAPER = ("--preset", "paper")
PRUNE = ("prune", "model", "out", *HOW, *PAPER, "--compensation", "rcpu")
COMMANDS = {
    "prune": PRUNE,
    "prune sampled text": ("prune", "model", "out", "--calibration", "self", *HOW[2:],
                           *PAPER, "--compensation", "none"),
    "prune answers": ("prune", "model", "out", "--calibration", "self:prompts.jsonl",
                      "--answer-tokens", "24", "--samples", "24", *HOW[4:],
                      *PAPER, "--compensation", "none"),
    "vocabulary": ("prune", "model", "out", *HOW, "--preset", "fast", "--vocabulary", "300",
                   "--vocabulary-text", "text.txt"),
    "replace": (*PRUNE, "--force"),
    "balanced": ("prune", "model", "out", *HOW, "--reconstruct", "1", "--holdout", "0.3"),
    "by block": (*PRUNE, "--by-block"),
    "drop blocks": ("prune", "model", "out", *HOW, "--preset", "fast", "--drop-blocks", "1"),
    "recover": ("recover", "model", "small", "out", "--text", "text.txt", "--seq-len", "48",
                "--batch-size", "16", "--tokens", "4k"),
    "export": ("export", "model", "out.gguf", "--dtype", "f32", "--no-tokenizer"),
}  # fmt: skip
"""Each makes `out`."""
FORCED = ("replace",)

TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
"""Of stories260K, which has none."""

TIMES = ("seconds", "peak_memory_bytes", "timings")
"""What a run need not have in common with another, by the name it has in any record."""


class Place:
    """A folder with what a command needs, in which it is run.

    Args:
        server: of the driver.
        root: an empty folder.
        beside: another one, for what is told of runs.
        shared: the models and texts.
        name: of the command.
    """

    def __init__(self, server, root: Path, beside: Path, shared: Path, name: str) -> None:
        self._server, self.name, self.argv = server, name, COMMANDS[name]
        self.root, self.beside = root, beside
        made = "out.gguf" if name == "export" else "out"
        self.out, self.partial = root / made, root / f"{made}.partial"
        (self.root / "model").mkdir()
        for file in (shared / "models/stories260K").iterdir():
            (self.root / "model" / file.name).symlink_to(file)
        (self.root / "model/chat_template.jinja").write_text(TEMPLATE)
        prompts = [json.dumps({"prompt": f"{name} was"}) for name in ("Tim", "Lily", "Mom") * 20]
        (self.root / "prompts.jsonl").write_text("\n".join(prompts))
        text = (shared / "data/tinystories/train.txt").read_text(encoding="utf-8")
        for file, start in {"text.txt": 0, "other.txt": 40_000}.items():
            (self.root / file).write_text(text[start : start + 20_000], encoding="utf-8")
        if name == "recover":
            pruning = ("prune", "model", "small", *HOW, *PAPER, "--compensation", "none")
            assert self.send(pruning)["status"] == 0, self.log()
        if name in FORCED:
            earlier = ("prune", "model", self.argv[2], *HOW, *PAPER, "--compensation", "none")
            assert self.send(earlier)["status"] == 0, self.log()

    def run(self, **how):
        """Runs the command, which something may befall."""
        return self.send(self.argv, **how)

    def send(self, argv, **how):
        return self._server({
            "argv": argv, "cwd": str(self.root), "log": str(self.beside / "log"),
            "told": str(self.beside / "told"), "shard": "200KB", **how,
        })  # fmt: skip

    def log(self) -> str:
        """What the last command printed."""
        return (self.beside / "log").read_text()

    def recorded(self) -> set[str]:
        """The solved blocks that the journal has, by the names of their pieces."""
        path = self.partial / "journal.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        names = [json.loads(line).get("name", "") for line in lines]
        return {name for name in names if "units of block" in name}

    def finished(self, wanted: dict[str, str]) -> bool:
        """Whether all is there, and no journal any more that says so."""
        journal = self.partial / "journal.jsonl"
        return not journal.exists() and wanted.items() <= self.listing().items()

    def listing(self) -> dict[str, str]:
        """Everything below the root by path: what it holds, without times."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            if path.is_file():
                found[str(path.relative_to(self.root))] = _content(path)
        return found

    def clear(self) -> None:
        """Removes what the command made, but for what it will replace again."""
        made = (self.out, self.partial) if self.name not in FORCED else ()
        for path in made:
            if path.is_file():
                path.unlink()
            shutil.rmtree(path, ignore_errors=True)


def spread(events: int, count: int) -> list[int]:
    """So many numbers of events, from the first to the last."""
    return sorted({round(i * (events - 1) / max(1, count - 1)) for i in range(count)})


def _content(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        with contextlib.suppress(ValueError):  # of a file that was not finished
            content = json.dumps([_timeless(json.loads(line)) for line in lines]).encode()
    return hashlib.sha256(content).hexdigest()


def _timeless(value):
    if isinstance(value, dict):
        return {name: _timeless(inner) for name, inner in value.items() if name not in TIMES}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value
