"""SIGTERM and SIGHUP leave nothing behind."""

import os
import signal

import pytest

from coec.checkpoint.journal import journal
from coec.cli.signals import END_SIGNALS, begin


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", END_SIGNALS)
def test_a_signal_that_ends_the_program_leaves_nothing(number, tmp_path):
    begin()

    def write():
        with journal(tmp_path / "a" / "out", {}) as done:
            (done.new / "model.safetensors").write_text("half")
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as caught:
        write()
    assert caught.value.code == 128 + number
    assert not list(tmp_path.iterdir())
    os.kill(os.getpid(), number)  # a second one is not heard


@pytest.mark.usefixtures("handlers")
def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    begin()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
