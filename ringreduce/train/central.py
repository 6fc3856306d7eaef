"""Parameters once for all ranks of a node, in memory that all of them map.

As in stage 2 of `ShardedParallel`, a reduce-scatter gives each rank the sums of its shard of the
gradients, and the rank updates its shard of the parameters.  The parameters need not be gathered:
all ranks read the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ringreduce as rr
from ringreduce.parallel.equality import on_host
from ringreduce.parallel.mismatches import check_arrays
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
    """One rank's part of a data-parallel model whose parameters are once in a node's memory.

    It is used as `ShardedParallel`.  `parameters` are the shared arrays by name.  `params` are
    arrays of one dtype; all ranks start with rank 0's.
    """

    _replicated = _CentralBucket

    def __init__(
        self,
        comm: rr.Communicator,
        params: Mapping[str, Any],
        *,
        slots: Sequence[str],
        **options: Any,
    ) -> None:
        params = check_arrays("CentralParallel", params)
        count = sum(array.size for array in params.values())
        (dtype,) = {array.dtype for array in params.values()}
        self._shared = comm.shared(count, dtype)
        self.parameters: dict[str, Any] = {}
        end = 0
        for name, array in params.items():
            start, end = end, end + array.size
            self.parameters[name] = self._shared.array[start:end].reshape(array.shape)
            if comm.rank == 0:
                self.parameters[name][...] = on_host(array)
        comm.barrier()
        super().__init__(comm, self.parameters, stage=2, slots=slots, **options)

    def step(self, update: Update) -> None:
        """Update the parameters, each rank its shard; wait until all ranks have."""
        super().step(update)
        self._comm.barrier()

    def load(self, arrays: Mapping[str, Any] | None) -> None:
        super().load(arrays)
        self._comm.barrier()
