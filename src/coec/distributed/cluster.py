"""A Ray cluster: joined, checked, and left again.

Work is computed there as it would be here: every node has the same versions, sees the same files,
and uses as many threads as this process.
"""

import contextlib
import functools
import importlib
import logging
import os
import pickle
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from coec.errors import CoecError, OptionError, check_installed, first_line
from coec.events import record
from coec.execution.output import nearest
from coec.version import __version__

ANSWER_S = 5
"""Seconds after which a cluster that does not answer counts as absent."""
CHECK_S = 120
"""Seconds in which a node starts a process and answers."""
LOOK_S, SHORT_S, PATIENCE_S = 5, 15, 600
"""Seconds between two looks at the nodes; before fewer workers go on after a node was lost; and
before a run gives up because there is room for none."""
LOOPBACK, ENABLED = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "ENABLE_RAY_CLUSTER"
"""The variable by which Ray listens to other machines, and the constant that holds it."""
RETRIES = 3
"""Number of times that work lost with a process or a node is done again."""
AGAIN = {"max_retries": RETRIES, "scheduling_strategy": "SPREAD"}
"""Options of tasks that Ray itself does again where they were lost."""
HALF = 0.5
"""Share of a device that a worker takes, and that a block takes which is solved meanwhile."""
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Node:
    """Machine of a cluster: CPUs and GPUs that Ray may use, bytes of its object store."""

    id: str
    host: str
    cpus: float
    gpus: float
    store: int


class LostError(Exception):
    """A process or a node was lost, and with it work that can be done again."""


class Cluster:
    """A cluster that this process has joined; made by `joined`."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.threads = torch.get_num_threads()
        self.nodes = self.alive()

    def alive(self) -> list[Node]:
        """Return the nodes that are alive now."""
        return [
            Node(
                node["NodeID"],
                node.get("NodeManagerHostname") or node["NodeManagerAddress"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
                int(node["Resources"].get("object_store_memory", 0)),
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def slots(self, nodes: Sequence[Node], device: torch.device) -> int:
        """Return how many workers and solved blocks, of `HALF` each, there is room for."""
        return sum(int(share / HALF) for share in self._shares(nodes, device))

    def _shares(self, nodes: Sequence[Node], device: torch.device) -> list[float]:
        """Return the devices of every node, or its processes of as many threads as this one has."""
        return [n.gpus if device.type == "cuda" else n.cpus / self.threads for n in nodes]

    @property
    def gpus(self) -> float:
        """Number of GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)

    def device(self, name: str) -> torch.device:
        """Return the device of the workers; raises OptionError where no node has it."""
        if name == "auto":
            return torch.device("cuda" if self.gpus else "cpu")
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise OptionError(f"device '{name}' cannot be used: {error}") from error
        if str(device) not in ("cpu", "cuda"):
            raise OptionError(
                f"device '{name}' cannot be asked of a cluster, which gives every worker its own: "
                "device is auto, cpu or cuda"
            )
        if device.type == "cuda" and not self.gpus:
            raise OptionError("device = cuda, but no node of the cluster has a GPU: use device=cpu")
        return device

    def workers(self, count: int | None, device: torch.device) -> int:
        """Return the number of workers; raises OptionError where there is no room for so many.

        A worker takes half of a device, or of the cores that a process uses, and carries windows
        through the model; a block that is solved meanwhile takes the other half.
        """
        # A worker for every device, or for every process that the cores make; they and one block
        # being solved must fit, half a device each.
        of_gpus = device.type == "cuda"
        room = int(sum(self._shares(self.nodes, device)))
        if count is None:
            count = room if of_gpus else max(1, room)
        slots = self.slots(self.nodes, device)
        if count + 1 > slots:
            resources = f"{self.gpus:g} GPUs" if of_gpus else (
                f"{sum(n.cpus for n in self.nodes):g} CPUs, {self.threads} for a process"
            )  # fmt: skip
            raise OptionError(
                f"workers = {count} does not fit a cluster of {resources}: a worker takes half of "
                f"one, as does a block being solved; ask for at most {max(slots - 1, 0)}"
                + ("" if of_gpus else ", or set OMP_NUM_THREADS to fewer threads")
            )
        return count

    def check_room(self, device: torch.device) -> None:
        """Raise OptionError where no node has room for a job that does all by itself."""
        nodes = self.alive()
        if device.type == "cuda" and max(node.gpus for node in nodes) < 1:
            raise OptionError("no node of the cluster has a GPU: add one, or use device=cpu")
        if device.type == "cpu" and max(node.cpus for node in nodes) < self.threads:
            raise OptionError(
                f"no node of the cluster has {self.threads} CPUs, as many as this process has "
                "threads: set OMP_NUM_THREADS to fewer"
            )

    def submit(
        self,
        device: torch.device,
        share: float,
        function: Callable[..., Any],
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Return a reference to what a function returns as a task, and to the task's host.

        Args:
            device: where it computes.
            share: of a device, or of the cores that this process has threads for.
            options: of Ray's tasks, such as how often a lost one is done again.
        """
        task = self.ray.remote(**options, **self.resources(device, share))(_carry_out)
        return task.remote(self.threads, function, *arguments)

    def cancel(self, references: Sequence[Any]) -> None:
        """Cancel the tasks that have not finished yet.

        One that has just finished must not be: where its reply meets the cancellation, a check
        inside Ray (2.60) fails, and ends this process.
        """
        for reference in references:
            if not self.ray.wait([reference], timeout=0)[0]:
                self.ray.cancel(reference)

    def resources(self, device: torch.device, share: float) -> dict[str, float]:
        """Return what Ray reserves for a share of a device, or of as many cores as threads."""
        if device.type == "cuda":
            return {"num_gpus": share, "num_cpus": 0}
        return {"num_cpus": share * self.threads}

    def check_store(self, needed: int) -> None:
        """Raise OptionError where a node cannot hold an object of so many bytes twice over."""
        smallest = min(self.nodes, key=lambda node: node.store)
        if smallest.store < 2 * needed:
            raise OptionError(
                f"the object store of {smallest.host} has {smallest.store / 1e9:.2f} GB, and the "
                f"statistics of one block take {needed / 1e9:.2f} GB twice over: start Ray there "
                f"with --object-store-memory={2 * needed}"
            )

    def check_nodes(self, look: Callable[[], str], expected: str, subject: str) -> None:
        """Check that every node has these versions, and sees what this process sees.

        Args:
            look: raises CoecError where a node sees nothing.
            expected: what this process sees.
            subject: what is looked at, for the error.

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
            answer = {"coec": coec.__version__, "torch": torch.__version__}
            if answer == ours:
                try:
                    answer["seen"] = pickle.loads(looking)()
                except coec.CoecError as error:
                    answer["error"] = str(error)
            return answer

        ours = {"coec": __version__, "torch": torch.__version__}
        task, looking = self.ray.remote(num_cpus=0, max_retries=0)(ask), pickle.dumps(look)
        # Asked on every node by name, all at once; no resources, so that a busy node answers too.
        references = {
            n: task.options(scheduling_strategy=On(n.id, soft=False)).remote(looking)
            for n in self.nodes
        }
        for node, reference in references.items():
            try:
                answer = self.ray.get(reference, timeout=CHECK_S)
            except self.ray.exceptions.RayError as error:
                raise OptionError(f"node {node.host} does not work: {first_line(error)}") from error
            if missing := answer.get("missing"):
                raise OptionError(f"node {node.host} has no {missing}: install 'coec[ray]' there")
            for name, version in ours.items():
                if answer[name] != version:
                    raise OptionError(
                        f"node {node.host} has {name} {answer[name]}, this one has {version}: "
                        "install the same on all, as results would differ"
                    )
            if answer.get("seen") != expected:
                why = answer.get("error", "it has another one there")
                raise OptionError(
                    f"node {node.host} does not see {subject} ({why}): use a path that all nodes "
                    "share"
                )

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raise errors of remote work as they were raised there, all others as `LostError`."""
        errors = self.ray.exceptions
        try:
            yield
        except errors.RayError as error:
            cause: Any = error
            # A task that failed inside another is wrapped once for each: unwrap to the reason.
            while isinstance(cause, errors.RayTaskError):
                cause = cause.cause
            if isinstance(cause, errors.RayError | LostError):
                raise LostError(first_line(cause)) from error
            raise cause from None

    def get(self, reference: Any) -> Any:
        """Return what remote work returned; raises LostError where it was lost."""
        with self.translated():
            return self.ray.get(reference)

    def result(self, task: Any) -> Any:
        """Return what a task returned that Ray itself does again; CoecError if lost too often."""
        try:
            return self.get(task)
        except LostError as error:
            raise lost(error) from error


class ClusterJobs:
    """Run jobs on a cluster, each a task that is done again where it was lost.

    Every job takes a device, or as many cores as this process has threads. Raises OptionError where
    no node has so many.
    """

    def __init__(self, cluster: Cluster, device: torch.device) -> None:
        cluster.check_room(device)
        self._cluster, self._device = cluster, device

    def map(self, function: Callable[[_Job], _Result], jobs: Iterable[_Job]) -> Iterator[_Result]:
        """Yield the results in the order of the jobs; raises CoecError if one is lost too often."""
        cluster, device = self._cluster, self._device
        # All jobs are handed out at once, and Ray holds back those for which there is no room.
        references = [cluster.submit(device, 1, function, job, **AGAIN) for job in jobs]
        try:
            for reference in references:
                while not cluster.ray.wait([reference], timeout=LOOK_S)[0]:
                    try:
                        cluster.check_room(device)
                    except OptionError as error:
                        record(f"waiting for a node, since one was lost: {error}")
                result: _Result
                result, _ = cluster.result(reference)
                yield result
        finally:  # an error or a signal: nobody waits for the rest
            cluster.cancel(references)


def _content(path: Path) -> str:
    """Return the content of a file as a node sees it."""
    try:
        return path.read_text()
    except OSError as error:
        raise CoecError(str(error)) from error


@contextmanager
def shared_folder(folder: Path) -> Iterator[Callable[[], str]]:
    """Give a function that shows whether a node sees a folder, or its nearest parent.

    It works while the `with` block lasts.
    """
    # A file of a new name: a node that sees another file system cannot have one like it.
    path = nearest(folder.absolute()) / f".seen-{uuid.uuid4().hex}"
    path.write_text(path.name)
    try:
        yield functools.partial(_content, path)
    finally:
        path.unlink(missing_ok=True)


def lost(error: LostError, times: int = RETRIES + 1) -> CoecError:
    """Return the error for work that was lost too often."""
    return CoecError(
        f"work was lost {times} times with a process or a node of the cluster ({error}): "
        "what is finished is kept, and the same command goes on with the rest"
    )


def begin_process(threads: int) -> None:
    """Let a new process use so many threads, and keep its libraries from chatter."""
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _carry_out(threads: int, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Return what a function returns in a process of the cluster, and the name of its machine."""
    begin_process(threads)
    return function(*arguments), socket.gethostname()


@contextmanager
def joined(address: str | None) -> Iterator[Cluster]:
    """Give a cluster while the `with` block lasts.

    Args:
        address: HOST:PORT of its head, `auto` for the cluster that this machine belongs to, or None
            for a new one of this machine alone.

    Raises:
        OptionError: Ray is not installed, or no cluster answers.
    """
    # By default Ray reports usage, and hides all GPUs from processes that ask for none.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    check_installed("executor=ray", "'coec[ray]'", "ray")
    import ray

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
    """Join a cluster, or start one; raises OptionError where there is none."""
    # A cluster of this machine alone listens to no other: whoever can reach it could run code.
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
    """Keep our SIGTERM handler: Ray takes the signal as it starts, and would end with status 15.

    What Ray raises meanwhile becomes what our handler raises.
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
    """Let a cluster that is started meanwhile listen to this machine alone.

    Ray does so by itself on macOS and Windows, where this variable is off. The processes that Ray
    starts read it, and this process when it imports Ray.
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
    """Raise OptionError unless something listens there: Ray itself would wait for minutes."""
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
