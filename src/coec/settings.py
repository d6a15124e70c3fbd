"""Every setting of a pruning by name, without importing torch: what flags and help are made of.

The functions in `coec.compensation` and the fields of `coec.recipe.Recipe` decide what a setting
does; this table says it again in plain values, because help must not wait seconds for torch. Tests
compare the two, word for word, and print the entry that is missing.
"""

from dataclasses import dataclass
from typing import Any

from coec.errors import OptionError

SELECTION_NAMES = ("rcpu", "wanda-sp", "flap", "magnitude", "random")
COMPENSATION_NAMES = ("coec", "rcpu", "bias", "least-squares", "ridge-to-slice", "none")
DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")
SOLVE_DTYPE_NAMES = ("float64", "float32")

Value = float | int | str | None


@dataclass(frozen=True)
class Setting:
    """A flag of `coec prune`, a key of recipes and grids, an argument of `coec.prune`.

    Attributes:
        name: with underscores, as in Python.
        kind: `float`, `int` or `str`; or the values that are allowed.
        default: where nothing is given.
        help: what it does; of an option what its function's docstring says.
        otherwise: the default in words, where None stands for something.
        methods: the compensations that have this option; none for a setting of every recipe.
    """

    name: str
    kind: type[float] | type[int] | type[str] | tuple[str, ...]
    default: Value
    help: str
    otherwise: str = ""
    methods: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The help text: what it does, what it may be, and its default."""
        default = self.default if self.otherwise == "" else self.otherwise
        return f"{self.help}{self._choices} Default: {default}."

    @property
    def _choices(self) -> str:
        """The allowed values, where the sentence does not name them all."""
        if not isinstance(self.kind, tuple) or all(value in self.help for value in self.kind):
            return ""
        return f" One of {', '.join(self.kind)}."


RECIPE = (
    Setting("sparsity", float, 0.3, "Fraction of units removed, between 0 and 1."),
    Setting("selection", SELECTION_NAMES, "rcpu", "Which score picks the units."),
    Setting("compensation", COMPENSATION_NAMES, "coec", "How the kept weights are repaired."),
    Setting(
        "calibration",
        str,
        "wikitext2",
        "wikitext2; c4; hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (their train splits); self (text "
        "sampled from the model); or a .txt, .jsonl, .parquet, .npy or .safetensors file.",
    ),
    Setting("samples", int, 128, "Calibration windows."),
    Setting(
        "seq_len", int, None, "Tokens per window.", otherwise="2048, or the model's maximum if less"
    ),
    Setting("seed", int, 0, "Draws the windows."),
    Setting(
        "holdout",
        float,
        0.0,
        "Fraction of the windows not fitted on, whose error the report has too.",
    ),
    Setting(
        "text_column", str, "text", "Column of a jsonl or parquet file, or of a hub: data set."
    ),
    Setting("device", str, "auto", "auto (a GPU where there is one), cpu, cuda, cuda:1, …"),
    Setting("dtype", DTYPE_NAMES, None, "Of the written weights.", otherwise="the model's"),
    Setting(
        "forward_dtype",
        DTYPE_NAMES,
        None,
        "Of the dense forward pass.",
        otherwise="the model's on a GPU, float32 on the CPU",
    ),
    Setting("solve_dtype", SOLVE_DTYPE_NAMES, "float64", "Of the compensation."),
)
"""Settings of every recipe."""

OPTIONS = (
    Setting(
        "alpha",
        float,
        0.9,
        "Gram tempering exponent in [0, 1]; 1 is off, 0 returns the slice.",
        methods=("coec",),
    ),
    Setting(
        "rotation",
        ("two-sided", "left", "right", "better"),
        "two-sided",
        "Which side turns; `better` runs left and right alone and keeps what ends lower.",
        methods=("coec",),
    ),
    Setting(
        "parameterization",
        ("stiefel", "full"),
        "stiefel",
        "`stiefel` turns the b×k frame, `full` the whole of O(k).",
        methods=("coec",),
    ),
    Setting(
        "start",
        ("identity", "procrustes"),
        "identity",
        "Of every right solve: where the frame is, or the one-sided Procrustes solution.",
        methods=("coec",),
    ),
    Setting(
        "slices",
        int,
        1,
        "Contiguous groups of output rows, each compensated on its own.",
        methods=("coec",),
    ),
    Setting(
        "rescale",
        ("gcv", "fixed", "uniform"),
        "gcv",
        "`gcv`, `fixed` (λ = rescale_ridge × median mode energy) or `uniform` (one scale).",
        methods=("coec",),
    ),
    Setting("rescale_ridge", float, 1.0, 'For `rescale = "fixed"`.', methods=("coec",)),
    Setting(
        "kappa",
        float,
        10.0,
        "The band of a mode around the global scale, at least 1.",
        methods=("coec",),
    ),
    Setting(
        "solver",
        ("joint", "conjugate", "gradient"),
        "joint",
        "`joint` (conjugate gradient, the left factor following), `conjugate` (the left factor "
        "held) or `gradient` (the source's).",
        methods=("coec",),
    ),
    Setting(
        "retraction",
        ("auto", "polar"),
        "auto",
        "Of `gradient`: `auto` (Cayley for square frames, polar for others) or `polar`.",
        methods=("coec",),
    ),
    Setting(
        "delta",
        float,
        7e-4,
        "`gradient` stops when the rotation changes by less.",
        methods=("coec",),
    ),
    Setting(
        "precision",
        float,
        1e-4,
        "`joint` and `conjugate` stop when a step lowers the objective by a smaller fraction.",
        methods=("coec",),
    ),
    Setting("iterations", int, 200, "At most so many steps in one right solve.", methods=("coec",)),
    Setting("rounds", int, 50, "At most so many rounds.", methods=("coec",)),
    Setting(
        "tol",
        float,
        1e-4,
        "Stop when a round changes the objective, relative to `‖Y‖²`, by less.",
        methods=("coec",),
    ),
    Setting("lambda_a", float, 50.0, "Weight of the alignment penalty.", methods=("coec",)),
    Setting(
        "r_p",
        int,
        16,
        "Rank of the aligned subspaces, capped at the frame's.",
        methods=("coec",),
    ),
    Setting(
        "ridge",
        float,
        1e-2,
        "λ relative to the mean diagonal of Gxx, at least 0.",
        methods=("least-squares", "ridge-to-slice"),
    ),
)
"""Options of the compensations, in the order of their arguments."""

TABLE = (*RECIPE, *OPTIONS)
NAMES = frozenset(setting.name for setting in TABLE)


def plain(value: Any) -> Any:
    """A number of numpy or torch, also in an array without dimensions, as Python's own."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


SEEDS = 2**64
"""Generators of random numbers take seeds below this."""


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """The value as Python's own; raises OptionError unless it is whole and at least `least`."""
    value = plain(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}, got {value!r:.80}")
    return value


def check_seed(seed: Any) -> int:
    """The seed as Python's own number; raises OptionError unless a generator takes it."""
    seed = check_whole("seed", seed, least=0)
    if seed >= SEEDS:
        raise OptionError(f"seed must be below 2**64, got a number of {seed.bit_length()} bits")
    return seed


def document() -> str:
    """docs/SETTINGS.md: all settings as Markdown tables."""
    groups = {"Every recipe": RECIPE} | {
        f"Options of {', '.join(f'`{name}`' for name in methods)}": tuple(
            option for option in OPTIONS if option.methods == methods
        )
        for methods in dict.fromkeys(option.methods for option in OPTIONS)
    }
    parts = [PREFACE]
    for title, group in groups.items():
        rows = "\n".join(_row(setting) for setting in group)
        parts.append(f"## {title}\n\n| setting | values | default | |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


PREFACE = """# Settings

Each is a flag of `coec prune` (`--seq-len`), a key of a recipe or grid (`seq-len` or `seq_len`),
and an argument of `coec.prune` (`seq_len`). This file is written by `python -m coec.settings`.
"""


def _row(setting: Setting) -> str:
    kind = setting.kind
    words = {float: "number", int: "whole number", str: "text"}
    values = ", ".join(f"`{v}`" for v in kind) if isinstance(kind, tuple) else words[kind]
    default = setting.otherwise or f"`{setting.default}`"
    return f"| `{setting.name}` | {values} | {default} | {setting.help} |"


if __name__ == "__main__":
    print(document(), end="")
