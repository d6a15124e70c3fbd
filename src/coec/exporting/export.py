"""Export of a model as one GGUF file, which llama.cpp and its clients read (docs/FORMATS.md).

Everything that can be refused is refused before a byte is written. Tensors are then read, converted
and written one at a time.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from coec.checkpoint.folder import (
    appearing,
    check_file,
    check_space,
    clear_remains,
    path_of,
    resolved,
)
from coec.errors import OptionError, OutputError, check_installed
from coec.events import Progress, recording
from coec.exporting import GGUF_DTYPES
from coec.models.dense import Dense
from coec.models.files import JsonDict
from coec.progress import showing

_MAGIC = b"GGUF"
"""First bytes of the files."""
_SUFFIX = ".gguf"


@dataclass(frozen=True)
class Export:
    """Account of a written file; JSON-ready by `as_dict`.

    Attributes:
        arch: llama.cpp's architecture.
        dtype: dtype of the matrices.
        parameters: number of parameters of the model, tied ones once.
        context: largest number of tokens that the file states.
        tokenizer: llama.cpp's names for its kind and for its way to cut text; None if the file has
            no tokenizer.
        fallback: matrices that are f16 instead of the chosen dtype, since their rows do not divide
            into its blocks.
        notes: differences from the model, one sentence each.
    """

    path: str
    arch: str
    dtype: str
    parameters: int
    file_bytes: int
    context: int
    tokenizer: str | None
    fallback: tuple[str, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> JsonDict:
        """Return every field by name."""
        return asdict(self)


def export(
    model: str | Path | Dense,
    out: str | Path,
    *,
    dtype: str | None = None,
    context: int | None = None,
    no_tokenizer: bool = False,
    force: bool = False,
    progress: Progress | bool | None = None,
) -> Export:
    """Write a model, pruned or not, as a GGUF file; one tensor at a time is in memory.

    Args:
        model: a model folder or hub name, or a model opened before.
        out: the file to make, `….gguf`.
        dtype: of matrices: `f32`, `f16`, `bf16` or `q8_0`; None for that of the stored weights (f32
            for float64). Vectors are f32.
        context: tokens that the file says the model takes; None for what its configuration says.
        no_tokenizer: leaves the tokenizer out: the file then takes and gives token ids alone.
        force: replaces a GGUF file that is there.
        progress: as in `prune`.

    Raises:
        CoecError: with one line that says what to change; nothing is written then.

    Example:
        >>> coec.export("out/llama-30", "out/llama-30-q8_0.gguf", dtype="q8_0").file_bytes
    """
    if dtype is not None and dtype not in GGUF_DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(GGUF_DTYPES)}, got {dtype!r}")
    path = path_of(out)
    if path.suffix != _SUFFIX:
        raise OutputError(f"the output must be a file whose name ends in {_SUFFIX}, got '{out}'")
    check_installed("writing GGUF files", "gguf", "gguf")
    clear_remains(resolved(path))
    check_file(path, _MAGIC, force)
    # These modules need the package, so they are imported only now.
    from coec.exporting.content import ExportPlan, write

    with recording() as events:
        # Plan, with every refusal → space → file, which appears whole or not at all
        plan = ExportPlan.of(Dense.open(model), dtype, context, with_tokenizer=not no_tokenizer)
        check_space(path, plan.size)
        with appearing(path, _MAGIC, force) as partial, showing(progress) as shown:
            write(plan, partial, shown)
    vocabulary = plan.tokenizer.vocabulary if plan.tokenizer else None
    return Export(
        path=str(path),
        arch=plan.target.name,
        dtype=plan.dtype,
        parameters=plan.model.parameters,
        file_bytes=path.stat().st_size,
        context=plan.facts.context,
        tokenizer=None if vocabulary is None else f"{vocabulary.model}, {vocabulary.pre}",
        fallback=tuple(entry.name for entry in plan.fallback),
        notes=(*plan.model.notes, *(vocabulary.notes if vocabulary else ()), *events),
    )
