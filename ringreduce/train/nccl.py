"""All-reduces of CuPy arrays by NCCL, for ``cross_device="nccl"``.

NCCL is part of CUDA's toolkit and of CuPy's wheels.  It reduces on a stream of its own, beside the
computation.  The other calls are those of the communicator.

Not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import ringreduce as rr

_DTYPES = {"float16": "NCCL_FLOAT16", "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64"}


class _Event:
    """A call under way on NCCL's stream.  Stands in for `Work`."""

    seconds: float | None = None
    """NCCL does not measure its calls."""

    def __init__(self, cuda: Any, event: Any) -> None:
        self._cuda, self._event = cuda, event

    def done(self) -> bool:
        return bool(self._event.done)

    def wait(self) -> None:
        """Let the present stream wait for the call; the host does not wait."""
        self._cuda.get_current_stream().wait_event(self._event)


class NcclCommunicator:
    """A communicator whose all-reduces are NCCL's.  Collective.

    Args:
        comm: the communicator of the ranks, each with a GPU of its own.
        cuda: the module ``cupy.cuda``.

    Raises:
        ValueError: CuPy was built without NCCL.
    """

    def __init__(self, comm: rr.Communicator, cuda: Any) -> None:
        if not cuda.nccl.available:
            raise ValueError("cross_device is nccl; this CuPy has no NCCL: choose two_shot")
        self._comm, self._cuda = comm, cuda
        # The number of bytes is the same on all ranks; rank 0's identify the group.
        identity = np.array(cuda.nccl.get_unique_id(), np.int64)
        words = comm.broadcast(identity, root=0).tolist()
        self._nccl = cuda.nccl.NcclCommunicator(comm.size, tuple(words), comm.rank)
        self._stream = cuda.Stream(non_blocking=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False, **how: Any
    ) -> Any:
        """Add up the arrays of all ranks; ValueError for another op, or a wire."""
        if op != "sum" or how.get("wire") is not None:
            raise ValueError("cross_device nccl adds up gradients in their dtype; leave out wire")
        result = x.copy() if out is None else out
        if x.size:
            self._start(x, result)
        finished = self._cuda.Event(disable_timing=True)
        finished.record(self._stream)
        work = _Event(self._cuda, finished)
        if async_op:
            return work
        work.wait()
        return result

    def sent_bytes(self, collective: str, x: Any, **how: Any) -> int:
        """Return the bytes that a ring sends; NCCL does not tell its algorithm."""
        how["algorithm"] = "ring"
        return self._comm.sent_bytes(collective, x, **how)

    def _start(self, x: Any, result: Any) -> None:
        """Start the reduction once the array has been computed."""
        nccl = self._cuda.nccl
        computed = self._cuda.Event(disable_timing=True)
        computed.record(self._cuda.get_current_stream())
        self._stream.wait_event(computed)
        dtype = getattr(nccl, _DTYPES[x.dtype.name])
        count, stream = x.size, self._stream.ptr
        self._nccl.allReduce(x.data.ptr, result.data.ptr, count, dtype, nccl.NCCL_SUM, stream)
