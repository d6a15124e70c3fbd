"""Named sets of settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coec.errors import OptionError
from coec.settings.parts import PresetName


@dataclass(frozen=True)
class Preset:
    """A named set of settings.

    Attributes:
        about: what it is for, in a sentence.
        fixed: what makes it what it is; another value beside it is a contradiction.
        amounts: what it sets besides; a value given beside it wins.
    """

    about: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    amounts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """All of them."""
        return {**self.fixed, **self.amounts}


PRESETS: dict[PresetName, Preset] = {
    "paper": Preset("COEC as published: the defaults."),
    "fast": Preset(
        "Closed forms only, from one dense pass.",
        {"selection": "obs", "compensation": "ridge-to-slice"},
    ),
    "best": Preset(
        "Every block fitted to the dense model's hidden states, on inputs that the pruned model "
        "has; how many KV groups stay is chosen on held-out windows.",
        {"selection": "obs", "propagate": True, "final_norm": True},
        {
            "compensation": "ridge-to-slice", "ridge": 0.1, "reconstruct": 3,
            "curvature_share": 0.5, "token_weights": "residual", "kv_groups": "held-out",
            "holdout": 0.125, "self_samples": 1.0,
        },
    ),
}  # fmt: skip


def with_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings, completed by those of the preset that they name.

    Raises:
        OptionError: a setting contradicts the preset.
    """
    name = settings.get("preset", "paper")
    preset = PRESETS.get(name) if isinstance(name, str) else None  # type: ignore[call-overload]
    if preset is None:
        return dict(settings)  # the setting itself is checked with the others
    for one, value in preset.fixed.items():
        if one in settings and settings[one] != value:
            raise OptionError(
                f"preset = {name} means {one} = {_shown(value)}, got {_shown(settings[one])}: "
                "leave one of the two out (coec methods lists what a preset sets)"
            )
    if settings.get("reconstruct", 1) == 0 and "reconstruct" in preset.settings:
        raise OptionError(f"preset = {name} reconstructs blocks: leave out reconstruct = 0")
    amounts = dict(preset.amounts)
    if settings.get("compensation", amounts.get("compensation")) != amounts.get("compensation"):
        amounts.pop("ridge", None)  # an option of the compensation that gives way
    options = settings.get("options")
    if isinstance(options, Mapping):
        amounts = {one: value for one, value in amounts.items() if one not in options}
    return {**preset.fixed, **amounts, **settings}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value!s:.40}"
