"""What goes beside channels, at equal parameters: quality on the real model, speed in llama.cpp.

    PYTHONPATH=.venv-gguf .venv/bin/python -m benchmarks.units [--sparsity 0.2 0.3] [--repeats 7]

Every case leaves as many parameters as `fast` does without it. benchmarks.real makes its rows, with
the settings that this prints where they are missing. Speed is that of random models of the same
sizes, channels rounded as presets do, since the time of a product does not depend on its numbers:
llama.cpp's q8_0, one thread, in turns with the dense model, the best rate over its best. Printed is
the table of docs/lab/RESULTS.md, saved what was measured.
"""

import argparse
import ctypes
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.real import key_of
from benchmarks.real_model import folder

BUDGETS = {0.2: 0.889009, 0.3: 0.827348}
"""Share of the parameters that `fast` leaves of the real model, by sparsity."""
_THIRD = {"attention_sparsity": 0.33334}
FAST, BY_BLOCK = "fast", "fast, by block"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "channels": (FAST, {}),
    **{
        f"{count} of 30 blocks, and channels": (FAST, {"drop_blocks": count})
        for count in (1, 2, 3, 4, 6)
    },
    "one of three KV groups, and channels": (FAST, _THIRD),
    "one of three heads in every group, and channels": (
        FAST, {"attention_units": "heads"} | _THIRD,
    ),
    "channels by block": (BY_BLOCK, {}),
    "2 of 30 blocks, and channels by block": (BY_BLOCK, {"drop_blocks": 2}),
}  # fmt: skip
"""Row of benchmarks.real and settings beside it, by what goes."""


def settings_of(case: str, sparsity: float) -> dict[str, Any]:
    """Return the settings of a case beside its row's, with the budget that makes it comparable.

    Channels beside whole blocks go one by one, so that budgets are met to the channel.
    """
    row, settings = CASES[case]
    if row == BY_BLOCK and not settings:
        return {}
    exact = row == FAST and "attention_sparsity" not in settings
    budget = {"budget_parameters": BUDGETS[sparsity]}
    return settings | budget | ({"multiple_of": 1} if exact else {})


def row_of(case: str, sparsity: float, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a case's row on the real model, where it was made."""
    key = key_of(CASES[case][0], sparsity, settings_of(case, sparsity))
    return next((row for row in rows if row["key"] == key), None)


def main(arguments: list[str] | None = None) -> None:
    """Measure the speed of every case, save it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(BUDGETS))
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args(arguments)
    rows = record.load("real").get("rows", [])
    for sparsity in chosen.sparsity:
        for case in CASES:
            if row_of(case, sparsity, rows) is None:
                asked = json.dumps(settings_of(case, sparsity))
                print(f"missing: benchmarks.real --rows '{CASES[case][0]}' "
                      f"--sparsity {sparsity} --settings '{asked}'")  # fmt: skip
    found = measured(chosen.sparsity, chosen.repeats)
    record.save("units", arguments, {"rows": found})
    print(table(rows, found))


def measured(sparsities: list[float], repeats: int) -> list[dict[str, Any]]:
    """Return llama.cpp's rates, pruned over dense, of the sizes of every case."""
    import llama_cpp
    from transformers import AutoConfig

    from benchmarks.gguf_speed import Runner, paired, random_model, written
    from coec.errors import OptionError
    from coec.models.fewer_blocks import without_blocks
    from coec.models.description import Description
    from coec.planning import Plan
    from coec.config.recipe import Recipe

    silent: Any = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    model, found = Description.read(folder()), []
    with tempfile.TemporaryDirectory() as place:
        config = AutoConfig.for_model(**model.config)
        whole = written(str(random_model(Path(place) / "dense", config)), "q8_0")
        for sparsity in sparsities:
            for case in CASES:
                if CASES[case][0] == BY_BLOCK:
                    continue  # its widths follow from the weights
                settings = settings_of(case, sparsity) | {"multiple_of": "auto"}
                try:
                    plan = Plan.of(model, Recipe(preset="fast", sparsity=sparsity, **settings))
                except OptionError:  # the blocks alone are more than the budget
                    continue
                small = AutoConfig.for_model(**without_blocks(plan.output.config, plan.dropped))
                path = written(str(random_model(Path(place) / "pruned", small)), "q8_0")
                dense, pruned = Runner(whole), Runner(path)
                read, write = paired(dense, pruned, repeats)
                dense.close()
                pruned.close()
                Path(path).unlink()
                rates = {"read": asdict(read), "write": asdict(write)}
                gone = 1 - plan.parameters_after / plan.parameters_before
                found.append({"case": case, "sparsity": sparsity, "gone": gone, **rates})
                ratios = (f"{best(rate):.3f}" for rate in rates.values())
                print(f"{case}, {sparsity:g}:", *ratios, flush=True)
    return found


def best(rates: dict[str, Any]) -> float:
    """Return the pruned model's best rate over the dense one's."""
    return float(rates["pruned"]["greatest"] / rates["dense"]["greatest"])


def table(rows: list[dict[str, Any]], speeds: list[dict[str, Any]]) -> str:
    """Return parameters, KL on both texts and speed of every case of which anything is known."""
    lines = []
    for sparsity in BUDGETS:
        for case in CASES:
            row = row_of(case, sparsity, rows)
            speed = next(
                (s for s in speeds if (s["case"], s["sparsity"]) == (case, sparsity)), None
            )
            if row is None:
                continue
            rates = ["–", "–"] if speed is None else [
                f"{best(speed[kind]):.2f}" for kind in ("read", "write")
            ]  # fmt: skip
            lines.append([
                f"{100 * sparsity:.0f} %", case, f"{100 * row['removed']:.1f} %",
                f"{row['perplexity']:.1f}", f"{row['kl']:.3f}", f"{row['stories_kl']:.3f}", *rates,
            ])  # fmt: skip
    head = ["", "what goes", "parameters", "perplexity", "KL", "KL on stories", "reads", "writes"]
    return record.table(head, lines)


if __name__ == "__main__":
    main()
