"""Every benchmark in turn: `make bench`, or `python -m benchmarks.run [NAME ...] [--quick]`.

Results go to `benchmarks/results/`, a JSON file for each.
"""

import argparse
import importlib
import time

import torch

QUICK: dict[str, list[str]] = {
    "right_solve": ["--shapes", "192x404", "--limit", "20", "20"],
    "true_widths": ["--sites", "192x577"],
    "elimination": ["--sites", "3072x1024"],
    "end_to_end": ["--layers", "1", "--models", "wt2-llama"],
    "cuda": ["--models", "Llama-3.1-8B"],
}


def main() -> None:
    """Runs them; the one for a GPU only where there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(QUICK))
    parser.add_argument("--quick", action="store_true", help="small sizes, minutes")
    parser.add_argument("--shared", default="../shared")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(QUICK):
        parser.error(f"unknown benchmark '{min(unknown)}'; known: {', '.join(QUICK)}")
    for name in chosen.names or QUICK:
        if name == "cuda" and not torch.cuda.is_available():
            print("skipped cuda: no CUDA device here (rehearse: --device cpu --scale 0.02)\n")
            continue
        arguments = list(QUICK[name]) if chosen.quick else []
        if name in ("right_solve", "end_to_end"):
            arguments += ["--shared", chosen.shared]
        began = time.perf_counter()
        importlib.import_module(f"benchmarks.{name}").main(arguments)
        print(f"({name}: {time.perf_counter() - began:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
