"""What programs make of pruned checkpoints: every client, model type and way of pruning.

    python -m benchmarks.clients make FOLDER [--subjects llama qwen2]
    python -m benchmarks.clients run FOLDER --client vllm --python /path/to/python
    python -m benchmarks.clients table > matrix.md

`make` writes random checkpoints and what transformers computes of them in float64. `run` loads them
in a client's own environment, a Python given by its path, as they are, and keeps the largest
difference of logits, or the client's error to the letter, in `results/clients.jsonl`; earlier rows
of that client and these checkpoints go. The environment passes through: `LLAMA_CPP` is the folder
that has llama.cpp's converter, `PYTHONPATH` may lead to packages. `table` is the one of
docs/lab/CLIENTS.md.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import coec
from benchmarks import record
from benchmarks.client_models import DENSE, WAYS, Checkpoint, made, subjects
from coec.errors import CoecError

ROWS = record.RESULTS / "clients.jsonl"
RUNNERS = Path(__file__).parent / "runners"
CHECKPOINTS = "checkpoints.jsonl"
EQUAL = 2e-3
"""The largest difference, as a share of the largest logit, that rounding explains: llama.cpp looks
up GELU in a table of half precision. What computes another model is ten times and more away."""
SHOWN = 300
"""Characters of an error."""


@dataclass(frozen=True)
class Client:
    """A program that loads checkpoints.

    Attributes:
        key: what it is asked for as.
        name: at the head of its column.
        script: of `RUNNERS`.
        loader: in coec.models.formats, where that has findings of it.
        instead: another client's key; only what that one does not compute is run then.
        environment: variables that the script is run with.
    """

    key: str
    name: str
    script: str
    loader: str | None = None
    instead: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


OWN, EXPORT = "coec", "llama.cpp"
CLIENTS = {
    client.key: client
    for client in (
        Client("transformers-4", "transformers 4", "run_transformers.py"),
        Client("transformers-5", "transformers 5", "run_transformers.py", "transformers"),
        Client("peft", "peft", "run_peft.py"),
        Client("vllm", "vLLM", "run_vllm.py", "vLLM"),
        Client(
            "vllm-transformers", "vLLM, `--model-impl transformers`", "run_vllm.py", instead="vllm",
            environment={"VLLM_MODEL_IMPL": "transformers"},
        ),
        Client("llama.cpp-converter", "llama.cpp, its converter", "run_llama_cpp_converter.py",
               "llama.cpp"),
        Client(
            "llama.cpp-no-mtp", "llama.cpp, its converter, `--no-mtp`",
            "run_llama_cpp_converter.py", instead="llama.cpp-converter",
            environment={"LLAMA_CPP_NO_MTP": "1"},
        ),
        Client(EXPORT, "llama.cpp, coec export", "run_llama_cpp.py"),
        Client("openvino", "OpenVINO", "run_openvino.py", "OpenVINO"),
        Client("ctranslate2", "CTranslate2", "run_ctranslate2.py", "CTranslate2"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What a client makes of a checkpoint.

    Attributes:
        client: its key; `coec` where coec does not make the checkpoint.
        versions: package → version, of its environment.
        checkpoint: what it was given.
        measure: `logits`, or `log_probabilities` where it gives no logits.
        difference: the largest from what transformers computes in float64.
        largest: of that, the largest magnitude.
        greedy: whether the greedy text is the same.
        error: what it said instead.
    """

    client: str
    checkpoint: Checkpoint
    versions: dict[str, str] = field(default_factory=dict)
    measure: str | None = None
    difference: float | None = None
    largest: float | None = None
    greedy: bool | None = None
    error: str | None = None

    @property
    def share(self) -> float | None:
        """The difference as a share of the largest; None where there was an error."""
        return self.difference / self.largest if self.difference and self.largest else None

    @property
    def right(self) -> bool:
        """Whether the client computes the checkpoint."""
        return self.share is not None and self.greedy is True and self.share < EQUAL


def main(arguments: list[str] | None = None) -> None:
    """Makes, runs or prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=["make", "run", "table"])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--subjects", nargs="+", default=list(subjects()))
    parser.add_argument("--ways", nargs="+", default=[DENSE, *WAYS])
    parser.add_argument("--client", choices=list(CLIENTS))
    parser.add_argument("--python", default=sys.executable)
    chosen = parser.parse_args(arguments)
    if chosen.what == "table":
        from benchmarks.client_table import rendered

        print(rendered(read(ROWS)))
        return
    if chosen.folder is None or (chosen.what == "run" and chosen.client is None):
        parser.error("make needs FOLDER, run needs FOLDER and --client")
    if chosen.what == "make":
        rows = make(chosen.folder, chosen.subjects)
    else:
        client = CLIENTS[chosen.client]
        asked = todo(chosen.folder, client, chosen.subjects, chosen.ways)
        rows = ran(chosen.folder, client, chosen.python, asked)
    keep(ROWS, rows)
    if chosen.what == "run":
        print(f"{sum(row.right for row in rows)} of {len(rows)} are computed as they should be")


def make(folder: Path, names: list[str]) -> list[Row]:
    """Writes checkpoints; a row for every one that coec refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with (folder / CHECKPOINTS).open("a", encoding="utf-8") as file:
        for one in made(folder, names):
            file.write(json.dumps(asdict(one)) + "\n")
            print(f"{one.name}: {one.stored or one.refusal}", flush=True)
            if one.refusal:
                rows.append(Row(OWN, one, {"coec": coec.__version__}, error=one.refusal))
    return rows


def todo(
    folder: Path, client: Client, names: list[str], ways: Iterable[str] = (DENSE, *WAYS)
) -> dict[str, Checkpoint]:
    """Folder → checkpoint: what a client is given of some subjects, pruned in some ways."""
    lines = (folder / CHECKPOINTS).read_text(encoding="utf-8").splitlines()
    found = {one.name: one for one in map(_checkpoint, map(json.loads, lines))}
    done = {row.checkpoint.name for row in read(ROWS) if row.client == client.instead and row.right}
    return {
        str((folder / one.name).absolute()): one
        for one in found.values()
        if one.stored is not None
        and one.subject in names
        and one.way in ways
        and one.name not in done
    }


def ran(folder: Path, client: Client, python: str, asked: dict[str, Checkpoint]) -> list[Row]:
    """A row for every checkpoint."""
    refused = _exported(asked) if client.key == EXPORT else {}
    out = folder / f"{client.key}.jsonl"
    out.unlink(missing_ok=True)
    found = _every(client, python, out, [place for place in asked if place not in refused])
    versions = {name: it for line in found for name, it in line.get("versions", {}).items()}
    results = {line["folder"]: line for line in found if "folder" in line} | {
        place: {"error": f"coec export refuses it: {why}"} for place, why in refused.items()
    }
    rows = []
    for place, one in asked.items():
        line = {key: value for key, value in results[place].items() if key != "folder"}
        if line.get("error"):
            line["error"] = _public(line["error"], place)
        rows.append(Row(client.key, one, versions, **line))
    return rows


def _exported(places: Iterable[str]) -> dict[str, str]:
    """Writes GGUF files beside folders; which of them coec export refuses, and why."""
    refused = {}
    for place in places:
        try:
            coec.export(place, f"{place}.gguf", dtype="f32", no_tokenizer=True, force=True)
        except CoecError as error:
            refused[place] = str(error)
    return refused


def _every(client: Client, python: str, out: Path, places: list[str]) -> list[dict[str, Any]]:
    """A runner's lines; a process that dies has an error for the folder that it was at."""
    left, lines = list(places), []
    while left:
        command = [python, str(RUNNERS / client.script), str(out), *left]
        done = subprocess.run(command, env={**os.environ, **client.environment}, check=False)
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        seen = {line["folder"] for line in lines if "folder" in line}
        if not seen & set(left) and not any("versions" in line for line in lines):
            raise SystemExit(f"{client.name} does not start: `{' '.join(command[:2])}` says why")
        left = [place for place in left if place not in seen]
        if left:
            with out.open("a", encoding="utf-8") as file:
                line = {"folder": left[0], "error": f"the process ended ({done.returncode})"}
                file.write(json.dumps(line) + "\n")
            lines.append(line)
            left = left[1:]
    return lines


def _public(error: str, place: str) -> str:
    """An error in one line, without the places of this machine."""
    text = " ".join(error.replace(place, "MODEL").split())
    for prefix in {sys.prefix, str(Path(place).parent), str(Path.home())}:
        text = text.replace(prefix, "…")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"


def _checkpoint(line: dict[str, Any]) -> Checkpoint:
    return Checkpoint(**{**line, "biased": tuple(line["biased"])})


def read(path: Path) -> list[Row]:
    """Rows as they were kept; none where there are none yet."""
    if not path.is_file():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Row(**{**line, "checkpoint": _checkpoint(line["checkpoint"])}) for line in lines]


def keep(path: Path, rows: list[Row]) -> None:
    """Puts rows in place of the earlier ones of their clients and checkpoints."""
    replaced = {(row.client, row.checkpoint.name) for row in rows}
    kept = [row for row in read(path) if (row.client, row.checkpoint.name) not in replaced]
    lines = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in [*kept, *rows]]
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
