"""Weights in FP8 and MXFP4, as they are released, read as what they stand for; others refused."""

import dataclasses
import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import coec
import tiny_models as tm
from coec.errors import ModelError
from coec.models.architectures import architecture_of
from coec.models.dense import Dense
from coec.models.files import Piece, opened, read_headers
from coec.models.quantised import mxfp4, scaled, with_scales

BLOCK = [16, 24]  # which divides neither 32 nor 40
LAYOUTS = {
    "blocks": {"quant_method": "fp8", "weight_block_size": BLOCK},
    "rows": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
    },
    "named blocks": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 8, "type": "float", "block_structure": BLOCK}}
        },
    },
    "whole": {"quant_method": "fp8", "activation_scheme": "static"},
}


def block_of(layout):
    return {"rows": (1, 10**6), "whole": (10**6, 10**6)}.get(layout, BLOCK)


def quantised(weight, layout):
    """Quantise a matrix; return it in FP8 and its scales, by the obvious loop."""
    height, width = block_of(layout)
    grid = [-(-size // each) for size, each in zip(weight.shape, (height, width), strict=True)]
    small, scale = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(grid)
    for i, j in itertools.product(*map(range, grid)):
        place = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
        scale[i, j] = weight[place].abs().max() / 448
        small[place] = (weight[place] / scale[i, j]).to(torch.float8_e4m3fn)
    return small, scale


def meant_by(small, scale, layout):
    """Return what a matrix in FP8 stands for, by the obvious loop."""
    full, (height, width) = torch.empty(small.shape), block_of(layout)
    for i, j in itertools.product(*map(range, small.shape)):
        full[i, j] = small[i, j].float() * scale[i // height, j // width]
    return full.to(torch.bfloat16)


def released(folder, layout):
    """Write a model's linear layers in FP8; return what the weights stand for."""
    path, meant = folder / "model.safetensors", {}
    state = load_file(path)
    end = "_scale" if layout in ("rows", "named blocks") else "_scale_inv"
    for name in [n for n in state if n.startswith("model.layers") and state[n].ndim == 2]:
        small, scale = quantised(state[name].float(), layout)
        meant[name] = meant_by(small, scale, layout)
        state |= {name: small, name + end: scale.reshape(()) if layout == "whole" else scale}
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
    assert any("weights in FP8 are read as bfloat16" in note for note in dense.notes)


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


def test_a_plan_counts_bfloat16_and_says_so_from_the_configuration_alone(folder, tmp_path):
    model, _ = folder
    tm.edit_config(model, "dtype", "torch_dtype")  # as gpt-oss is released
    settings = {"sparsity": 0.5, "device": "cpu"}
    plans = [coec.plan(source, **settings) for source in (model, model / "config.json")]
    plans.append(coec.plan(Dense.open(model), **settings))
    for plan in plans:
        assert (plan.stored, plan.written) == (torch.bfloat16, torch.bfloat16)
        (note,) = [note for note in plan.notes if "FP8" in note]
        assert "bfloat16 is written: quantise the result again" in note
    assert plans[0].record() == plans[2].record()
    wider = coec.plan(model, dtype="float32", **settings)
    assert any("FP8, and float32 is written" in note for note in wider.notes)


def test_transformers_dequantises_fp8_alike():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "Fp8Dequantize"):
        pytest.skip("this release of transformers has another dequantisation")
    small = torch.randn(64, 96).to(torch.float8_e4m3fn)
    theirs = fp8.Fp8Dequantize(None)._dequantize_one
    for scale in (torch.rand(4, 4), torch.randint(100, 140, (4, 4), dtype=torch.uint8)):
        expected = theirs(small, scale, torch.bfloat16)
        assert torch.equal(scaled(small, scale, (16, 24)), expected)
        rows = scaled(small[20:50], scale, (16, 24), 20)
        assert torch.equal(rows, expected[20:50])


def stacked_in_fp8(folder, layout):
    """Write a mixture's experts in one tensor of FP8 for each block, as transformers 5 holds them;
    return what every expert stands for.
    """
    model = tm.tiny("qwen3_moe", torch.bfloat16)
    tm.save(model, folder)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    meant = {}
    for name in [n for n in state if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        # If a scale is of a whole matrix, gate and up projection have one each.
        parts = 2 if layout == "whole" and name.endswith("gate_up_proj") else 1
        pairs = [[quantised(part, layout) for part in expert.float().chunk(parts)]
                 for expert in state[name]]  # fmt: skip
        for stored, place in ((name, 0), (f"{name}_scale_inv", 1)):
            state[stored] = torch.stack([torch.cat([p[place] for p in pair]) for pair in pairs])
        meant[name] = [torch.cat([meant_by(*part, layout) for part in pair]) for pair in pairs]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    tm.edit_config(folder, quantization_config=LAYOUTS[layout])
    return meant


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_in_one_tensor_of_fp8_are_what_their_scales_say(layout, tmp_path):
    meant = stacked_in_fp8(tmp_path / "model", layout)
    dense = Dense.open(tmp_path / "model")
    assert dense.dtype == torch.bfloat16
    for block, number in itertools.product(range(2), range(4)):
        module = f"model.layers.{block}.mlp.experts."
        gate, up = meant[f"{module}gate_up_proj"][number].chunk(2)
        down = meant[f"{module}down_proj"][number]
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            assert torch.equal(dense.tensor(f"{module}{number}.{name}.weight"), weight)


def read_all(folder, state, config=None):
    """Save tensors and read them, with scales if they have some."""
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    headers = with_scales(read_headers(folder), config or {})
    with opened(folder / "model.safetensors") as content:
        return headers, {name: h.read(content, folder) for name, h in headers.items()}


@pytest.mark.parametrize("shape", [(2, 2, 3), (2, 1, 1), (2,)])
def test_all_experts_in_fp8_are_read_together_if_none_is_asked_for(shape, tmp_path):
    small, scale = torch.randn(2, 4, 6).to(torch.float8_e4m3fn), torch.rand(shape)
    headers, read = read_all(tmp_path, {"w": small, "w_scale_inv": scale})
    assert list(read) == ["w"]
    block = (2, 2) if len(shape) == 3 and shape[1] == 2 else (4, 6)
    assert headers["w"].block == block
    expected = [scaled(w, s, block) for w, s in zip(small, scale, strict=True)]
    assert torch.equal(read["w"], torch.stack(expected))


@pytest.mark.parametrize("grid", [(1, 4), (6, 1), (1, 1), (3, 2)])
@pytest.mark.parametrize(
    "part",
    [Piece(1, slice(0, 2), transposed=True), Piece(1, slice(2, 4), transposed=True),
     Piece(1, slice(1, None, 2), transposed=True), Piece(0, slice(1, None, 2))],
)  # fmt: skip
def test_a_piece_of_fp8_has_the_scales_of_its_place(part, grid, tmp_path):
    """Of experts × inputs × outputs, as in Llama 4, and where gate and up projection alternate."""
    small, scale = torch.randn(2, 6, 4).to(torch.float8_e4m3fn), torch.rand(2, *grid) + 0.1
    headers, read = read_all(tmp_path, {"w": small, "w_scale": scale})
    header = dataclasses.replace(headers["w"], piece=part)
    with opened(tmp_path / "model.safetensors") as content:
        assert torch.equal(header.read(content, tmp_path), part.of(read["w"]))


def test_scales_of_another_shape_are_refused(tmp_path):
    model = tm.save(tm.tiny("llama", torch.bfloat16), tmp_path / "model")
    released(model, "blocks")
    tm.edit_config(model, quantization_config=LAYOUTS["blocks"] | {"weight_block_size": [8, 8]})
    with pytest.raises(
        ModelError, match="weight_scale_inv.* has shape .* mend quantization_config"
    ):
        Dense.open(model)


@pytest.mark.parametrize("shape", [(3, 2, 3), (2, 3, 3), (2, 2, 3, 1)])
def test_scales_of_other_experts_or_blocks_are_refused(shape, tmp_path):
    small = torch.randn(2, 4, 6).to(torch.float8_e4m3fn)
    with pytest.raises(ModelError, match="w_scale_inv"):
        read_all(tmp_path, {"w": small, "w_scale_inv": torch.rand(shape)})


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


EXPERTS, ROWS, GROUPS = 3, 10, 2


def packed():
    """Return codes and scales of MXFP4, with every code and every finite scale."""
    torch.manual_seed(0)
    codes = torch.randint(256, (EXPERTS, ROWS, GROUPS, 16), dtype=torch.uint8)
    scales = torch.randint(255, (EXPERTS, ROWS, GROUPS), dtype=torch.uint8)
    codes.view(-1)[:256], scales.view(-1)[:2] = torch.arange(256), torch.tensor([0, 254])
    return codes, scales


def theirs(codes, scales):
    """Return what transformers makes of MXFP4: experts × inputs × outputs."""
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    return integration.convert_moe_packed_tensors(codes, scales)


def test_mxfp4_is_what_its_specification_says():
    """By hand: E2M1 has values 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign; scales are powers of two."""
    codes = torch.zeros(1, 2, 16, dtype=torch.uint8)
    codes[0, 0, 0], codes[0, 0, 1], codes[0, 1, 15] = 0x71, 0xF2, 0x9D
    found = mxfp4(codes, torch.tensor([[127, 130]], dtype=torch.uint8))
    assert found.shape == (1, 64)
    assert found[0, :4].tolist() == [0.5, 6, 1, -6]
    assert found[0, -2:].tolist() == [-24, -4]
    assert not found[0, 4:-2].any()


def test_transformers_dequantises_mxfp4_alike(tmp_path):
    codes, scales = packed()
    expected = theirs(codes, scales)
    state = {"m.experts.down_proj_blocks": codes, "m.experts.down_proj_scales": scales}
    headers, read = read_all(tmp_path, state)
    assert list(read) == ["m.experts.down_proj"]
    (header,), (found,) = headers.values(), read.values()
    assert (header.dtype, header.shape) == ("BF16", tuple(expected.shape))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.unchecked  # a whole model
def test_transformers_reads_a_tiny_gpt_oss_alike(tmp_path):
    """All tensors of a folder, as its experts are released."""
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS,
             "num_experts_per_tok": 2, "vocab_size": 64}  # fmt: skip
    config = transformers.AutoConfig.for_model("gpt_oss", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj"))]:
        _, inputs, outputs = state.pop(name).shape
        scales = torch.randint(110, 130, (EXPERTS, outputs, inputs // 32), dtype=torch.uint8)
        codes = torch.randint(256, (*scales.shape, 16), dtype=torch.uint8)
        state |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    headers, read = read_all(tmp_path, state)
    tm.edit_config(tmp_path, quantization_config=quantisation)
    dequantised = transformers.Mxfp4Config(dequantize=True)
    expected = tm.load(tmp_path, torch.bfloat16, quantization_config=dequantised).state_dict()
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert headers[name].shape == tuple(tensor.shape)
        assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize("part", [slice(0, 32), slice(8, 40)])
def test_a_piece_of_mxfp4_is_one_of_all_experts(part, tmp_path):
    """Scales are in another file than codes."""
    codes, scales = packed()
    save_file({"w_blocks": codes}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"w_scales": scales}, tmp_path / "model-00002-of-00002.safetensors")
    header = with_scales(read_headers(tmp_path), {})["w"]
    assert len(header.files) == 2
    piece = dataclasses.replace(header, piece=Piece(1, part, transposed=True))
    with opened(tmp_path / header.file) as content:
        found = piece.read(content, tmp_path)
    assert torch.equal(found, theirs(codes, scales)[1].T[part])


@pytest.mark.parametrize("shape", [None, (EXPERTS, ROWS), (EXPERTS, ROWS, GROUPS + 1)])
def test_mxfp4_with_other_scales_is_refused(shape, tmp_path):
    state = {"w_blocks": packed()[0]}
    if shape:
        state["w_scales"] = torch.zeros(shape, dtype=torch.uint8)
    with pytest.raises(ModelError, match="w_blocks in .* download it again"):
        read_all(tmp_path, state)


CONFIG = {"model_type": "llama"}
INT4 = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "mxfp4"])
def test_formats_that_are_read(method):
    config = CONFIG | {"quantization_config": {"quant_method": method}}
    assert architecture_of(config).model_type == "llama"


@pytest.mark.parametrize(
    ("quantisation", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, r"\(awq\).*original checkpoint \(bfloat16\), prune"),
        (
            {"quant_method": "gptq", "bits": 4},
            r"\(gptq\).*original checkpoint",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"\(bitsandbytes\).*original checkpoint",
        ),
        ({"quant_method": "compressed-tensors"} | INT4, r"\(compressed-tensors\).*dequantize=True"),
        ({"quant_method": "compressed-tensors"}, r"\(compressed-tensors\)"),
        ({"quant_method": "hqq"}, r"\(hqq\).*original checkpoint"),
        ({"bits": 4}, r"\(unknown method\)"),
    ],
)
def test_formats_that_are_refused_with_what_to_do(quantisation, words):
    with pytest.raises(ModelError, match=words) as refusal:
        architecture_of(CONFIG | {"quantization_config": quantisation})
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith("prune it, then quantise the result")


def test_int4_next_to_fp8_is_refused():
    """As of mixed releases: attention in FP8, experts in int4."""
    groups = LAYOUTS["rows"]["config_groups"] | {"group_1": INT4["config_groups"]["group_0"]}
    quantisation = {"quant_method": "compressed-tensors", "config_groups": groups}
    with pytest.raises(ModelError, match="compressed-tensors"):
        architecture_of(CONFIG | {"quantization_config": quantisation})
