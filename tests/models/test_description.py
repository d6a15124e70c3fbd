"""What a configuration says, and the ones that say what cannot be."""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import coec
import tiny_models as tm
from coec.config.recipe import Recipe
from coec.errors import ModelError, OptionError
from coec.models.description import Description
from coec.models.folder import find_model, read_config
from coec.models.layout import Shape
from coec.planning.plan import Plan


def test_a_tied_head_is_no_tensor_of_its_own():
    tied, untied = (Description.of(tm.raw_config(v)).shapes for v in ("llama tied", "llama"))
    assert untied.keys() - tied.keys() == {"lm_head.weight"}


def test_a_skeleton_takes_no_memory():
    model = Description.of(tm.raw_config("llama", vocab_size=2**26)).skeleton()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not model.training


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": "two"}, "num_hidden_layers .* no whole number: 'two'"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers .* no whole number: '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers .* no whole number: 'True'"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers .* no whole number"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers .* no whole number"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers .* no whole number"),
        ({"num_hidden_layers": [2]}, "num_hidden_layers .* no whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* is 0: it must be at least 1"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers .* is 100000: .* at most 512"),
        ({"num_hidden_layers": 10**5000}, "num_hidden_layers .* is absurd"),
        ({"hidden_size": None}, "config.json lacks 'hidden_size'"),
        ({"hidden_size": 2**40}, "hidden_size .* at most 1,048,576"),
        ({"intermediate_size": 0}, "intermediate_size .* is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads .* is 0"),
        ({"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": None}, "does not hold"),
        ({"num_key_value_heads": -4}, "num_key_value_heads .* is -4"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings"),
        ({"architectures": 3}, "not a decoder-only"),
        ({"model_type": ["llama"]}, "is not known to transformers"),
        ({"model_type": None}, "is not known to transformers"),
    ],
)
def test_sizes_that_are_none_are_refused(changes, match):
    with pytest.raises(ModelError, match=match):
        Description.of(tm.raw_config("llama", **changes))


@pytest.mark.slow
def test_json_is_utf8_whatever_the_locale(tmp_path):
    code = """
import sys
from pathlib import Path
from coec.models.folder import read_config
from coec.models.files import write_json
path = Path(sys.argv[1])
write_json(path, {"name": "na\\u00efve"})
assert read_config(path) == {"name": "na\\u00efve"}
"""
    path = tmp_path / "config.json"
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, path], env={**os.environ, **ascii_only}, check=True)
    assert path.read_bytes().decode() == '{\n  "name": "naïve"\n}\n'


def test_a_configuration_file_is_enough_only_without_weights(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert find_model(path, weights=False) == path
    with pytest.raises(ModelError, match="no model at"):
        find_model(path)


def of_a_gigabyte(path):
    with path.open("wb") as file:
        file.truncate(2**30)


UNREADABLE = {
    "1e400 is not finite": '{"rms_norm_eps": 1e400}',
    "NaN is not finite": '{"rms_norm_eps": NaN}',
    "is not finite": '{"rms_norm_eps": -Infinity}',
    "nested too deeply": '{"a": ' * 100_000,
    "is not valid JSON": '{"a": ' + "9" * 5000 + "}",
    r"config\.json' cannot be read: Is a directory": Path.mkdir,
    "larger than 64 MiB": of_a_gigabyte,
    "no config.json|cannot be read": os.mkfifo,  # which is not waited for
}


def test_a_limit_of_infinity_is_read_as_transformers_writes_it(tmp_path):
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_config(tmp_path) == {"time_step_limit": [0.0, math.inf]}


@pytest.mark.parametrize("match", UNREADABLE)
def test_a_configuration_that_cannot_be_read_is_named(match, tmp_path):
    content, path = UNREADABLE[match], tmp_path / "config.json"
    path.write_text(content) if isinstance(content, str) else content(path)
    with pytest.raises(ModelError, match=match) as caught:
        read_config(tmp_path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["x" * 300, "o/" + "x" * 300, "a\0b", "\ud800", "loop"])
def test_names_that_no_file_system_holds(name, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ModelError, match="no model|no local folder") as caught:
        find_model(tmp_path / name if name == "loop" else name)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_of_a_hub_model_one_copy_of_the_weights_is_downloaded(monkeypatch, tmp_path):
    from huggingface_hub.utils import filter_repo_objects

    there = ["config.json", "model.safetensors", "consolidated.safetensors", "tekken.json",
             "original/model.safetensors", "onnx/config.json", "tokenization_odd.py", "a.tiktoken",
             "model.gguf", "additional_chat_templates/tool_use.jinja"]  # fmt: skip

    def download(name, **patterns):
        (tmp_path / "got").write_text("\n".join(filter_repo_objects(there, **patterns)))
        return tmp_path

    monkeypatch.setattr("coec.models.folder.snapshot_download", download)
    assert find_model("org/model") == tmp_path
    assert (tmp_path / "got").read_text().split() == [
        "config.json", "model.safetensors", "tekken.json", "tokenization_odd.py", "a.tiktoken",
        "additional_chat_templates/tool_use.jinja",
    ]  # fmt: skip


LLAMA3 = tm.VARIANTS["llama rope"]["rope_scaling"]


def new_form(**parameters):
    """A configuration as transformers 5 writes it."""
    config = tm.raw_config("llama")
    return config | {"rope_parameters": {"rope_theta": 500000.0, **parameters}}


def test_rotary_settings_are_written_for_every_release():
    """4.57 does not know rope_parameters: without the old form it computes another model."""
    described = Description.of(new_form(**LLAMA3))
    for config in (described.config, Plan.of(described, Recipe()).output.config):
        assert config["rope_theta"] == 500000.0
        assert config["rope_scaling"] == LLAMA3
        assert config["rope_parameters"] == {"rope_theta": 500000.0, **LLAMA3}
    plain = Description.of(new_form(rope_type="default")).config
    assert (plain["rope_theta"], plain["rope_scaling"]) == (500000.0, None)


@pytest.mark.parametrize("variant", ["llama rope", "llama"])
def test_rotary_settings_of_the_old_form_stay_as_they_are(variant):
    config = tm.raw_config(variant)
    kept = copy.deepcopy(config)
    assert Description.of(config).config == kept
    written = Plan.of(Description.of(config), Recipe()).output.config
    assert written.get("rope_scaling") == kept.get("rope_scaling")
    assert config == kept


def test_rotary_settings_that_contradict_each_other_are_refused():
    match = "rope_theta in config.json is 1.0, in its rope_parameters"
    with pytest.raises(ModelError, match=match):
        Description.of({**new_form(**LLAMA3), "rope_theta": 1.0})


def test_rotary_settings_are_completed_from_wherever_they_are():
    """As transformers 5 reads them: the base from either place, a null as nothing said."""
    plain = tm.raw_config("llama")
    one = Description.of({**plain, "rope_theta": 5e5, "rope_parameters": LLAMA3}).config
    two = Description.of({**new_form(**LLAMA3), "rope_scaling": None, "rope_theta": None}).config
    three = Description.of({**new_form(**LLAMA3), "rope_scaling": LLAMA3}).config
    for config in (one, two, three):
        assert (config["rope_theta"], config["rope_scaling"]) == (5e5, LLAMA3)
        theirs = Description.of(config).skeleton().config.rope_parameters
        assert (theirs["rope_theta"], theirs["rope_type"]) == (5e5, "llama3")


@pytest.mark.parametrize(
    "scaling", [{**LLAMA3, "factor": 4.0}, {"type": "linear", "factor": 2.0}, {"type": "default"}]
)
def test_a_scaling_that_contradicts_the_new_form_is_refused(scaling):
    with pytest.raises(ModelError, match="rope_scaling in config.json is .*its rope_parameters"):
        Description.of({**new_form(**LLAMA3), "rope_scaling": scaling})


def test_remote_code_is_neither_asked_for_nor_run():
    config = tm.raw_config("llama", auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert Description.of(config).shape == Shape.of(config)


def test_phi3_has_the_three_keys_that_4_57_reads():
    """Its class there takes no others, and reads the share of a head that turns beside them."""
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    new = {
        **factors, "type": "longrope", "rope_type": "longrope", "rope_theta": 1e4,
        "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32,
    }  # fmt: skip
    config = Description.of(tm.raw_config("phi3", rope_parameters=new)).config
    assert config["rope_scaling"] == {"type": "longrope", **factors}
    assert config["partial_rotary_factor"] == 0.5


def test_phi3_with_a_factor_for_every_frequency_keeps_its_heads(tmp_path):
    """Its configuration counts the factors by the number of heads, whatever head_dim says."""
    scaling = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tm.raw_config("phi3", rope_scaling=scaling)))
    with pytest.raises(OptionError, match=r"not phi3: .*short_factor.*attention_sparsity = 0 "):
        coec.plan(path, sparsity=0.5, attention_sparsity=0.5)
    plan = coec.plan(path, sparsity=0.5)
    assert (plan.pruned.kv_heads, plan.pruned.ffn) == (4, 20)


def test_what_a_server_keeps_of_a_token():
    llama = Description.of(tm.raw_config("llama", num_hidden_layers=3))
    assert llama.cached() == 3 * 2 * 4 * 4
    assert llama.cached([0, 2]) == 2 * 2 * 4 * 4
    deepseek = tm.raw_config("deepseek_v3")
    of_low_rank = deepseek["kv_lora_rank"] + deepseek["qk_rope_head_dim"]
    assert Description.of(deepseek).cached() == 2 * of_low_rank
