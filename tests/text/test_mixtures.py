"""Calibration windows of several texts, by shares."""

import pytest
import torch

import coec
import tiny_models as tm
from coec.config import nth_seed
from coec.config.recipe import Recipe
from coec.errors import CalibrationError
from coec.models.dense import Dense
from coec.streams.windows import CalibrationText
from coec.text.sources import mixture
from coec.text.windows import mixed, shares, source_digest
from outcomes import one_line, succeeded


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return Dense.open(tm.save(tm.tiny("llama"), tmp_path_factory.mktemp("dense") / "model"))


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Two texts and token ids in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(chr(97 + i % 26) for i in range(4000)))
    (tmp_path / "b.jsonl").write_text('{"text": "%s"}\n' % ("0123456789" * 400))
    tm.token_file(tmp_path / "c.npy", rows=24, length=32)
    return tmp_path


def made(dense, source, samples=6, **settings):
    how = {"preset": "paper", "seq_len": 32, **settings}
    text = CalibrationText.read(dense, Recipe(calibration=source, samples=samples, **how), None)
    [drawn] = text.drawn
    return mixed(drawn, source)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("a.txt", [("a.txt", 1)]),
        ("a.txt=2", [("a.txt=2", 1)]),
        ("a.txt,b.jsonl", [("a.txt", 1), ("b.jsonl", 1)]),
        ("a.txt=2, b.jsonl=0.5", [("a.txt", 2), ("b.jsonl", 0.5)]),
        ("hub:o/n:c=3,wikitext2,x=y.txt", [("hub:o/n:c", 3), ("wikitext2", 1), ("x=y.txt", 1)]),
        ("a.txt,", [("a.txt", 1), ("", 1)]),
        ("a=1e9,b=-1", [("a=1e9", 1), ("b=-1", 1)]),
        (["a,b"], [(["a,b"], 1)]),
    ],
)
def test_commas_separate_sources_and_their_shares(source, parts):
    assert mixture(source) == parts


def test_a_file_that_is_there_is_one_source_whatever_its_name(texts):
    for name in ("a,b.txt", "a.txt=2,b.jsonl", "x=2"):
        (texts / name).write_text("text")
        assert mixture(name) == [(name, 1)]
    assert mixture("x=2,a.txt") == [("x=2", 1), ("a.txt", 1)]


@pytest.mark.parametrize(
    ("samples", "weights", "counts"),
    [
        (9, (2, 1), [6, 3]), (128, (2, 1), [85, 43]), (7, (1, 1, 1), [3, 2, 2]),
        (8, (1000, 1, 1), [6, 1, 1]), (3, (1, 50, 2), [1, 1, 1]), (10, (0.7, 0.3), [7, 3]),
        (1000, (1, 1, 999), [1, 1, 998]),
    ],
)  # fmt: skip
def test_every_source_gets_its_share_and_one_window_at_least(samples, weights, counts):
    source = ",".join(f"{number}.txt={share}" for number, share in enumerate(weights))
    assert shares(source, samples) == [(f"{n}.txt", count) for n, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("a.txt,", "'a.txt,' is no mixture: .* once"),
        ("a.txt,b.jsonl=0", "every share above 0"),
        ("a.txt=2,a.txt", "every source once"),
        (",".join(f"{n}.txt" for n in range(7)), "7 sources, and samples=6"),
        ("a.txt,missing.txt", "no text at 'missing.txt'"),
        ("a.txt=5,b.jsonl=300", r"too little .* 'b\.jsonl' has 4000 tokens.* it has 125 windows"),
    ],
)
def test_what_is_no_mixture_is_said_in_one_line(dense, texts, source, match):
    samples = 300 if "300" in source else 6
    with one_line(CalibrationError, match=match):
        made(dense, source, samples)


def test_windows_are_those_of_each_source_in_turn(dense, texts):
    windows = made(dense, "a.txt=2,c.npy", seed=3)
    a, c = (
        made(dense, source, samples, seed=nth_seed(3, number))
        for number, (source, samples) in enumerate([("a.txt", 4), ("c.npy", 2)])
    )
    assert torch.equal(windows.ids[[0, 2, 3, 5]], a.ids)
    assert torch.equal(windows.ids[[1, 4]], c.ids)
    record = windows.record()
    assert record["source"] == "a.txt=2,c.npy"
    assert record["tokens_available"] == a.available + c.available
    assert record["text_sha256"] == f"{a.text_sha256},{c.text_sha256}"
    assert record["characters"] == 4000


def test_the_identity_is_of_contents_and_shares(texts):
    sources = ["a.txt,b.jsonl", "a.txt=2,b.jsonl", "b.jsonl,a.txt", "a.txt,wikitext2"]
    digests = [source_digest(source) for source in sources]
    assert len(set(digests)) == len(digests)
    (texts / "b.jsonl").rename(texts / "d.jsonl")
    assert source_digest("a.txt,d.jsonl") == digests[0]
    (texts / "d.jsonl").write_text('{"text": "other"}')
    assert source_digest("a.txt,d.jsonl") != digests[0]


SETTINGS = {"samples": 6, "seq_len": 32, "preset": "paper"}


def test_a_run_records_it_without_places(dense, texts):
    settings = {**SETTINGS, "calibration": f"{texts}/a.txt=2,b.jsonl,{texts}/c.npy"}
    report = coec.prune(dense, texts / "out", **settings)
    record = report.as_dict()
    assert record["calibration"]["source"] == "a.txt=2,b.jsonl,c.npy"
    assert record["recipe"]["calibration"] == "a.txt=2,b.jsonl,c.npy"
    assert str(texts) not in (texts / "out/coec.json").read_text()
    measured = [coec.perplexity(texts / "out", name, seq_len=32) for name in ("b.jsonl", "c.npy")]
    assert all(result.same_text_as_calibration for result in measured)
    (texts / "d.txt").write_text("another text " * 10)
    assert not coec.perplexity(texts / "out", "d.txt", seq_len=32).same_text_as_calibration


def test_an_evaluation_takes_one_text(dense, texts):
    with one_line(CalibrationError, match="mixture of texts, which only calibration"):
        coec.perplexity(dense, "a.txt,b.jsonl")


@pytest.mark.unchecked
def test_the_command_plans_and_prunes_it(dense, texts, run):
    flags = ("--preset", "paper", "--samples", 6, "--seq-len", 32, "--device", "cpu",
             "--calibration")  # fmt: skip
    assert run("prune", dense.folder, *flags, "a.txt=2,b.jsonl", "--dry-run")[0] == 0
    for source in ("a.txt,", "a.txt,b.jsonl=0"):
        status, _, err = run("prune", dense.folder, texts / "out", *flags, source)
        assert (status, err.count("\n")) == (1, 1)
    config = texts / "recipe.toml"
    config.write_text('calibration = "a.txt=2,b.jsonl"\nsamples = 6\npreset = "paper"\n')
    out, _ = succeeded(run("prune", dense.folder, texts / "out", "--config", config))
    assert "--text a.txt=2,b.jsonl" in out
    assert "--text OTHER.txt" in out
