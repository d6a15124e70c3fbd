"""Several workers hold the windows: the result of one, also where one of them is lost."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch

import coec
import tiny_models as tm
from coec.distributed.cluster import RETRIES, LostError
from coec.distributed.ray_group import RayGroup
from coec.distributed.workers import WorkerPool
from coec.errors import CoecError
from coec.pipeline import reconstruct as reconstruction
from coec.streaming.passes import DensePass
from coec.streaming.two_streams import SUMMANDS, shards
from coec.streaming.worker_group import LocalGroup, WorkerGroup, streams_of

SETTINGS = {
    "samples": 20, "seq_len": 16, "preset": "best", "reconstruct": 1, "prediction_passes": 1,
    "holdout": 0.2, "seed": 1,
}  # fmt: skip
MADE = {
    "uniform": {**SETTINGS, "kv_groups": "uniform"},
    "held-out": {**SETTINGS, "kv_groups": "held-out"},
    "fast": {"samples": 20, "seq_len": 16, "preset": "fast"},
    "beside": {**SETTINGS, "kv_groups": "uniform", "propagate": False},
}


class Several(WorkerGroup):
    """Workers in one process, the first of which dies whenever `lost` says so."""

    def __init__(self, make, shards, lost):
        self._make, self._shards, self._lost = make, shards, lost
        self._members = [LocalGroup(make(shard)) for shard in shards]

    def _lose(self, name):
        if self._lost(name):
            self._members[0] = LocalGroup(self._make(self._shards[0]))
            raise LostError(name)

    def answers(self, method, args, kwargs):
        self._lose(method.__name__)
        answers = [member.answers(method, args, kwargs) for member in self._members]
        return itertools.chain.from_iterable(answers)

    def solve(self, work):
        solved = work()
        if self._lost("solve"):
            raise LostError("solve")
        return solved, None

    def bring_to(self, index, finished):
        for member in self._members:
            member.bring_to(index, finished)


class LateRay:
    """What `RayGroup` asks of Ray, in this process; calls that were given up come late.

    A node is lost when a block is solved for the second time. What was asked of the worker for that
    block comes once more behind its next `rewind`, as Ray lets calls of another process come.
    """

    def __init__(self):
        self.ray, self.threads = self, torch.get_num_threads()
        self.exceptions = SimpleNamespace(ActorUnavailableError=LostError)
        self._calls, self._late, self._solved = [], [], 0
        self.refused = 0

    def remote(self, **resources):
        return lambda kind: SimpleNamespace(remote=lambda: self._actor(kind()))

    def _actor(self, worker):
        def call(*told):
            self._calls.append(told)
            return worker.call(*told)

        def rewind(*told):
            index = worker.rewind(*told)
            for late in self._late:
                with pytest.raises(LostError):
                    worker.call(*late)
                self.refused += 1
            self._late = []
            return index

        return SimpleNamespace(
            call=SimpleNamespace(remote=call), rewind=SimpleNamespace(remote=rewind),
            host=SimpleNamespace(remote=worker.host),
        )  # fmt: skip

    def submit(self, device, share, work, **options):
        self._calls, self._solved = [], self._solved + 1
        solved = work(), "host"
        if self._solved == 2:
            self._late = list(self._calls)
            return LostError("a node")
        return solved

    def get(self, reference):
        if isinstance(reference, LostError):
            raise reference
        return reference

    def put(self, value):
        return value

    def wait(self, references, timeout):
        return references, []

    def resources(self, device, share):
        return {}

    def kill(self, worker):
        pass

    translated = contextlib.nullcontext


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("teams")
    model = tm.save(tm.tiny("llama", torch.float32), root / "model")
    tokens = tm.token_file(root / "tokens.npy", rows=20, length=16)
    for name, settings in MADE.items():
        coec.prune(model, root / name, calibration=tokens, **settings)
    return root


def pruned(place, out, monkeypatch, count, lost=lambda name: False, made="uniform"):
    """By several workers, as `made` was."""

    @contextlib.contextmanager
    def worker_group(source, run):
        windows, held = source.windows_of_text()
        size = max(1, len(windows) // SUMMANDS)
        several = shards(windows, held, count, tokens=size * windows.shape[1])
        dense = source._dense
        yield Several(
            lambda shard: streams_of(run, dense, shard, source.device),
            several,
            lost,
        )

    monkeypatch.setattr(DensePass, "worker_group", worker_group)
    coec.prune(place / "model", out, calibration=place / "tokens.npy", **MADE[made])


@pytest.mark.parametrize(("count", "made"), [(3, "uniform"), (50, "uniform"), (3, "fast")])
def test_any_number_of_places_gives_the_same_bits(count, made, place, tmp_path, monkeypatch):
    pruned(place, tmp_path / "out", monkeypatch, count, made=made)
    assert tm.same_weights(tmp_path / "out", place / made)


class Lost:
    """Loses a worker where a method is asked for the first and for the third time."""

    def __init__(self, name):
        self.name, self.asked = name, []

    def __call__(self, name):
        self.asked.append(name)
        return name == self.name and self.asked.count(name) in (1, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "made"),
    [*((name, "uniform") for name in ("squares", "advance", "predict", "advance_site", "load",
                                      "solve", "examples")),
     *((name, "fast") for name in ("advance", "advance_site", "solve")),
     *((name, "beside") for name in ("measure_block", "solve")),
     ("measure", "held-out")],  # while a candidate is tried, and again
)  # fmt: skip
def test_a_place_that_is_lost_anywhere_is_made_up_for(name, made, place, tmp_path, monkeypatch):
    lost = Lost(name)
    pruned(place, tmp_path / "out", monkeypatch, 2, lost, made)
    assert lost.asked.count(name) >= 2
    assert tm.same_weights(tmp_path / "out", place / made)


@pytest.mark.parametrize("made", ["uniform", "beside"])
def test_calls_for_a_block_that_was_given_up_change_nothing(made, place, tmp_path, monkeypatch):
    cluster = LateRay()

    @contextlib.contextmanager
    def worker_group(source, run):
        yield RayGroup(cluster, source.windows_of_text(), 1, source._dense, run)

    monkeypatch.setattr(WorkerPool, "end_if_crowded", lambda self: None)
    monkeypatch.setattr(DensePass, "worker_group", worker_group)
    coec.prune(place / "model", tmp_path / "out", calibration=place / "tokens.npy", **MADE[made])
    assert cluster.refused > 3
    assert tm.same_weights(tmp_path / "out", place / made)


@pytest.mark.parametrize("tried", [[0], [1]])
def test_a_place_that_is_lost_where_a_trial_passes_a_block_is_made_up_for(
    tried, place, tmp_path, monkeypatch
):
    monkeypatch.setattr(reconstruction, "tried_blocks", lambda layers: tried)
    pruned(place, tmp_path / "out", monkeypatch, 2, Lost("advance"), "held-out")
    assert tm.same_weights(tmp_path / "out", place / "held-out")


def test_what_is_lost_again_and_again_ends_the_run_and_leaves_what_is_finished(
    place, tmp_path, monkeypatch
):
    asked = []

    def lost(name):
        asked.append(name)
        return asked.count("open") > 1 and name == "examples" and "reconstructing" in asked

    monkeypatch.setattr(
        reconstruction.Checkpoint, "keep",
        lambda self, solved, keep=reconstruction.Checkpoint.keep: (
            asked.append("reconstructing"), keep(self, solved)
        ),
    )  # fmt: skip
    with pytest.raises(CoecError, match=f"work was lost {RETRIES + 1} times") as caught:
        pruned(place, tmp_path / "out", monkeypatch, 2, lost, "held-out")
    assert "what is finished is kept" in "".join(caught.value.__notes__)
    pruned(place, tmp_path / "out", monkeypatch, 2, made="held-out")
    assert tm.same_weights(tmp_path / "out", place / "held-out")


def test_parts_are_the_same_however_many_places_there_are():
    windows = torch.arange(19)[:, None].expand(19, 4)
    held = torch.arange(3)[:, None].expand(3, 4)
    whole = shards(windows, held, tokens=8)
    assert len(whole) == 1
    assert len(whole[0]["fit"]) == SUMMANDS
    for count in (2, 5, 8, 30):
        several = shards(windows, held, count, tokens=8)
        assert len(several) == min(count, SUMMANDS)
        for kind in ("fit", "validation"):
            parts = [part for shard in several for part in shard[kind]]
            numbers = [[b.number for b in part] for part in parts]
            assert numbers == [[b.number for b in part] for part in whole[0][kind]]
    ids = torch.cat([b.ids for part in whole[0]["fit"] for b in part])
    assert torch.equal(ids, windows)
