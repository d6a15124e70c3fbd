"""Few tokens: the validation error says how far every compensation is followed."""

import pytest
import torch
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec.calibration.windows import with_validation
from coec.compensation.shrinkage import FEW
from coec.models.dense import Dense
from coec.settings import Calibration
from coec.types import KeptSet
from outcomes import succeeded

FEW_TOKENS = "few tokens: the compensation is shrunk towards plain slicing"
LENGTH = 4
PLENTY = 80
"""Windows of which a tiny model's columns have more than `FEW` tokens."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tm.save(tm.tiny("llama"), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return tm.token_file(folder / "tokens.npy", rows=2 * PLENTY, length=LENGTH)


@pytest.fixture
def pruned(dense, tokens, tmp_path):
    """Prunes the tiny model; returns the report and the written tensors."""

    def prune(name="out", **settings):
        settings = {"preset": "paper", "sparsity": 0.3, "samples": 6, "seed": 1,
                    "forward_dtype": "float64", "compensation": "least-squares",
                    "dtype": "float64", **settings}  # fmt: skip
        if "statistics" not in settings:
            settings |= {"calibration": tokens, "seq_len": LENGTH}
        report = coec.prune(dense, tmp_path / name, **settings)
        return report, load_file(tmp_path / name / "model.safetensors")

    return prune


def drawn(report):
    return [event for event in report.events if event.startswith(FEW_TOKENS)]


def followed(report):
    return [row["followed"] for row in report.sites if "followed" in row]


def test_a_quarter_of_the_windows_validates_where_tokens_are_few(dense):
    model = Dense.open(dense)
    widest = max(site.columns for site in model.layout.sites)
    few, plenty = FEW * widest // LENGTH - 1, FEW * widest // LENGTH
    for samples, share in ((few, 0.25), (plenty, 0.0), (1, 0.0)):
        calibration = Calibration(samples=samples, seq_len=LENGTH)
        assert with_validation(calibration, model).guard_share == share
    without = Calibration(samples=few, seq_len=LENGTH, guard=False)
    assert with_validation(without, model).guard_share == 0
    given = Calibration(samples=few, seq_len=LENGTH, holdout=0.5)
    assert with_validation(given, model).validation == 0.5


@pytest.mark.parametrize("compensation", ["least-squares", "rcpu", "ridge-to-slice", "bias"])
def test_a_compensation_of_few_tokens_is_the_whole_one_shrunk(
    dense, pruned, tmp_path, compensation
):
    """`W_K + θ (W̃ − W_K)`, W̃ and the units those of all windows, but for the order of sums."""
    report, written = pruned(compensation=compensation)
    _, whole = pruned("whole", compensation=compensation, guard=False)
    (event,) = {event.rpartition("; ")[0] for event in drawn(report)}
    assert event.endswith("by its validation error")
    assert min(followed(report)) < 1
    model, kept = Dense.open(dense), load_file(tmp_path / "out/coec/kept.safetensors")
    for row in report.sites:
        site = next(s for s in model.layout.sites if s.consumer == row["module"])
        columns = site.kept_columns(KeptSet(kept[site.key], site.units)).indices
        slice_ = model.tensor(site.weight).double()[:, columns]
        expected = slice_ + row["followed"] * (whole[site.weight] - slice_)
        torch.testing.assert_close(written[site.weight], expected, rtol=0, atol=1e-10)


def test_with_plenty_of_tokens_all_windows_are_fitted_on_and_no_bit_changes(pruned):
    report, written = pruned(samples=PLENTY)
    _, whole = pruned("whole", samples=PLENTY, guard=False)
    assert followed(report) == drawn(report) == []
    assert all(torch.equal(written[name], whole[name]) for name in whole)


def test_a_single_window_leaves_the_slice(pruned):
    report, written = pruned(samples=1)
    _, slices = pruned("slices", samples=1, compensation="none")
    assert any("without validation windows" in event for event in drawn(report))
    assert set(followed(report)) == {0.0}
    assert all(torch.equal(written[name], slices[name]) for name in slices)


def test_windows_of_holdout_validate_and_are_not_fitted_on(pruned):
    report, _ = pruned(holdout=0.5)
    assert min(followed(report)) < 1
    for row in report.sites:
        if row["followed"] < 1:
            assert row["holdout_after"] <= row["holdout_before"]


def test_statistics_serve_as_the_text_does(dense, tokens, pruned, tmp_path):
    settings = {"samples": 6, "seed": 1, "forward_dtype": "float64", "seq_len": LENGTH}
    coec.collect(dense, tmp_path / "statistics", calibration=tokens, **settings)
    report, written = pruned()
    again, same = pruned("same", statistics=tmp_path / "statistics")
    assert followed(report) == followed(again)
    assert all(torch.equal(written[name], same[name]) for name in written)


@pytest.mark.parametrize("settings", [{"propagate": True}, {"reconstruct": 1},
                                      {"propagate": True, "reconstruct": 1}])  # fmt: skip
def test_in_order_the_validation_windows_have_targets_of_their_own(pruned, settings):
    report, _ = pruned(samples=8, **settings)
    assert 0 < max(followed(report)) < 1
    for row in report.sites:
        assert row["holdout_after"] <= row["holdout_before"]
        if "reconstruct" in settings and row["site"] == "mlp":
            training = row["reconstruction"]
            assert training["errors"][training["taken"]] == min(training["errors"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_errors_are_those_of_the_dtype_that_is_written(pruned, dtype):
    """The slice of a wide model is itself no worse than the slice."""
    report, _ = pruned(compensation="none", samples=PLENTY, dtype=dtype)
    wide, _ = pruned("wide", compensation="none", samples=PLENTY)
    assert not report.events
    for row, other in zip(report.sites, wide.sites, strict=True):
        assert row["error_before"] == row["error_after"] != other["error_after"]
        assert row["error_after"] == pytest.approx(other["error_after"], rel=1e-2)


def test_so_many_windows_are_named_that_no_site_has_few_tokens(pruned):
    """Those for validation are not fitted on, and count for nothing."""
    report, _ = pruned(holdout=0.5)
    count = max(int(event.split("; ")[1].split()[1]) for event in drawn(report))
    enough, _ = pruned("enough", holdout=0.5, samples=count)
    assert not drawn(enough)
    assert not any("plain slicing" in note for note in enough.plan["notes"])


def test_the_command_says_what_was_done_and_what_would_do(dense, tokens, tmp_path, run):
    flags = ["--samples", "6", "--seq-len", LENGTH, "--calibration", tokens]
    made, said = succeeded(run("prune", dense, tmp_path / "out", *flags))
    assert "validation" in made
    assert "(hidden-state error relative to the dense hidden state, on validation windows)" in made
    assert FEW_TOKENS in said
    assert "windows or more" in said
    dry, _ = succeeded(run("prune", dense, tmp_path / "out2", *flags, "--dry-run"))
    assert "are shrunk" in dry


@pytest.mark.parametrize("method", [pytest.param("coec", marks=pytest.mark.slow), "least-squares"])
def test_few_tokens_do_not_ruin_a_trained_model(shared, tmp_path, method):
    """128 tokens for 121 columns: 393.6 for coec as it is fitted, 27.8 for none."""
    model, text = shared / "models" / "stories260K", shared / "data" / "tinystories"
    perplexity = {}
    for compensation in ("none", method):
        out = tmp_path / compensation
        coec.prune(
            model, out, calibration=str(text / "train.txt"), samples=2, seq_len=64, sparsity=0.3,
            compensation=compensation, preset="paper",
        )  # fmt: skip
        result = coec.perplexity(out, str(text / "test.txt"), seq_len=256, max_windows=30)
        perplexity[compensation] = result.perplexity
    assert perplexity[method] < 1.02 * perplexity["none"]


@pytest.mark.parametrize("preset", ["fast", "balanced"])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_trained_model_with_very_few_tokens_is_not_worse_than_its_slice(
    preset, samples, shared, tmp_path
):
    """64 or 128 tokens: at most 2 % of perplexity behind the same units without compensation."""
    model = tm.readable(shared / "models/stories260K", tmp_path / "model")
    windows = {
        "calibration": str(shared / "data/tinystories/train.txt"), "samples": samples,
        "seq_len": 64, "seed": 2,
    }  # fmt: skip
    coec.prune(model, tmp_path / "out", preset=preset, sparsity=0.3, **windows)
    kept = tmp_path / "out/coec/kept.safetensors"
    bare = {"preset": "paper", "compensation": "none", "kept": kept}
    coec.prune(model, tmp_path / "bare", **bare, **windows)
    test = str(shared / "data/tinystories/test.txt")
    mine, slice_ = (
        coec.perplexity(tmp_path / name, test, seq_len=256, max_windows=8).perplexity
        for name in ("out", "bare")
    )
    assert mine <= 1.02 * slice_
