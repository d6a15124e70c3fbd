"""Models that transformers loads and coec does not read: an adapter, another architecture."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

import coec
import tiny_models as tm
from coec.errors import ModelError
from outcomes import succeeded

IDS = torch.randint(2, tm.VOCABULARY, (64,), generator=torch.Generator().manual_seed(2))


def measure(model, dense, text=IDS, **more):
    return coec.perplexity(model, text, seq_len=16, baseline=dense, device="cpu", **more)


def test_both_ways_give_the_same_numbers(dense, tokens, tmp_path):
    coec.prune(dense, tmp_path / "out", calibration=tokens, samples=24, seq_len=32, preset="paper",
               compensation="rcpu")  # fmt: skip
    one, other = (measure(tmp_path / "out", dense, via=via) for via in ("coec", "transformers"))
    assert other.kl == pytest.approx(one.kl, rel=1e-5)
    assert other.perplexity == pytest.approx(one.perplexity, rel=1e-6)
    assert (other.parameters, other.agreement) == (one.parameters, one.agreement)


def test_an_adapter_is_measured_with_its_model_and_the_baselines_tokenizer(dense, tmp_path):
    import peft

    network = peft.get_peft_model(
        tm.load(dense), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    network.save_pretrained(tmp_path / "adapter")
    text = tm.text_file(tmp_path / "text.txt", 400)
    result = measure(tmp_path / "adapter", dense, text, via="transformers")
    merged = tm.save(network.merge_and_unload(), tmp_path / "merged")
    assert result.kl == pytest.approx(measure(merged, dense, text).kl, rel=1e-3)
    assert result.kl > 1e-4


def test_another_architecture_is_measured(tmp_path):
    config = GPT2Config(
        n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=tm.VOCABULARY, n_inner=32
    )
    torch.manual_seed(0)
    tm.save(AutoModelForCausalLM.from_config(config), tmp_path / "gpt2")
    result = coec.perplexity(tmp_path / "gpt2", IDS, via="transformers", device="cpu")
    assert result.seq_len == 32  # its positions
    with pytest.raises(ModelError, match="gpt2"):
        coec.perplexity(tmp_path / "gpt2", IDS)


def test_a_model_in_memory_is_measured_as_it_is(dense, tmp_path):
    network = tm.load(dense)
    text = tm.text_file(tmp_path / "text.txt", 400)
    assert measure(network, dense, text).kl == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        network.model.norm.weight.mul_(1.1)
    changed = tm.save(network, tmp_path / "changed")
    kl = measure(network, dense, text).kl
    assert kl == pytest.approx(measure(changed, dense, text).kl, rel=1e-5)
    assert kl > 1e-4
    network.name_or_path = "nowhere/at/all"  # the baseline's tokenizer is its own
    assert measure(network, dense, text).kl == kl
    measure(network.train(), dense, text)
    assert network.training


def test_what_cannot_be_loaded_is_refused(run, dense, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ModelError, match="transformers does not load"):
        measure(tmp_path, None, via="transformers")
    own = {"calibration": IDS.reshape(4, 16), "preset": "fast", "by_block": True}
    coec.prune(dense, tmp_path / "own", samples=4, seq_len=16, **own)
    with pytest.raises(ModelError, match="code of its own builds it: trust_remote_code=True"):
        measure(tmp_path / "own", None, via="transformers")
    out, _ = succeeded(run("eval", dense, "--via", "transformers", "--text", "self", "--baseline",
                           dense, "--samples", 2, "--seq-len", 16))  # fmt: skip
    assert "KL 0.000" in out
