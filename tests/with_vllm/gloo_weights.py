"""
Weights from a trainer to a vLLM server on CPUs. vLLM's own weight transfer runs on NCCL; this one runs on gloo.

[`Extension`] is the server's side, given to it by `--worker-extension-cls`; [`Client`] is the trainer's, and takes the
place of TRL's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import on_cpu  # also in the server's worker, whose weights must not be packed
import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore
from trl.generation.vllm_client import VLLMClient


LIMIT = timedelta(seconds=240)


def store_at(port: int, is_master: bool) -> TCPStore:
    """Where a group of two meets: the trainer's main process (0), the server's worker (1). The first binds the port,
    one that the system chooses if it is 0."""
    return TCPStore("127.0.0.1", port, 2, is_master, timeout=LIMIT, wait_for_workers=False)


def join(store: TCPStore, rank: int) -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore("weights", store), rank, 2, LIMIT)


def broadcast(group: ProcessGroupGloo, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


class Extension:
    """Methods of a vLLM worker, called by `/collective_rpc`."""

    def join_trainer(self, port: int) -> None:
        self.trainer_group = join(store_at(port, is_master=False), 1)

    def receive_weights(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        model = self.model_runner.model  # type: ignore[attr-defined]
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            weights = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.trainer_group, weights)
            model.load_weights([(name, weights)])


class Client(VLLMClient):
    """TRL's client, but for the way weights go."""

    def _call(self, method: str, **arguments: Any) -> None:
        response = self.session.post(
            f"{self.base_url}/collective_rpc", json={"method": method, "kwargs": arguments, "timeout": 240}
        )
        assert response.status_code == 200, response.text

    def init_communicator(self, device: Any = None) -> None:
        store = store_at(0, is_master=True)
        with ThreadPoolExecutor(1) as executor:
            joined = executor.submit(self._call, "join_trainer", port=store.port)
            self.communicator = join(store, 0)
            joined.result()

    def update_named_params(self, metadata: list, named_params: Any) -> None:
        names, dtypes, shapes = (list(column) for column in zip(*metadata, strict=True))
        with ThreadPoolExecutor(1) as executor:
            loaded = executor.submit(self._call, "receive_weights", names=names, dtypes=dtypes, shapes=shapes)
            for _, weights in named_params:
                broadcast(self.communicator, weights.contiguous())
            loaded.result()

    def close_communicator(self) -> None:
        self.communicator = None


assert on_cpu
