"""`coec eval`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coec.cli import common
from coec.cli.common import CommandFlag, Values, argument, flag_of, given
from coec.cli.progress import showing_progress
from coec.evaluation.settings import Measurement, TextEvaluation
from coec.settings import Setting

if TYPE_CHECKING:
    from coec.evaluation.perplexity import Perplexity


def _own(settings: type[Measurement]) -> tuple[Setting, ...]:
    """Settings that are flags of one of the two measurements; nobody needs another split."""
    return tuple(
        row for row in settings.table() if row not in Measurement.table() and row.name != "split"
    )


_TEXT = CommandFlag(
    "text", str,
    "wikitext2; c4 (validation); hub:OWNER/NAME or hub:OWNER/NAME:CONFIG (its test split); a file "
    "as in `coec prune`; or self (text sampled from the baseline). Default: wikitext2.",
)  # fmt: skip
_BASELINE = CommandFlag(
    "baseline", str,
    "The dense model: adds the perplexity ratio, KL divergence and agreement (the share of "
    "tokens with the same most probable next one).", metavar="MODEL",
)  # fmt: skip
_OF_BOTH = Measurement.table()
_OF_TEXT: tuple[common.Option, ...] = (_BASELINE, *_own(TextEvaluation))


@common.with_flags(
    _TEXT, *_OF_TEXT, *_OF_BOTH,
    common.TRUST_REMOTE_CODE, common.QUIET, common.JSON,
)  # fmt: skip
def eval_command(
    model: Annotated[str, argument("Model folder or hub name.", "MODEL")], **flags: Any
) -> None:
    """Measure token perplexity of MODEL, and its distance from a baseline."""
    text, for_text = flags["text"], given(flags, _OF_TEXT)
    _refuse_unheard(text, for_text)
    for_both = given(flags, (*_OF_BOTH, common.TRUST_REMOTE_CODE))
    for_text["text"] = text or "wikitext2"
    common.quieten()
    from coec.evaluation.perplexity import perplexity

    with showing_progress(flags["quiet"]) as advance:
        result = perplexity(model, **for_text, **for_both, progress=advance)
    if result.same_text_as_calibration:
        common.notes.print("note: evaluated on the text it was calibrated on")
    common.show(result.as_dict(), _of_perplexity(result), flags["json"])


def _refuse_unheard(text: str | None, given: Values) -> None:
    """Raise BadParameter for a flag of something that is not measured."""
    if text == "self":
        owner = "text that is read: with --text self, give --samples"
        refused = dict.fromkeys(("max_windows", "text_column", "bos"), owner)
    else:
        refused = dict.fromkeys(("samples", "seed"), "--text self")
    for name in refused:
        if name in given:
            raise typer.BadParameter(f"{flag_of(name)} belongs to {refused[name]}")


def _of_perplexity(result: "Perplexity") -> Iterator[str]:
    for name, value in result.as_dict().items():
        if value is not None and not isinstance(value, bool):
            text = f"{value:,}" if isinstance(value, int) else value
            text = f"{value:.4f}" if isinstance(value, float) else text
            yield f"{name.replace('_', ' '):<20} {text}"
    if result.bos:
        yield "every window begins with the tokenizer's start (bos)"
