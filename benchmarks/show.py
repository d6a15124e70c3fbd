"""The tables of the last results, as the benchmarks printed them: `python -m benchmarks.show`."""

import argparse
from itertools import groupby
from typing import Any

from benchmarks import (
    cuda,
    device_paths,
    elimination,
    end_to_end,
    gguf_tables,
    record,
    right_solve,
    true_widths,
)


def main() -> None:
    """Prints Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
    for name in parser.parse_args().names or TABLES:
        if found := record.load(name):
            print(f"## {name} {found['arguments']}\n\n{_origin(found)}\n")
            print("\n\n".join(TABLES[name](found)), end="\n\n")


def _origin(found: dict[str, Any]) -> str:
    machine, versions = found["machine"], found["versions"]
    on = "gpu" if found["benchmark"] == "cuda" else "processor"
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{machine[on]}, {machine['threads']} thread(s), "
        f"{machine['clock']}; {names}; commit {found['commit']}, {found['date']}"
    )


def _cuda(found: dict[str, Any]) -> list[str]:
    sites = groupby(found["sites"], key=lambda site: (site["model"], site["dtype"], site["rate"]))
    parts = [device_paths.describe_differences(found["differences"])]
    parts += [cuda.describe(*key, list(rows)) for key, rows in sites]
    return parts + [device_paths.describe_timings(one) for one in found["others"]]


TABLES = {
    "right_solve": lambda found: map(right_solve.describe, found["problems"]),
    "elimination": lambda found: [elimination.describe(found["sites"])],
    "cuda": _cuda,
    "cuda_rehearsal": _cuda,
    "true_widths": lambda found: map(true_widths.describe, found["sites"]),
    "gguf_speed": gguf_tables.described,
    "end_to_end": lambda found: map(end_to_end.describe, found["models"]),
}


if __name__ == "__main__":
    main()
