"""A Ray cluster: joined, checked, and left again. The one room that knows Ray.

What is handed to a cluster is computed there as it would be here: every node has the same version
of what computes, sees the same files, and uses as many threads as this process.
"""

import contextlib
import importlib
import logging
import math
import os
import pickle
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from coec import __version__
from coec.errors import CoecError, OptionError, first_line
from coec.events import record
from coec.execution.places import nearest

ANSWER_S = 5
"""Seconds in which a cluster answers, or is taken not to be there."""
CHECK_S = 120
"""Seconds in which a node starts a process and says what it has."""
LOOK_S, SHORT_S, PATIENCE_S = 5, 15, 600
"""Seconds between two looks at what a cluster has; in which what it lost is back, before fewer
workers go on; and in which there is room again where not even one has any."""
LOOPBACK, ENABLED = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "ENABLE_RAY_CLUSTER"
"""The variable by which Ray listens to other machines, and what its process reads of it."""
RETRIES = 3
"""How often work that was lost with a process or a node is done again."""
Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Node:
    """One machine of a cluster.

    Attributes:
        id: Ray's own.
        host: its name or address.
        cpus, gpus: what Ray may use of it.
        store: bytes of its object store.
    """

    id: str
    host: str
    cpus: float
    gpus: float
    store: int


class LostError(Exception):
    """A process or a node was lost, and with it work that can be done again."""


class Cluster:
    """A cluster that this process has joined; made by `joined`.

    Args:
        ray: the module.
    """

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.threads = torch.get_num_threads()
        self.nodes = self.alive()

    def alive(self) -> list[Node]:
        """The nodes that it has by now."""
        return [
            Node(
                one["NodeID"],
                one.get("NodeManagerHostname") or one["NodeManagerAddress"],
                one["Resources"].get("CPU", 0.0),
                one["Resources"].get("GPU", 0.0),
                int(one["Resources"].get("object_store_memory", 0)),
            )
            for one in self.ray.nodes()
            if one["Alive"]
        ]

    def slots(self, nodes: Sequence[Node], device: torch.device) -> int:
        """How many workers and solved blocks there is room for at once; each takes `half`."""
        return sum(int(2 * share) for share in self._shares(nodes, device))

    def _shares(self, nodes: Sequence[Node], device: torch.device) -> list[float]:
        """Of every node, how many devices it has, or processes of as many threads as this has."""
        return [n.gpus if device.type == "cuda" else n.cpus / self.threads for n in nodes]

    @property
    def gpus(self) -> float:
        """Of all nodes."""
        return sum(node.gpus for node in self.nodes)

    def device(self, asked: str) -> torch.device:
        """Where workers compute; raises OptionError where no node has such a device."""
        if asked == "auto":
            return torch.device("cuda" if self.gpus else "cpu")
        try:
            device = torch.device(asked)
        except RuntimeError as error:
            raise OptionError(f"device '{asked}' cannot be used: {error}") from error
        if str(device) not in ("cpu", "cuda"):
            raise OptionError(
                f"device '{asked}' cannot be asked of a cluster, which gives every worker its own: "
                "device is auto, cpu or cuda"
            )
        if device.type == "cuda" and not self.gpus:
            raise OptionError("device = cuda, but no node of the cluster has a GPU: use device=cpu")
        return device

    def workers(self, asked: int | None, device: torch.device) -> int:
        """How many workers there are; raises OptionError where there is no room for so many.

        Half of a device, or of the cores that a process uses, is a worker's, which carries windows
        through the model; the other half is a block's that is solved meanwhile.
        """
        of_gpus = device.type == "cuda"
        room = int(sum(self._shares(self.nodes, device)))
        count = (room if of_gpus else max(1, room)) if asked is None else asked
        slots = self.slots(self.nodes, device)
        if count + 1 > slots:
            what = f"{self.gpus:g} GPUs" if of_gpus else (
                f"{sum(n.cpus for n in self.nodes):g} CPUs, {self.threads} for a process"
            )  # fmt: skip
            raise OptionError(
                f"workers = {count} does not fit a cluster of {what}: a worker takes half of one, "
                f"as does a block being solved; ask for at most {max(slots - 1, 0)}"
                + ("" if of_gpus else ", or set OMP_NUM_THREADS to fewer threads")
            )
        return count

    def check_room(self, device: torch.device) -> None:
        """Raises OptionError where no node has room for a job that does all by itself."""
        nodes = self.alive()
        if device.type == "cuda" and max(node.gpus for node in nodes) < 1:
            raise OptionError("no node of the cluster has a GPU: add one, or use device=cpu")
        if device.type == "cpu" and max(node.cpus for node in nodes) < self.threads:
            raise OptionError(
                f"no node of the cluster has {self.threads} CPUs, as many as this process has "
                "threads: set OMP_NUM_THREADS to fewer"
            )

    def half(self, device: torch.device) -> dict[str, float]:
        """What Ray is asked for a worker, or for a block that is solved."""
        if device.type == "cuda":
            return {"num_gpus": 0.5, "num_cpus": 0}
        return {"num_cpus": self.threads / 2}

    def whole(self, device: torch.device) -> dict[str, float]:
        """What Ray is asked for a job that does all by itself."""
        if device.type == "cuda":
            return {"num_gpus": 1, "num_cpus": 0}
        return {"num_cpus": self.threads}

    def check_store(self, needed: int) -> None:
        """Raises OptionError where a node cannot hold an object of so many bytes twice over."""
        least = min(self.nodes, key=lambda node: node.store)
        if least.store < 2 * needed:
            raise OptionError(
                f"the object store of {least.host} has {least.store / 1e9:.2f} GB, and the "
                f"statistics of one block take {needed / 1e9:.2f} GB twice over: start Ray there "
                f"with --object-store-memory={2 * needed}"
            )

    def check_nodes(self, look: Callable[[], str], here: str, what: str) -> None:
        """Every node has these versions, and sees what this process sees.

        Args:
            look: what a node sees, in a word; raises CoecError where it sees nothing.
            here: the same in this process.
            what: is looked at, for the error.

        Raises:
            OptionError: naming the node.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        # Pickled by value, and what it calls apart: a node without this package can still say so.
        def ask(looking: bytes) -> dict[str, str]:
            try:
                import torch

                import coec
            except ImportError as error:
                return {"missing": error.name or str(error)}
            found = {"coec": coec.__version__, "torch": torch.__version__}
            if found == ours:
                try:
                    found["seen"] = pickle.loads(looking)()
                except coec.CoecError as error:
                    found["error"] = str(error)
            return found

        ours = {"coec": __version__, "torch": torch.__version__}
        task, looking = self.ray.remote(num_cpus=0, max_retries=0)(ask), pickle.dumps(look)
        asked = {
            n: task.options(scheduling_strategy=On(n.id, soft=False)).remote(looking)
            for n in self.nodes
        }
        for node, answer in asked.items():
            try:
                found = self.ray.get(answer, timeout=CHECK_S)
            except self.ray.exceptions.RayError as error:
                raise OptionError(f"node {node.host} does not work: {first_line(error)}") from error
            if missing := found.get("missing"):
                raise OptionError(f"node {node.host} has no {missing}: install 'coec[ray]' there")
            for name, version in ours.items():
                if found[name] != version:
                    raise OptionError(
                        f"node {node.host} has {name} {found[name]}, this one has {version}: "
                        "install the same on all, as results would differ"
                    )
            if found.get("seen") != here:
                why = found.get("error", "it has another one there")
                raise OptionError(
                    f"node {node.host} does not see {what} ({why}): use a path that all nodes share"
                )

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Errors of remote work: its own as they were raised there, all others as `LostError`."""
        errors = self.ray.exceptions
        try:
            yield
        except errors.RayError as error:
            cause: Any = error
            while isinstance(cause, errors.RayTaskError):
                cause = cause.cause
            if isinstance(cause, errors.RayError | LostError):
                raise LostError(first_line(cause)) from error
            raise cause from None

    def get(self, reference: Any) -> Any:
        """What remote work returned.

        Raises:
            LostError: it was lost; errors of the work itself as they were raised there.
        """
        with self.translated():
            return self.ray.get(reference)

    def result(self, task: Any) -> Any:
        """As `get`, of a task that Ray itself does again.

        Raises:
            CoecError: it was lost too often.
        """
        try:
            return self.get(task)
        except LostError as error:
            raise lost(error) from error

    def hosts(self, actors: Sequence[Any]) -> list[str]:
        """The machine of every actor; "lost" where one is being begun anew."""
        found = []
        for answer in [actor.host.remote() for actor in actors]:
            try:
                found.append(self.get(answer))
            except LostError:
                found.append("lost")
        return found


class Shortage:
    """Watches that a cluster has room for a block being solved beside its workers.

    Workers of a lost node begin anew on others, and may take the last room there: a block would
    wait for ever.

    Args:
        cluster: which.
        device: of the workers.
    """

    def __init__(self, cluster: Cluster, device: torch.device) -> None:
        self._cluster, self._device = cluster, device
        self._looked, self._since = 0.0, math.inf

    def fewer(self, workers: int) -> int | None:
        """With how many workers to go on; None where there is room, or may be again soon.

        Raises:
            CoecError: there was no room for a single one for too long.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return None
        self._looked = now
        room = self._cluster.slots(self._cluster.alive(), self._device) - 1
        if room >= workers:
            self._since = math.inf
            return None
        self._since = min(self._since, now)
        short = now - self._since
        if room >= 1 and short >= SHORT_S:
            self._since = math.inf
            record(
                f"the cluster lost a node: {workers} workers leave no room for a block being "
                f"solved, so {room} go on with their windows"
            )
            return room
        if room < 1:
            each = "half a GPU" if self._device.type == "cuda" else (
                f"{self._cluster.threads / 2:g} CPUs"
            )  # fmt: skip
            record(
                f"the cluster lost a node: waiting for one with room for a worker and a block "
                f"being solved, each of {each}, for {PATIENCE_S} s"
            )
            if short >= PATIENCE_S:
                raise CoecError(
                    f"the cluster has had no room for a worker and a block being solved for "
                    f"{PATIENCE_S} s: add a node; what is finished is kept, and the same command "
                    "goes on with the rest"
                )
        return None


class ClusterJobs:
    """Carries out jobs on a cluster, each a task that is done again where it was lost.

    Args:
        cluster: where.
        device: of which every job takes one, or as many cores as this process has threads.

    Raises:
        OptionError: no node has so many.
    """

    def __init__(self, cluster: Cluster, device: torch.device) -> None:
        cluster.check_room(device)
        self._cluster, self._device = cluster, device

    def map(self, function: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """The results in the order of the jobs.

        Raises:
            CoecError: a job was lost too often.
        """
        cluster = self._cluster
        task = cluster.ray.remote(
            max_retries=RETRIES, scheduling_strategy="SPREAD", **cluster.whole(self._device)
        )(_carry_out)
        handed = [task.remote(function, job, cluster.threads) for job in jobs]
        try:
            for reference in handed:
                while not cluster.ray.wait([reference], timeout=LOOK_S)[0]:
                    self._say_what_is_waited_for()
                yield cluster.result(reference)
        finally:  # an error or a signal: nobody waits for the rest
            for reference in handed:
                cluster.ray.cancel(reference)

    def _say_what_is_waited_for(self) -> None:
        """Records that a node was lost without which no job can be done."""
        try:
            self._cluster.check_room(self._device)
        except OptionError as error:
            record(f"waiting for a node, since one was lost: {error}")


@dataclass(frozen=True)
class _Look:
    """What a node sees in a file."""

    path: Path

    def __call__(self) -> str:
        try:
            return self.path.read_text()
        except OSError as error:
            raise CoecError(str(error)) from error


@contextmanager
def shared_folder(folder: Path) -> Iterator[Callable[[], str]]:
    """What tells whether another node sees a folder, or the nearest that is there.

    As long as the `with` block lasts.
    """
    path = nearest(folder.absolute()) / f".seen-{uuid.uuid4().hex}"
    path.write_text(path.name)
    try:
        yield _Look(path)
    finally:
        path.unlink(missing_ok=True)


def lost(error: LostError) -> CoecError:
    """What is said of work that was lost too often."""
    return CoecError(
        f"work was lost {RETRIES + 1} times with a process or a node of the cluster ({error}): "
        "what is finished is kept, and the same command goes on with the rest"
    )


def _carry_out(function: Callable[[Any], Any], job: Any, threads: int) -> Any:
    begin(threads)
    return function(job)


def begin(threads: int) -> None:
    """Sets a process of a cluster up: as many threads as the driver has, and no chatter."""
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


@contextmanager
def joined(address: str | None) -> Iterator[Cluster]:
    """A cluster, as long as the `with` block lasts.

    Args:
        address: HOST:PORT of its head, `auto` for the one that this machine is of, or None for one
            of this machine alone, which is started and ended.

    Raises:
        OptionError: Ray is not installed, or no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise OptionError("executor = ray needs Ray: pip install 'coec[ray]'") from None
    if ray.is_initialized():  # somebody's own, who leaves it as well
        yield Cluster(ray)
        return
    if address is not None and address != "auto":
        _check_answers(address)
    try:
        _start(ray, address)
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _start(ray: Any, address: str | None) -> None:
    """Joins a cluster, or starts one; raises OptionError where there is none."""
    alone = _on_loopback() if address is None else contextlib.nullcontext()
    try:
        with _own_signals(), alone:
            ray.init(
                address="local" if address is None else address,
                logging_level=logging.ERROR,
                log_to_driver=False,
                include_dashboard=False if address is None else None,
            )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise OptionError(
            f"no Ray cluster can be joined at '{address}' ({first_line(error)}): start one with "
            "`ray start --head`, or leave address out"
        ) from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself as it starts, and never gives it back: it ends with status 15.

    What it raises meanwhile is made to what our own handler raises.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if error.code != signal.SIGTERM:
            raise
        raise SystemExit(128 + signal.SIGTERM) from error
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A cluster that is started meanwhile listens to this machine alone.

    Ray does so by itself on macOS and Windows, where this variable is off; it is read by what Ray
    starts, and by this process when it imports Ray.
    """
    try:
        constants: Any = importlib.import_module("ray._private.ray_constants")
    except ImportError:  # private to Ray: another release may have it elsewhere
        constants = None
    before, enabled = os.environ.get(LOOPBACK), getattr(constants, ENABLED, True)
    os.environ[LOOPBACK] = "0"
    if constants is not None:
        setattr(constants, ENABLED, False)
    try:
        yield
    finally:
        if constants is not None:
            setattr(constants, ENABLED, enabled)
        del os.environ[LOOPBACK]
        if before is not None:
            os.environ[LOOPBACK] = before


def _check_answers(address: str) -> None:
    """Raises OptionError unless something listens there: Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        raise OptionError(f"address is HOST:PORT of a Ray cluster's head, or auto, got '{address}'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise OptionError(
            f"no Ray cluster answers at '{address}' ({error}): start one with `ray start --head`, "
            "or mend the address"
        ) from error
