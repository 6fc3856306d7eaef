"""Gloo, by way of torch.distributed, where torch is installed: a baseline for all-reduce."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import numpy as np

from ringreduce.bench.collectives import IN_PLACE
from ringreduce.bench.contenders import BenchArguments, Contender
from ringreduce.bench.world import MPI

_TIMEOUT = datetime.timedelta(seconds=60)
_OPS = {
    "sum": "SUM",
    "prod": "PRODUCT",
    "min": "MIN",
    "max": "MAX",
    "and": "BAND",
    "or": "BOR",
    "xor": "BXOR",
}


class Gloo:
    def __init__(self, torch: Any) -> None:
        self._torch, self._distributed = torch, torch.distributed

    @classmethod
    def start(cls, world: MPI.Intracomm) -> Gloo | None:
        """Collective.  None where torch is not installed on all ranks, or has no Gloo."""
        try:
            import torch
            import torch.distributed as distributed

            there = distributed.is_available() and distributed.is_gloo_available()
        except ImportError:
            torch, there = None, False
        everywhere = np.array([there], np.int32)
        world.Allreduce(MPI.IN_PLACE, everywhere, MPI.MIN)
        if not everywhere[0]:
            return None
        assert torch is not None
        torch.set_num_threads(1)
        rank, size = world.rank, world.size
        store = distributed.TCPStore(*address(world), size, is_master=rank == 0, timeout=_TIMEOUT)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
        return cls(torch)

    def contenders(self, at: BenchArguments) -> list[Contender]:
        """Gloo's all-reduce, which is in place; none where Gloo lacks the op or the dtype."""
        name = _OPS.get(at.op)
        if name is None:
            return []
        x, op = at.buffer(), getattr(self._distributed.ReduceOp, name)
        try:
            tensor = self._tensor(x)
            self._distributed.all_reduce(tensor[:1].clone(), op)
        except (TypeError, RuntimeError, ValueError):
            return []
        return [Contender("Gloo", IN_PLACE, lambda: self._distributed.all_reduce(tensor, op), x, x)]

    def _tensor(self, x: np.ndarray) -> Any:
        """View `x` as a tensor.  torch does not know the bfloat16 of ml_dtypes."""
        if x.dtype.name == "bfloat16":
            return self._torch.from_numpy(x.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(x)

    def close(self) -> None:
        self._distributed.destroy_process_group()


def address(world: MPI.Intracomm) -> tuple[str, int]:
    place = np.zeros(64, np.uint8)
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            text = f"{socket.gethostbyname(socket.gethostname())}:{free.getsockname()[1]}".encode()
        place[: len(text)] = list(text)
    world.Allreduce(MPI.IN_PLACE, place)
    host, _, port = place.tobytes().rstrip(b"\0").decode().partition(":")
    return host, int(port)
