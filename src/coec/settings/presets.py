"""Presets: named sets of defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coec.errors import OptionError
from coec.settings.options import COMPENSATION_OPTIONS
from coec.settings.parts import DEFAULT_PRESET, PresetName, Pruning

HOLDOUT = 0.125
"""Fraction of the windows that presets with training set aside for validation."""


@dataclass(frozen=True)
class Preset:
    """Defaults that a name stands for; any setting given beside it wins.

    Attributes:
        about: what it is for, in a sentence.
        time: what it takes on a real model, where `fast` takes 1 (docs/lab/RESULTS.md).
        settings: the defaults by which it differs from the settings' own.
    """

    about: str
    time: float
    settings: Mapping[str, Any] = field(default_factory=dict)


_CLOSED_FORMS = {
    "multiple_of": "auto", "selection": "obs", "compensation": "ridge-to-slice", "ridge": 1.0,
    "allocation": "error", "propagate": True, "bos": "auto",
}  # fmt: skip
"""What all presets but the published method begin with."""

PRESETS: dict[PresetName, Preset] = {
    "paper": Preset("COEC as published.", 1.8),
    "fast": Preset(
        "Closed forms only, on inputs that the pruned model has; widths by block follow the error.",
        1.0,
        _CLOSED_FORMS | {"ridge": "auto"},
    ),
    "balanced": Preset(
        "Every block trained, briefly, towards the dense model's hidden states.",
        2.8,
        _CLOSED_FORMS | {
            "token_weights": "residual", "reconstruct": 4, "prediction_passes": 2,
            "holdout": HOLDOUT,
        },
    ),
    "best": Preset(
        "Every block trained for longer; with uniform widths, validation windows choose the number "
        "of KV groups.",
        5.4,
        _CLOSED_FORMS | {
            "token_weights": "residual", "reconstruct": 8, "reconstruct_rate": 0.005,
            "prediction_passes": 6, "kv_groups": "held-out",
            "holdout": HOLDOUT,
        },
    ),
}  # fmt: skip
YIELDING: tuple[PresetName, ...] = ("fast", "balanced")
"""Presets that leave out what needs the text, or blocks that add their parts, where it is not to be
had; `best` says what is missing."""
_NEEDED = {
    "allocation": ("non_uniform",),
    "reconstruct_rate": ("reconstruct",), "prediction_passes": ("reconstruct",),
    "token_weights": ("reconstruct", "propagate"), "kv_groups": ("holdout",),
}  # fmt: skip
"""Defaults of presets that have no effect unless one of these settings is on."""
_OPTIONS = {
    method: {item.name for item in options.table()}
    for method, options in COMPENSATION_OPTIONS.items()
}
"""Names of the options of every compensation that has some."""


def with_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings, completed by the defaults of the preset that they name.

    A default that would have no effect beside the settings given is left out, and so are windows
    that the default preset sets aside where there is only one.

    Raises:
        OptionError: an option of another compensation than the preset's, and none is named.
    """
    name = settings.get("preset", DEFAULT_PRESET)
    preset = PRESETS.get(name) if isinstance(name, str) else None  # type: ignore[call-overload]
    if preset is None:
        return dict(settings)  # the setting itself is checked with the others
    options = settings.get("options")
    given_names = {*settings, *(options if isinstance(options, Mapping) else ())}
    defaults = {key: value for key, value in preset.settings.items() if key not in given_names}
    compensation = preset.settings.get("compensation", Pruning.compensation)
    if "compensation" not in settings:
        _check_options(given_names, name, str(compensation), preset_named="preset" in settings)
    elif settings["compensation"] != compensation:
        defaults.pop("ridge", None)  # an option of the compensation that gives way
    if name == DEFAULT_PRESET and settings.get("samples") == 1:
        defaults.pop("holdout", None)
    completed = {"preset": name, **defaults, **settings}
    for key, needed in _NEEDED.items():
        if key in defaults and not any(completed.get(setting) for setting in needed):
            del completed[key]
    return completed


def _check_options(names: set[str], preset: str, compensation: str, *, preset_named: bool) -> None:
    """Raise OptionError for an option that the compensation of a preset does not have."""
    for option in sorted(names - _OPTIONS.get(compensation, set())):
        if methods := [method for method, options in _OPTIONS.items() if option in options]:
            or_paper = "preset=paper or " if "coec" in methods and not preset_named else ""
            raise OptionError(
                f"{option} is an option of compensation {' and '.join(methods)}, and preset "
                f"{preset} takes {compensation}: add {or_paper}compensation={methods[-1]}"
            )
