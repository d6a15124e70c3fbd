"""The processes of one training: this one alone, or all that `accelerate launch` started."""

import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from coec.errors import OptionError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Processes:
    """Number of processes, and which of them this one is.

    Attributes:
        rank: 0 is the process that reads texts and writes files.
    """

    count: int
    rank: int

    @classmethod
    def here(cls, device: torch.device) -> "Processes":
        """Join the others, if there are any."""
        from accelerate import PartialState

        # accelerate reads the environment that `accelerate launch` set.
        state = PartialState(cpu=device.type == "cpu")
        return cls(state.num_processes, state.process_index)

    def agree(self, value: _T) -> _T:
        """Return the value of the first process, in all of them."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        values: list[Any] = [value]
        return broadcast_object_list(values)[0]


def shards() -> int:
    """Number of processes that the trained weights are divided among: 1, where each has all.

    `accelerate launch --use_fsdp` tells its processes by the environment. Raises OptionError for
    the first version of FSDP, whose states nobody has gone on with here.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return 1
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise OptionError(
            "weights are divided by FSDP 2 alone: fsdp_version of accelerate must be 2"
        )
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """True unless this process is another than the first of several; imports nothing."""
    return os.environ.get("RANK", "0") == "0"
