"""The real model as the judge: every preset and its peers on SmolLM2-135M, as rows that are kept.

    python -m benchmarks.real [--size cpu|gpu] [--rows fast "balanced, by block"] [--sparsity 0.3]
        [--seeds 0] [--jobs 1] [--minutes 9] [--again] [--table] [--first 8]

`cpu`: 64 windows of 512 tokens of WikiText-2 valid calibrate; perplexity and KL are of the first 32
windows of 512 of test, and of TinyStories' test, a text of another kind. `gpu`: 128 windows of
1,024, and the first 900,000 characters of both. The texts lie in ../shared/data, the model comes
from benchmarks.real_model. Forward passes run in the model's bfloat16. `--equal` makes the rows of
README: forward passes in float32, which is nine times faster on a CPU that has no products of
bfloat16, and in every row the number of channels that the presets keep, a multiple of 64, and all
of the attention. Rows are in benchmarks/results/real.json, made where they are missing (`--again`:
anew); with `--minutes` none is begun or goes on after so many. A row is a process of its own:
pruning by this package, then the checkpoint in transformers, beside the dense model's states, which
are kept. Seconds are of the wall and of the CPU, of pruning with loading, checks, text and writing,
without Python's start. `--first 8` is the quick proxy: the model's first eight blocks alone, and
the error of the hidden states behind them on the test windows, mean of ‖h − h̃‖² / ‖h‖² over
tokens.
"""

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import osscar, record
from benchmarks.instances import SHARED
from benchmarks.real_model import CACHE, NoModelError, first_blocks, folder

TEXTS = "data/wikitext-2"
JUDGES = {"": f"{TEXTS}/test.raw.txt", "stories_": "data/tinystories/test.txt"}
"""Texts of which perplexity and KL are measured, by what their names begin with in a row."""
SPARSITIES = (0.3, 0.5, 0.2)
BASELINE = "fast"
DENSE = "dense"
_TOKENS_AT_ONCE = 2048
"""Tokens whose logits are in memory at once."""


@dataclass(frozen=True)
class Size:
    """Windows that calibrate, and the text that judges: as many windows, or characters, as said."""

    samples: int
    seq_len: int
    windows: int | None = None
    characters: int | None = None


SIZES = {
    "cpu": Size(64, 512, windows=32),
    "gpu": Size(128, 1024, characters=900_000),
    "rehearsal": Size(8, 128, windows=4),
}
EQUAL = {"forward_dtype": "float32", "multiple_of": "auto", "attention_sparsity": 0.0}
ONE_SHOT = {"preset": "paper", "multiple_of": 1}
ROWS: dict[str, dict[str, Any]] = {
    "fast": {"preset": "fast"},
    "fast, by block": {"preset": "fast", "by_block": True},
    "balanced": {"preset": "balanced"},
    "balanced, by block": {"preset": "balanced", "by_block": True},
    "paper": {"preset": "paper"},
    "none": {**ONE_SHOT, "selection": "wanda-sp", "compensation": "none"},
    "FLAP": {**ONE_SHOT, "selection": "flap", "compensation": "bias"},
    "RCPU": {**ONE_SHOT, "selection": "rcpu", "compensation": "rcpu"},
    "OSSCAR": ONE_SHOT,
}
"""Settings by row; `none` keeps the units of Wanda-sp, OSSCAR is its authors' own code, which takes
windows and widths from them."""
USUAL = tuple(ROWS)
"""Rows that are made where none is named."""
_COEC = {**ONE_SHOT, "compensation": "coec"}
ROWS["none, COEC"] = _COEC | {"selection": "wanda-sp"}
ROWS["FLAP, COEC"] = _COEC | {"selection": "flap"}
_PLAIN = _COEC | {"selection": "rcpu", "alpha": 1.0, "lambda_a": 0.0}
ABLATION: dict[str, dict[str, Any]] = {
    "RCPU": ROWS["RCPU"],
    "+ GCV rescale": _PLAIN | {"rotation": "left"},
    "+ two-sided rotation": _PLAIN | {"parameterization": "full"},
    "+ reduced Stiefel": _PLAIN,
    "+ tempering": _COEC | {"selection": "rcpu", "lambda_a": 0.0},
    "+ alignment": _COEC | {"selection": "rcpu"},
}
ROWS |= {name: settings for name, settings in ABLATION.items() if name not in ROWS}
for _name in ("fast", "balanced", "balanced, by block"):
    ROWS[f"{_name}, a million tokens"] = ROWS[_name] | {"calibration": "train", "samples": 976}
STARTS = ("none", "fast", "fast, by block", "balanced, by block")
BUDGETS = ("20k", "100k", "2M", "20M")
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "calibration text": {"text": "valid"},
    "stories": {"text": "stories"},
    "both texts": {"text": "both"},
    "same windows": {"text": "same"},
    "self-written": {"text": "self"},
    "LoRA 8": {"lora": 8},
    "LoRA 64": {"lora": 64},
    "teacher stored": {"predictions": "stored"},
}
"""Ways to train a start, by what they differ in from all weights on WikiText-2 train."""
TRAININGS = {
    f"{start}, recover {tokens}" + (f", {way}" if way else ""): (start, tokens, way)
    for start, tokens, way in product(STARTS, BUDGETS, WAYS)
}
"""Start, budget and way of every row that is trained, by its name."""
for _name, (_start, _tokens, _way) in TRAININGS.items():
    _training = {"text": "train", "tokens": _tokens} | WAYS[_way]
    ROWS[_name] = ROWS[_start] | {"recover": _training}
"""Rows that are made where they are named: the rest of the paper's main table, its ablation
(COEC built up from RCPU), a million tokens that calibrate, and trainings of what a row pruned."""


def main(arguments: list[str] | None = None) -> None:
    """Make the rows that are missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", choices=list(SIZES), default="cpu")
    parser.add_argument(
        "--rows", nargs="+", choices=[DENSE, *ROWS], default=[DENSE, *USUAL], metavar="ROW"
    )
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, metavar="BLOCKS", help="the quick proxy")
    parser.add_argument("--settings", type=json.loads, default={}, help="of every row, besides")
    parser.add_argument(
        "--equal", dest="settings", action="store_const", const=EQUAL, help="the rows of README"
    )
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the kept rows, and stop")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.one is not None:
        print(json.dumps(measured(chosen.one)))
        return
    if not chosen.table:
        try:
            measure_all(chosen, arguments)
        except NoModelError as error:
            sys.exit(str(error))
    print(tables(record.load("real").get("rows", []), chosen.size))


def measure_all(chosen: argparse.Namespace, arguments: list[str] | None) -> None:
    """Measure the rows that are asked for, several at a time, and save each."""
    model = first_blocks(chosen.first) if chosen.first else folder()
    print(f"{model.name}, {chosen.size}. {record.header()}\n", flush=True)
    ends = time.monotonic() + 60 * chosen.minutes
    name = "real" if not chosen.first else "real_proxy"
    kept = record.load(name).get("rows", [])
    done = set() if chosen.again else {row["key"] for row in kept}
    cases: list[dict[str, Any]] = []
    for sparsity, seed, row in product(chosen.sparsity, chosen.seeds, chosen.rows):
        if row == DENSE and cases:
            continue
        settings = chosen.settings if row == DENSE else ROWS[row] | chosen.settings
        case = {
            "size": chosen.size, "sparsity": 0.0 if row == DENSE else sparsity, "seed": seed,
            "row": row, "settings": settings, "first": chosen.first,
        }  # fmt: skip
        case["key"] = key_of(
            row, case["sparsity"], chosen.settings, chosen.size, seed, chosen.first
        )
        if case["key"] not in done:
            cases.append(case | {"model": str(model), "shared": str(chosen.shared)})
    for text in JUDGES.values() if cases else ():  # before others run beside it: all need it
        ids = evaluation_ids(model, SIZES[chosen.size], chosen.shared / text)
        dense_states(model, ids, _dtype(chosen.settings))

    def measure(case: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "benchmarks.real", "--one", json.dumps(case)]
        left = ends - time.monotonic()
        if left < 0:
            return
        try:
            run = subprocess.run(
                command, check=False, capture_output=True, text=True, cwd=record.ROOT,
                timeout=None if left == float("inf") else left,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{case['row']}: not done in time", flush=True)
            return
        if run.returncode:
            last = (run.stderr.strip().splitlines() or ["no word"])[-1]
            print(f"{case['row']}, {case['sparsity']:g}: failed: {last}", flush=True)
            return
        row = {k: v for k, v in case.items() if k not in ("model", "shared", "first")}
        row |= json.loads(run.stdout.strip().splitlines()[-1])
        row |= {"commit": record.commit(), "machine": record.machine(), "jobs": chosen.jobs}
        rows = record.merged(record.load(name).get("rows", []), [row], "key")
        record.save(name, arguments, {"rows": sorted(rows, key=lambda r: str(r["key"]))})
        print(_line(row), flush=True)

    with ThreadPoolExecutor(chosen.jobs) as pool:
        list(pool.map(measure, cases))


def key_of(
    row: str,
    sparsity: float,
    settings: dict[str, Any] | None = None,
    size: str = "cpu",
    seed: int = 0,
    first: int = 0,
) -> str:
    """Return what tells a row from all others; `settings` are those besides the row's own."""
    named = json.dumps(settings) if settings else ""
    return "|".join(map(str, (size, sparsity, seed, row, first, named)))


def _line(row: dict[str, Any]) -> str:
    numbers = "  ".join(
        f"{name} {row[name]:.4g}" for name in ("perplexity", "kl", "error") if name in row
    )
    return (
        f"{row['row']:<20}{100 * row['sparsity']:>3.0f} %  {numbers}  "
        f"{row.get('wall', 0):.0f} s, CPU {row.get('cpu', 0):.0f} s"
    )


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Make a row's model, in this process; return the row's numbers."""
    model, size = Path(case["model"]), SIZES[case["size"]]
    numbers: dict[str, Any] = {"wall": 0.0, "cpu": 0.0}
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        made = Path(work) / "model"
        if case["row"] == DENSE:
            made = model
        elif "recover" in case["settings"]:
            numbers = _trained(case, made)
        else:
            numbers = _pruned(case, made)
        numbers["bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if torch.cuda.is_available():
            numbers["device_bytes"] = torch.cuda.max_memory_allocated()
        dtype = _dtype(case["settings"])
        network, head = _network(made, dtype), _network(model, dtype).lm_head.weight.detach()
        for prefix, text in JUDGES.items():
            ids = evaluation_ids(model, size, Path(case["shared"]) / text)
            dense, norm = dense_states(model, ids, dtype)
            if case["first"]:
                found = {"error": _state_error(network, ids, dense)}
            else:
                found = _prediction(network, ids, dense, [norm, head])
            numbers |= {prefix + name: value for name, value in found.items()}
    return numbers


def _pruned(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Prune into a folder; return the seconds, and the share of the parameters that went."""
    import coec

    model, size = Path(case["model"]), SIZES[case["size"]]
    texts = Path(case["shared"]) / TEXTS
    windows = {
        "calibration": str(texts / "valid.raw.txt"), "samples": size.samples,
        "seq_len": size.seq_len, "seed": case["seed"], "forward_dtype": "bfloat16",
    }  # fmt: skip
    numbers: dict[str, Any] = {}
    began, spent = time.perf_counter(), time.process_time()
    settings = windows | case["settings"]
    if "budget" not in settings:
        settings["sparsity"] = case["sparsity"]
    if case["row"] == "OSSCAR":
        numbers["removed"] = osscar.prune(model, out, **settings)
    else:
        if settings["calibration"] == "train":
            settings["calibration"] = str(_train_text(texts, out.parent))
        report = coec.prune(model, out, progress=_progress, **settings)
        numbers["removed"] = report.plan["removed"]["parameters"]
    return numbers | {
        "wall": time.perf_counter() - began, "cpu": time.process_time() - spent,
    }  # fmt: skip


def _kept_start(case: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return what a row pruned, kept for the trainings that begin from it, and its numbers."""
    named = json.dumps([case["model"], case["size"], case["sparsity"], case["seed"],
                        case["settings"], record.commit()])  # fmt: skip
    folder = CACHE / "starts" / hashlib.sha256(named.encode()).hexdigest()[:16]
    numbers = folder.with_suffix(".json")
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not numbers.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            numbers.write_text(json.dumps(_pruned(case, folder)), encoding="utf-8")
    return folder, json.loads(numbers.read_text(encoding="utf-8"))


def _trained(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train what the row's other settings prune; return seconds, and memory beside its plan.

    Seconds hold those of the pruning; what the training's report says is there too.
    """
    import coec
    from benchmarks.recover import same_windows
    from coec.config.recovery import Recovery
    from coec.devices import choose_device
    from coec.recovery.plan import footprints

    pruning = dict(case["settings"])
    settings = pruning.pop("recover")
    start, before = _kept_start(case | {"settings": pruning})
    model, size, data = Path(case["model"]), SIZES[case["size"]], Path(case["shared"]) / "data"
    began, spent = time.perf_counter(), time.process_time()
    train, text = _train_text(data / "wikitext-2", out.parent), settings["text"]
    stories = data / "tinystories/train.txt"
    sources = {
        "train": train,
        "stories": stories,
        "valid": data / "wikitext-2/valid.raw.txt",
        "both": f"{train}=1,{stories}=1",
    }
    if text == "same":
        sources[text] = same_windows(
            model, data / "wikitext-2/valid.raw.txt", out.parent, samples=size.samples,
            seq_len=size.seq_len, seed=case["seed"],
        )  # fmt: skip
    settings = settings | {
        "text": str(sources.get(text, text)), "seq_len": size.seq_len, "seed": case["seed"],
        "forward_dtype": case["settings"].get("forward_dtype", "bfloat16"),
    }  # fmt: skip
    way = footprints(model, start, Recovery(**settings), choose_device("auto"), None)[0]
    training = coec.recover(model, start, out, progress=_progress, **settings).recoveries[-1]
    cpu = time.process_time() - spent
    told = ("tokens", "passes", "learning_rate", "held_out", "curve")
    return {
        "wall": before["wall"] + time.perf_counter() - began, "cpu": before["cpu"] + cpu,
        "training_cpu": cpu, "planned_bytes": way.bytes,
        "tokens_per_second": training["tokens"] / training["seconds"],
    } | {name: training[name] for name in told}  # fmt: skip


def _train_text(texts: Path, work: Path) -> Path:
    """Write WikiText-2 train without the sentences that have `<unk>`, which is for rare words."""
    lines = (texts / "train.tokens.txt").read_text(encoding="utf-8").splitlines()
    path = work / "train.txt"
    kept = (" . ".join(s for s in line.split(" . ") if "<unk>" not in s) for line in lines)
    path.write_text("\n".join(kept), encoding="utf-8")
    return path


def _progress(phase: str, done: int, total: int) -> None:
    print(f"{phase}: {done} of {total}", file=sys.stderr, flush=True)


def evaluation_ids(model: Path, size: Size, path: Path) -> Tensor:
    """Return the windows of a test text, n × length."""
    text = path.read_text(encoding="utf-8")[: size.characters]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    count = len(ids) // size.seq_len
    return ids[: count * size.seq_len].view(count, -1)[: size.windows]


def _dtype(settings: dict[str, Any]) -> torch.dtype:
    """Return the dtype of forward passes, by the settings of a row."""
    dtype: torch.dtype = getattr(torch, settings.get("forward_dtype", "bfloat16"))
    return dtype


def _network(model: Path, dtype: torch.dtype) -> Any:
    """Load a model of any origin by transformers; its final norm is called apart."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=True)
    return network.to(device).eval()


def dense_states(
    model: Path, ids: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Return what the dense model has behind its last block, kept in the cache, and its norm."""
    made_in = "" if dtype == torch.bfloat16 else f"-{dtype}".replace("torch.", "")
    name = f"{model.name}-{ids.shape[0]}x{ids.shape[1]}-{int(ids.sum())}{made_in}"
    path = CACHE / f"{name}.safetensors"
    if not path.is_file():
        network = _network(model, dtype)
        states = torch.cat([_states(network, batch) for batch in ids.split(8)])
        save_file({"states": states, "norm": network.model.norm.weight.detach().cpu()}, path)
    kept = load_file(path)
    return kept["states"], kept["norm"]


@torch.no_grad()
def _states(network: Any, ids: Tensor) -> Tensor:
    """Return hidden states behind the last block, before the final norm, on the host."""
    found: list[Tensor] = []
    hook = network.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    try:
        network.model(input_ids=ids.to(network.device), use_cache=False)
    finally:
        hook.remove()
    return found[0].cpu()


@torch.no_grad()
def _prediction(network: Any, ids: Tensor, dense: Tensor, end: list[Tensor]) -> dict[str, float]:
    """Return perplexity, mean KL(dense ‖ pruned) in nats per token, and the dense perplexity.

    Args:
        dense: what the dense model has behind its last block.
        end: weights of its final norm and head; what is trained has others.
    """
    norm, head = ({"weight": weight.to(network.device)} for weight in end)
    sums = torch.zeros(3, dtype=torch.float64)
    for batch, states in zip(ids.split(8), dense.split(8), strict=True):
        ours = network.model.norm(_states(network, batch).to(network.device))[:, :-1]
        theirs = functional_call(network.model.norm, norm, states.to(network.device))[:, :-1]
        parts = [t.flatten(0, 1).split(_TOKENS_AT_ONCE) for t in (ours, theirs)]
        for p, q, target in zip(*parts, batch[:, 1:].flatten().split(_TOKENS_AT_ONCE), strict=True):
            logits = network.lm_head(p), functional_call(network.lm_head, head, q)
            log_p, log_q = (scores.float().log_softmax(-1) for scores in logits)
            target = target.to(network.device)
            sums += torch.stack([
                F.nll_loss(log_p, target, reduction="sum").double(),
                F.nll_loss(log_q, target, reduction="sum").double(),
                F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1).double().sum(),
            ]).cpu()  # fmt: skip
    entropy, baseline, divergence = (sums / ids[:, 1:].numel()).tolist()
    exp = torch.tensor([entropy, baseline], dtype=torch.float64).exp().tolist()
    return {"perplexity": exp[0], "kl": divergence, "dense": exp[1]}


def _state_error(network: Any, ids: Tensor, dense: Tensor) -> float:
    """Return the mean of ‖h − h̃‖² / ‖h‖² over tokens."""
    states = torch.cat([_states(network, batch) for batch in ids.split(8)]).float()
    difference, scale = (t.square().sum(-1) for t in (states - dense.float(), dense.float()))
    return float((difference / scale).mean())


def tables(rows: list[dict[str, Any]], size: str) -> str:
    """Return a table for every sparsity, in Markdown; ratios are over `fast` with the same seed."""
    parts, clock = [], "wall" if size == "gpu" else "cpu"
    of_size = [row for row in rows if row["size"] == size and not row["key"].split("|")[5]]
    for row in of_size:
        if row["row"] == DENSE:
            stories = f", of stories {row['stories_perplexity']:.2f}" if "stories_kl" in row else ""
            parts += [f"Dense: perplexity {row['perplexity']:.2f}{stories}.", ""]
    for sparsity in sorted({row["sparsity"] for row in of_size} - {0.0}):
        at = [row for row in of_size if row["sparsity"] == sparsity]
        base = {row["seed"]: row for row in at if row["row"] == BASELINE}
        own = {name: [row for row in at if row["row"] == name] for name in ROWS}
        lines = [{"": name, **_cells(own[name], base, clock)} for name in ROWS if own[name]]
        table = record.table(list(lines[0]), [list(line.values()) for line in lines])
        parts += [f"{100 * sparsity:.0f} %:", "", table, ""]
    return "\n".join(parts)


def _cells(
    own: list[dict[str, Any]], base: dict[int, dict[str, Any]], clock: str
) -> dict[str, str]:
    """Return the cells of a row by their heads; ratios only if the baseline was measured."""
    perplexity, kl, spent = (sum(r[v] for r in own) / len(own) for v in ("perplexity", "kl", clock))
    both = [r for r in own if r["seed"] in base]
    ratios = {
        v: f"{sum(r[v] / base[r['seed']][v] for r in both) / len(both):.2f}" if both else "–"
        for v in ("kl", clock)
    }
    spread = max(r["kl"] for r in own) - min(r["kl"] for r in own)
    sizes = {f"{100 * r['removed']:.1f} %" for r in own if "removed" in r}
    cells = {
        "removed": " to ".join(sorted(sizes)) or "–", "perplexity": f"{perplexity:.2f}",
        "KL": f"{kl:.3f}" + (f" (±{spread / 2:.3f})" if len(own) > 1 else ""),
        f"KL over `{BASELINE}`": ratios["kl"],
        f"{clock.replace('cpu', 'CPU')} s": f"{spent:.0f}", f"over `{BASELINE}`": ratios[clock],
    }  # fmt: skip
    if not base:
        cells = {head: cell for head, cell in cells.items() if BASELINE not in head}
    second = [r for r in own if "stories_kl" in r]
    for head, name, digits in (
        ("stories: perplexity", "stories_perplexity", 2), ("stories: KL", "stories_kl", 3),
    ):  # fmt: skip
        values = [r[name] for r in second]
        cells[head] = f"{sum(values) / len(values):.{digits}f}" if values else "–"
    return cells


if __name__ == "__main__":
    main()
