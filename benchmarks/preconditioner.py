"""How far to shift the right solve's preconditioner: steps to come near the best known loss.

    python benchmarks/preconditioner.py [--shared ../shared]

The first right solve of every reference matrix, for a range of shifts (relative to the mean of the
Hessian's diagonal).
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from coec.compensation.frame import Frame, RotationTarget, Shrinkage
from coec.compensation.objective import OutputProblem, kept_columns
from coec.linalg import conjugate
from coec.linalg.right import RightProblem
from coec.linalg.spd import power
from coec.types import KeptSet

SHIFTS = (1e-4, 1e-3, 1e-2, 3e-2, 5e-2, 1e-1, 3e-1, 1.0)
GAPS = (1e-2, 1e-3, 1e-4)


def main() -> None:
    """Prints a table: steps until the loss is within 1e-2, 1e-3, 1e-4 of the best known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    folder = parser.parse_args().shared / "vectors"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        sys.exit(f"preconditioner.py: no reference matrices in '{folder}'; pass --shared")
    problems = {file.stem: first_right_problem(file) for file in files}
    print(f"| shift | {' | '.join(problems)} |")
    print("|---" * (len(problems) + 1) + "|")
    for shift in SHIFTS:
        conjugate.SHIFT = shift
        cells = [" / ".join(map(str, steps(*problem))) for problem in problems.values()]
        print(f"| {shift:g} | {' | '.join(cells)} |", flush=True)


def first_right_problem(file: Path) -> tuple[RightProblem, torch.Tensor, float]:
    """The right solve after the first left rotation and rescale, its start, the best known loss."""
    data, best = load_file(file), json.loads(file.with_suffix(".json").read_text())
    kept = KeptSet(data["in.kept"].long(), data["in.W0"].shape[1])
    problem = OutputProblem.of(data["in.W0"], power(data["in.G"], 0.9), kept)
    target = RotationTarget.of(problem)
    frame = Frame.of(kept_columns(data["in.W0"], kept), target).rotated_left(target)
    frame, _, _ = frame.rescaled(target, Shrinkage("gcv", 1.0, 10.0))
    return frame.right_problem(target, None), frame.R, float(best["right.best_known_loss"])


def steps(problem: RightProblem, R: torch.Tensor, best: float) -> list[int]:
    """Steps until the objective is within each gap of the best known."""
    _, ended = conjugate.conjugate(problem, R, tolerance=1e-13, iterations=1000)
    return [sum(value > best * (1 + gap) for value in ended.history) for gap in GAPS]


if __name__ == "__main__":
    main()
