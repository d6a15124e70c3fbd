"""An interrupted run goes on to the bytes of an undisturbed one, and not from anything else.

How a run survives being killed at any moment is in `tests/crash`.
"""

import itertools
import shutil

import pytest
import torch

import coec
import tiny_models as tm
from coec import devices, pruning
from coec.checkpoint import checkpoint as writing
from coec.checkpoint.journal import Journal
from coec.errors import ModelError, OptionError, UnfinishedError
from coec.models import dense as module
from coec.types import SiteResult
from prunings import content, interrupt

SETTINGS = {"preset": "paper", "samples": 24, "seq_len": 32}


@pytest.fixture
def solved(monkeypatch):
    """The blocks that were solved."""
    numbers, solve = [], pruning.solve

    def counted(blocks, *arguments):
        numbers.extend(block.index for block in blocks)
        return solve(blocks, *arguments)

    monkeypatch.setattr(pruning, "solve", counted)
    return numbers


PAIRS = [
    {"selection": "flap", "compensation": "bias"},
    {"selection": "wanda-sp", "lambda_a": 0.0, "dtype": "bfloat16"},
    {"compensation": "rcpu", "forward_dtype": "float64"},
    {"compensation": "ridge-to-slice", "sparsity": 0.5, "forward_dtype": "bfloat16"},
    {"selection": "random", "rotation": "left", "seed": 3},
    {"selection": "obs", "compensation": "ridge-to-slice", "by_block": True},
    {"calibration": "self", "samples": 4, "compensation": "least-squares"},
    {"calibration": "self", "samples": 4, "selection": "magnitude"},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", PAIRS, ids=lambda o: "-".join(map(str, o)))
def test_going_on_gives_the_same_bytes(options, dense, solved, text, tmp_path, monkeypatch):
    if PAIRS.index(options) % 2:
        monkeypatch.setattr(writing, "MAX_SHARD", "20KB")
    settings = {"calibration": text} | SETTINGS | options
    coec.prune(dense, tmp_path / "whole", **settings)
    solved.clear()
    interrupt(monkeypatch, coec.prune, dense, tmp_path / "out", **settings)
    coec.prune(dense, tmp_path / "out", **settings)
    assert solved == [0, 1]
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.fixture
def begun(dense, solved, tmp_path, monkeypatch):
    """An unfinished run: its arguments, on a model and a text of the test's own."""
    model = shutil.copytree(dense, tmp_path / "model")
    text = tm.text_file(tmp_path / "text.txt")
    asked = {
        "preset": "paper", "calibration": text, "compensation": "none", "samples": 24,
        "seq_len": 32,
    }  # fmt: skip
    interrupt(monkeypatch, coec.prune, model, tmp_path / "out", **asked)
    return asked


def refused(tmp_path, said, **asked):
    """Nothing is lost, and the run may be thrown away."""
    partial = tmp_path / "out.partial"
    before = {path: path.read_bytes() for path in partial.rglob("*") if path.is_file()}
    with pytest.raises(UnfinishedError, match=f"{said}.*restart=True"):
        coec.prune(tmp_path / "model", tmp_path / "out", **asked)
    assert before == {path: path.read_bytes() for path in partial.rglob("*") if path.is_file()}
    coec.prune(tmp_path / "model", tmp_path / "out", restart=True, **asked)
    assert not partial.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparsity": 0.5}, r"sparsity was 0\.3, now 0\.5"),
        ({"selection": "flap"}, 'selection was "rcpu", now "flap"'),
        ({"compensation": "least-squares", "ridge": 0.1}, "compensation was"),
        ({"samples": 12}, "samples was 24, now 12"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"dtype": "bfloat16"}, 'dtype was "float32", now "bfloat16"'),
        ({"forward_dtype": "float64"}, 'forward_dtype was "float32", now "float64"'),
    ],
)
def test_other_settings_are_refused(changes, said, begun, tmp_path):
    refused(tmp_path, said, **(begun | changes))


def test_other_text_under_the_same_name_is_refused(begun, tmp_path):
    (tmp_path / "text.txt").write_text("the mat sat on a cat. " * 200)
    refused(tmp_path, "calibration was", **begun)


def test_the_same_text_under_another_name_goes_on(begun, solved, tmp_path):
    moved = shutil.move(tmp_path / "text.txt", tmp_path / "moved.txt")
    coec.prune(tmp_path / "model", tmp_path / "out", **(begun | {"calibration": moved}))
    assert solved == [0, 1]


def test_other_weights_of_the_same_model_are_refused(begun, tmp_path):
    tm.edit_weights(tmp_path / "model", lambda tensors: tensors["model.norm.weight"][0].add_(1))
    refused(tmp_path, "model was", **begun)


def test_another_tokenizer_is_refused(begun, tmp_path):
    """It cuts other windows from the same text."""
    path = tmp_path / "model/tokenizer.json"
    path.write_text(path.read_text() + "\n")
    refused(tmp_path, "tokenizer was", **begun)


def test_other_libraries_are_refused(begun, tmp_path, monkeypatch):
    """Their bits may differ, and a model of both would be of neither."""
    monkeypatch.setattr(devices.torch, "__version__", "2.0.0")
    refused(tmp_path, 'torch was ".*", now "2.0.0"', **begun)


def test_another_device_is_refused(begun, tmp_path, monkeypatch):
    computed_by = writing.computed_by
    monkeypatch.setattr(writing, "computed_by", lambda device: computed_by(torch.device("cuda")))
    refused(tmp_path, 'device was "cpu", now "cuda"', **begun)


def test_the_same_device_by_another_name_goes_on(begun, solved, tmp_path):
    coec.prune(tmp_path / "model", tmp_path / "out", **begun, device="cpu")
    assert solved == [0, 1]


def test_a_run_with_functions_of_the_users_own_is_begun_anew(
    dense, solved, text, tmp_path, monkeypatch
):
    """Nothing tells whether they still do the same; a compensation of the same name is another."""

    def bias(problem):
        return SiteResult(problem.weight[:, problem.kept.indices] / 2)

    asked = {"preset": "paper", "calibration": text, "samples": 8, "seq_len": 32}
    shutil.copytree(dense, tmp_path / "model")
    arguments = (tmp_path / "model", tmp_path / "out")
    interrupt(monkeypatch, coec.prune, *arguments, compensation=bias, **asked)
    solved.clear()
    with pytest.warns(RuntimeWarning, match="is begun anew: compensation is a function"):
        coec.prune(*arguments, compensation=bias, **asked)
    assert solved == [0, 1]


def test_diagnostics_that_no_report_holds_are_refused(dense, text, tmp_path):
    def late(problem):
        last = problem.weight.shape[1] == 40  # not on the small problem that is tried first
        diagnostics = {"mine": float("nan") if last else 0.0}
        return SiteResult(problem.weight[:, problem.kept.indices], None, diagnostics)

    with pytest.raises(OptionError, match="diagnostics for model.layers.0.mlp.*no report holds"):
        coec.prune(dense, tmp_path / "out", calibration=text, samples=8, seq_len=32,
                   compensation=late, preset="paper")  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_other_threads_are_refused(begun, tmp_path):
    """They add up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        refused(tmp_path, f'threads was "{threads}", now "{threads + 1}"', **begun)
    finally:
        torch.set_num_threads(threads)


def test_a_damaged_block_found_late_costs_only_itself(dense, text, tmp_path, monkeypatch, solved):
    """Weights are read when their turn comes: what was finished before stays, and is used."""
    monkeypatch.setattr(module, "_SAMPLED", 64)
    good, out = shutil.copytree(dense, tmp_path / "good"), tmp_path / "out"
    whole = coec.prune(good, tmp_path / "whole", calibration=text, **SETTINGS)
    undo = changed(good, "model.layers.1.mlp.up_proj.weight", float("nan"))
    with pytest.raises(ModelError, match=r"1\.mlp\.up_proj\.weight .* holds NaN or Inf") as caught:
        coec.prune(good, out, calibration=text, **SETTINGS)
    assert "what is finished is kept" in caught.value.__notes__[0]
    undo()
    solved.clear()
    report = coec.prune(good, out, calibration=text, **SETTINGS)
    assert solved == [1]
    assert report.model_sha256 == whole.model_sha256
    assert content(out)[0].keys() == content(tmp_path / "whole")[0].keys()
    assert tm.same_weights(out, tmp_path / "whole")


BEGUN = {
    "prune": ({"compensation": "none"}, 2),
    "balanced": ({"preset": "balanced", "reconstruct": 1, "samples": 8}, 2),
    "self": ({"compensation": "none", "calibration": "self", "samples": 4}, 1),
    "allocate": ({"compensation": "none", "by_block": True}, 1),
}
"""Runs, and after how many pieces they are ended."""
OTHER = "model.embed_tokens.weight"


def changed(model, name, by=0.5):
    """Changes a weight where the fingerprint does not look; returns what undoes that."""
    path = model / "model.safetensors"
    before = path.read_bytes()
    tm.edit_weights(model, lambda weights: weights[name].view(-1)[5].add_(by))
    return lambda: path.write_bytes(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "name"),
    [*((run, OTHER) for run in BEGUN), ("prune", "model.norm.weight"), ("self", "lm_head.weight"),
     ("prune", "model.layers.0.mlp.up_proj.weight"), ("self", "model.layers.0.mlp.up_proj.weight")],
)  # fmt: skip
def test_a_model_that_changed_where_nothing_was_sampled_is_not_gone_on_with(
    run, name, dense, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_SAMPLED", 64)
    model, out = shutil.copytree(dense, tmp_path / "model"), tmp_path / "out"
    settings, pieces = BEGUN[run]
    asked = {"calibration": text, "samples": 12, "seq_len": 32, **settings}
    put, count = Journal.put, itertools.count(1)

    def ended(self, *arguments, **facts):
        put(self, *arguments, **facts)
        if next(count) == pieces:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "put", ended)
    with pytest.raises(KeyboardInterrupt):
        coec.prune(model, out, **asked)
    undo = changed(model, name)
    what = r"model\.layers\.0" if "layers" in name else "embedding, final norm or head"
    with pytest.raises(ModelError, match=rf"was changed .{what}. since it was read by a run that"):
        coec.prune(model, out, **asked)
    assert not out.exists()
    undo()
    coec.prune(model, out, **asked)
