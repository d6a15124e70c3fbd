"""The server that runs commands and ends them, and places where they run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import COMMANDS, Place

DRIVER = Path(__file__).with_name("driver.py")


@pytest.fixture(scope="session")
def server():
    """Sends a request and returns the answer; one process with everything imported."""
    command = [sys.executable, str(DRIVER)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert json.loads(process.stdout.readline()) == {"ready": True}

    def send(request):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield send
    process.stdin.close()
    process.wait()


@pytest.fixture(scope="session")
def undisturbed(server, shared, tmp_path_factory):
    """What a command leaves when nothing befalls it, and its events; by the command's name."""
    known = {}

    def find(name):
        if name not in known:
            root, beside = (tmp_path_factory.mktemp(what) for what in ("root", "beside"))
            place = Place(server, root, beside, shared, name)
            answer = place.run()
            assert answer["status"] == 0, place.log()
            known[name] = (place.listing(), answer)
        return known[name]

    assert COMMANDS
    return find


@pytest.fixture
def place(server, shared, tmp_path_factory):
    """Makes a folder with what a command needs; a fresh one where none is given."""

    def make(name, root=None):
        beside = tmp_path_factory.mktemp("beside")
        return Place(server, root or tmp_path_factory.mktemp("root"), beside, shared, name)

    return make
