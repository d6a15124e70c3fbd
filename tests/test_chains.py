"""What others make of a pruned model: quantised models, and adapters that become part of it.

`make chains` runs those that need torchao and bitsandbytes; what llama.cpp makes of exported files
is in exporting/test_llama_cpp.py.
"""

import shutil

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import coec
import tiny_models as tm
from coec.models.dense import Dense

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
"""Wide enough for quantisers' groups."""
WAYS = {
    "uniform": {"multiple_of": "128"},
    "by block": {
        "multiple_of": "128", "by_block": True, "sparsity": 0.4,
    },
    "odd": {"multiple_of": "1"},
}  # fmt: skip
WIDTHS = {"uniform": [384, 384], "by block": [256, 512], "odd": [359, 359]}


@pytest.fixture(scope="module", params=WAYS)
def pruned(request, tmp_path_factory):
    """A folder of random weights, all KV groups kept; the channels of its blocks."""
    place = tmp_path_factory.mktemp("chains")
    network = tm.tiny("llama", torch.float32, **WIDE)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.3)
    tm.save(network, place / "dense")
    tokens = tm.token_file(place / "tokens.npy")
    settings = {"preset": "fast", "sparsity": 0.3, "attention_sparsity": 0, "samples": 24}
    settings |= {"seq_len": 32, "calibration": tokens, **WAYS[request.param]}
    coec.prune(place / "dense", place / "pruned", **settings)
    shape = Dense.open(place / "pruned").shape
    widths = [shape.at(block).ffn for block in range(2)]
    assert sorted(widths) == WIDTHS[request.param]
    return place / "pruned", request.param


def test_an_adapter_becomes_part_of_a_pruned_model(pruned, tmp_path):
    folder, _ = pruned
    base = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    before = tm.logits(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    expected = tm.logits(model)
    assert not torch.allclose(expected, before, atol=0.1)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    network = Dense.open(tmp_path / "merged").network(torch.device("cpu"), torch.float32)
    torch.testing.assert_close(tm.logits(network), expected, rtol=1e-3, atol=1e-3)
    coec.export(tmp_path / "merged", tmp_path / "merged.gguf", no_tokenizer=True)


def quantisers():
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    groups = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(128))
    return {
        "int8": TorchAoConfig(Int8WeightOnlyConfig()),
        "int4": TorchAoConfig(groups),
        "nf4": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
    }


@pytest.mark.chains
@pytest.mark.parametrize(("quantiser", "bound"), [("int8", 0.002), ("int4", 0.1), ("nf4", 0.1)])
def test_quantisers_take_a_pruned_model(quantiser, bound, pruned, tmp_path):
    folder, way = pruned
    options = {"quantization_config": quantisers()[quantiser], "trust_remote_code": True}
    if (quantiser, way) == ("int4", "odd"):
        with pytest.raises(RuntimeError, match="conversion"):
            AutoModelForCausalLM.from_pretrained(folder, **options)
        return
    out = tmp_path / "quantised"
    AutoModelForCausalLM.from_pretrained(folder, **options).save_pretrained(out)
    for file in folder.iterdir():
        if file.suffix == ".py" or "tokenizer" in file.name:
            shutil.copy(file, out)
    ids = torch.randint(2, tm.VOCABULARY, (1000,), generator=torch.Generator().manual_seed(2))
    settings = {"seq_len": 32, "baseline": folder, "via": "transformers", "device": "cpu"}
    if (quantiser, way) == ("nf4", "odd") and takes_rows_by_32():
        with pytest.raises(AssertionError, match="divisible"):
            coec.perplexity(out, ids, **settings, trust_remote_code=True)
        return
    found = coec.perplexity(out, ids, **settings, trust_remote_code=True)
    assert 0 < found.kl < bound


@pytest.mark.chains
@pytest.mark.parametrize("pruned", ["uniform"], indirect=True)
def test_moments_of_a_byte_train_as_those_of_four(pruned, tmp_path):
    """Also where the training was stopped: they are read back from a state."""
    dense, tokens = pruned[0].parent / "dense", pruned[0].parent / "tokens.npy"
    folder = tmp_path / "uncompensated"  # what is left to learn from random text is little
    plain = {"compensation": "none", "multiple_of": "128", "samples": 24, "seq_len": 32}
    coec.prune(dense, folder, calibration=tokens, **plain)
    settings = {"text": str(tokens), "tokens": 2048, "seq_len": 32}

    def recovered(name, optimizer, progress=None):
        more = {"optimizer": optimizer, "progress": progress}
        return coec.recover(dense, folder, tmp_path / name, **settings, **more).recoveries[-1]

    def stop(phase, done, total):
        if phase == "training on tokens" and done > 0.6 * total:
            raise KeyboardInterrupt

    validation = [recovered(name, name)["held_out"] for name in ("adamw", "adamw-8bit")]
    wide, narrow = (found["before"] - found["after"] for found in validation)
    assert wide > 0
    assert narrow == pytest.approx(wide, rel=0.05)
    with pytest.raises(KeyboardInterrupt):
        recovered("stopped", "adamw-8bit", stop)
    recovered("stopped", "adamw-8bit")
    assert tm.same_weights(tmp_path / "stopped", tmp_path / "adamw-8bit")
    assert not tm.same_weights(tmp_path / "adamw", tmp_path / "adamw-8bit")


def takes_rows_by_32():
    """Whether bitsandbytes runs the kernel that it has for CPUs with AVX-512 and bfloat16."""
    from bitsandbytes.functional import has_avx512bf16

    return has_avx512bf16()
