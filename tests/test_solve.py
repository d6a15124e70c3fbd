"""Experts that a calibration sends few tokens, or none."""

import json

import pytest
import torch
from safetensors.torch import load_file

import coec
import tiny_models as tm
from coec.methods import FEW
from coec.models.dense import Dense
from coec.solve import BY_MAGNITUDE, UNSEEN
from coec.types import KeptSet
from outcomes import succeeded

COLLECTED = {"forward_dtype": "float64", "seq_len": 2, "samples": 1, "seed": 1}
SETTINGS = {"preset": "paper", "sparsity": 0.3, **COLLECTED}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tm.save(tm.tiny("mixtral"), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tm.token_file(tmp_path_factory.mktemp("text") / "tokens.npy", rows=24, length=2)


def of_expert(dense, out, row):
    """Slice and written weight of an expert, and the columns that it keeps."""
    model = Dense.open(dense)
    site = next(one for one in model.layout.sites if one.consumer == row["module"])
    kept = load_file(out / "coec/kept.safetensors")[site.key]
    weight = model.tensor(site.weight)
    columns = site.kept_columns(KeptSet(kept, site.units)).indices
    return weight, columns, Dense.open(out).tensor(site.weight)


@pytest.mark.parametrize("compensation", ["least-squares", "coec", "ridge-to-slice"])
def test_an_expert_without_tokens_keeps_the_slice_of_its_largest_columns(
    compensation, dense, tokens, tmp_path
):
    report = coec.prune(
        dense, tmp_path / "out", **SETTINGS, calibration=tokens, compensation=compensation
    )
    unseen = [row for row in report.sites if row["site"] == "expert" and not row["tokens"]]
    assert unseen
    for row in unseen:
        assert row["events"] == [BY_MAGNITUDE, UNSEEN]
        assert (row["error_before"], row["error_after"]) == (None, None)
        weight, columns, written = of_expert(dense, tmp_path / "out", row)
        assert torch.equal(written, weight[:, columns])
        largest = weight.norm(dim=0).topk(len(columns)).indices.sort().values
        assert torch.equal(columns, largest)


def test_with_few_tokens_a_compensation_goes_so_far_from_the_slice_as_these_can_tell(
    dense, tokens, tmp_path, monkeypatch
):
    settings = {**SETTINGS, "calibration": tokens, "compensation": "least-squares"}
    shrunk = coec.prune(dense, tmp_path / "shrunk", **settings)
    monkeypatch.setattr("coec.methods.FEW", 0.0001)
    plain = coec.prune(dense, tmp_path / "plain", **settings)
    few = 0
    for row, other in zip(shrunk.sites, plain.sites, strict=True):
        if row["site"] != "expert" or not row["tokens"]:
            continue
        few += 1
        assert any(event.startswith("few tokens") for event in row["events"])
        assert not any(event.startswith("few tokens") for event in other["events"])
        weight, columns, written = of_expert(dense, tmp_path / "shrunk", row)
        whole = of_expert(dense, tmp_path / "plain", other)[2]
        share = row["tokens"] / (FEW * len(columns))
        assert row["followed"] == share
        expected = weight[:, columns] + share * (whole - weight[:, columns])
        torch.testing.assert_close(written, expected, rtol=0, atol=1e-12)
        assert row["error_before"] > row["error_after"] > other["error_after"]
    assert few


def test_a_method_that_shrinks_of_itself_is_left(dense, tokens, tmp_path, monkeypatch):
    settings = {**SETTINGS, "calibration": tokens, "compensation": "ridge-to-slice"}
    report = coec.prune(dense, tmp_path / "one", **settings)
    events = [e for row in report.sites if row["site"] == "expert" for e in row["events"]]
    assert not any(event.startswith("few tokens") for event in events)
    monkeypatch.setattr("coec.methods.FEW", 0.0001)
    coec.prune(dense, tmp_path / "other", **settings)
    assert tm.same_weights(tmp_path / "one", tmp_path / "other")


def test_the_command_says_what_became_of_experts(dense, tokens, tmp_path, run):
    flags = ["--sparsity", "0.3", "--samples", "2", "--seq-len", "2", "--calibration", tokens]
    dry, _ = succeeded(run("prune", dense, tmp_path / "out", *flags, "--dry-run"))
    assert "experts × 2 blocks" in dry
    made, said = succeeded(run("prune", dense, tmp_path / "out", *flags))
    assert "expert error" in made
    assert UNSEEN in said
    rows = json.loads((tmp_path / "out/coec.json").read_text())["sites"]
    assert sum(row["site"] == "expert" for row in rows) == 8


def test_a_row_says_how_its_own_weight_was_found(tmp_path):
    """Not how a descent ended whose weight was replaced: here alignment raised the error."""
    model = tm.save(tm.tiny("llama", torch.float32), tmp_path / "dense")
    report = coec.prune(
        model, tmp_path / "out", preset="paper", rotation="right", samples=64, seq_len=32,
        calibration=tm.token_file(tmp_path / "tokens.npy", rows=64),
    )  # fmt: skip
    fell = [row for row in report.sites if any("to rcpu" in event for event in row["events"])]
    assert fell
    for row in fell:
        assert row["reason"] == "fell back to rcpu"
        assert "errors_per_round" not in row
