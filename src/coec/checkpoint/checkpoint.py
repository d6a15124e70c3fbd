"""Write solved blocks to durable files, and those to a checkpoint.

A solved block is written while the next one is computed, and on the disk before that one is
written. In the end blocks and the tensors outside them become shards, each durable before the
blocks that are wholly in it are removed, so that the disk holds the model about once, whenever the
run is killed.
"""

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from coec import parallel
from coec.checkpoint.card import origin, write_card
from coec.checkpoint.folder import check_space, partial_of
from coec.checkpoint.journal import Journal, journal, unfinished
from coec.checkpoint.report import Report
from coec.devices import computed_by, dtype_name, environment
from coec.events import RESUMING, Progress, record
from coec.models import non_uniform
from coec.models.dense import Dense
from coec.models.files import (
    FLOAT_DTYPES,
    INDEX,
    JsonDict,
    Kept,
    opened,
    read_tensors,
    write_json,
    write_tensors,
)
from coec.models.folder import CONFIG, carried_files, carry_files
from coec.models.formats import without_blocks
from coec.models.layout import BlockLayout
from coec.models.names import build, split
from coec.models.renumbering import VOCABULARY, Renumbering
from coec.models.surgery import dtype_of
from coec.planning.kept import KEPT
from coec.planning.memory import disk
from coec.planning.plan import Plan
from coec.solve import SolvedBlock

MAX_SHARD = "2GB"
_PREDICTIONS = "predictions"
"""The note that says how well the model predicts."""


class Checkpoint:
    """A checkpoint in the making, whose pieces a journal holds.

    Only the first process has the journal and writes; it sends all others the data it reads.

    Attributes:
        finished: the report of an earlier run that was killed when all was done; else None.
    """

    def __init__(self, journal: Journal | None, dense: Dense, plan: Plan) -> None:
        self._pieces, self._dense = journal, dense
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._renumbering: Renumbering | None = None
        self.finished: Report | None = parallel.lead(self._earlier)
        self.begin(plan)

    @classmethod
    @contextmanager
    def open(
        cls, out: Path, plan: Plan, dense: Dense, text: JsonDict, *, force: bool, restart: bool
    ) -> "Iterator[Checkpoint]":
        """Begin a run into `out`, or resume it, while the `with` block lasts.

        Args:
            out: the folder to make.
            plan: of the run.
            dense: the model.
            text: the inputs that determine the calibration windows.
            force: replace the model that `out` holds.
            restart: begin anew if an unfinished run was asked for something else. A run with
                functions of the user's own always does: nothing tells whether they are the same.

        Raises:
            OutputError: as in `journal`, or the disk has too little room.
        """
        own = plan.recipe.own_functions
        if own and unfinished(out):
            record(f"the unfinished run into '{out}' is begun anew: {own[0]} is a function")
        identity = {
            **plan.recipe.record("device"),
            **text,
            "kept": None if plan.kept is None else plan.kept.identity,
            "model": dense.fingerprint,
            "dtype": dtype_name(plan.written),
            "seq_len": plan.seq_len,
            "forward_dtype": dtype_name(plan.forward),
            "computed_by": computed_by(plan.device),
        }
        parallel.lead(_check_room, out, plan, dense)
        opening = journal(out, identity, force=force, restart=restart or bool(own))
        with parallel.leading(opening) as pieces:
            checkpoint = cls(pieces, dense, plan)
            try:
                yield checkpoint
            finally:
                checkpoint._thread.shutdown()

    def _earlier(self) -> Report | None:
        """Return the report of a complete run; else pass the journal's digests to the model."""
        if self._journal.finished:
            return Report.read(self._journal.out)
        since = (
            "it was read by a run that this one resumes: give the model as it was, or pass "
            "restart=True to begin anew"
        )
        self._dense.expect((digests, since) for digests in self._journal.every("made_of"))
        return None

    @property
    def _journal(self) -> Journal:
        assert self._pieces is not None, "the first process alone has the journal"
        return self._pieces

    def once(self, name: str, make: Callable[[], Kept]) -> Kept:
        """Return the tensors and facts that are kept under a name; make and keep them first."""
        kept = parallel.lead(lambda: self._journal.tensors(name))
        if kept is None:
            kept = parallel.lead(self._keep_piece, name, make())
        return kept

    def _keep_piece(self, name: str, made: Kept) -> Kept:
        tensors, facts = made
        made_of = self._dense.digests_of(self._dense.layout.blocks)
        self._journal.put_tensors(name, tensors, **facts, made_of=made_of)
        return made

    def begin(self, plan: Plan) -> None:
        """Set the plan whose blocks are written."""
        self.plan, dense = plan, self._dense
        # Names in files → names in the language model alone; and the tensors that are around it
        stored = dense.around.stored if dense.around else str
        self._sources = {stored(file): source for file, source in plan.sources.items()}
        # Names in files by the number of the block; None for what is outside of all blocks
        self._by_block: dict[int | None, list[str]] = {}
        for whole, source in self._sources.items():
            name = source if isinstance(source, str) else source.names[0]
            inside = (b.index for b in dense.layout.blocks if name.startswith(b.prefix))
            self._by_block.setdefault(next(inside, None), []).append(whole)
        empty = {
            name: torch.empty(shape, dtype=dtype_of(name, plan.written), device="meta")
            for name, shape in plan.pruned_shapes.items()
        }
        state = {whole: build(s, empty.__getitem__) for whole, s in self._sources.items()}
        for name, header in dense.carried.items():
            dtype = FLOAT_DTYPES.get(header.dtype, torch.int64)
            state[name] = torch.empty(header.shape, dtype=dtype, device="meta")
        self._split = split_torch_state_dict_into_shards(state, max_shard_size=MAX_SHARD)

    def say_resumed(self, progress: Progress | None) -> None:
        """Report how many blocks an earlier run has solved, if this run resumes it."""
        if progress and self._pieces and self._pieces.resumed:
            done = sum(map(self._is_solved, self.plan.blocks))
            progress(f"{RESUMING} blocks", done, len(self.plan.blocks))

    @property
    def complete(self) -> bool:
        """True if every block is solved, and the predictions are known."""

        def is_complete() -> bool:
            return _PREDICTIONS in self._journal and all(map(self._is_solved, self.plan.blocks))

        return parallel.lead(is_complete)

    def solved(self, blocks: Sequence[BlockLayout]) -> list[SolvedBlock] | None:
        """Return blocks that an earlier run has solved, with their written tensors alone; None if
        one of them is missing.
        """

        def read() -> list[SolvedBlock] | None:
            if not all(map(self._is_solved, blocks)):
                return None
            return [SolvedBlock(block, self._tensors(block), {}, []) for block in blocks]

        return parallel.lead(read)

    def keep(self, solved: Sequence[SolvedBlock]) -> None:
        """Begin to put solved blocks on the disk, once the blocks before them are there."""
        parallel.lead(self._keep, solved)

    def _keep(self, solved: Sequence[SolvedBlock]) -> None:
        self._settle()
        self._writing = self._thread.submit(self._put, solved)

    def _settle(self) -> None:
        """Wait for the blocks that are being written; OutputError if the disk refuses them."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    def _put(self, solved: Sequence[SolvedBlock]) -> None:
        """Put solved blocks on the disk; of each the rows last, which say that it is there."""
        for block in solved:
            index, work = block.block.index, self._journal.work
            weights = functools.partial(write_tensors, block.tensors)
            path = work / f"block-{index:05}.safetensors"
            self._journal.put(_weights(block.block), path, weights)
            units = functools.partial(write_tensors, block.kept)
            path = work / f"units-{index:05}.safetensors"
            made_of = self._dense.digests_of([block.block])
            self._journal.put(_units(block.block), path, units, sites=block.rows, made_of=made_of)

    def _is_solved(self, block: BlockLayout) -> bool:
        return _units(block) in self._journal and (
            _weights(block) in self._journal or self._in_shards(block)
        )

    def _tensors(self, block: BlockLayout) -> dict[str, Tensor]:
        """Return the written tensors of a solved block, wherever they are by now."""
        if _weights(block) in self._journal:
            return read_tensors(self._journal.path(_weights(block)))
        tensors: dict[str, Tensor] = {}
        for whole in self._by_block[block.index]:
            with opened(self._journal.path(self._split.tensor_to_filename[whole])) as file:
                tensors |= split(self._sources[whole], file.get_tensor(whole))
        return tensors

    def note_predictions(self, facts: JsonDict) -> None:
        """Keep how well the pruned model predicts."""

        def note() -> None:
            self._settle()
            self._journal.note(_PREDICTIONS, **facts)

        parallel.lead(note)

    def finish(
        self, windows: JsonDict, seconds: dict[str, float], renumbering: Renumbering | None = None
    ) -> Report:
        """Write everything that is missing, and put the folder in place.

        Args:
            windows: the record of the calibration windows, and notes on them.
            seconds: wall-clock time by phase.
            renumbering: the token ids that stay; None if all do.
        """
        self._renumbering = renumbering
        return parallel.lead(self._finish, windows, seconds)

    def _finish(self, windows: JsonDict, seconds: dict[str, float]) -> Report:
        self._settle()
        dense, plan, journal = self._dense, self.plan, self._journal
        dense.check_unchanged()
        self._write()
        base, unread = origin(dense.name, dense.folder)
        notes = [*dense.notes, *plan.notes, *windows.pop("notes"), *unread]
        report = Report(
            model=dense.name,
            model_sha256=dense.digest,
            out=str(journal.out),
            recipe={
                **plan.recipe.record(),
                "options": {**plan.method.defaults, **plan.recipe.options},
                "kept": None if plan.kept is None else plan.kept.source,
                "seq_len": plan.seq_len,
                "dtype": dtype_name(plan.written),
                "forward_dtype": dtype_name(plan.forward),
            },
            plan=plan.record() | {"notes": notes},
            calibration=windows,
            sites=[row for b in plan.blocks for row in journal.facts(_units(b))["sites"]],
            seconds=seconds,
            environment=environment(str(plan.device)),
            reconstruction=journal.facts(_PREDICTIONS),
            origin=base,
        )
        report.write(journal.new)
        write_card(report, journal.new)
        journal.complete()
        return report

    def _write(self) -> None:
        """Write everything but the report, from solved blocks."""
        folder = self._journal.new
        # Blocks → shards; a block's file goes as soon as all its tensors are in durable shards.
        for file_name, names in self._split.filename_to_tensors.items():
            if file_name not in self._journal:
                write = functools.partial(
                    write_tensors, self._shard({*names}), metadata={"format": "pt"}
                )
                self._journal.put(file_name, folder / file_name, write)
            for block in self.plan.blocks:
                if _weights(block) in self._journal and self._in_shards(block):
                    self._journal.remove(_weights(block))
        if self._split.is_sharded:
            weight_map = dict(sorted(self._split.tensor_to_filename.items()))
            write_json(folder / INDEX, {"metadata": self._split.metadata, "weight_map": weight_map})
        (folder / KEPT).parent.mkdir(exist_ok=True)
        kept: dict[str, Tensor] = {}
        for block in self.plan.blocks:
            kept |= read_tensors(self._journal.path(_units(block)))
        if (ids := self._renumbering) and not ids.all_stay:
            kept[VOCABULARY] = ids.kept
        write_tensors(kept, folder / KEPT, {"format": "pt"})
        write_json(folder / CONFIG, self._config())
        if (code := self.plan.output.code) is not None:
            (folder / non_uniform.FILE).write_text(code, encoding="utf-8")
        carry_files(self._dense.folder, folder)
        if self._renumbering:
            self._renumbering.write(folder)

    def _shard(self, names: Set[str]) -> dict[str, Tensor]:
        """Return tensors of the result by their names in files.

        They are from their blocks' files, or from the dense model.

        Every file is opened once: a tensor holds a map of all of it.
        """
        tensors: dict[str, Tensor] = {}
        for whole in names & {*self._by_block.get(None, [])}:
            tensors[whole] = build(self._sources[whole], self._outside).to(self.plan.written)
        for block in self.plan.blocks:
            if inside := names & {*self._by_block[block.index]}:
                with opened(self._journal.path(_weights(block))) as file:
                    tensors |= {w: build(self._sources[w], file.get_tensor) for w in inside}
        return tensors | {w: self._dense.around_it(w) for w in names - self._sources.keys()}

    def _outside(self, name: str) -> Tensor:
        """Return a tensor outside of all blocks, with the rows of the tokens that stay."""
        tensor, renumbering = self._dense.tensor(name), self._renumbering
        return renumbering.rows(tensor) if renumbering and name in self._dense.by_token else tensor

    def _in_shards(self, block: BlockLayout) -> bool:
        """Return whether every tensor of a block is in a shard that is on the disk."""
        files = self._split.tensor_to_filename
        return all(files[whole] in self._journal for whole in self._by_block[block.index])

    def _config(self) -> JsonDict:
        """Return the configuration with the dtype written."""
        config = dict(without_blocks(self.plan.output.config, self.plan.dropped))
        config = self._renumbering.config(config) if self._renumbering else config
        for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
            config[key] = dtype_name(self.plan.written)
        if around := self._dense.around:
            return around.with_sizes(self._dense.config, config)
        return non_uniform.as_written(config)


def _check_room(out: Path, plan: Plan, dense: Dense) -> None:
    """Raise ModelError or OutputError if files cannot be carried over, or the disk is too full."""
    carried_files(dense.folder)
    present = sum(p.stat().st_size for p in partial_of(out).rglob("*") if p.is_file())
    check_space(out, max(0, sum(disk(plan)) - present))


def _weights(block: BlockLayout) -> str:
    return f"weights of block {block.index}"


def _units(block: BlockLayout) -> str:
    return f"units of block {block.index}"
