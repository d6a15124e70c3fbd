"""Presets: named sets of defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coec.settings.parts import PresetName


@dataclass(frozen=True)
class Preset:
    """Defaults that a name stands for; any setting given beside it wins.

    Attributes:
        about: what it is for, in a sentence.
        settings: the defaults by which it differs from the settings' own.
    """

    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_PRESET: PresetName = "paper"
"""The preset where none is named. Documents say what it is."""
PRESETS: dict[PresetName, Preset] = {
    "paper": Preset("COEC as published: the defaults."),
    "fast": Preset(
        "Closed forms only, from one dense pass; widths by block follow the error.",
        {"selection": "obs", "compensation": "ridge-to-slice", "allocation": "error"},
    ),
    "balanced": Preset(
        "Every block fitted to the dense model's hidden states, on the text alone: three to five "
        "times what `paper` takes, and most of what `best` gives.",
        {
            "selection": "obs", "allocation": "error", "propagate": True,
            "final_norm": True, "compensation": "ridge-to-slice", "ridge": 0.1, "reconstruct": 2,
            "curvature_tokens": 16_384, "logit_iterations": 6, "token_weights": "residual",
            "holdout": 0.125,
        },
    ),
    "best": Preset(
        "Every block fitted to the dense model's hidden states, on inputs that the pruned model "
        "has; how many KV groups stay is chosen on held-out windows.",
        {
            "selection": "obs", "allocation": "error", "propagate": True, "final_norm": True,
            "compensation": "ridge-to-slice", "ridge": 0.1, "reconstruct": 3,
            "curvature_tokens": 16_384, "logit_iterations": 10, "token_weights": "residual",
            "kv_groups": "held-out", "holdout": 0.125, "self_samples": 1.0,
        },
    ),
}  # fmt: skip
_NEEDED = {
    "allocation": ("non_uniform",),
    "curvature_tokens": ("reconstruct",), "logit_iterations": ("reconstruct",),
    "token_weights": ("reconstruct", "propagate"), "kv_groups": ("holdout",),
}  # fmt: skip
"""Defaults of presets that have no effect unless one of these settings is on."""


def with_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings, completed by the defaults of the preset that they name.

    A default that would have no effect beside the settings given is left out.
    """
    name = settings.get("preset", DEFAULT_PRESET)
    preset = PRESETS.get(name) if isinstance(name, str) else None  # type: ignore[call-overload]
    if preset is None:
        return dict(settings)  # the setting itself is checked with the others
    options = settings.get("options")
    given_names = {*settings, *(options if isinstance(options, Mapping) else ())}
    defaults = {key: value for key, value in preset.settings.items() if key not in given_names}
    if settings.get("compensation", preset.settings.get("compensation")) != preset.settings.get(
        "compensation"
    ):
        defaults.pop("ridge", None)  # an option of the compensation that gives way
    completed = {"preset": name, **defaults, **settings}
    for key, needed in _NEEDED.items():
        if key in defaults and not any(completed.get(setting) for setting in needed):
            del completed[key]
    return completed
