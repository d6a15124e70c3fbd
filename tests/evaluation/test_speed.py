"""What is run and counted; nothing here depends on how fast anything is."""

import json
from dataclasses import replace

import pytest
import torch

import coec
import tiny_models as tm
from coec.errors import OptionError
from coec.evaluation import efficiency as module
from coec.evaluation.efficiency import _NO_PEAK, Rates, Spread, oddities, run_once
from coec.evaluation.settings import Workload

SMALL = Workload(prompt_tokens=12, new_tokens=5, batch_size=2, repeats=3, warmup=1)


@pytest.mark.parametrize("variant", ["llama", "mistral sliding", "qwen3", "granite"])
def test_a_run_decodes_what_transformers_generates(variant):
    model = tm.tiny(variant, torch.float32)
    prompt = torch.randint(2, tm.VOCABULARY, (2, 12))
    filling, decoding, tokens = run_once(model, prompt, 6)
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=6,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(tokens, expected[:, 12:])
    assert filling > 0
    assert decoding > 0


def test_the_models_take_turns_and_swap_their_order(dense, pruned_folder, monkeypatch):
    ran = []

    def timed(model, prompt, new_tokens):
        ran.append((model.config.intermediate_size, tuple(prompt.shape), new_tokens))
        seconds = 2.0 if model.config.intermediate_size == 40 else 1.0
        return seconds * len(ran), 2 * seconds * len(ran), prompt

    monkeypatch.setattr(module, "run_once", timed)
    told = []
    found = coec.speed(dense, pruned_folder, load=SMALL, progress=lambda *step: told.append(step))
    assert ran == [(width, (2, 12), 5) for width in (40, 28, 28, 40, 40, 28, 28, 40)]
    assert told == [("timing", i, 4) for i in range(1, 5)]
    # Runs 3 to 8 count, the first two are the warm-up.
    dense, pruned = ([24 / (2.0 * i) for i in (4, 5, 8)], [24 / i for i in (3, 6, 7)])
    assert found.prefill == Rates.of(dense, pruned)
    assert found.decode.dense.median == pytest.approx(10 / (4.0 * 5))


def test_rates_are_medians_and_pairs():
    rates = Rates.of([1.0, 2.0, 4.0], [3.0, 2.0, 6.0])
    assert rates.dense == Spread(2.0, 1.0, 4.0)
    assert rates.pruned == Spread(3.0, 2.0, 6.0)
    assert rates.ratio == 1.5
    assert rates.paired == Spread(1.5, 1.0, 3.0)


def test_a_measurement_on_the_cpu(dense, pruned_folder):
    found = coec.speed(dense, pruned_folder, load=SMALL, device="cpu", dtype="float64")
    for rates in (found.prefill, found.decode):
        for spread in (rates.dense, rates.pruned, rates.paired):
            assert 0 < spread.least <= spread.median <= spread.greatest
    assert (found.peak_memory_dense, found.peak_memory_pruned) == (None, None)
    assert found.memory_note == _NO_PEAK
    assert (found.device, found.dtype, found.load) == ("cpu", "float64", SMALL)
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_prompt_is_as_long_as_the_model_allows(dense, pruned_folder):
    asked = Workload(new_tokens=4, repeats=1, warmup=0)
    found = coec.speed(dense, pruned_folder, load=asked)
    assert found.load.prompt_tokens == tm.POSITIONS - 4
    assert "60 tokens instead of 512" in oddities(found, asked)[0]
    with pytest.raises(OptionError, match="new_tokens=64 leaves no room .* 64 positions; use 63"):
        coec.speed(dense, pruned_folder, load=Workload(new_tokens=64))


def test_odd_rates_are_named(dense, pruned_folder):
    found = coec.speed(dense, pruned_folder, load=SMALL)
    quiet = replace(
        found, prefill=Rates.of([1.0] * 3, [1.5] * 3), decode=Rates.of([1.0] * 3, [1.2] * 3)
    )
    assert oddities(quiet, SMALL) == [_NO_PEAK]
    odd = replace(
        quiet, prefill=Rates.of([1.0] * 3, [0.8] * 3), decode=Rates.of([1.0, 1.0], [0.9, 1.3])
    )
    slower, torn, _ = oddities(odd, SMALL)
    assert slower == "prefill: the pruned model is slower (0.80 of the rate)"
    assert "decode: which model is faster differs between repeats (0.90 to 1.30)" in torn


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("prompt_tokens", 0, 1), ("new_tokens", 0, 1), ("batch_size", 0, 1), ("repeats", 0, 1),
     ("warmup", -1, 0)],
)  # fmt: skip
def test_a_workload_that_is_none_is_refused(name, value, least):
    message = f"{name} must be a whole number of at least {least}, got {value}"
    with pytest.raises(OptionError, match=message):
        Workload(**{name: value})


def test_bad_settings_are_refused_before_a_model_is_opened():
    with pytest.raises(OptionError, match="dtype must be one of"):
        coec.speed("nowhere", "nowhere", dtype="int8")
    with pytest.raises(OptionError, match="device 'warp' cannot be used"):
        coec.speed("nowhere", "nowhere", device="warp")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="peak memory needs a CUDA device")
def test_peak_memory_on_cuda(dense, pruned_folder):
    found = coec.speed(dense, pruned_folder, load=SMALL, device="cuda")
    cost = coec.efficiency(dense, pruned_folder)
    assert found.memory_note is None
    assert found.peak_memory_dense > cost.dense.weight_bytes
    assert found.peak_memory_dense > found.peak_memory_pruned > cost.pruned.weight_bytes
