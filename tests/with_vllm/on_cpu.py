"""
Lets vLLM run beside a trainer on a CPU, for tests and benchmarks. Import it before vLLM.

vLLM's CPU build packs a linear layer's weights into a form that can't be loaded again, so no new weights would ever
reach it: here they stay as they are. Models run eagerly and in float32, so that log-probs can be compared with the
trainer's. Processes that hold one engine between them talk through shared memory whose name is the same for every run
on a machine, so that what a killed run left behind is in the next one's way: here each launch has a name of its own.
A process that was started alone meets with itself at a port that TRL finds free, and that is used later: here the port
is bound at once.
"""

import functools
import os


os.environ.update(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Else it would bind the trainer's threads as well, those of two processes to one core
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
)

import torch  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402
from vllm.distributed.device_communicators import cpu_communicator  # noqa: E402
from vllm.model_executor.layers import utils as layers  # noqa: E402


ENGINE = {"dtype": "float32", "enforce_eager": True, "block_size": 32}


def _keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _named_by_launch(communicator: cpu_communicator.CpuCommunicator) -> str:
    ranks = "-".join(str(rank) for rank in communicator.ranks)
    # All processes of a launch have one parent and meet at one port
    return f"{os.getppid()}-{os.environ['MASTER_PORT']}-{communicator.unique_name}-[{ranks}]"


_store: TCPStore | None = None


def _bind_master_port() -> None:
    global _store
    if "MASTER_PORT" not in os.environ:
        # A process group of this process that names the port shares this store
        _store = _store or TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_store.port))


layers.dispatch_cpu_unquantized_gemm = _keep_weights
cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(_named_by_launch)
# TRL offers no option for any of these
vllm_generation.ensure_master_addr_port = _bind_master_port
vllm_generation.LLM = functools.partial(vllm_generation.LLM, **ENGINE)
