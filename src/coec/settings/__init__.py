"""Every setting of a pruning, declared once as a field of a dataclass, without importing torch.

From the fields come the flags of `coec prune` and their help, the keys of recipes and grids, the
options that rows of results may have, and docs/SETTINGS.md (`python -m coec.settings`).
"""

from dataclasses import replace

from coec.settings.fields import (
    RENAMED,
    SEEDS,
    Setting,
    Settings,
    check_seed,
    check_whole,
    of_annotation,
    plain,
    setting,
    without_effect,
)
from coec.settings.options import COMPENSATION_OPTIONS, CoecOptions, Options, RidgeOptions
from coec.settings.parts import (
    CHOOSING,
    DTYPE_NAMES,
    Calibration,
    DtypeName,
    Pruning,
    Reconstruction,
    Runtime,
    SolveDtypeName,
    Source,
    check_sparsity,
)
from coec.settings.presets import PRESETS, Preset, with_preset

__all__ = [
    "CHOOSING",
    "COMPENSATION_OPTIONS",
    "DTYPE_NAMES",
    "NAMES",
    "OPTIONS",
    "PARTS",
    "PRESETS",
    "RECIPE",
    "RENAMED",
    "SEEDS",
    "TABLE",
    "Calibration",
    "CoecOptions",
    "DtypeName",
    "Options",
    "Preset",
    "Pruning",
    "Reconstruction",
    "RidgeOptions",
    "Runtime",
    "Setting",
    "Settings",
    "SolveDtypeName",
    "Source",
    "check_seed",
    "check_sparsity",
    "check_whole",
    "of_annotation",
    "plain",
    "setting",
    "with_preset",
    "without_effect",
]


def _options() -> tuple[Setting, ...]:
    """The options of all compensations, each once, with the methods that have it."""
    found: dict[str, Setting] = {}
    for method, options in COMPENSATION_OPTIONS.items():
        for one in options.table():
            earlier = found.get(one.name, one)
            found[one.name] = replace(earlier, methods=(*earlier.methods, method))
    return tuple(found.values())


PARTS = (Pruning, Reconstruction, Calibration, Runtime)
RECIPE = tuple(one for part in PARTS for one in part.table())
"""Settings of every recipe."""

OPTIONS = _options()
"""Options of the compensations."""

TABLE = (*RECIPE, *OPTIONS)
NAMES = frozenset(one.name for one in TABLE)
