"""Spoiled inputs: a clear one-line error or a right result, and nothing else.

    pytest -m fuzz                      2,000 cases, a few minutes
    COEC_FUZZ_CASES=20000 pytest -m fuzz      more of them

A case is a number. What is wrong with one names it, and how to run it again by itself.
"""

import json
import os
import select
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker.py")
COUNT = int(os.environ.get("COEC_FUZZ_CASES", "2000"))
PARTS = max(1, min(4, COUNT // 100))
"""Tests that the cases are dealt out to, so that a machine of several cores runs some at a time."""

PATIENCE = 30.0
"""Seconds after which a case counts as a hang; the first one waits for imports too."""


def cases(first: int, last: int):
    """What the worker tells of every case; one that hangs or dies is told too, and passed over.

    Raises RuntimeError where the worker ends before it has begun any: it would with every other.
    """
    while first < last:
        command = [sys.executable, str(WORKER), str(first), str(last)]
        worker = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        begun = False
        while first < last:
            patience = PATIENCE if begun else 10 * PATIENCE
            if not select.select([worker.stdout], [], [], patience)[0]:
                yield {"case": first, "end": "hang", "wrong": f"no end after {PATIENCE:g} s"}
                break
            line = worker.stdout.readline()
            if not line:
                if not begun:
                    command = " ".join(command)
                    raise RuntimeError(f"the worker ends before its first case: {command}")
                yield {"case": first, "end": "death", "wrong": f"exit status {worker.wait()}"}
                break
            told = json.loads(line)
            begun = True
            if "begin" not in told:
                yield told
                first += 1
        worker.kill()
        worker.wait()
        first += 1  # past the one that hung or died


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_spoiled_inputs_are_refused_in_one_line_or_give_a_right_result(part):
    first, last = COUNT * part // PARTS, COUNT * (part + 1) // PARTS
    told = list(cases(first, last))
    ends = Counter(one["end"] for one in told)
    wrong = [one for one in told if one["wrong"]]
    print(dict(ends), file=sys.stderr)
    listing = "\n".join(
        f"python tests/fuzz/worker.py {one['case']} {one['case'] + 1}  # {json.dumps(one)}"
        for one in wrong
    )
    assert not wrong, f"{len(wrong)} of {last - first}; run one again by itself:\n{listing}"
    assert ends["refused"] > (last - first) / 10  # the mutations reach the checks
    assert ends["right"] > (last - first) / 50
