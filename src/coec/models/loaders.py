"""Which programs load a checkpoint as it is, as data (docs/FORMATS.md has the table made of it).

What is found by running a program and what is read in its source are told apart: a finding holds
for the version that it names. Of a type that nobody tried nothing is known.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coec.models.layout import ATTENTION, MLP
from coec.models.shape import Shape

YES, UNKNOWN = "yes", "not known"
ANY = ("every type",)
"""Stands for all model types."""


@dataclass(frozen=True)
class Loader:
    """A program that loads checkpoints.

    Attributes:
        name: as people know it.
        checked: which versions, and how.
        types: the model types that were tried; of others nothing is known.
    """

    name: str
    checked: str
    types: tuple[str, ...]


SOURCE_READ = ("llama", "mistral", "qwen2", "qwen3", "granite")
WHOLE_MATRIX = (*SOURCE_READ, "seed_oss", "smollm3", "gemma2", "gemma3_text", "cohere2")
"""The types of which every client was given every checkpoint (`python -m benchmarks.clients`)."""
LOADERS = {
    loader.name: loader
    for loader in (
        Loader("transformers", "run: 4.57.6, 5.0, 5.3, 5.17, 5.23", ANY),
        Loader("vLLM", "run: 0.32 on a CPU",
               (*WHOLE_MATRIX, "olmo2", "phi3", "mixtral", "qwen3_moe")),
        Loader("SGLang", "read: 0.5.23", SOURCE_READ),
        Loader("llama.cpp", "run: its converter of November 2026, float32; coec export",
               (*WHOLE_MATRIX, "olmo2")),
        Loader("OpenVINO", "run: optimum-intel 2.2, OpenVINO 2026.4",
               (*WHOLE_MATRIX, "olmo2", "phi3")),
        Loader("CTranslate2", "run: 4.8.5", WHOLE_MATRIX),
    )
}  # fmt: skip
TARGETS = {"hf": "transformers", "vllm": "vLLM", "llama.cpp": "llama.cpp"}
"""The loader that a setting `target` names."""


@dataclass(frozen=True)
class Stored:
    """What of a checkpoint loaders differ in.

    Attributes:
        config: its configuration.
        sizes: its sizes.
        biased: the sites whose consumer has a bias.
    """

    config: dict[str, Any]
    sizes: Shape
    biased: frozenset[str]


Condition = Callable[[Stored], bool]


def fewer_heads(stored: Stored) -> bool:
    """The heads together are not as wide as the hidden states."""
    return not stored.sizes.full_width


def output_bias(stored: Stored) -> bool:
    """`o_proj` has a bias."""
    return ATTENTION.name in stored.biased


def down_bias(stored: Stored) -> bool:
    """`down_proj` has a bias."""
    return MLP.name in stored.biased


def new_biases(stored: Stored) -> bool:
    """`o_proj` or `down_proj` has a bias."""
    return bool(stored.biased)


def sliding(stored: Stored) -> bool:
    """Attention sees a window only that is shorter than the longest text."""
    return slides(stored.config)


def own_widths(stored: Stored) -> bool:
    """Widths differ by block."""
    return not stored.sizes.uniform


def own_heads(stored: Stored) -> bool:
    """The number of heads differs by block."""
    sizes = stored.sizes
    return len({sizes.at(index).kv_heads for index in range(sizes.layers)}) > 1


def llama3_positions(stored: Stored) -> bool:
    """Positions are llama3's."""
    forms = (stored.config.get(key) for key in ("rope_scaling", "rope_parameters"))
    return any(isinstance(form, dict) and form.get("rope_type") == "llama3" for form in forms)


def always(stored: Stored) -> bool:
    """However it is shaped."""
    return True


def slides(config: dict[str, Any]) -> bool:
    """Whether any layer of a raw configuration sees less than the longest text."""
    window, layers = config.get("sliding_window"), config.get("layer_types")
    if window is None or not config.get("use_sliding_window", True):
        return False
    if isinstance(layers, list) and "sliding_attention" not in layers:
        return False
    if layers is None and (config.get("max_window_layers") or 0) >= config["num_hidden_layers"]:
        return False  # Qwen's way of saying it: layers from this one on
    positions = config.get("max_position_embeddings")
    return not isinstance(positions, int) or window < positions


@dataclass(frozen=True)
class Incompatibility:
    """Where a loader does not do as transformers does.

    Attributes:
        loader: whose finding.
        types: the model types that it holds for; `ANY` for all of them.
        when: the condition, whose docstring says it in words.
        verdict: what to know, in words.
    """

    loader: str
    types: tuple[str, ...]
    when: Condition
    verdict: str

    def holds(self, model_type: str, stored: Stored) -> bool:
        """Whether it is about a checkpoint of this type."""
        return (self.types == ANY or model_type in self.types) and self.when(stored)


OWN = "by coec export (its own converter {})"
"""What llama.cpp makes of checkpoints that its converter has no words for."""
FINDINGS = (
    Incompatibility("transformers", ANY, own_widths, "with trust_remote_code=True"),
    Incompatibility(
        "vLLM", ANY, own_heads, "no (its transformers backend wants one number of heads)"
    ),
    Incompatibility(
        "vLLM", ANY, own_widths, "with trust_remote_code=True, if all blocks have as many heads",
    ),
    Incompatibility("SGLang", ANY, own_widths, UNKNOWN),
    Incompatibility("llama.cpp", ("qwen3",), own_widths, "no (its qwen3 has one width)"),
    Incompatibility(
        "llama.cpp", ("llama", "mistral", "qwen2", "seed_oss"), own_widths,
        OWN.format("wants one width"),
    ),
    Incompatibility(
        "llama.cpp", ("granite",), own_widths,
        OWN.format("wants one width") + ", where its multipliers are neutral",
    ),
    Incompatibility("llama.cpp", ANY, own_widths, "no (its architectures have one width)"),
    Incompatibility("OpenVINO", ANY, own_widths, UNKNOWN),
    Incompatibility("CTranslate2", ANY, own_widths, "no (it wants one width)"),
    Incompatibility(
        "vLLM", ("qwen2",), fewer_heads,
        "with --model-impl transformers (its Qwen2 ignores head_dim)",
    ),
    Incompatibility("vLLM", ("qwen3",), output_bias, "no (its Qwen3 has no o_proj bias)"),
    Incompatibility("vLLM", ("cohere2",), always, "no (it goes wrong, dense models too)"),
    Incompatibility("SGLang", ("llama",), down_bias, "no (it drops down_proj.bias without a word)"),
    Incompatibility("llama.cpp", ("qwen2",), fewer_heads, OWN.format("ignores head_dim")),
    Incompatibility("llama.cpp", ("granite",), fewer_heads, OWN.format("drops head_dim")),
    Incompatibility("llama.cpp", ("seed_oss",), new_biases, OWN.format("has no biases")),
    Incompatibility("llama.cpp", ("qwen3",), output_bias, "no (its qwen3 has no o_proj bias)"),
    Incompatibility(
        "llama.cpp", ("mistral",), sliding,
        "up to the sliding window only (it ignores it, and goes wrong)",
    ),
    Incompatibility("llama.cpp", ("qwen2", "qwen3"), sliding, UNKNOWN),
    Incompatibility("llama.cpp", ("granite",), llama3_positions, OWN.format("refuses them")),
    Incompatibility("llama.cpp", ("smollm3",), new_biases, "no (its smollm3 has no biases)"),
    Incompatibility("llama.cpp", ("cohere2",), fewer_heads, "no (its cohere2 ignores head_dim)"),
    Incompatibility("OpenVINO", ("seed_oss",), always, "no (it does not know the type)"),
    Incompatibility(
        "OpenVINO", ("gemma2", "gemma3_text"), always, "no (not with the transformers it brings)",
    ),
    Incompatibility("CTranslate2", ("llama", "qwen2"), fewer_heads, "no (its converter fails)"),
    Incompatibility("CTranslate2", ("mistral",), llama3_positions, "no (its converter fails)"),
    Incompatibility("CTranslate2", ("llama",), llama3_positions, "no (it goes wrong)"),
    Incompatibility("CTranslate2", ("mistral", "gemma3_text"), sliding, "no (longer texts fail)"),
    Incompatibility(
        "CTranslate2", ("gemma2",), always, "no (it leaves out the soft caps, and goes wrong)",
    ),
    Incompatibility(
        "CTranslate2", ("granite", "seed_oss", "smollm3", "cohere2"), always,
        "no (it does not know the type)",
    ),
)  # fmt: skip


def loads_in(model_type: str, stored: Stored) -> dict[str, str]:
    """For every loader `yes`, or what to know."""
    return {name: verdict(name, model_type, stored) for name in LOADERS}


def verdict(loader: str, model_type: str, stored: Stored) -> str:
    """`yes`, or what to know of a loader."""
    found = (f for f in FINDINGS if f.loader == loader and f.holds(model_type, stored))
    types = LOADERS[loader].types
    default = YES if types == ANY or model_type in types else UNKNOWN
    return next((finding.verdict for finding in found), default)


def table() -> str:
    """The findings in Markdown: a row for every loader, what it was tried with, what it lacks."""
    lines = [
        "| loader | checked | types that were tried | loads them, except |",
        "|---|---|---|---|",
    ]
    for loader in LOADERS.values():
        exceptions = [
            f"{', '.join(f.types)}{_words(f.when)}: {f.verdict}"
            for f in FINDINGS
            if f.loader == loader.name
        ]
        cells = [loader.name, loader.checked, ", ".join(loader.types), "; ".join(exceptions)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _words(when: Condition) -> str:
    if when is always:
        return ""
    words = (when.__doc__ or "").strip().rstrip(".")
    return f" where {words[0].lower()}{words[1:]}" if words[0] != "`" else f" where {words}"


if __name__ == "__main__":
    print(table())
