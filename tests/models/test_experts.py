"""Experts as checkpoints have them and as a model has them."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3MoeConfig

import coec
import tiny_models as tm
from coec.config.recipe import Recipe
from coec.errors import ModelError, OptionError
from coec.models import description
from coec.models.architectures import ARCHITECTURES
from coec.models.dense import Dense
from coec.models.description import Description
from coec.models.surgery import routed_inputs, without_experts
from coec.planning.plan import Plan
from coec.types import KeptSet

EXPERTS = [name for name, v in tm.VARIANTS.items() if ARCHITECTURES[v["model_type"]].count]


def test_a_release_that_stacks_no_experts_is_refused(monkeypatch):
    """As 4.57 names them: the inputs of such a module say nothing of the router's weights."""
    monkeypatch.setattr(description, "loading", None)
    with pytest.raises(ModelError, match="'qwen3_moe' needs transformers 5"):
        Description.of(tm.raw_config("qwen3_moe"))


class Experts(nn.Module):
    """Experts of one parameter each for all, as transformers runs them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 5))
        self.down_proj = nn.Parameter(torch.randn(3, 5, 4))

    def channels(self, expert, hidden):
        gate, up = nn.functional.linear(hidden, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            token, place = (index == expert).nonzero(as_tuple=True)
            product = self.channels(expert, hidden[token]) @ self.down_proj[expert].T
            out.index_add_(0, token, product * weights[token, place, None])
        return out


def test_an_expert_reads_its_own_tokens_times_their_weights():
    """Token 0 goes to experts 2 and 0, token 1 to expert 0 alone, and none to expert 1."""
    experts = Experts()
    hidden, weights = torch.randn(2, 5), torch.tensor([[0.75, 0.25], [1.0, 0.0]])
    index = torch.tensor([[2, 0], [0, 3]])
    routed = list(routed_inputs(experts, (hidden, index, weights)))
    found = {expert: inputs for expert, _, inputs, _ in routed}

    first, second = experts.channels(0, hidden)
    torch.testing.assert_close(found[0], torch.stack([0.25 * first, second]))
    assert found[1].shape == (0, 4)
    torch.testing.assert_close(found[2], 0.75 * experts.channels(2, hidden)[:1])
    for expert, token, inputs, norms in routed:
        assert token.tolist() == [[0, 1], [], [0]][expert]
        torch.testing.assert_close(norms, (inputs @ experts.down_proj[expert].T).norm(dim=1))


def saved_stacked(variant, folder):
    """Save a model with the tensors of its memory, as programs do that train it."""
    model = tm.tiny(variant)
    tm.save(model, folder, tokenizer=False)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("variant", EXPERTS)
def test_experts_in_one_tensor_are_read_as_experts_by_themselves(variant, tmp_path):
    alone = Dense.open(tm.save(tm.tiny(variant), tmp_path / "alone", tokenizer=False))
    stacked = Dense.open(saved_stacked(variant, tmp_path / "stacked"))
    assert any(header.piece for header in stacked.stored.values())
    assert stacked.digest == alone.digest
    assert stacked.notes == alone.notes


def test_an_expert_in_two_layouts_is_refused(tmp_path):
    folder = saved_stacked("qwen3_moe", tmp_path / "model")
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    state = load_file(folder / "model.safetensors")
    save_file(state | {name: torch.ones(3, 3)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="both hold"):
        Dense.open(folder)


@pytest.mark.parametrize("variant", EXPERTS)
def test_experts_that_stay_are_numbered_anew_with_their_rows_of_the_router(variant, tmp_path):
    dense = Dense.open(tm.save(tm.tiny(variant), tmp_path / "model", tokenizer=False))
    block, kept = dense.layout.blocks[1], KeptSet(torch.tensor([1, 3]), 4)
    tensors = dense.tensors(block)
    smaller = without_experts(tensors, block, kept)
    routers = [rows.tensor for rows in block.router]
    assert routers[0].endswith("gate.weight")
    for router in routers:
        assert torch.equal(smaller.pop(router), tensors[router][[1, 3]])
    for name, tensor in smaller.items():
        old = re.sub(r"experts\.(\d)\.", lambda m: f"experts.{[1, 3][int(m[1])]}.", name)
        assert torch.equal(tensor, tensors[old])
    assert len(smaller) == len(tensors) - len(routers) - 2 * 3
    assert [site.expert for site in block.remaining(kept) if site.routed] == [1, 3]
    assert block.remaining(None) == block.sites


def test_how_many_there_are_is_said_as_4_57_reads_it():
    config = tm.raw_config("qwen3_moe")
    config["num_local_experts"] = config.pop("num_experts")
    assert Description.of(config).config["num_experts"] == 4


def test_experts_without_a_size_have_that_of_their_class():
    config = tm.raw_config("qwen3_moe")
    del config["moe_intermediate_size"]
    assert Description.of(config).shape.expert_ffn == Qwen3MoeConfig().moe_intermediate_size


def plan(channels, **settings):
    config = tm.raw_config("qwen3_moe", moe_intermediate_size=channels)
    return coec.plan(Description.of(config), **{"preset": "paper", **settings})


def test_experts_keep_a_multiple_of_8_as_their_product_of_matrices_wants():
    rounded = plan(64, sparsity=0.3)
    assert rounded.record()["widths"]["experts"] == {"before": 64, "after": 48}
    exact = plan(64, sparsity=0.25)
    assert exact.record()["widths"]["experts"]["after"] == 48
    assert not any("multiple" in note for note in exact.notes)
    assert plan(64, sparsity=0.3, multiple_of="12").record()["widths"]["experts"]["after"] == 48
    whole = plan(64, sparsity=0.5, attention_sparsity=0).record()["widths"]["experts"]["after"]
    assert whole % 8 == 0
    assert whole <= 32


def test_experts_whose_units_are_named_keep_these_and_a_note_says_what_that_means():
    sites = [(block, expert) for block in range(2) for expert in range(4)]
    kept = {f"layers.{b}.expert.{e}": list(range(e, e + 11)) for b, e in sites}
    named = plan(64, sparsity=0.3, kept=kept)
    assert named.record()["widths"]["experts"]["after"] == 11
    assert any('experts_implementation="eager"' in note for note in named.notes)


def test_one_share_is_of_mlps_and_experts():
    config = tm.raw_config("qwen3_moe mixed", moe_intermediate_size=64)
    recipe = Recipe(sparsity=0.25, attention_sparsity=0, multiple_of=1)
    made = Plan.of(Description.of(config), recipe)
    assert made.record()["widths"] == {
        "mlp": {"before": 40, "after": 30},
        "experts": {"before": 64, "after": 48},
        "whole_experts": {"before": 4, "after": 4},
        "kv_groups": {"before": 4, "after": 4},
        "query_heads": {"before": 8, "after": 8},
    }


def test_the_smallest_fraction_counts_experts_channels_by_eights(tmp_path):
    """One of 24 channels is no more than a third here; one of four KV groups is the least."""
    model = tm.save(tm.tiny("qwen3_moe", torch.float32, moe_intermediate_size=24), tmp_path / "m")
    with pytest.raises(OptionError, match="nothing is removed"):
        coec.plan(model, sparsity=0.05)
    assert coec.plan(model, sparsity=0.25, preset="paper").pruned.kv_heads == 3
    assert coec.plan(model, sparsity=0.34, attention_sparsity=0).pruned.expert_ffn == 16


@pytest.mark.unchecked  # whole models
@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_corrections_of_a_router_stay_float32_next_to_bfloat16(preset, tokens, tmp_path):
    """As GLM 4.5 and DeepSeek V3 are released; rounding them changes which experts are chosen."""
    sizes = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
    folder = tm.save(tm.tiny("glm4_moe", torch.bfloat16, **sizes), tmp_path / "model")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    fine = 8 + torch.tensor([0.001, 0.002, 0.003, 0.004])  # one number in bfloat16
    tm.edit_weights(folder, lambda weights: weights | {name: fine})
    dense = Dense.open(folder)
    assert dense.dtype == torch.bfloat16
    network = dense.network(torch.device("cpu"), torch.bfloat16)
    assert torch.equal(network.get_buffer(name), fine)
    coec.prune(folder, tmp_path / "out", calibration=tokens, preset=preset, samples=16, seq_len=32,
               sparsity=0.5, forward_dtype="bfloat16", device="cpu")  # fmt: skip
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written.pop(name), fine)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert Dense.open(tmp_path / "out").dtype == torch.bfloat16
