"""Weights in FP8 with scales, as they are released: read as what they stand for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import coec
import tiny_models as tm
from coec.errors import ModelError
from coec.models.dense import Dense
from coec.models.files import scaled

BLOCK = [16, 24]  # which divides neither 32 nor 40
LAYOUTS = {
    "blocks": {"quant_method": "fp8", "weight_block_size": BLOCK},
    "rows": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
    },
    "whole": {"quant_method": "fp8", "activation_scheme": "static"},
}


def quantised(weight, layout):
    """Quantise a matrix; return it in FP8 and its scales, by the obvious loop."""
    rows, columns = weight.shape
    height, width = {"blocks": BLOCK, "rows": (1, columns), "whole": (rows, columns)}[layout]
    grid = -(-rows // height), -(-columns // width)
    small, scale = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            place = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scale[i, j] = weight[place].abs().max() / 448
            small[place] = (weight[place] / scale[i, j]).to(torch.float8_e4m3fn)
    return small, scale.reshape(()) if layout == "whole" else scale


def released(folder, layout):
    """Write a model's linear layers in FP8; return what the weights stand for."""
    path, meant = folder / "model.safetensors", {}
    state = load_file(path)
    end = "_scale" if layout == "rows" else "_scale_inv"
    for name in [n for n in state if n.startswith("model.layers") and state[n].ndim == 2]:
        small, scale = quantised(state[name].float(), layout)
        state |= {name: small, name + end: scale}
        full = torch.empty(small.shape)
        height, width = {"blocks": BLOCK, "rows": (1, 10**6), "whole": (10**6,) * 2}[layout]
        for i in range(len(full)):
            for j in range(full.shape[1]):
                s = scale if layout == "whole" else scale[i // height, j // width]
                full[i, j] = small[i, j].float() * s
        meant[name] = full.to(torch.bfloat16)
    save_file(state, path, {"format": "pt"})
    tm.edit_config(folder, quantization_config=LAYOUTS[layout])
    return meant


@pytest.fixture(params=LAYOUTS)
def folder(request, tmp_path):
    model = tm.save(tm.tiny("llama", torch.bfloat16), tmp_path / "model")
    return model, released(model, request.param)


def test_weights_are_what_their_scales_say(folder):
    dense = Dense.open(folder[0])
    assert dense.dtype == torch.bfloat16
    assert len(folder[1]) == 2 * 7
    for name, weight in folder[1].items():
        assert torch.equal(dense.tensor(name), weight), name
    assert any("14 weights are FP8" in note for note in dense.notes)


def test_the_result_is_an_ordinary_bfloat16_checkpoint(folder, tokens, tmp_path):
    model, meant = folder
    report = coec.prune(model, tmp_path / "out", calibration=tokens, preset="fast", samples=16,
                        seq_len=32, sparsity=0.5, device="cpu")  # fmt: skip
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    written = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    kept = load_file(tmp_path / "out/coec/kept.safetensors")["layers.0.mlp"]
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(written[name], meant[name][kept])
    assert tm.load(tmp_path / "out").num_parameters() == report.plan["parameters"]["after"]


def test_transformers_dequantises_alike():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "Fp8Dequantize"):
        pytest.skip("this release of transformers has another dequantisation")
    small = torch.randn(64, 96).to(torch.float8_e4m3fn)
    scale = torch.rand(4, 4)
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(small, scale, torch.bfloat16)
    assert torch.equal(scaled(small, scale, (16, 24)), theirs)


def test_scales_of_another_shape_are_refused(tmp_path):
    model = tm.save(tm.tiny("llama", torch.bfloat16), tmp_path / "model")
    released(model, "blocks")
    tm.edit_config(model, quantization_config=LAYOUTS["blocks"] | {"weight_block_size": [8, 8]})
    with pytest.raises(
        ModelError, match="weight_scale_inv.* has shape .* mend quantization_config"
    ):
        Dense.open(model)


@pytest.mark.parametrize("size", [[128], [128, 0], "128", [1.5, 2]])
def test_a_block_that_is_none_is_refused(size, tmp_path):
    model = tm.save(tm.tiny("llama", torch.bfloat16), tmp_path / "model")
    tm.edit_config(model, quantization_config={"quant_method": "fp8", "weight_block_size": size})
    with pytest.raises(ModelError, match="weight_block_size"):
        Dense.open(model)


def test_fp8_without_scales_is_refused(tmp_path):
    model = tm.save(tm.tiny("llama", torch.bfloat16), tmp_path / "model")
    name = "model.layers.0.mlp.up_proj.weight"
    tm.edit_weights(model, lambda weights: weights | {name: weights[name].to(torch.float8_e4m3fn)})
    with pytest.raises(ModelError, match="F8_E4M3: the weights are quantised"):
        Dense.open(model)


def test_experts_in_one_tensor_of_fp8_are_refused(tmp_path):
    model = tm.tiny("qwen3_moe", torch.bfloat16)
    folder = tm.save(model, tmp_path / "model")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in [n for n in state if n.endswith("experts.gate_up_proj")]:
        state[name] = state[name].to(torch.float8_e4m3fn)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    tm.edit_config(folder, quantization_config=LAYOUTS["blocks"])
    with pytest.raises(ModelError, match="all experts of a block in FP8"):
        Dense.open(folder)
