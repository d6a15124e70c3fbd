"""Every table and figure of the paper, made with coec's public functions.

    python -m experiments.paper main --model ./Llama-3.1-8B --model ./Qwen2.5-7B --tasks seven

`--model` may be given several times: a model is a column of the main tables, and the ablation is a
mean over models. Each row is appended to OUT/rows.jsonl as soon as it is measured; a second call
measures only what is missing. Tables are OUT/NAME.csv and .tex, figures OUT/NAME.pdf and .png.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

import coec
from experiments.geometry import frames

Settings = dict[str, Any]
Row = dict[str, Any]

MAIN: list[tuple[str, str, Settings]] = [
    ("Wanda-sp", "--",   {"selection": "wanda-sp", "compensation": "none"}),
    ("Wanda-sp", "COEC", {"selection": "wanda-sp", "compensation": "coec"}),
    ("FLAP",     "bias", {"selection": "flap",     "compensation": "bias"}),
    ("FLAP",     "COEC", {"selection": "flap",     "compensation": "coec"}),
    ("RCPU",     "RCPU", {"selection": "rcpu",     "compensation": "rcpu"}),
    ("RCPU",     "COEC", {"selection": "rcpu",     "compensation": "coec"}),
]  # fmt: skip
"""Rows of the main tables: a selection with its own compensation, and with COEC."""
SPARSITIES = (0.1, 0.2, 0.3)
CALIBRATION_SIZES = (32, 64, 128, 256)

_COEC: Settings = {"selection": "rcpu", "compensation": "coec"}
_PLAIN = _COEC | {"alpha": 1.0, "lambda_a": 0.0}
BUILD_UP: dict[str, Settings] = {
    "Prune + RCPU compensation":      {"selection": "rcpu", "compensation": "rcpu"},
    "+ GCV per-mode rescale":         _PLAIN | {"rotation": "left"},
    "+ converged two-sided rotation": _PLAIN | {"parameterization": "full"},
    "+ reduced-Stiefel right solve":  _PLAIN,
    "+ Gram tempering":               _COEC | {"lambda_a": 0.0},
    "+ anchored align":               _COEC,
}  # fmt: skip
"""Rows of the ablation: COEC built up from RCPU, one component a row."""
VARIANTS: dict[str, Settings] = {
    "prune only":            {"selection": "rcpu", "compensation": "none"},
    "least squares":         {"selection": "rcpu", "compensation": "least-squares"},
    "left rotation only":    _COEC | {"rotation": "left"},
    "right rotation only":   _COEC | {"rotation": "right"},
    "fixed ridge":           _COEC | {"rescale": "fixed"},
    "source's right solver": _COEC | {"solver": "gradient"},
    "  in O(k)":             _COEC | {"solver": "gradient", "parameterization": "full"},
    **{f"alpha = {alpha:g}": _COEC | {"alpha": alpha} for alpha in (0.0, 0.3, 0.5, 0.7, 1.0)},
    **{f"lambda_a = {weight:g}": _COEC | {"lambda_a": weight} for weight in (10.0, 100.0, 1000.0)},
}  # fmt: skip
"""COEC with one component changed."""
GEOMETRY = {f"lambda_a = {weight:g}": weight for weight in (0.0, 1.0, 50.0)}

SEVEN = {
    "boolq": "acc", "rte": "acc", "winogrande": "acc", "hellaswag": "acc_norm",
    "arc_easy": "acc_norm", "arc_challenge": "acc_norm", "openbookqa": "acc_norm",
}  # fmt: skip
"""The paper's tasks, and the metric of each."""
METRICS = {"perplexity": ("{:.2f}".format, "min"), "zero_shot": ("{:.1f}".format, "max")}
"""Format of a number in the tables, and which of two is better."""
TITLES = {"perplexity": "PPL", "zero_shot": "ZS"}


class Lab:
    """Measures rows and keeps them in OUT/rows.jsonl.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out)
        self.models = [Path(model) for model in options.model]
        self.file = self.out / "rows.jsonl"
        self.out.mkdir(parents=True, exist_ok=True)
        text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        # A line that a crash cut short is measured again.
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        self.file.write_text("".join(lines), encoding="utf-8")
        self.rows: dict[str, Row] = {row["key"]: row for row in map(json.loads, lines)}

    def row(
        self, model: Path, settings: Settings | None, measure: Callable[[Path, Path], Row]
    ) -> Row:
        """Return what `measure(dense, folder)` says of a pruned model, measured once.

        Args:
            model: the dense model.
            settings: of `coec.prune`, beside the command line's; None for the dense model.
            measure: one of `quality`, `angles` and `cost`.
        """
        text = {"calibration": self.options.calibration, "samples": self.options.samples,
                "seq_len": self.options.seq_len}  # fmt: skip
        asked = None if settings is None else {"preset": "paper"} | text | settings
        about = {"model": model.name, "measure": measure.__name__, "settings": asked}
        if measure.__name__ == "quality":
            names = ("text", "eval_seq_len", "max_windows", "tasks", "limit")
            about |= {name: getattr(self.options, name) for name in names}
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        if key not in self.rows:
            print(f"{model.name}: {measure.__name__}, {settings or 'dense'}", flush=True)
            try:
                measured = self._measured(model, asked, key, measure)
            except coec.CoecError as error:
                if measure.__name__ != "quality":
                    raise
                # A dash in the tables: no format holds the biases of every model. Tried again.
                print(f"  not measured: {error}", flush=True)
                return {}
            row = {"key": key, **about, **measured}
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self.rows[key] = row
        return self.rows[key]

    def _measured(
        self, model: Path, settings: Settings | None, key: str, measure: Callable[[Path, Path], Row]
    ) -> Row:
        if settings is None:
            return measure(model, model)
        folder, began = self.out / "models" / key, time.perf_counter()
        shutil.rmtree(folder, ignore_errors=True)
        coec.prune(model, folder, device=self.options.device, **settings)  # goes on if interrupted
        seconds = time.perf_counter() - began
        row = measure(model, folder) | {"seconds": seconds}
        shutil.rmtree(folder)
        return row

    def quality(self, dense: Path, folder: Path) -> Row:
        """Measure perplexity, and zero-shot accuracy in % if tasks are asked for."""
        o = self.options
        result = coec.perplexity(
            folder, o.text, device=o.device, seq_len=o.eval_seq_len, max_windows=o.max_windows
        )
        tasks = zero_shot(folder, o) if o.tasks else {}
        mean = 100 * statistics.mean(tasks.values()) if tasks else None
        return {"perplexity": result.perplexity, "zero_shot": mean, "task_scores": tasks}

    def angles(self, dense: Path, folder: Path) -> Row:
        """Measure the frames of every pruned module."""
        return {"modules": frames(dense, folder)}

    def cost(self, dense: Path, folder: Path) -> Row:
        """Measure parameters, memory in GiB, GFLOPs per token, and tokens per second.

        Memory is the peak of a greedy continuation on a GPU; on a CPU that of the weights alone.
        GFLOPs are 2 × parameters, the paper's rule.
        """
        device = torch.device(self.options.device)
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        network = network.to(device).eval()
        positions = network.config.max_position_embeddings
        new = min(64, positions // 2)
        prompt = torch.ones(1, min(512, positions - new), dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        for _ in range(2):  # the first one loads kernels
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            network.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)
            seconds = time.perf_counter() - began
        memory = (
            torch.cuda.max_memory_allocated(device) if on_gpu else network.get_memory_footprint()
        )
        parameters = network.num_parameters()
        return {
            "Params (B)": parameters / 1e9, "Mem (GB)": memory / 2**30,
            "GFLOPs/tok": 2 * parameters / 1e9, "tokens/s": new / seconds,
        }  # fmt: skip

    def save(self, name: str, table: pd.DataFrame, texts: pd.DataFrame | None = None) -> None:
        """Write and print a table: numbers as CSV, texts as LaTeX."""
        table.to_csv(self.out / f"{name}.csv")
        texts = table.map("{:.3g}".format) if texts is None else texts
        texts.to_latex(self.out / f"{name}.tex", escape=False, na_rep="--")
        print(f"\n{name}\n{table.to_string(float_format='%.4g')}", flush=True)

    def draw(self, name: str, figure: Figure) -> None:
        """Write a figure."""
        for suffix in ("pdf", "png"):
            figure.savefig(self.out / f"{name}.{suffix}", dpi=200)


def zero_shot(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the paper's metric of each task, by lm-evaluation-harness, without examples."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names, own = options.tasks.split(","), options.task_folder
    model = HFLM(
        pretrained=str(folder), dtype="auto", device=options.device, batch_size=options.batch_size
    )
    found = lm_eval.simple_evaluate(
        model, tasks=names, num_fewshot=0, limit=options.limit, log_samples=False,
        bootstrap_iters=0, task_manager=TaskManager(include_path=own, include_defaults=own is None),
    )["results"]  # fmt: skip
    return {name: found[name][f"{SEVEN.get(name, 'acc')},none"] for name in names}


def main_tables(lab: Lab, sparsities: Sequence[float] = (0.3,)) -> None:
    """Tables 1 and 2: perplexity and zero-shot accuracy, a column per model."""
    rows = {
        (sparsity, selection, compensation, model.name): lab.row(
            model, {"sparsity": sparsity, **settings}, lab.quality
        )
        for sparsity in sparsities
        for model in lab.models
        for selection, compensation, settings in MAIN
    }
    for metric, (form, better) in METRICS.items():
        numbers = pd.Series({place: row.get(metric) for place, row in rows.items()}, dtype=float)
        if numbers.isna().all():
            continue
        numbers.index.names = ["Sparsity", "Selection", "Comp.", "Model"]
        table = numbers.unstack("Model", sort=False)
        # Bold: the better compensation of a selection, as printed
        texts = table.map(form, na_action="ignore")
        printed = texts.astype(float)
        pairs = printed.groupby(level=["Sparsity", "Selection"], sort=False)
        best = (printed == pairs.transform(better)) & (pairs.transform("nunique") > 1)
        texts = texts.mask(best, texts.map(r"\textbf{{{}}}".format))
        name = "main" if tuple(sparsities) == (0.3,) else "sparsity"
        lab.save(f"{name}-{metric}", table, texts)


def sparsity_tables(lab: Lab) -> None:
    """The supplement's tables: the main tables at 10, 20 and 30 %."""
    main_tables(lab, SPARSITIES)


def calibration_figure(lab: Lab) -> None:
    """Figure 2: perplexity against the calibration size; the selection is made anew for each."""
    methods = {"prune only": "none", "RCPU": "rcpu", "COEC": "coec"}
    for model in lab.models:
        numbers = pd.Series({
            (sparsity, method, samples): lab.row(
                model,
                {"sparsity": sparsity, "selection": "rcpu", "compensation": name,
                 "samples": samples},
                lab.quality,
            ).get("perplexity")
            for sparsity in SPARSITIES for method, name in methods.items()
            for samples in lab.options.sizes
        })  # fmt: skip
        numbers.index.names = ["Sparsity", "Comp.", "N"]
        table = numbers.unstack("N")
        lab.save(f"calibration-{model.name}", table)
        figure = Figure((10, 3), layout="constrained")
        panels = figure.subplots(1, len(SPARSITIES), squeeze=False)[0]
        for axes, sparsity in zip(panels, SPARSITIES):
            table.loc[sparsity].T[[*methods]].plot(ax=axes, marker="o", logx=True)
            axes.set(title=f"{sparsity:.0%}", xlabel="calibration windows", ylabel="perplexity")
            axes.set_xticks(lab.options.sizes, map(str, lab.options.sizes))
            axes.minorticks_off()
        lab.draw(f"calibration-{model.name}", figure)


def ablation_table(lab: Lab) -> None:
    """Table 3: COEC built up from RCPU at 30 %, mean over the models; then single changes."""
    for name, cases in {"ablation": BUILD_UP, "variants": VARIANTS}.items():
        rows = {
            (label, model.name): lab.row(model, {"sparsity": 0.3, **settings}, lab.quality)
            for label, settings in cases.items()
            for model in lab.models
        }
        numbers = pd.DataFrame.from_dict(rows, orient="index")[[*METRICS]].astype(float)
        table = numbers.groupby(level=0, sort=False).mean().dropna(axis="columns")
        table = table.set_axis([TITLES[name] for name in table], axis="columns")
        table.index.name = "Configuration"
        lab.save(name, table, table.map("{:.2f}".format))


def geometry_table(lab: Lab) -> None:
    """Section C: frames of every module at 30 % with Wanda-sp's selection, by weight of alignment.

    Angles and discrepancies are means, penalties medians over the modules of a site.
    """
    for model in lab.models:
        cases = {}
        for label, weight in GEOMETRY.items():
            settings = {"sparsity": 0.3, "selection": "wanda-sp", "compensation": "coec",
                        "lambda_a": weight}  # fmt: skip
            cases[label] = pd.DataFrame(lab.row(model, settings, lab.angles)["modules"])
        modules = pd.concat(cases, names=["Alignment", None]).reset_index("Alignment")
        modules["oc_above_op"] = modules["angle_oc"] > modules["angle_op"]
        modules["penalty_factor"] = modules["penalty_pruned"] / modules["penalty_compensated"]
        table = modules.groupby(["Alignment", "site"], sort=False).agg(
            modules=("block", "size"), op=("angle_op", "mean"), op_least=("angle_op", "min"),
            op_most=("angle_op", "max"), oc=("angle_oc", "mean"), pc=("angle_pc", "mean"),
            oc_above_op=("oc_above_op", "sum"), discrepancy=("discrepancy", "mean"),
            discrepancy_most=("discrepancy", "max"), gap=("gap", "median"),
            penalty_pruned=("penalty_pruned", "median"),
            penalty_compensated=("penalty_compensated", "median"),
            penalty_factor=("penalty_factor", "median"),
        )  # fmt: skip
        lab.save(f"geometry-{model.name}", table)
        figure = Figure((8, 3), layout="constrained")
        default = cases["lambda_a = 50"]
        for axes, site in zip(figure.subplots(1, 2), ("attention", "mlp")):
            drawn = default[default["site"] == site].set_index("block")
            drawn = drawn[["angle_op", "angle_oc"]].rename(
                columns={"angle_op": "O–P", "angle_oc": "O–C"}
            )
            if not drawn.empty:
                drawn.plot(ax=axes, marker="o")
            axes.set(title=site, xlabel="block", ylabel="mean principal angle, degrees")
        lab.draw(f"geometry-{model.name}", figure)


def efficiency_table(lab: Lab) -> None:
    """Table 4: the cost of the dense model and at 30 %, which no compensation changes."""
    pruned = {"sparsity": 0.3, "selection": "wanda-sp", "compensation": "none"}
    names = ("Params (B)", "Mem (GB)", "GFLOPs/tok", "tokens/s")
    table = pd.DataFrame({
        model.name: {
            (name, which): lab.row(model, settings, lab.cost)[name]
            for name in names for which, settings in (("dense", None), ("30%", pruned))
        }
        for model in lab.models
    }).T  # fmt: skip
    table.index.name = "Model"
    lab.save("efficiency", table)


EXPERIMENTS: dict[str, Callable[[Lab], None]] = {
    "main": main_tables, "sparsity": sparsity_tables, "calibration": calibration_figure,
    "ablation": ablation_table, "geometry": geometry_table, "efficiency": efficiency_table,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one experiment."""
    parser = argparse.ArgumentParser(description="The tables and figures of the paper.")
    add = parser.add_argument
    add("experiment", choices=EXPERIMENTS)
    add("--model", action="append", required=True, help="model folder; several may be given")
    add("--out", default="paper-results", help="folder of rows, tables and figures")
    add("--calibration", default="wikitext2", help="as in coec prune")
    add("--samples", type=int, default=128, help="calibration windows")
    add("--seq-len", type=int, default=2048, help="tokens per calibration window")
    add("--sizes", type=int, nargs="+", default=[*CALIBRATION_SIZES],
        help="calibration windows of the experiment calibration")  # fmt: skip
    add("--text", default="wikitext2", help="evaluation text, as in coec eval")
    add("--eval-seq-len", type=int, help="tokens per evaluation window; default: as in coec eval")
    add("--max-windows", type=int, help="evaluate the first so many windows")
    add("--tasks", help="zero-shot tasks of lm-eval, separated by commas; seven: the paper's")
    add("--task-folder", help="read tasks from this folder instead of lm-eval's own")
    add("--limit", type=int, help="items per task")
    add("--batch-size", type=int, default=8, help="requests of lm-eval per forward pass")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    options.tasks = ",".join(SEVEN) if options.tasks == "seven" else options.tasks
    EXPERIMENTS[options.experiment](Lab(options))


if __name__ == "__main__":
    main()
