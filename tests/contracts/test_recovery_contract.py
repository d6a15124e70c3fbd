"""Every architecture is trained a few steps, and its result loads again."""

import pytest
import torch

import coec
import tiny_models as tm
from coec.models.dense import Dense
from coec.recovery import session

pytestmark = pytest.mark.unchecked  # whole models

SETTINGS = {"seq_len": 32, "samples": 16, "preset": "fast"}
TRAINING = {"seq_len": 32, "tokens": 512, "learning_rate": 3e-5}


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """Pruned models by variant and settings, made once."""
    root = tmp_path_factory.mktemp("recovery")
    tokens = tm.token_file(root / "tokens.npy", rows=96)
    made = {}

    def make(variant, **settings):
        key = (variant, *sorted(settings.items()))
        if key not in made:
            dense = root / variant
            if not dense.exists():
                tm.save(tm.tiny(variant, torch.float32), dense)
            folder = root / f"pruned-{len(made)}"
            # Attention loses units too where it can, so that there is something to recover.
            whole = Dense.open(dense).architecture.attention_kept
            lost = {} if whole else {"attention_sparsity": 0.3}
            coec.prune(dense, folder, calibration=tokens, **SETTINGS | lost | settings)
            made[key] = dense, folder
        return (*made[key], tokens)

    return make


def check(dense, start, text, out, **settings):
    report = coec.recover(dense, start, out, text=text, **{**TRAINING, **settings})
    assert report.recoveries[-1]["improved"]
    before, after = Dense.open(start), Dense.open(out)
    assert (before.config, before.shapes) == (after.config, after.shapes)
    assert any(not torch.equal(before.tensor(n), after.tensor(n)) for n in before.files)
    code = bool(report.plan.get("code"))
    loaded = coec.perplexity(out, text, seq_len=32, baseline=dense)
    assert loaded.kl < coec.perplexity(start, text, seq_len=32, baseline=dense).kl
    if not code:
        network = after.network(torch.device("cpu"), torch.float32)
        torch.testing.assert_close(tm.logits(tm.load(out)), tm.logits(network))


@pytest.mark.parametrize("variant", tm.VARIANTS)
def test_every_architecture(variant, pruned, tmp_path):
    # Two windows do not show there what two steps gain.
    more = {"tokens": 2048} if variant in ("starcoder2", "qwen2") else {}
    check(*pruned(variant), tmp_path / "out", **more)


def test_low_rank_additions(pruned, tmp_path):
    check(*pruned("llama biases"), tmp_path / "out", lora=4, learning_rate=1e-4, tokens=2048)


@pytest.mark.slow
def test_low_rank_additions_begin_at_the_numbers_of_the_seed(pruned, tmp_path):
    dense, start, text = pruned("llama biases")
    settings = {"text": text, "lora": 4, **TRAINING, "learning_rate": 1e-4, "tokens": 2048}
    for seed in (1, 2):
        torch.manual_seed(seed)  # of the caller, which decides nothing
        report = coec.recover(dense, start, tmp_path / f"{seed}", **settings)
        assert report.recoveries[-1]["improved"]
    assert tm.same_weights(tmp_path / "1", tmp_path / "2")


@pytest.mark.parametrize("variant", ["gemma2", "mixtral"])
@pytest.mark.slow
def test_low_rank_additions_become_weights_of_other_families(
    variant, pruned, tmp_path, monkeypatch
):
    """On random models four steps need not help, so that the result is taken as better."""
    dense, start, text = pruned(variant)
    divergences = iter((1.0, 0.5))
    monkeypatch.setattr(session, "divergence", lambda *given: next(divergences))
    coec.recover(dense, start, tmp_path / "out", text=text, lora=4, **TRAINING)
    before, after = Dense.open(start), Dense.open(tmp_path / "out")
    changed = [n for n in before.files if not torch.equal(before.tensor(n), after.tensor(n))]
    assert any(".self_attn." in name for name in changed)
    assert not any("norm" in name or "embed" in name for name in changed)
    torch.testing.assert_close(
        tm.logits(tm.load(tmp_path / "out")),
        tm.logits(after.network(torch.device("cpu"), torch.float32)),
    )


def test_widths_by_block(pruned, tmp_path):
    check(*pruned("llama tied", by_block=True), tmp_path / "out")
