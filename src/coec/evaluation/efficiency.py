"""The cost of running a model, by its configuration alone and measured (docs/lab/ANALYSIS.md)."""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from coec.devices import DTYPES, choose_device, choose_forward_dtype, stored_dtype
from coec.errors import OptionError
from coec.evaluation.pair import ModelPair, check_dtype
from coec.evaluation.settings import Workload
from coec.events import Progress
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.files import JsonDict
from coec.planning import Plan
from coec.planning.recipe import Recipe


@dataclass(frozen=True)
class Cost:
    """The cost of a model.

    Attributes:
        parameters: tied ones count once.
        dtype: that of weights and cache.
        weight_bytes: `parameters × bytes of the dtype`. The peak memory of inference, the paper's
            `Mem`, adds activations, cache and the allocator's share; `speed` measures it.
        gflops_per_token: `2 × parameters / 1e9`, the paper's rule (embeddings count too).
        kv_cache_bytes_per_token: bytes of keys and values in all blocks.
    """

    parameters: int
    dtype: str
    weight_bytes: int
    gflops_per_token: float
    kv_cache_bytes_per_token: int


@dataclass(frozen=True)
class Efficiency:
    """The cost of a dense and of a pruned model."""

    dense: Cost
    pruned: Cost

    def as_dict(self) -> JsonDict:
        """List both costs by name, and `ratio`: pruned over dense."""
        dense, pruned = asdict(self.dense), asdict(self.pruned)
        ratio = {name: pruned[name] / dense[name] for name in dense if name != "dtype"}
        return {"dense": dense, "pruned": pruned, "ratio": ratio}


def efficiency(
    model: str | Path | Description,
    pruned: str | Path | Description | None = None,
    *,
    sparsity: float | None = None,
    dtype: str | None = None,
) -> Efficiency:
    """Compute the cost before and after pruning, without weights. Paper, Efficiency Analysis.

    Args:
        model: the dense model: a folder, a config.json, or a hub name.
        pruned: a pruned model likewise; None for the dense model pruned by `sparsity`.
        sparsity: fraction of units removed, with `pruned = None`; None for 0.3.
        dtype: dtype of weights and cache; None for the dtype that each configuration declares.

    Raises:
        CoecError: with one line that says what to change.

    Example:
        >>> coec.efficiency("Qwen2.5-7B/config.json", sparsity=0.3).pruned.gflops_per_token
    """
    if pruned is not None and sparsity is not None:
        raise OptionError("give a pruned model or a sparsity, not both")
    check_dtype(dtype)
    before = Description.read(model)
    if pruned is None:
        recipe = Recipe(preset="paper", sparsity=0.3 if sparsity is None else sparsity)
        plan = Plan.of(before, recipe)
        after = Description.of(plan.output.config)
    else:
        after = Description.read(pruned)
    return Efficiency(_cost(before, dtype), _cost(after, dtype))


def _cost(model: Description, dtype: str | None) -> Cost:
    chosen = DTYPES[dtype] if dtype else stored_dtype(model.config)
    parameters = model.parameters
    return Cost(
        parameters=parameters,
        dtype=str(chosen).removeprefix("torch."),
        weight_bytes=parameters * chosen.itemsize,
        gflops_per_token=2 * parameters / 1e9,
        kv_cache_bytes_per_token=model.cached() * chosen.itemsize,
    )


@dataclass(frozen=True)
class Spread:
    """Median and extremes over the repeats."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Summarize at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Rates:
    """Tokens per second; `ratio` is that of the medians, `paired` those within each repeat."""

    dense: Spread
    pruned: Spread
    ratio: float
    paired: Spread

    @classmethod
    def of(cls, dense: list[float], pruned: list[float]) -> "Rates":
        """Compare rates measured in turns, one of each model per repeat."""
        before, after = Spread.of(dense), Spread.of(pruned)
        paired = [new / old for old, new in zip(dense, pruned)]
        return cls(before, after, after.median / before.median, Spread.of(paired))


@dataclass(frozen=True)
class Speed:
    """The result of a measurement; JSON-ready by `as_dict`.

    Attributes:
        peak_memory_dense, peak_memory_pruned: bytes of the weights plus the maximum that a run
            allocates besides; None on a CPU, which `memory_note` explains.
        load: the work of a run, with the capped prompt.
        device, dtype, threads: environment of the runs; threads are torch's on the CPU.
    """

    prefill: Rates
    decode: Rates
    peak_memory_dense: int | None
    peak_memory_pruned: int | None
    memory_note: str | None
    load: Workload
    device: str
    dtype: str
    threads: int

    def as_dict(self) -> JsonDict:
        """List every field by name."""
        return asdict(self)


_NO_PEAK = (
    "peak memory is measured on CUDA devices only: a process's resident size on the CPU also "
    "counts mapped files and memory that was freed"
)


def speed(
    dense: str | Path | None,
    pruned: str | Path | ModelPair,
    *,
    load: Workload | None = None,
    device: str = "auto",
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Speed:
    """Measure prefill and decode rates of both models, run in turns in this process.

    Both models are in memory together. Every repeat runs both, alternately in one order and
    the other, so that neither model gains from a drifting clock.

    Args:
        dense: the dense model; None for the one that the pruned folder's report names.
        pruned: a folder that `coec.prune` wrote; or both models, opened before.
        device: `auto` (CUDA where there is one), or a torch device.
        dtype: dtype of both forward passes; None as in the setting `forward_dtype`.

    Raises:
        CoecError: with one line that says what to change.
    """
    check_dtype(dtype)
    chosen = choose_device(device)
    pair = ModelPair.open(dense, pruned)
    load = (load or Workload()).within(pair.dense.positions)
    forward = choose_forward_dtype(dtype, pair.dense.dtype, chosen)
    generator = torch.Generator().manual_seed(0)
    shape = (load.batch_size, load.prompt_tokens)
    # Random tokens, the same for both models.
    prompt = torch.randint(pair.dense.vocabulary, shape, generator=generator).to(chosen)
    loaded = [_load(model, forward, chosen) for model in (pair.dense, pair.pruned)]
    prefill, decode = _in_turns([model for model, _ in loaded], prompt, load, progress)
    peaks = [_peak(*model, prompt, load.new_tokens) for model in loaded]
    return Speed(
        prefill=Rates.of(*prefill),
        decode=Rates.of(*decode),
        peak_memory_dense=peaks[0],
        peak_memory_pruned=peaks[1],
        memory_note=None if chosen.type == "cuda" else _NO_PEAK,
        load=load,
        device=torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else str(chosen),
        dtype=str(forward).removeprefix("torch."),
        threads=torch.get_num_threads(),
    )


def _load(dense: Dense, dtype: torch.dtype, device: torch.device) -> tuple[Any, int]:
    """Load the model on the device; returns it and its bytes there (0 on a CPU)."""
    before = _allocated(device)
    model = dense.network(device, dtype)
    return model, _allocated(device) - before


def _peak(model: Any, weights: int, prompt: Int[Tensor, "n length"], new_tokens: int) -> int | None:
    """Measure the bytes of the model plus the maximum that a run allocates; None on a CPU."""
    device = prompt.device
    if device.type != "cuda":
        return None
    before = _allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_once(model, prompt, new_tokens)
    # `before` has both models and whatever else is there: only what the run adds counts.
    return weights + torch.cuda.max_memory_allocated(device) - before


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _in_turns(
    models: list[Any], prompt: Int[Tensor, "n length"], load: Workload, progress: Progress | None
) -> tuple[list[list[float]], list[list[float]]]:
    prefill: list[list[float]] = [[], []]
    decode: list[list[float]] = [[], []]
    total = load.warmup + load.repeats
    for repeat in range(total):
        # Dense first, pruned first, and so on: a clock that drifts favours neither.
        for index in (0, 1) if repeat % 2 == 0 else (1, 0):
            filling, decoding, _ = run_once(models[index], prompt, load.new_tokens)
            if repeat >= load.warmup:
                prefill[index].append(prompt.numel() / filling)
                decode[index].append(load.batch_size * load.new_tokens / decoding)
        if progress:
            progress("timing", repeat + 1, total)
    return prefill, decode


@torch.inference_mode()
def run_once(
    model: Any, prompt: Int[Tensor, "n length"], new_tokens: int
) -> tuple[float, float, Int[Tensor, "n new"]]:
    """Run once; returns seconds of the prefill, seconds of the decoding, and the greedy tokens.

    The prefill gives the first token; decoding feeds `new_tokens` tokens back, one at a time.
    """
    # Prompt → cache and first token; then one token at a time from the cache
    began = _now(prompt.device)
    out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    tokens = [out.logits[:, -1:].argmax(dim=-1)]
    filled = _now(prompt.device)
    for _ in range(new_tokens):
        out = model(
            input_ids=tokens[-1], past_key_values=out.past_key_values, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        tokens.append(out.logits[:, -1:].argmax(dim=-1))
    decoded = _now(prompt.device)
    return filled - began, decoded - filled, torch.cat(tokens[:-1], dim=1)


def _now(device: torch.device) -> float:
    """Read the clock after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def oddities(speed: Speed, load: Workload) -> list[str]:
    """List caveats about the rates, one sentence each."""
    notes = []
    if speed.load.prompt_tokens < load.prompt_tokens:
        notes.append(
            f"the prompt is {speed.load.prompt_tokens} tokens instead of {load.prompt_tokens}: "
            "with the new tokens it fills the model's positions"
        )
    for name, rates in {"prefill": speed.prefill, "decode": speed.decode}.items():
        if rates.paired.least < 1 < rates.paired.greatest:
            notes.append(
                f"{name}: which model is faster differs between repeats "
                f"({rates.paired.least:.2f} to {rates.paired.greatest:.2f}): measure on a quiet "
                "machine"
            )
        elif rates.ratio < 1:
            notes.append(f"{name}: the pruned model is slower ({rates.ratio:.2f} of the rate)")
    if speed.memory_note:
        notes.append(speed.memory_note)
    return notes
