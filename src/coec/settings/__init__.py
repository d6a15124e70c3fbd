"""Every setting of a pruning, declared once as a field of a dataclass, without importing torch.

From the fields come the flags of `coec prune` and their help, the keys of recipes and grids, the
options that rows of results may have, and docs/SETTINGS.md (`tools/tables.py`).
"""

from collections.abc import Iterable
from dataclasses import replace

from coec.settings.fields import Setting, shown
from coec.settings.options import COMPENSATION_OPTIONS, CoecOptions, RidgeOptions
from coec.settings.parts import DEFAULT_PRESET, Calibration, Pruning, Reconstruction, Runtime
from coec.settings.presets import PRESETS, Preset, with_preset

__all__ = [
    "NAMES", "OPTIONS", "PARTS", "PRESETS", "RECIPE", "TABLE", "Calibration", "CoecOptions",
    "Preset", "Pruning", "Reconstruction", "RidgeOptions", "Runtime", "Setting",
]  # fmt: skip


def _options() -> tuple[Setting, ...]:
    """The options of all compensations, each once, with the methods that have it."""
    table: dict[str, Setting] = {}
    for method, options in COMPENSATION_OPTIONS.items():
        for item in options.table():
            earlier = table.get(item.name, item)
            table[item.name] = replace(earlier, methods=(*earlier.methods, method))
    return tuple(table.values())


def _by_default(table: Iterable[Setting]) -> tuple[Setting, ...]:
    """The settings, each with both defaults in words where the default preset brings another."""
    brought = with_preset({})

    def described(item: Setting) -> Setting:
        if item.name == "preset" or item.name not in brought:
            return item
        plain, value = item.otherwise or shown(item.default), shown(brought[item.name])
        otherwise = f"{value}; {plain} in paper"
        if item.methods:
            otherwise = f"{plain}; {value} in {DEFAULT_PRESET}"
        return replace(item, otherwise=otherwise)

    return tuple(map(described, table))


PARTS = (Pruning, Reconstruction, Calibration, Runtime)
RECIPE = _by_default(item for settings in PARTS for item in settings.table())
"""Settings of every recipe."""
OPTIONS = _by_default(_options())
"""Options of the compensations."""
TABLE = (*RECIPE, *OPTIONS)
NAMES = frozenset(item.name for item in TABLE)
