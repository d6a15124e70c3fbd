"""GGUF files, read back: names, shapes, every bit of the weights, what describes them, refusals."""

import dataclasses
import json
import math
import weakref

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from variants import HELD, UNIT, YARN

import coec
import tiny_models as tm
from coec.errors import ModelError, OptionError, OutputError
from coec.exporting.hyperparameters import TARGETS
from coec.models.architectures import ARCHITECTURES
from coec.models.dense import Dense
from outcomes import check_refused, succeeded

WINDOW = 8
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}


def written(tmp_path, variant="llama", model=None, **options):
    """A variant as a folder and as a file; what `export` returns, and the file, opened."""
    folder = tmp_path / "model"
    tm.save(model or tm.tiny(variant, torch.float32), folder, tokenizer=False)
    context = WINDOW if variant in ("mistral sliding", "qwen2 mixed") else None
    options = {"no_tokenizer": True, "context": context} | options
    result = coec.export(folder, tmp_path / "out.gguf", **options)
    return Dense.open(folder), result, GGUFReader(tmp_path / "out.gguf")


def tensors(reader):
    return {tensor.name: tensor for tensor in reader.tensors}


def says(reader, key):
    field = reader.get_field(key)
    return None if field is None else field.contents()


def name_of(source):
    """GGUF's name of a stored tensor."""
    module, _, kind = source.rpartition(".")
    if module.startswith("model.layers."):
        _, _, block, within = module.split(".", 3)
        return f"blk.{block}.{NAMES[within]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def in_own_order(rows, heads):
    """Rows `2i` and `2i + 1` of every head back at `i` and `i + d/2`."""
    size = len(rows) // heads
    own = np.empty_like(rows)
    for head in range(heads):
        for i in range(size // 2):
            own[head * size + i] = rows[head * size + 2 * i]
            own[head * size + i + size // 2] = rows[head * size + 2 * i + 1]
    return own


@pytest.mark.parametrize("variant", HELD)
def test_every_weight_is_there_to_the_bit(variant, tmp_path):
    model, result, reader = written(tmp_path, variant)
    found = tensors(reader)
    expected = {name_of(source): source for source in model.shapes}
    assert found.keys() - {"rope_freqs.weight"} == expected.keys()
    shape = model.shape
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
    for name, source in expected.items():
        data = found[name].data
        stem = name.split(".")[-2]
        if stem in heads and variant != "qwen3":
            data = in_own_order(data, heads[stem])
        assert np.array_equal(data, model.tensor(source).numpy()), name
    assert result.parameters == sum(p.numel() for p in tm.tiny(variant).parameters())
    assert result.file_bytes == (tmp_path / "out.gguf").stat().st_size


def test_what_describes_the_model(tmp_path):
    model = tm.tiny("mistral", torch.float32, rope_theta=5e5, rms_norm_eps=1e-4, head_dim=6,
                    num_attention_heads=6, num_key_value_heads=3)  # fmt: skip
    _, result, reader = written(tmp_path, model=model)
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "model",
        "general.file_type": 0,
        "llama.vocab_size": tm.VOCABULARY,
        "llama.context_length": tm.POSITIONS,
        "llama.embedding_length": tm.HIDDEN,
        "llama.block_count": 2,
        "llama.feed_forward_length": tm.FFN,
        "llama.attention.head_count": 6,
        "llama.attention.head_count_kv": 3,
        "llama.attention.key_length": 6,
        "llama.attention.value_length": 6,
        "llama.rope.dimension_count": 6,
        "llama.rope.freq_base": 5e5,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-4)),
        "tokenizer.ggml.model": "none",
        "llama.rope.scaling.type": None,
    }
    assert {key: says(reader, key) for key in expected} == expected
    assert (result.arch, result.context, result.tokenizer) == ("llama", tm.POSITIONS, None)


def test_a_pruned_checkpoint_is_written_like_any_other(tokens, tmp_path):
    dense = tm.save(tm.tiny("qwen2", torch.float32), tmp_path / "dense")
    coec.prune(dense, tmp_path / "pruned", sparsity=0.3, samples=24, seq_len=32,
               calibration=tokens, compensation="bias", preset="paper")  # fmt: skip
    result = coec.export(tmp_path / "pruned", tmp_path / "out.gguf", no_tokenizer=True)
    reader = GGUFReader(tmp_path / "out.gguf")
    assert result.arch == "llama"
    assert says(reader, "llama.attention.head_count_kv") == 3
    assert says(reader, "llama.feed_forward_length") == 28
    bias = Dense.open(tmp_path / "pruned").tensor("model.layers.1.mlp.down_proj.bias")
    assert np.array_equal(tensors(reader)["blk.1.ffn_down.bias"].data, bias.numpy())


def test_llama_3_divides_its_frequencies_by_factors(tmp_path):
    model, _, reader = written(tmp_path, "llama rope")
    factors = tensors(reader)["rope_freqs.weight"].data
    rotary = model.network(torch.device("cpu"), torch.float32).model.rotary_emb
    plain = [500000.0 ** (-i / 2) for i in range(2)]  # head_dim 4
    np.testing.assert_allclose(np.array(plain) / factors, rotary.inv_freq, rtol=1e-6)
    assert factors[0] == 1.0  # the fast one is as it was
    assert factors[1] == 8.0


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "linear", "factor": 2.0}, ("linear", 2.0, None)),
        (YARN, ("yarn", 4.0, 16)),
        ({**YARN, "beta_fast": 32, "attention_factor": 1 + 0.1 * math.log(4)}, ("yarn", 4.0, 16)),
    ],
)
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_linear_and_yarn_are_keys(scaling, expected, variant, tmp_path):
    model = tm.tiny(variant, torch.float32, rope_scaling=scaling, head_dim=16)
    _, result, reader = written(tmp_path, model=model)
    prefix = f"{result.arch}.rope.scaling"
    keys = ("type", "factor", "original_context_length")
    assert tuple(says(reader, f"{prefix}.{key}") for key in keys) == expected


def rotary(**scaling):
    return {"rope_scaling": scaling, "head_dim": 16}


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("qwen3", {"attention_bias": True}, "qwen3: it has no model.layers.0.self_attn.[qkvo]_pro"),
        ("qwen3", {"rope_scaling": tm.VARIANTS["llama rope"]["rope_scaling"]}, "no factors"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", rotary(rope_type="dynamic", factor=2.0), "rope_type 'dynamic'"),
        ("llama", rotary(**YARN, beta_fast=16), "beta_fast=16"),
        ("llama", rotary(**YARN, truncate=False), "truncate=False"),
        ("llama", rotary(**YARN, attention_factor=1.0), "attention factor is 1"),
        ("llama", rotary(**YARN | {"factor": None}), "'yarn' in config.json has no factor"),
        ("llama", rotary(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor="),
    ],
)
def test_what_would_be_another_model_is_refused(variant, changes, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        written(tmp_path, model=tm.tiny(variant, torch.float32, **changes))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


SCALES = {"attention.scale": 0.3, "embedding_scale": 2.0, "residual_scale": 0.7, "logit_scale": 1.5}


@pytest.mark.parametrize(("changes", "arch"), [({}, "granite"), (UNIT, "llama")])
def test_granite_is_llama_where_its_multipliers_change_nothing(changes, arch, tmp_path):
    _, result, reader = written(tmp_path, model=tm.tiny("granite", torch.float32, **changes))
    assert result.arch == arch
    assert len([key for key in reader.fields if "scale" in key]) == 4 * (arch == "granite")
    if arch == "granite":
        assert {key: says(reader, f"granite.{key}") for key in SCALES} == pytest.approx(SCALES)


def test_an_architecture_without_a_target_is_refused(tmp_path):
    assert TARGETS.keys() < ARCHITECTURES.keys()
    for variant in tm.VARIANTS.keys() - set(HELD):
        kind = tm.VARIANTS[variant]["model_type"]
        with pytest.raises(ModelError, match=f"model type '{kind}'"):
            written(tmp_path / variant, variant)


@pytest.mark.parametrize("variant", ["mistral sliding", "qwen2 mixed"])
def test_a_window_shorter_than_the_context_is_refused(variant, tmp_path):
    with pytest.raises(ModelError, match="sliding window of 8 tokens.*pass context=8"):
        written(tmp_path, variant, context=None)
    with pytest.raises(ModelError, match="sliding window"):
        written(tmp_path, variant, context=WINDOW + 1)
    _, result, reader = written(tmp_path, variant, context=WINDOW)
    assert says(reader, "llama.context_length") == result.context == WINDOW


@pytest.mark.parametrize(
    "changes",
    [
        {"variant": "qwen2 mixed", "max_window_layers": 2},  # no block is left that slides
        {"variant": "mistral", "sliding_window": tm.POSITIONS},
        {"variant": "qwen2", "sliding_window": 8, "use_sliding_window": False},
    ],
)
def test_a_window_that_changes_nothing_is_no_reason(changes, tmp_path):
    _, result, _ = written(tmp_path, model=tm.tiny(**changes, dtype=torch.float32))
    assert result.context == tm.POSITIONS


@pytest.mark.parametrize("context", [tm.POSITIONS + 1, 0])
def test_a_context_that_the_model_does_not_have_is_refused(context, tmp_path):
    with pytest.raises(OptionError, match="context must be"):
        written(tmp_path, context=context)


@pytest.mark.parametrize(
    ("stored", "asked", "kind", "file_type"),
    [
        (torch.float64, None, "f32", 0),
        (torch.float32, None, "f32", 0),
        (torch.float16, None, "f16", 1),
        (torch.bfloat16, None, "bf16", 32),
        (torch.float32, "f16", "f16", 1),
        (torch.float32, "bf16", "bf16", 32),
    ],
)
def test_the_dtype_is_that_of_the_weights_unless_asked(stored, asked, kind, file_type, tmp_path):
    """Half precision rounds as torch does."""
    model, result, reader = written(tmp_path, model=tm.tiny("qwen2", stored), dtype=asked)
    assert result.dtype == kind
    assert says(reader, "general.file_type") == file_type
    found = tensors(reader)
    for name, source in (
        ("blk.0.ffn_up", "model.layers.0.mlp.up_proj"),
        ("blk.1.attn_v", "model.layers.1.self_attn.v_proj"),
        ("output", "lm_head"),
    ):
        matrix, own = found[f"{name}.weight"], model.tensor(f"{source}.weight")
        assert matrix.tensor_type.name == kind.upper()
        exact = torch.from_numpy(gguf.dequantize(matrix.data, matrix.tensor_type).copy())
        assert torch.equal(exact, own.to(HALVES.get(kind, torch.float32)).float())
    kinds = {t.tensor_type.name for t in found.values() if len(t.shape) == 1}
    assert kinds == {"F32"}  # norms and biases


def test_q8_0_is_exact_to_half_a_step_and_says_what_is_not_in_it(tmp_path):
    """Hidden states of 32 divide into blocks; 40 channels of the MLP do not."""
    model, result, reader = written(tmp_path, dtype="q8_0")
    found = tensors(reader)
    stored = found["blk.0.ffn_gate.weight"]
    assert stored.tensor_type.name == "Q8_0"
    own = model.tensor("model.layers.0.mlp.gate_proj.weight").numpy()
    error = np.abs(gguf.dequantize(stored.data, stored.tensor_type) - own)
    step = np.abs(own).max(axis=1, keepdims=True) / 127
    assert (error <= step * 0.57).all()  # half a step, and the step itself is rounded to f16
    assert error.max() > 0
    downs = ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight")
    assert result.fallback == downs
    assert {found[name].tensor_type.name for name in downs} == {"F16"}
    assert not written(tmp_path, dtype="f16", force=True)[1].fallback


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (1e5, "f16", "numbers beyond 65504: pass dtype=bf16"),
        (1e7, "q8_0", "numbers beyond 8319008"),
        (float("nan"), "f32", "holds NaN or Inf"),
        (float("inf"), "bf16", "holds NaN or Inf"),
    ],
)
def test_numbers_that_do_not_fit_end_the_run_and_leave_nothing(value, dtype, message, tmp_path):
    model = tm.tiny("llama", torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
    with pytest.raises(ModelError, match=f"layers.1.mlp.up_proj.weight {message}|{message}"):
        written(tmp_path, model=model, dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_one_tensor_at_a_time_is_in_memory(tmp_path, monkeypatch):
    read = Dense.tensor
    alive = []

    def watched(self, name):
        assert not [one for one in alive if one() is not None]
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Dense, "tensor", watched)
    written(tmp_path, dtype="q8_0")
    assert len(alive) == len(Dense.open(tmp_path / "model").shapes)


def test_bad_options_are_refused_before_the_model_is_looked_at(tmp_path):
    nowhere = tmp_path / "nowhere"
    with pytest.raises(OptionError, match="dtype"):
        coec.export(nowhere, tmp_path / "out.gguf", dtype="q4")
    with pytest.raises(OutputError, match="ends in .gguf"):
        coec.export(nowhere, tmp_path / "out.bin")


def test_the_file_is_planned_and_told(tmp_path, monkeypatch):
    """No larger than was planned; progress counts tensors; the result is one JSON object."""
    planned, seen = [], []
    monkeypatch.setattr("coec.exporting.export.check_space", lambda out, size: planned.append(size))
    model, result, _ = written(tmp_path, progress=lambda *step: seen.append(step))
    assert result.file_bytes <= planned[0] < result.file_bytes + 2**20
    count = len(model.shapes)
    assert seen == [("writing", done, count) for done in range(1, count + 1)]
    names = {field.name for field in dataclasses.fields(result)}
    assert json.loads(json.dumps(result.as_dict())).keys() == names


def test_the_command(tmp_path, run):
    folder = tm.save(tm.tiny("llama", torch.float32), tmp_path / "model", tokenizer=False)
    out = tmp_path / "out.gguf"
    answer = run("export", folder, out)
    check_refused(answer, "--no-tokenizer")
    shown, _ = succeeded(run("export", folder, out, "--dtype", "q8_0", "--no-tokenizer"))
    assert "architecture     llama" in shown
    assert "f16 instead      2 matrices, first blk.0.ffn_down.weight" in shown
    assert "token ids alone" in shown
    check_refused(run("export", folder, out, "--no-tokenizer"), "--force")
    status, shown, _ = run("export", folder, out, "--no-tokenizer", "--force", "--json")
    assert json.loads(shown)["dtype"] == "f32"
    assert status == 0
    sliding = tm.save(tm.tiny("mistral sliding", torch.float32), tmp_path / "s", tokenizer=False)
    answer = run("export", sliding, out, "--no-tokenizer", "--force")
    check_refused(answer, "pass --context 8 for a file")
