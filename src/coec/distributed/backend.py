"""Where a run is computed: in this process, or on a Ray cluster."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from coec.devices import choose_solve_dtype
from coec.distributed.cluster import HALF, Cluster, joined
from coec.distributed.dense_pass import DistributedPass
from coec.events import Progress
from coec.models.dense import Dense
from coec.settings import Calibration, Runtime
from coec.streaming.passes import Backend


class RayBackend(Backend):
    """A cluster that this process has joined; at the end of its stack the workers end."""

    def __init__(self, cluster: Cluster, ending: ExitStack) -> None:
        self._cluster, self._ending = cluster, ending

    def device(self, name: str) -> torch.device:
        return self._cluster.device(name)

    def solve_dtype(self, name: str, device: torch.device) -> torch.dtype:
        """Return the dtype that a worker's device would choose: this process may have none."""
        if name != "auto" or device.type == "cpu":
            return choose_solve_dtype(name, device)
        # Measured where blocks are solved, on half a device as they are.
        cluster = self._cluster
        dtype: torch.dtype
        dtype, _ = cluster.result(cluster.submit(device, HALF, choose_solve_dtype, name, device))
        return dtype

    def dense_pass(
        self,
        dense: Dense,
        calibration: Calibration,
        runtime: Runtime,
        progress: Progress | None = None,
    ) -> DistributedPass:
        distributed = DistributedPass(dense, calibration, runtime, self._cluster, progress)
        self._ending.callback(distributed.end)
        return distributed


@contextmanager
def open_backend(runtime: Runtime) -> Iterator[Backend]:
    """Give the backend that the runtime settings ask for, while the `with` block lasts.

    Raises:
        OptionError: Ray is not installed, or no cluster answers.
    """
    if runtime.executor != "ray":
        yield Backend()
        return
    with joined(runtime.address) as cluster, ExitStack() as ending:
        yield RayBackend(cluster, ending)
