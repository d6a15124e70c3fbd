"""`coec analyze` as users type it."""

import functools
import json
import shutil

import pytest
import torch

import coec
from outcomes import WORK, check_refused, raising, succeeded
from paper_models import QWEN_7B

FAST = ("--new-tokens", 2, "--device", "cpu")


@pytest.fixture(scope="module")
def folders(dense, tokens, tmp_path_factory):
    """A model, and beside it what was made of it."""
    root = tmp_path_factory.mktemp("analyze")
    model = shutil.copytree(dense, root / "dense")
    coec.prune(model, root / "pruned", calibration=tokens, samples=24, seq_len=32,
               preset="paper")  # fmt: skip
    return model, root / "pruned"


@pytest.fixture
def run(run):
    """Runs the command in this process: exit status, stdout, stderr."""
    return functools.partial(run, "analyze", columns=80)


def test_tables_for_readers(folders, run):
    out, err = succeeded(run(*folders, *FAST))
    lines = [line.strip() for line in out.splitlines()]
    for start in ("parameters", "weights, GiB", "GFLOPs per token", "prefill, tokens/s",
                  "decode, tokens/s", "angle O–P, mean", "frame discrepancy, mean",
                  "penalty pruned, median"):  # fmt: skip
        assert len([line for line in lines if line.startswith(start)]) == 1, start
    assert "note: peak memory is measured on CUDA devices only" in err
    assert "note: the frames hold all that the weights read" in err  # 64 of 28 columns


def test_json_is_one_object_on_stdout(folders, run):
    ranks = ("--rank-attention", 4, "--rank-mlp", 8)
    load = ("--dtype", "float64", "--batch-size", 2, "--prompt-tokens", 7)
    out, _ = succeeded(run(*folders, *FAST, *ranks, *load, "--json"))
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found.keys() == {"efficiency", "speed", "geometry", "notes"}
    assert found["efficiency"]["dense"]["dtype"] == "float64"
    assert found["speed"]["load"] == {"prompt_tokens": 7, "new_tokens": 2, "batch_size": 2,
                                      "repeats": 5, "warmup": 1}  # fmt: skip
    assert [row["r"] for row in found["geometry"]["modules"]] == [4, 8, 4, 8]
    assert found["geometry"]["summary"]["mlp"]["discrepancy"]["worst"] > 0
    assert found["speed"]["memory_note"] in found["notes"]


def test_parts_can_be_left_out_and_the_dense_model_too(folders, run):
    out, err = succeeded(run(folders[1], "--no-speed", "--no-geometry", "--json"))
    found = json.loads(out)
    assert found["speed"] is None
    assert found["geometry"] is None
    assert found["notes"] == []
    assert err == ""
    _, out, _ = run(folders[1], "--no-speed")
    assert "peak memory and speed have to be measured" in out
    assert "angle O–C" in out


def test_a_row_of_the_paper_from_a_configuration(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_7B))
    out, _ = succeeded(run("--config-only", path, "--sparsity", 0.3, "--dtype", "bfloat16"))
    rows = {line.split("  ")[0].strip(): line.split()[-3:] for line in out.splitlines()}
    assert rows["parameters"] == ["7,615,616,512", "5,699,162,112", "0.748"]
    assert rows["weights, GB"] == ["15.23", "11.4", "0.748"]
    assert rows["weights, GiB"] == ["14.19", "10.62", "0.748"]
    assert rows["GFLOPs per token"] == ["15.23", "11.4", "0.748"]
    assert "peak memory and speed have to be measured" in out
    out, _ = succeeded(run("--config-only", path, "--json"))
    assert json.loads(out)["efficiency"]["pruned"]["parameters"] == 5_699_162_112


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-only", "{dense}", "{pruned}"], "--config-only takes one model"),
        (["{dense}", "{pruned}", "--sparsity", "0.3"], "--sparsity goes with --config-only"),
        (["{dense}"], "no coec/kept.safetensors in"),
        (["{dense}", "{lost}"], "no model at"),
        (["{orphan}"], "is no folder here or beside it: name the dense model, coec analyze DENSE"),
        (["{dense}", "{pruned}", "--new-tokens", "64"], "leaves no room for a prompt"),
        (["{dense}", "{pruned}", "--batch-size", "0"], "batch_size must be a whole number"),
        (["{dense}", "{pruned}", "--rank-mlp", "0"], "the rank of mlp must be"),
        (["{dense}", "{pruned}", "--device", "warp"], "device 'warp' cannot be used"),
    ],
)
def test_mistakes_are_one_line_before_any_work(
    arguments, message, folders, run, tmp_path, monkeypatch
):
    dense, pruned = folders
    orphan = shutil.copytree(pruned, tmp_path / "orphan")
    report = json.loads((orphan / "coec.json").read_text())
    (orphan / "coec.json").write_text(json.dumps(report | {"model": "org/model"}))

    monkeypatch.setattr("coec.evaluation.efficiency._load", raising(WORK))
    monkeypatch.setattr("coec.evaluation.geometry.compare_frames", raising(WORK))
    places = {"dense": dense, "pruned": pruned, "orphan": orphan, "lost": tmp_path / "lost"}
    check_refused(run(*(argument.format(**places) for argument in arguments)), message)


def test_memory_that_runs_out_says_what_to_change(folders, run, monkeypatch):
    exhausted = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
    monkeypatch.setattr("coec.evaluation.efficiency.speed", raising(exhausted))
    said = "coec: out of memory: lower --prompt-tokens or --batch-size"
    check_refused(run(*folders, *FAST), said)
