"""What a command line may hold that nobody means: one line on stderr, no traceback, no output."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import coec
import tiny_models as tm
from coec.errors import ModelError, OptionError, OutputError


@pytest.fixture
def place(dense, tmp_path):
    """A folder with odd things in it, by name."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 50_000)
    (tmp_path / "digits.toml").write_text("seed = " + "9" * 5000)
    (tmp_path / "seed.toml").write_text("seed = " + "9" * 100)
    (tmp_path / "trust.toml").write_text("trust-remote-code = true")
    (tmp_path / "options.toml").write_text("options = [1]")
    (tmp_path / "latin.toml").write_bytes(b'selection = "\xff"')
    (tmp_path / "surrogate.jsonl").write_text('{"text": "\\udfff"}')
    np.save(tmp_path / "truth.npy", np.ones((24, 32), dtype=bool))
    tm.token_file(tmp_path / "tokens.npy")
    return tmp_path


@pytest.fixture
def run(run, monkeypatch, place, dense):
    """Runs the command in the folder: status, stdout, stderr. DENSE is a model, LONG a name."""
    monkeypatch.chdir(place)
    words = {"DENSE": str(dense), "LONG": "n" * 300, "EMPTY": "", "BYTES": "a\udcff"}
    return lambda line: run(*(words.get(word, word) for word in line.split()))


TABLES = tomllib.loads(Path(__file__).with_name("odd_commands.toml").read_text(encoding="utf-8"))
LINES = [(f"{start} {end}", said) for start, table in TABLES.items() for end, said in table.items()]


@pytest.mark.parametrize(("line", "match"), LINES)
def test_one_line_and_status_1(line, match, run, place):
    before = sorted(os.listdir(place))
    status, out, err = run(line)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("coec: ")
    assert any(part in err for part in match.split("|")), err
    assert sorted(os.listdir(place)) == before


@pytest.mark.parametrize(
    "line", ["prune EMPTY out", "prune DENSE EMPTY --force", "eval DENSE --text EMPTY"]
)
def test_an_empty_argument_is_wrong_usage_and_not_this_folder(line, run):
    status, out, err = run(line)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "an argument is empty" in err


COMMAND = [sys.executable, "-m", "coec"]


def test_results_that_cannot_be_written_are_one_line():
    with open("/dev/full", "w") as full:
        shown = subprocess.run([*COMMAND, "-h"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert shown.returncode == 1
    assert shown.stderr == "coec: the output cannot be used: No space left on device\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    shown = subprocess.run([*COMMAND, "-h"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (shown.returncode, shown.stderr) == (1, "")


def test_an_interrupt_at_any_time_of_start_up_is_one_line():
    command = subprocess.Popen(
        [*COMMAND, "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(0.5)  # while torch is imported
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (130, "")
    assert err == "coec: interrupted; nothing half-written is left\n"


def test_a_terminal_that_knows_ascii_alone_shows_what_it_can():
    shown = subprocess.run(
        [*COMMAND, "prune", "-h"], capture_output=True, text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert (shown.returncode, shown.stderr) == (0, "")


def test_settings_may_be_numbers_of_numpy_and_torch(dense, tokens, tmp_path):
    """And token ids an array."""
    numbers = {
        "preset": "paper", "sparsity": np.float32(0.5), "samples": np.int64(24),
        "seq_len": np.array(32), "seed": np.uint8(3), "r_p": np.int16(1),
        "alpha": torch.tensor(0.5, dtype=torch.float64),
    }  # fmt: skip
    ids = np.load(tokens).astype(np.uint16)
    report = coec.prune(dense, tmp_path / "out", calibration=ids, **numbers)
    recipe = report.recipe
    assert (recipe["sparsity"], recipe["samples"], recipe["seq_len"]) == (0.5, 24, 32)
    assert (recipe["seed"], recipe["options"]["alpha"], recipe["options"]["r_p"]) == (3, 0.5, 1)
    X = torch.randn(8, 50, dtype=torch.float64)
    gram = coec.Gram(X @ X.T, X.sum(dim=1), 50)
    W = torch.randn(4, 8, dtype=torch.float64)
    compensated = coec.compensate(W, gram, torch.arange(5), alpha=np.array(0.5), r_p=np.int64(1))
    assert compensated.diagnostics["rounds"]


PLACES = {
    "the root": (lambda m, o: coec.prune(m, "/"), OutputError, "the whole file system"),
    "no output": (lambda m, o: coec.prune(m, None), OutputError, "folder or file, got None"),
    "a number": (lambda m, o: coec.recover(m, m, 3), OutputError, "folder or file, got 3"),
    "export": (lambda m, o: coec.export(m, None), OutputError, "folder or file, got None"),
    "a share": (lambda m, o: coec.prune(m, o, sparsity=10**400), OptionError, "sparsity"),
    "a count": (lambda m, o: coec.prune(m, o, samples=10**400), OptionError, "samples"),
    "a budget": (lambda m, o: coec.recover(m, m, o, tokens=10**400), OptionError, "tokens"),
}


@pytest.mark.parametrize("case", PLACES)
def test_what_no_caller_can_mean_is_one_line(case, dense, tmp_path):
    call, error, match = PLACES[case]
    with pytest.raises(error, match=match):
        call(dense, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_network_without_a_head_predicts_nothing(dense):
    with pytest.raises(ModelError, match="give the whole causal language model"):
        coec.perplexity(tm.load(dense).model, torch.ones(2, 8, dtype=torch.int64), seq_len=8)


def test_the_largest_seed_draws_windows_text_and_scores(dense, tokens, tmp_path):
    settings = {"preset": "fast", "seq_len": 32, "samples": 8, "seed": 2**64 - 1}
    for calibration in (tokens, "self"):
        out = tmp_path / calibration[-4:]
        report = coec.prune(dense, out, selection="random", calibration=calibration, **settings)
        assert report.recipe["seed"] == 2**64 - 1
