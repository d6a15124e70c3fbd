"""`coec export`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from coec.cli import common
from coec.cli.flags import Flag, argument, given, switch, with_flags
from coec.exporting import GGUF_DTYPES

if TYPE_CHECKING:
    from coec.exporting.export import Export

_FLAGS = (
    Flag(
        "dtype", str,
        "Dtype of matrices: f32, f16, bf16 or q8_0. Default: the dtype of the stored weights.",
        names=GGUF_DTYPES,
    ),
    Flag(
        "context", int,
        "Tokens that the file says the model takes. Default: max_position_embeddings.",
    ),
    switch(
        "no_tokenizer", "Leave the tokenizer out: the file then takes and gives token ids alone."
    ),
    switch("force", "Replace the GGUF file at OUT.gguf."),
)  # fmt: skip


@with_flags(*_FLAGS, common.QUIET, common.JSON)
def export_command(
    model: Annotated[str, argument("Model folder or hub name, pruned or not.", "MODEL")],
    out: Annotated[Path, argument("File to make, named ….gguf.", "OUT.gguf")],
    **flags: Any,
) -> None:
    """Write MODEL as one GGUF file, for llama.cpp and programs that use it."""
    common.quieten()
    from coec.exporting.export import export

    with common.showing_progress(flags["quiet"]) as advance:
        written = export(
            model, out, progress=advance, **given(flags, (flag.name for flag in _FLAGS))
        )
    common.show(written.as_dict(), _lines(written), flags["json"])


def _lines(written: "Export") -> Iterator[str]:
    rows = {
        "written": written.path,
        "architecture": written.arch,
        "parameters": f"{written.parameters:,}",
        "size": f"{written.file_bytes / 1e6:,.2f} MB, {written.dtype}",
        "context": f"{written.context:,} tokens",
        "tokenizer": written.tokenizer or "none: the file takes and gives token ids alone",
    }
    if written.fallback:
        rows["f16 instead"] = (
            f"{len(written.fallback)} matrices, first {written.fallback[0]}: their rows do not "
            f"divide into blocks of {written.dtype}"
        )
    yield from (f"{name:<16} {value}" for name, value in rows.items())
    yield from written.notes
