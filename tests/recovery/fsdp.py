"""`coec` as `accelerate launch --use_fsdp` starts it on devices, on CPUs.

accelerate divides weights on devices alone: the processes of a CPU are taken for such. With
STOP_AT_STATE they end without a word when the first state is on the disk.
"""

import os

from accelerate import state
from accelerate.utils import DistributedType

from coec.cli import main
from coec.recovery import distillation

begin, save = state.PartialState.__init__, distillation.TrainingMonitor.on_save


def begin_on_devices(self, *args, **options):
    begin(self, *args, **options)
    shared = state.PartialState._shared_state
    if shared["distributed_type"] == DistributedType.MULTI_CPU:  # and not FSDP, as it is later
        shared["distributed_type"] = DistributedType.MULTI_XPU


def save_and_stop(self, *args, **options):
    save(self, *args, **options)
    state.PartialState().wait_for_everyone()
    os._exit(9)


state.PartialState.__init__ = begin_on_devices
if "STOP_AT_STATE" in os.environ:
    distillation.TrainingMonitor.on_save = save_and_stop
main()
