"""Programs that load a checkpoint as it is; the findings are data, in `loaders.toml`."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

from coec.models.block_patterns import ATTENTION, MLP
from coec.models.files import JsonDict
from coec.models.shape import Shape

YES, UNKNOWN = "yes", "not known"
TARGETS = {"hf": "transformers", "vllm": "vLLM", "llama.cpp": "llama.cpp"}
"""Loader of every value of the setting `target`."""


@dataclass(frozen=True)
class Traits:
    """The properties of a checkpoint that loaders disagree on.

    Attributes:
        model_type: the type that it is stored as.
        config: its configuration.
        sizes: its sizes.
        biased: the sites whose consumer has a bias.
    """

    model_type: str
    config: JsonDict
    sizes: Shape
    biased: frozenset[str]

    @cached_property
    def conditions(self) -> frozenset[str]:
        """Names of the conditions that hold, as exceptions name them."""
        return frozenset(name for name, holds in _CONDITIONS.items() if holds(self))


def _has_llama3_positions(config: JsonDict) -> bool:
    forms = (config.get(key) for key in ("rope_scaling", "rope_parameters"))
    return any(isinstance(form, dict) and form.get("rope_type") == "llama3" for form in forms)


def slides(config: JsonDict) -> bool:
    """True if any layer of a raw configuration sees less than the longest text."""
    window, layers = config.get("sliding_window"), config.get("layer_types")
    if window is None or not config.get("use_sliding_window", True):
        return False
    if isinstance(layers, list) and "sliding_attention" not in layers:
        return False
    if layers is None and (config.get("max_window_layers") or 0) >= config["num_hidden_layers"]:
        return False  # Qwen's window begins at this layer
    positions = config.get("max_position_embeddings")
    return not isinstance(positions, int) or window < positions


_CONDITIONS: Mapping[str, Callable[[Traits], bool]] = {
    "fewer_heads": lambda traits: not traits.sizes.full_width,
    "output_bias": lambda traits: ATTENTION.name in traits.biased,
    "down_bias": lambda traits: MLP.name in traits.biased,
    "new_biases": lambda traits: bool(traits.biased),
    "sliding": lambda traits: slides(traits.config),
    "non_uniform": lambda traits: not traits.sizes.uniform,
    "non_uniform_heads": lambda traits: traits.sizes.heads_differ,
    "llama3_positions": lambda traits: _has_llama3_positions(traits.config),
}


@dataclass(frozen=True)
class Incompatibility:
    """A case in which a loader does not do as transformers does.

    Attributes:
        verdict: what to know, in words.
        types: the model types that it holds for; None for all.
        when: name of the condition; None if it holds for every checkpoint.
    """

    verdict: str
    types: tuple[str, ...] | None = None
    when: str | None = None

    def holds(self, traits: Traits) -> bool:
        """True if the checkpoint is such a case."""
        of_type = self.types is None or traits.model_type in self.types
        return of_type and (self.when is None or self.when in traits.conditions)


@dataclass(frozen=True)
class Loader:
    """A program that loads checkpoints.

    Attributes:
        name: its usual name.
        checked: the versions, and how they were checked.
        types: the model types that were tried; None for all. Of others nothing is known.
        exceptions: the first that holds gives the verdict.
    """

    name: str
    checked: str
    types: tuple[str, ...] | None
    exceptions: tuple[Incompatibility, ...]

    def verdict(self, traits: Traits) -> str:
        """`yes`, or what to know before loading the checkpoint."""
        tried = self.types is None or traits.model_type in self.types
        default = YES if tried else UNKNOWN
        return next((case.verdict for case in self.exceptions if case.holds(traits)), default)


def _read(tables: list[dict[str, Any]]) -> dict[str, Loader]:
    def types(table: dict[str, Any]) -> tuple[str, ...] | None:
        return tuple(table["types"]) if "types" in table else None

    return {
        table["name"]: Loader(
            table["name"],
            table["checked"],
            types(table),
            tuple(
                Incompatibility(case["verdict"], types(case), case.get("when"))
                for case in table.get("exceptions", ())
            ),
        )
        for table in tables
    }


_DATA = tomllib.loads(files("coec.models").joinpath("loaders.toml").read_text(encoding="utf-8"))
CONDITIONS: dict[str, str] = _DATA["conditions"]
"""The conditions in words, by name."""
LOADERS = _read(_DATA["loaders"])


def loads_in(traits: Traits) -> dict[str, str]:
    """The verdict of every loader: `yes`, or what to know."""
    return {name: loader.verdict(traits) for name, loader in LOADERS.items()}


def table() -> str:
    """Write the findings in Markdown: a row for every loader, with its versions and exceptions."""
    lines = [
        "| loader | checked | types that were tried | loads them, except |",
        "|---|---|---|---|",
    ]
    for loader in LOADERS.values():
        exceptions = [
            f"{_listed(case.types)}{f' where {CONDITIONS[case.when]}' if case.when else ''}: "
            f"{case.verdict}"
            for case in loader.exceptions
        ]
        cells = [loader.name, loader.checked, _listed(loader.types), "; ".join(exceptions)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _listed(types: tuple[str, ...] | None) -> str:
    return "every type" if types is None else ", ".join(types)


if __name__ == "__main__":
    print(table())
