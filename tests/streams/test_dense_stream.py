"""The dense model, one block at a time."""

import pytest
import torch
from coec.streaming import layers as module
from coec.streaming.dense_stream import DenseStream, summed_inputs

import tiny_models as tm
from coec.models.dense import Dense
from coec.streams.layers import Layers

IDS = torch.randint(2, tm.VOCABULARY, (5, 32), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    return Dense.open(tm.save(tm.tiny("mistral sliding"), root / "model", tokenizer=False))


def stream(checkpoint, ids=IDS, dtype=torch.float64, progress=None):
    return DenseStream(checkpoint, ids, device=torch.device("cpu"), dtype=dtype, progress=progress)


def test_batches_of_unequal_size_add_up(checkpoint, monkeypatch):
    whole = list(stream(checkpoint).blocks())
    monkeypatch.setattr(module, "TOKENS_PER_BATCH", 64)  # 2, 2 and 1 windows
    parts = list(stream(checkpoint).blocks())
    for one, two in zip(whole, parts, strict=True):
        for site in ("attention", "mlp"):
            assert one.grams[site].tokens == two.grams[site].tokens == 160
            torch.testing.assert_close(one.grams[site].xx, two.grams[site].xx)
            torch.testing.assert_close(one.grams[site].x, two.grams[site].x)


def test_a_window_longer_than_a_batch_is_a_batch(checkpoint, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_PER_BATCH", 8)
    blocks = list(stream(checkpoint).blocks())
    assert [block.grams["mlp"].tokens for block in blocks] == [160, 160]


def test_only_one_block_is_ever_in_memory(checkpoint, monkeypatch):
    running = stream(checkpoint)
    seen = []
    original = Dense.tensors

    def tensors(self, block):
        places = [{p.device.type for p in layer.parameters()} for layer in running._layers.modules]
        seen.append((block.index, places))
        return original(self, block)

    monkeypatch.setattr(Dense, "tensors", tensors)
    for _ in running.blocks():
        assert {p.device.type for layer in running._layers.modules for p in layer.parameters()} == {
            "meta"
        }
    assert seen == [(i, [{"meta"}, {"meta"}]) for i in range(2)]


def test_blocks_hold_the_weights_as_stored(checkpoint):
    for block in stream(checkpoint, dtype=torch.float32).blocks():
        stored = checkpoint.tensors(block.block)
        assert block.tensors.keys() == stored.keys()
        assert all(torch.equal(block.tensors[name], stored[name]) for name in stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_forward_pass_sums_in_float64(dtype, checkpoint):
    exact = list(stream(checkpoint).blocks())
    for one, two in zip(exact, stream(checkpoint, dtype=dtype).blocks(), strict=True):
        gram, reference = two.grams["mlp"].xx, one.grams["mlp"].xx
        assert gram.dtype == torch.float64
        assert torch.equal(gram, gram.T)
        error = float((gram - reference).norm() / reference.norm())
        assert 0 < error < 8 * torch.finfo(dtype).eps


def test_progress_counts_batches_over_all_blocks(checkpoint, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_PER_BATCH", 64)
    seen = []
    list(stream(checkpoint, progress=lambda *call: seen.append(call)).blocks())
    assert seen == [("calibrating", done, 6) for done in range(1, 7)]


@pytest.mark.parametrize("variant", ["llama", "cohere2", "mixtral", "deepseek_v3"])
@torch.no_grad()
def test_inputs_are_summed_with_the_weights_of_their_tokens(variant, tmp_path):
    """Of windows of one weight each: those of every window alone, times its weight."""
    dense = Dense.open(tm.save(tm.tiny(variant), tmp_path / "dense"))
    layers = Layers(dense, device=torch.device("cpu"), dtype=torch.float64)
    ids = torch.randint(2, tm.VOCABULARY, (3, 16), generator=torch.manual_seed(0))
    states, *alone = layers.embed([ids, *ids.split(1)], dense.tensor(dense.layout.embedding))
    block = dense.layout.blocks[-1]
    layers.load(block, dense.tensors(block))
    of_windows, expected, sums = torch.tensor([0.5, 2.0, 3.0]), {}, {}
    with summed_inputs(layers, block, sums, of_windows[:, None].expand(3, 16)):
        layers.advance(block.index, states)
    for weight, state in zip(of_windows, alone, strict=True):
        own = {}
        with summed_inputs(layers, block, own):
            layers.advance(block.index, state)
        for name, total in own.items():
            expected[name] = expected.get(name, 0) + float(weight) * total.xx
    assert set(sums) == {site.name for site in block.sites}
    for name, total in sums.items():
        torch.testing.assert_close(total.xx, torch.as_tensor(expected[name]), rtol=1e-5, atol=1e-6)
    layers.advance(block.index, states)  # no hook is left
    for name, total in sums.items():
        torch.testing.assert_close(total.xx, torch.as_tensor(expected[name]), rtol=1e-5, atol=1e-6)
