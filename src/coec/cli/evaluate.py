"""`coec eval`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from coec.cli import common
from coec.cli.flags import Flag, argument, flags_of, given, with_flags
from coec.config.evaluation import TextEvaluation

if TYPE_CHECKING:
    from coec.evaluation import Perplexity

_FLAGS = (
    Flag(
        "text", str,
        "wikitext2; c4 (validation); hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (its test split); a "
        "file as in `coec prune`; or self (text sampled from the baseline). Default: wikitext2.",
    ),
    Flag(
        "baseline", str,
        "The dense model: adds the perplexity ratio, KL divergence and agreement (the share of "
        "tokens with the same most probable next one).", metavar="MODEL",
    ),
    *flags_of(TextEvaluation, "split"),
    common.TRUST_REMOTE_CODE,
)  # fmt: skip


_FIRST = (
    "perplexity", "baseline_perplexity", "ratio", "kl", "agreement", "nats_per_character",
    "distinct", "baseline_distinct",
)  # fmt: skip
"""Numbers of the first two lines."""


@with_flags(*_FLAGS, common.QUIET, common.JSON)
def eval_command(
    model: Annotated[str, argument("Model folder or hub name.", "MODEL")], **flags: Any
) -> None:
    """Measure the token perplexity of MODEL, and its distance from a baseline."""
    common.quieten()
    from coec.evaluation import perplexity

    settings = given(flags, (flag.name for flag in _FLAGS))
    with common.showing_progress(flags["quiet"]) as advance:
        result = perplexity(model, progress=advance, **settings)
    if result.same_text_as_calibration:
        common.notes.print("note: evaluated on the text it was calibrated on")
    common.show(result.as_dict(), _lines(result), flags["json"])


def _lines(result: "Perplexity") -> Iterator[str]:
    """Yield the result in one line, then what it was measured on."""
    line = f"perplexity {result.perplexity:.4g}"
    if result.kl is not None:
        line += (
            f" (dense {result.baseline_perplexity:.4g}, × {result.ratio:.3g}), "
            f"KL {result.kl:.3f}, same top token {result.agreement:.0%}"
        )
    if result.nats_per_character is not None:
        line += f"; {result.nats_per_character:.4f} nats per character"
    yield line
    if result.distinct is not None:
        line = f"of its greedy text {result.distinct:.0%} of the 3-grams are different"
        other = result.baseline_distinct
        yield line + ("" if other is None else f" (dense {other:.0%})")
    for name, value in result.as_dict().items():
        if value is not None and not isinstance(value, bool) and name not in _FIRST:
            text = f"{value:,}" if isinstance(value, int) else value
            text = f"{value:.4f}" if isinstance(value, float) else text
            yield f"{name.replace('_', ' '):<20} {text}"
    if result.bos:
        yield "every window begins with the tokenizer's start (bos)"
