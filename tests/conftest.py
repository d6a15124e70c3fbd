"""What every test shares. Shapes and dtypes in annotations are checked here, and only here.

Checking every call makes the solvers several times slower, so it is done where a test is about one
function or one contract, and not where whole models are pruned: everything those call has tests of
its own. `COEC_TYPECHECK=1` checks everywhere. What a marker means is in pyproject.toml.
"""

import gc
import os
import random
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several workers would wait for each other

import typechecker

typechecker.install()

import pytest
import torch
from transformers.utils import logging as transformers_logging

import tiny_models as tm
from coec.cli.signals import END_SIGNALS, end
from places import SHARED

TESTS = Path(__file__).resolve().parent
CHECKED = ("linalg", "methods", "contracts", "models", "text",
           "test_types.py", "test_exact_cases.py")  # fmt: skip
"""Where annotations are checked, but for tests marked `unchecked`."""

RARE = list(tm.UNUSUAL)[1::3] + list(tm.UNUSUAL)[2::3]
"""Unusual models that are slow ones too: two of three."""
LONG = ("test_demo.py", "test_fuzz.py", "test_paper.py")
"""Files with tests of five seconds and more; the many short ones then fill up the cores."""

transformers_logging.disable_progress_bar()

# Started by nohup, or in the background of a script, the tests and the programs that they start
# would be deaf to what some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before any is deselected: what needs a browser says so by its fixture, and is marked.

    Of tests that every kind of model has, those of the less usual kinds are slow ones. Files of
    long tests come first, so that no core is left waiting for one at the end.
    """
    for item in items:
        if "browser" in item.fixturenames:
            item.add_marker(pytest.mark.browser)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        variant, name = params.get("variant"), params.get("name")
        if (variant in tm.VARIANTS and variant not in tm.USUAL) or name in RARE:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name not in LONG)
    gc.freeze()  # what is imported by now stays, and need not be searched for garbage again


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before any fixture of the test: whether it is one whose calls are checked."""
    small = item.path.relative_to(TESTS).parts[0] in CHECKED
    checked = typechecker.EVERYWHERE or (small and item.get_closest_marker("unchecked") is None)
    typechecker.switch(checked)


@pytest.fixture(autouse=True)
def _deterministic():
    """Every test starts from the same random state."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def modules(monkeypatch, tmp_path):
    """Where transformers copies the code of models that it is told to trust."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path != str(tmp_path / "modules")]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared data; a test that needs it is skipped where it is not there."""
    if not SHARED.is_dir():
        pytest.skip("needs the project's shared models and texts (../shared), which are not here")
    return SHARED


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process: exit status, stdout, stderr."""
    from coec.cli import main

    def call(*arguments, columns=200):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.argv", ["coec", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as exit_:
            status = exit_.code
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


@pytest.fixture
def handlers():
    """What is done at signals is afterwards as it was."""
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    end()


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    """The folder of a random Llama of two blocks in float32, to be read and not changed."""
    return tm.save(tm.tiny("llama", torch.float32), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A file of 24 rows of 32 token ids, to be read and not changed."""
    return tm.token_file(tmp_path_factory.mktemp("tokens") / "tokens.npy")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of 4,000 characters of text, to be read and not changed."""
    return tm.text_file(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(autouse=True, scope="session")
def _no_power_cut():
    """Files need not survive one here, which waiting for the disk is for; in `tests/crash` they do.

    A test of what is synced puts a function of its own in this place.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
