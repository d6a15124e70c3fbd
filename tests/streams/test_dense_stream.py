"""The dense model, one block at a time."""

import pytest
import torch

import tiny_models as tm
from coec.config.recipe import Recipe
from coec.models.dense import Dense
from coec.planning.plan import Plan
from coec.streams import streams as module
from coec.streams.layers import Layers
from coec.streams.streams import Streams, summed_inputs

IDS = torch.randint(2, tm.VOCABULARY, (20, 32), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    return Dense.open(tm.save(tm.tiny("mistral sliding"), root / "model", tokenizer=False))


def opened(checkpoint, dtype="float64"):
    recipe = Recipe(preset="paper", forward_dtype=dtype, device="cpu")
    return Streams(Plan.of(checkpoint, recipe), checkpoint, IDS)


def measured(checkpoint, dtype="float64"):
    """The Gram of every site by block."""
    streams = opened(checkpoint, dtype)
    sums = [streams.measure(block)[1] for block in checkpoint.layout.blocks]
    return [{name: total.gram() for name, total in of_block.items()} for of_block in sums]


@pytest.mark.parametrize("tokens", [8, 32])
def test_batches_of_any_size_add_up(tokens, checkpoint, monkeypatch):
    """Two windows at once, or one, which may be longer than a batch."""
    whole = measured(checkpoint)
    monkeypatch.setattr(module, "tokens_per_batch", lambda *given: tokens)
    for one, two in zip(whole, measured(checkpoint), strict=True):
        assert one.keys() == two.keys() == {"attention", "mlp"}
        for site in one:
            assert one[site].tokens == two[site].tokens == 640
            torch.testing.assert_close(one[site].xx, two[site].xx)
            torch.testing.assert_close(one[site].x, two[site].x)


def test_only_one_block_is_in_memory_with_the_weights_as_stored(checkpoint, monkeypatch):
    streams, seen = opened(checkpoint, "float32"), []
    stored = Dense.tensors

    def places():
        return {p.device.type for layer in streams._layers.modules for p in layer.parameters()}

    def tensors(self, block):
        seen.append(places())
        return stored(self, block)

    monkeypatch.setattr(Dense, "tensors", tensors)
    for block in checkpoint.layout.blocks:
        found, _ = streams.measure(block)
        assert places() == {"meta"}
        assert all(torch.equal(found[n], t) for n, t in stored(checkpoint, block).items())
    assert seen
    assert all(found == {"meta"} for found in seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_narrow_forward_pass_sums_in_float64(dtype, checkpoint):
    for one, two in zip(measured(checkpoint), measured(checkpoint, dtype), strict=True):
        gram, reference = two["mlp"].xx, one["mlp"].xx
        assert gram.dtype == torch.float64
        assert torch.equal(gram, gram.T)
        error = float((gram - reference).norm() / reference.norm())
        assert 0 < error < 8 * torch.finfo(getattr(torch, dtype)).eps


@pytest.mark.parametrize("variant", ["llama", "cohere2", "mixtral", "deepseek_v3"])
@torch.no_grad()
def test_inputs_are_summed_with_the_weights_of_their_tokens(variant, tmp_path):
    """Of windows of one weight each: those of every window alone, times its weight."""
    dense = Dense.open(tm.save(tm.tiny(variant), tmp_path / "dense"))
    layers = Layers(dense, device=torch.device("cpu"), dtype=torch.float64)
    ids = torch.randint(2, tm.VOCABULARY, (3, 16), generator=torch.manual_seed(0))
    batches = dict(enumerate([ids, *ids.split(1)]))
    states, *alone = layers.embed(batches, dense.outside_tensors()).values()
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
