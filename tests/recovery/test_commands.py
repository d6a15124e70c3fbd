"""Recovery as users ask for it: the command, after a pruning, in a grid, in several processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import coec
from coec import pruning, recovery
from coec.checkpoint.report import Report
from coec.config.recovery import Recovery
from coec.errors import OptionError, UnfinishedError
from coec.models.dense import Dense
from coec.recovery import prune_and_recover, session
from coec.recovery.job import Job
from coec.recovery.plan import footprints

PRUNING = {"samples": 24, "seq_len": 32, "preset": "fast",
           "propagate": False, "attention_sparsity": 0.3}  # fmt: skip
FLAGS = ("--tokens", 2048, "--seq-len", 32, "--batch-size", 8)


def same_weights(a, b):
    one, other = Dense.open(a), Dense.open(b)
    return all(torch.equal(one.tensor(name), other.tensor(name)) for name in one.files)


def end(*given, **more):
    raise KeyboardInterrupt


STAGES = {
    "prune": (pruning, "prune"),
    "checked": (Job, "checked"),
    "train": (session.Session, "train"),
}


@pytest.fixture
def both(dense, tokens, tmp_path, monkeypatch):
    """Prunes with recovery into `out`, until a stage is called, if any."""

    def call(until=None, budget=1000, **changes):
        settings = {**PRUNING, "calibration": tokens, **changes}
        with monkeypatch.context() as patch:
            if until:
                patch.setattr(*STAGES[until], end)
            return prune_and_recover(dense, tmp_path / "out", budget, **settings)

    return call


def test_the_command_says_what_was_gained(run, dense, pruned, tokens, tmp_path):
    more = ("--text", tokens, *FLAGS, "--learning-rate", 3e-3)
    status, out, err = run("recover", dense, pruned, tmp_path / "out", *more)
    assert status == 0, err
    assert "trained          all weights on 2,048 tokens" in out
    assert "KL to dense" in out
    assert f"coec eval {tmp_path / 'out'} --baseline {dense}" in out
    status, out, _ = run("recover", dense, pruned, tmp_path / "other", *more, "--json")
    told = json.loads(out)
    assert status == 0
    assert told["recoveries"][-1]["tokens"] == 2048
    assert same_weights(tmp_path / "out", tmp_path / "other")


def test_the_command_says_when_nothing_was_gained(run, dense, pruned, tokens, tmp_path):
    more = ("--text", tokens, *FLAGS, "--learning-rate", 1)
    status, out, err = run("recover", dense, pruned, tmp_path / "out", *more)
    assert status == 0
    assert "no state was better on 3 validation windows" in out
    assert "note: the training diverged (at step 2 KL" in err
    assert "more text gives more" not in out  # which was long enough


def test_a_dry_run_shows_the_ways_and_writes_nothing(run, dense, pruned, tokens, tmp_path):
    status, out, _ = run("recover", dense, pruned, "--dry-run", *FLAGS)
    assert status == 0
    ways = ("all weights", "optimizer=adamw-8bit", "lora=16", "predictions=stored")
    assert [words in out for words in ways] == [True] * 4
    _, out, _ = run("recover", dense, pruned, tmp_path / "out", "--dry-run", *FLAGS, "--json")
    ways = json.loads(out)["ways"]
    assert [way["fits"] for way in ways] == [True] * 4
    assert all(way["bytes"] == sum(way["memory"].values()) for way in ways)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_both_shows_what_each_takes(run, dense, tokens):
    both = ("prune", dense, "--calibration", tokens, "--seq-len", 32, "--recover", "1k")
    status, out, _ = run(*both, "--dry-run")
    assert status == 0
    assert "disk:" in out
    assert "training on the calibration text" in out
    assert "optimizer=adamw-8bit" in out
    _, out, _ = run(*both, "--dry-run", "--json")
    assert [way["fits"] for way in json.loads(out)["recover"]["ways"]] == [True] * 4


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("recover", "dense", "pruned"), "OUT is missing"),
        (("prune", "dense", "out", "--recover", "0"), "--tokens must"),
    ],
)
def test_what_does_not_go_together_is_refused(command, said, run, dense, pruned, tmp_path):
    places = {"dense": dense, "pruned": pruned, "out": tmp_path / "out"}
    status, _, err = run(*(places.get(word, word) for word in command))
    assert status != 0
    assert said in " ".join(err.replace("│", "").split())
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def pruned_and_recovered(dense, tokens, tmp_path_factory):
    out = tmp_path_factory.mktemp("both") / "out"
    return out, prune_and_recover(dense, out, 1000, calibration=tokens, **PRUNING)


def test_pruning_with_recovery_is_both_commands(
    pruned_and_recovered, dense, pruned, tokens, tmp_path
):
    out, report = pruned_and_recovered
    coec.recover(dense, pruned, tmp_path / "out", text=tokens, tokens=1000, seq_len=32)
    assert same_weights(out, tmp_path / "out")
    assert not same_weights(out, pruned)
    assert Report.read(out).recoveries[-1]["held_out"] == report.recoveries[-1]["held_out"]
    assert not out.with_name("out.partial").exists()


@pytest.mark.parametrize("broken", ["checked", "train"])
@pytest.mark.slow
def test_pruning_with_recovery_goes_on(broken, both, pruned_and_recovered, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        both(until=broken)
    with pytest.raises(UnfinishedError):
        both(budget=2000)
    both(until="prune")  # which is not called again
    assert same_weights(tmp_path / "out", pruned_and_recovered[0])


def test_units_that_changed_meanwhile_are_another_run(both, tmp_path):
    """The file is there under the same name, with other units; the order does not matter."""
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"layers.0.mlp": [0, 1, 2], "layers.1.mlp": [1, 2, 3]}))
    with pytest.raises(KeyboardInterrupt):
        both(until="train", kept=kept)
    kept.write_text(json.dumps({"layers.0.mlp": [0, 1, 3], "layers.1.mlp": [1, 2, 3]}))
    with pytest.raises(UnfinishedError):
        both(kept=kept)
    kept.write_text(json.dumps({"layers.1.mlp": [1, 2, 3], "layers.0.mlp": [2, 1, 0]}))
    both(kept=kept)


def test_the_command_prunes_and_recovers(run, pruned_and_recovered, dense, tokens, tmp_path):
    status, out, err = run("prune", dense, tmp_path / "out", "--calibration", tokens, "--samples",
                           24, "--seq-len", 32, "--preset", "fast", "--no-propagate",
                           "--attention-sparsity", 0.3, "--recover", "1k")  # fmt: skip
    assert status == 0, err
    assert "MLP channels" in out
    assert "KL to dense" in out
    assert same_weights(tmp_path / "out", pruned_and_recovered[0])


LAUNCH = sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"
TWO = "--tokens", "512", "--seq-len", "32", "--batch-size", "8", "--device", "cpu"
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}  # fmt: skip


@pytest.mark.slow
def test_weights_divided_among_two_processes_train_and_go_on_as_whole_ones(
    dense, pruned, tokens, tmp_path
):
    def recover(program, out, **environment):
        command = (*LAUNCH, *program, "recover", dense, pruned, tmp_path / out, "--text", tokens)
        return subprocess.run((*map(str, command), *TWO), env=os.environ | environment,
                              capture_output=True, text=True, timeout=300)  # fmt: skip

    divided = (Path(__file__).parent / "fsdp.py",)
    assert recover(("-m", "coec"), "whole").returncode == 0
    stopped = recover(divided, "divided", **FSDP, STOP_AT_STATE="1")
    assert stopped.returncode != 0
    assert not (tmp_path / "divided").exists()
    assert list((tmp_path / "divided.partial").rglob("checkpoint-1/pytorch_model_fsdp.bin"))
    ended = recover(divided, "divided", **FSDP)
    assert ended.returncode == 0, ended.stderr
    assert "resuming: 1 of 2 steps are done" in ended.stderr
    assert same_weights(tmp_path / "divided", tmp_path / "whole")


def test_plans_divide_what_is_trained_among_processes(dense, pruned, monkeypatch):
    def student():
        way = footprints(dense, pruned, Recovery(tokens=512), torch.device("cpu"), None)[0]
        return way.memory["student"]

    whole = student()
    for name, value in (FSDP | {"WORLD_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)
    assert whole / 8 < student() < whole / 2
    with pytest.raises(OptionError, match="minutes"):
        coec.recover(dense, pruned, "out", minutes=1)
    monkeypatch.setitem(sys.modules, "torchao", sys)
    with pytest.raises(OptionError, match="adamw-8bit"):
        coec.recover(dense, pruned, "out", optimizer="adamw-8bit")
    monkeypatch.delenv("FSDP_VERSION")
    with pytest.raises(OptionError, match="fsdp_version"):
        student()


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_two_processes_give_the_same_curve(own, dense, pruned, tokens, tmp_path):
    tokens = "self" if own else str(tokens)
    shared = ("--text", tokens, *TWO)
    command = ("-m", "coec", "recover", str(dense), str(pruned), str(tmp_path / "two"), *shared)
    ended = subprocess.run((*LAUNCH, *command), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("wrote") == 1
    one = coec.recover(dense, pruned, tmp_path / "one", text=tokens, tokens=512, seq_len=32,
                       device="cpu", batch_size=8).recoveries[-1]  # fmt: skip
    two = Report.read(tmp_path / "two").recoveries[-1]
    assert two["processes"] == 2
    for first, second in zip(one["curve"], two["curve"], strict=True):
        assert second == pytest.approx(first, rel=1e-5)


def test_a_training_that_is_refused_keeps_the_finished_pruning(
    dense, tokens, tmp_path, monkeypatch
):
    """As if the widths that the pruning decides needed more memory than there is."""

    def refused(*arguments, **options):
        raise OptionError("does not fit")

    how = {"calibration": tokens, **PRUNING}
    with monkeypatch.context() as patch:
        patch.setattr(Job, "checked", refused)
        with pytest.raises(OptionError, match="does not fit"):
            prune_and_recover(dense, tmp_path / "out", 1000, **how)
    assert (tmp_path / "out.partial/states/pruned/config.json").is_file()
    monkeypatch.setattr(recovery, "prune", None)  # it is not done again
    prune_and_recover(dense, tmp_path / "out", 1000, **how)


def test_other_threads_do_not_go_on_with_both(dense, tokens, tmp_path, monkeypatch):
    how = {"calibration": tokens, **PRUNING}
    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "train", end)
        with pytest.raises(KeyboardInterrupt):
            prune_and_recover(dense, tmp_path / "out", 1000, **how)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(UnfinishedError, match="threads was"):
            prune_and_recover(dense, tmp_path / "out", 1000, **how)
    finally:
        torch.set_num_threads(threads)
