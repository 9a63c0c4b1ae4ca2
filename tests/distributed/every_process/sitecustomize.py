"""
Python imports this when a process of a test starts: `launching.start` puts its folder on the path.

- A process that leaves its process group to the end of the interpreter fails. The threads of a gloo group may abort it
  there, now and then on a loaded machine.
- FSDP2 shards on CPUs. PyTorch can, but accelerate asks for an accelerator before it lets it.
"""

import atexit
import os
import sys


def check() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        print("This process ends without ending its process group: call `trainer.end()`.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


# The first that is registered is called last
atexit.register(check)


def shard_on_cpus() -> None:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    begin = PartialState.__init__

    def begin_as_on_gpus(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = begin_as_on_gpus


# Set for the processes that `accelerate launch` starts, not for itself
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    shard_on_cpus()
