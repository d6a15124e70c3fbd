"""Write solved blocks to durable files, and those to a checkpoint.

A solved block is written while the next one is computed, and on the disk before that one is
written. In the end blocks and the tensors outside them become shards, each durable before the
blocks that are wholly in it go, so that the disk holds the model about once, whenever the run is
killed.
"""

import functools
import itertools
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from coec.allocation.kept import KEPT
from coec.events import RESUMING, Progress
from coec.execution.journal import Journal
from coec.execution.output import partial_of
from coec.models import non_uniform
from coec.models.dense import Dense
from coec.models.depth import renumbered, without_blocks
from coec.models.files import (
    FLOAT_DTYPES,
    INDEX,
    JsonDict,
    opened,
    read_tensors,
    write_json,
    write_tensors,
)
from coec.models.folder import CONFIG, carry_files
from coec.models.layout import BlockLayout
from coec.pipeline.solve import SolvedBlock
from coec.planning import Plan
from coec.planning.memory import disk
from coec.planning.run import Run

MAX_SHARD = "2GB"
_ENDING = "ending"
"""The note that says how well the model predicts."""


class Checkpoint:
    """A checkpoint in the making, whose pieces a journal holds.

    The context manager waits for the block that is being written.
    """

    def __init__(self, journal: Journal, dense: Dense, run: Run) -> None:
        self._journal, self._dense, self.plan, self._dtype = journal, dense, run.plan, run.written
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        # Names in files → what the language model alone has; besides it, what is around it
        stored = dense.around.stored if dense.around else str
        self._names = {
            stored(written): name
            for name in self.plan.pruned_shapes
            if (written := renumbered(name, run.plan.dropped)) is not None
        }
        state = {
            whole: torch.empty(self.plan.pruned_shapes[name], dtype=self._dtype, device="meta")
            for whole, name in self._names.items()
        }
        for name, header in dense.carried.items():
            dtype = FLOAT_DTYPES.get(header.dtype, torch.int64)
            state[name] = torch.empty(header.shape, dtype=dtype, device="meta")
        self._split = split_torch_state_dict_into_shards(state, max_shard_size=MAX_SHARD)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._thread.shutdown()
        if kind is None:
            self._settle()

    def _settle(self) -> None:
        """Wait for the block that is being written; OutputError where the disk refuses it."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    @property
    def solved(self) -> set[int]:
        """Indices of the blocks that are solved already."""
        return {
            block.index
            for block in self._blocks
            if self._units(block) in self._journal
            and (self._weights(block) in self._journal or self._written(block))
        }

    @property
    def complete(self) -> bool:
        """True once every block that stays is solved."""
        return len(self.solved) == len(self._blocks)

    @property
    def _blocks(self) -> list[BlockLayout]:
        """The blocks that stay."""
        dropped = self.plan.dropped
        return [block for block in self._dense.layout.blocks if block.index not in dropped]

    def say_resumed(self, progress: Progress | None) -> None:
        """Report how many blocks an earlier run has solved, where this one goes on from it."""
        if progress and self._journal.resumed:
            progress(f"{RESUMING} blocks", len(self.solved), len(self._blocks))

    def tensors(self, block: BlockLayout) -> dict[str, Tensor]:
        """Return the written tensors of a solved block, wherever they are by now."""
        self._settle()
        if block.index in self.plan.dropped:
            return {}
        if self._weights(block) in self._journal:
            return read_tensors(self._journal.path(self._weights(block)))
        tensors: dict[str, Tensor] = {}
        for whole, file_name in self._split.tensor_to_filename.items():
            name = self._names.get(whole, "")
            if name.startswith(block.prefix):
                with opened(self._journal.path(file_name)) as file:
                    tensors[name] = file.get_tensor(whole)
        return tensors

    @property
    def ended(self) -> bool:
        """True once the end of the pruned model is known (`end`)."""
        return _ENDING in self._journal

    def end(self, facts: JsonDict) -> None:
        """Keep the scores of the model."""
        self._settle()
        self._journal.note(_ENDING, **facts)

    @property
    def facts(self) -> JsonDict:
        """Scores that were kept with the ending; none where there is none."""
        return self._journal.facts(_ENDING) if self.ended else {}

    def keep(self, solved: SolvedBlock) -> None:
        """Begin to put a solved block on the disk, once the one before it is there."""
        self._settle()
        self._writing = self._thread.submit(self._put, solved)

    def _put(self, solved: SolvedBlock) -> None:
        """Put a solved block on the disk; its rows last, which say that it is there."""
        index, work = solved.block.index, self._journal.work
        # Weights first: the rows that stand with the units say that the block is there.
        self._journal.put(
            self._weights(solved.block),
            work / f"block-{index:05}.safetensors",
            functools.partial(write_tensors, solved.tensors),
        )
        self._journal.put(
            self._units(solved.block),
            work / f"units-{index:05}.safetensors",
            functools.partial(write_tensors, solved.kept),
            sites=solved.rows,
            made_of=self._dense.digests_of([solved.block]),
        )

    @property
    def rows(self) -> list[JsonDict]:
        """The report's row of every site, in the order of the blocks."""
        return [
            row
            for block in self._blocks
            for row in self._journal.facts(self._units(block))["sites"]
        ]

    def write(self) -> None:
        """Write everything but the report, from solved blocks."""
        folder = self._journal.new
        # Blocks → shards; a block's file goes as soon as all its tensors are in durable shards.
        for file_name, names in self._split.filename_to_tensors.items():
            if file_name not in self._journal:
                shard = self._shard(names)
                self._journal.put(
                    file_name,
                    folder / file_name,
                    functools.partial(write_tensors, shard, metadata={"format": "pt"}),
                )
            for block in self._blocks:
                if self._weights(block) in self._journal and self._written(block):
                    self._journal.remove(self._weights(block))
        if self._split.is_sharded:
            weight_map = dict(sorted(self._split.tensor_to_filename.items()))
            write_json(folder / INDEX, {"metadata": self._split.metadata, "weight_map": weight_map})
        (folder / KEPT).parent.mkdir(exist_ok=True)
        kept: dict[str, Tensor] = {}
        for block in self._blocks:
            kept |= read_tensors(self._journal.path(self._units(block)))
        write_tensors(kept, folder / KEPT, {"format": "pt"})
        write_json(folder / CONFIG, self._config())
        if (code := self.plan.output.code) is not None:
            (folder / non_uniform.FILE).write_text(code, encoding="utf-8")
        carry_files(self._dense.folder, folder)

    def _shard(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return tensors of the result by their names in files.

        They are from their blocks' files, or from the dense model.

        Every file is opened once: a tensor holds a map of all of it.
        """
        tensors: dict[str, Tensor] = {}
        inside = {name: whole for whole in names if (name := self._names.get(whole))}
        for block, group in itertools.groupby(sorted(inside), self._block_of):
            if block is None:
                for name in group:
                    tensors[inside[name]] = self._dense.tensor(name).to(self._dtype)
                continue
            with opened(self._journal.path(self._weights(block))) as file:
                tensors |= {inside[name]: file.get_tensor(name) for name in group}
        carried = [whole for whole in names if whole not in self._names]
        return tensors | {whole: self._dense.around_it(whole) for whole in carried}

    def _block_of(self, name: str) -> BlockLayout | None:
        blocks = self._dense.layout.blocks
        return next((block for block in blocks if name.startswith(block.prefix)), None)

    def _written(self, block: BlockLayout) -> bool:
        """Return whether every tensor of a block is in a shard that is on the disk."""
        files = {
            file
            for whole, file in self._split.tensor_to_filename.items()
            if self._names.get(whole, "").startswith(block.prefix)
        }
        return all(file in self._journal for file in files)

    def _weights(self, block: BlockLayout) -> str:
        return f"weights of block {block.index}"

    def _units(self, block: BlockLayout) -> str:
        return f"units of block {block.index}"

    def _config(self) -> JsonDict:
        """Return the configuration with the dtype written."""
        config = dict(without_blocks(self.plan.output.config, self.plan.dropped))
        for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
            config[key] = dtype_name(self._dtype)
        if around := self._dense.around:
            return around.with_sizes(self._dense.config, config)
        return non_uniform.as_written(config)


def space_needed(out: Path, plan: Plan, dtype: torch.dtype) -> int:
    """Return the bytes that a run into `out` has yet to write: the model, a shard, and the rest."""
    partial = partial_of(out)
    present = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    return max(0, sum(disk(plan, dtype)) - present)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in configurations."""
    return str(dtype).removeprefix("torch.")
