"""CentralParallel: parameters once for all ranks of a node, in memory that all of them map.

As in stage 2 of `ShardedParallel`, a reduce-scatter gives each rank the sums of its shard of the
gradients, and the rank updates its shard of the parameters.  The parameters need not be gathered:
all ranks read the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.parallel.equality import on_host
from ringreduce.parallel.sharded_buckets import ReplicatedBucket, Update
from ringreduce.parallel.sharded_parallel import ShardedParallel


class _CentralBucket(ReplicatedBucket):
    """Parameters in shared memory, of which each rank updates its shard."""

    gathers = 0

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's arrays; rank 0 counts the parameters."""
        counted = sum(int(array.nbytes) for array in self._parameters.values())
        return super().nbytes - counted * bool(self._comm.rank)

    def publish(self) -> None:
        """Do nothing: all ranks read the parameters."""


class CentralParallel(ShardedParallel):
    """One rank's part of a data-parallel model whose parameters are once in the memory of a node.

    It is used as stage 2 of `ShardedParallel`, by the ranks of one node.  They share the arrays in
    `parameters`, so `step` gathers nothing.  These arrays change only while all ranks are in `step`
    or in `load`.  In `held_bytes` rank 0 counts them.

    Args:
        comm: the communicator of the ranks.
        params: name -> array of floats.  They are copied: drop them afterwards.
        slots, first_bucket_bytes, bucket_bytes, op, algorithm: as for `ShardedParallel`.

    Attributes:
        parameters: name -> parameter in the shared memory, to be read.
        times: the `StepTimes` of the last step.

    Raises:
        MismatchError, TypeError, ValueError: as for `ShardedParallel`.
        ValueError, MemoryError: as for `Communicator.shared`.

    Example:
        >>> def program(comm):
        ...     central = rr.train.CentralParallel(comm, {"w": np.full(4, comm.rank + 1.0)})
        ...     def update(parameters, slots, gradient):
        ...         parameters -= 0.1 * gradient
        ...     central.ready("w", np.arange(4.0) * comm.rank)
        ...     central.finish()
        ...     central.step(update)
        ...     return central.parameters["w"]
        >>> rr.spawn(program, 2)[1]
        array([1.  , 0.95, 0.9 , 0.85])
    """

    __module__ = "ringreduce.train"
    _replicated = _CentralBucket

    def __init__(
        self,
        comm: rr.Communicator,
        params: Mapping[str, Any],
        *,
        slots: Sequence[str] = (),
        first_bucket_bytes: int = 1 << 20,
        bucket_bytes: int = 25 << 20,
        op: str = "mean",
        algorithm: str = "auto",
    ) -> None:
        sizes = {"first_bucket_bytes": first_bucket_bytes, "bucket_bytes": bucket_bytes}
        super().__init__(comm, params, stage=2, slots=slots, op=op, algorithm=algorithm, **sizes)

    def _placed(self, comm: rr.Communicator, params: Mapping[str, Any]) -> dict[str, Any]:
        lines = [-(-array.nbytes // 64) for array in params.values()]  # no two have a cache line
        memory = comm.shared((sum(lines), 64), np.uint8).array
        self.parameters: dict[str, Any] = {}
        for (name, array), count, end in zip(params.items(), lines, accumulate(lines), strict=True):
            place = memory[end - count : end].reshape(-1)[: array.nbytes]
            self.parameters[name] = place.view(array.dtype).reshape(array.shape)
            self.parameters[name][...] = on_host(array)  # the same numbers on every rank
        return self.parameters

    def step(self, update: Update) -> None:
        """Update the parameters, each rank its shard, while all ranks are in this call."""
        self._comm.barrier()  # before it, a rank may read or write them
        super().step(update)
        self._comm.barrier()
