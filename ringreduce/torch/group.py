"""A process group of torch whose collectives are calls of a communicator."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import ringreduce as rr
from ringreduce.calls import compound
from ringreduce.errors import counted
from ringreduce.start.process_exit import ENDING_S, end_at_exit_by, forget, is_forgettable
from ringreduce.system.cores import cores
from ringreduce.torch.attributes import NamedGroup
from ringreduce.torch.calling import collective
from ringreduce.torch.functional import register_kernels
from ringreduce.torch.lists import (
    check_alike,
    check_dtypes,
    deliver,
    deliver_all,
    deliver_each,
    pieces_of,
    room_for,
)
from ringreduce.torch.reductions import add_entries, prepare, prepare_copy, sparse_calls
from ringreduce.torch.shared import LEAST_BYTES, SharedStorages
from ringreduce.torch.tensors import array_of, check, check_list, is_as_in_memory
from ringreduce.torch.works import AsyncWork, FinishedWork, TensorMessage, seconds_of

_log = logging.getLogger("ringreduce.torch")
_WAITS_S = 0.01
"""Seconds.  Where ranks have fewer than two cores each, an asynchronous call first runs in the
caller's thread: the group's thread would take a core from the backward pass.  A call that has
waited this long for other ranks goes on in the group's thread, since a call of another group may
have to come first."""
_BACKWARD = torch.autograd.graph.__name__
"""The module whose functions run backward passes."""
_PACKAGE = __name__.rpartition(".")[0]
_DONE = FinishedWork()
_KERNELS = register_kernels()


class RingReduceGroup(NamedGroup):
    """The group of the ranks that share a store."""

    def __init__(self, options: Any, backend: str, moves: bool) -> None:
        """Connect the ranks by the store in `options`.  Collective among them.

        `moves`: tensors that are reduced again are moved to registered memory.
        """
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size, backend, options.group_id)
        seconds = options.timeout.total_seconds()
        self.comm: rr.Communicator = rr.init(
            rendezvous=options.store, rank=rank, size=size, timeout_s=seconds
        )
        if cores() < 2 * _ranks_here(self.comm):
            self.comm._engine.queue.begins_here_s = _WAITS_S
        if is_forgettable(self.comm):
            end_at_exit_by(self.comm, partial(self._end, "the program"))
        self.storages = SharedStorages(self.comm) if size > 1 else None
        self._moves = moves

    # --- reductions ---

    @collective("all_reduce", c10d.AllreduceOptions, ("op", "timeout"))
    def allreduce(self, tensors: Sequence[Any], opts: Any) -> Any:
        calls: list[Any] = []
        xs, sparse, op = [], [], opts.reduceOp.op
        for tensor in tensors:
            if tensor.is_sparse:
                sparse.append(tensor)
            else:
                xs.append(self._to_reduce(tensor))
        names = [prepare(opts.reduceOp, x) for x in xs]  # raises errors before the first call
        for tensor in sparse:
            calls += sparse_calls(self.comm, tensor, op, **_how(opts))
        for x, name in zip(xs, names, strict=True):
            calls += [self.comm.all_reduce(x, name, out=x, **_how(opts))]
        deliver_sparse = partial(add_entries, sparse, op, self._size) if sparse else None
        return _work(opts, tensors, calls, deliver_sparse)

    def _to_reduce(self, tensor: Any) -> np.ndarray:
        """Return the array of a tensor to be all-reduced, in registered memory if it is there."""
        large = tensor.nbytes >= LEAST_BYTES and tensor.is_contiguous()
        if self.storages is not None and large and is_as_in_memory(tensor):
            check("all_reduce", tensor, writes=True, reduces=True)
            x = self.storages.array_of(tensor, moves=self._moves and _is_of_a_bucket())
            if x is not None:
                return x
        return array_of("all_reduce", tensor, writes=True, reduces=True)

    @collective("all_reduce", c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any) -> Any:
        xs = [array_of("all_reduce", each, writes=True, reduces=True) for each in tensors]
        by_op: dict[str, list[np.ndarray]] = {}
        for x in xs:
            by_op.setdefault(prepare(opts.reduceOp, x), []).append(x)
        calls = [
            self.comm.all_reduce(alike, op, out=alike, **_how(opts)) for op, alike in by_op.items()
        ]
        return _work(opts, tensors, calls)

    @collective("reduce", c10d.ReduceOptions, ("root", "op", "timeout"))
    def reduce(self, tensors: Sequence[Any], opts: Any) -> Any:
        is_root, calls = opts.rootRank == self._rank, []
        for x in [array_of("reduce", each, writes=is_root, reduces=True) for each in tensors]:
            out = x if is_root else None
            reduced, op = prepare_copy(opts.reduceOp, x)
            calls += [self.comm.reduce(reduced, opts.rootRank, op, out=out, **_how(opts))]
        return _work(opts, tensors, calls)

    @collective("reduce_scatter", c10d.ReduceScatterOptions, ("op", "timeout"))
    def reduce_scatter(
        self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any
    ) -> Any:
        lists: list[list[np.ndarray]] = []
        outs: list[np.ndarray] = []
        for output, pieces in zip(outputs, inputs, strict=True):
            check_list("reduce_scatter", pieces, self._size, "input_list")
            views = [
                array_of("reduce_scatter", each, writes=False, reduces=True) for each in pieces
            ]
            out = array_of("reduce_scatter", output, writes=True)
            check_dtypes("reduce_scatter", [*views, out])
            check_alike("reduce_scatter", [views[self._rank], out])
            lists += [views]
            outs += [out]
        calls: list[Any] = []
        parts: list[np.ndarray | None] = []
        for views, out in zip(lists, outs, strict=True):
            if len({view.size for view in views}) == 1:
                x = np.concatenate([view.reshape(-1) for view in views])
                calls += [self._reduce_scatter(x, out, opts)]
                parts += [out]
            else:
                calls += self._reduce_each(views, opts)
                parts += [out if root == self._rank else None for root in range(self._size)]
        return _work(opts, outputs, calls, partial(deliver_each, parts))

    def _reduce_each(self, views: Sequence[np.ndarray], opts: Any) -> list[Any]:
        """Reduce pieces of different lengths, one for each rank; return the results, or Works."""
        calls = []
        for root, view in enumerate(views):
            x, op = prepare_copy(opts.reduceOp, view.reshape(-1))
            calls += [self.comm.reduce(x, root, op, **_how(opts))]
        return calls

    @collective("reduce_scatter", c10d.ReduceScatterOptions, of_lists=False)
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Any:
        x, out = self._views_to_scatter(output, input)
        return _work(opts, [output], [self._reduce_scatter(x, out, opts)], _copies([out]))

    _reduce_scatter_base = reduce_scatter_single

    @collective("reduce_scatter", c10d.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
    ) -> Any:
        pairs = [self._views_to_scatter(*each) for each in zip(outputs, inputs, strict=True)]
        calls = [self._reduce_scatter(x, out, opts) for x, out in pairs]
        return _work(opts, outputs, calls, _copies([out for _, out in pairs]))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _views_to_scatter(self, output: Any, input: Any) -> tuple[np.ndarray, np.ndarray]:
        x = array_of("reduce_scatter", input, writes=False, reduces=True).reshape(-1)
        out = array_of("reduce_scatter", output, writes=True)
        if x.size != self._size * out.size:
            raise ValueError(
                f"reduce_scatter: the input has {counted(x.size, 'element')}, and the output "
                f"{out.size}; the input needs {self._size} times as many"
            )
        return x, out

    def _reduce_scatter(self, x: np.ndarray, out: np.ndarray, opts: Any) -> Any:
        """Reduce `x`; write this rank's part to `out`, which may be a part of `x`, if contiguous.

        Returns the part, or its Work.
        """
        x, op = prepare_copy(opts.reduceOp, x)
        into = out.reshape(-1) if out.flags.c_contiguous else None
        return self.comm.reduce_scatter(x, op, out=into, **_how(opts))

    # --- copies ---

    @collective("broadcast", c10d.BroadcastOptions, ("root", "timeout"))
    def broadcast(self, tensors: Sequence[Any], opts: Any) -> Any:
        writes = opts.rootRank != self._rank
        xs = [array_of("broadcast", tensor, writes=writes) for tensor in tensors]
        calls = [self.comm.broadcast(x, opts.rootRank, out=x, **_how(opts)) for x in xs]
        return _work(opts, tensors, calls)

    @collective("all_gather", c10d.AllgatherOptions, ("timeout",))
    def allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Any:
        return self._allgather(outputs, inputs, opts)

    def _allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Any:
        """Gather each of `inputs` from all ranks; `outputs` has a list of tensors for each."""
        xs, every = [], []
        for pieces, input in zip(outputs, inputs, strict=True):
            check_list("all_gather", pieces, self._size, "tensor_list")
            x = array_of("all_gather", input, writes=False).reshape(-1)
            outs = [array_of("all_gather", each, writes=True) for each in pieces]
            check_dtypes("all_gather", [x, *outs])
            if outs[self._rank].size != x.size:
                raise ValueError(
                    f"all_gather: this rank's tensor has {counted(x.size, 'element')}, and its "
                    f"place in tensor_list {outs[self._rank].size}"
                )
            xs += [x]
            every += [outs]
        calls = [
            self.comm.all_gather(x, counts=[out.size for out in outs], **_how(opts))
            for x, outs in zip(xs, every, strict=True)
        ]
        tensors = [each for pieces in outputs for each in pieces]
        return _work(opts, tensors, calls, partial(deliver_all, every))

    @collective("all_gather", c10d.AllgatherOptions)
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any
    ) -> Any:
        # `outputs` has a list for each rank; allgather takes one for each tensor.
        check_list("all_gather", outputs, self._size, "output_tensor_lists")
        if any(len(each) != len(inputs) for each in outputs):
            raise ValueError(
                f"all_gather: output_tensor_lists has lists of {[len(each) for each in outputs]} "
                f"tensors; each needs {len(inputs)}, as input_tensor_list"
            )
        return self._allgather(list(zip(*outputs, strict=True)), inputs, opts)

    @collective("all_gather", c10d.AllgatherOptions, of_lists=False)
    def all_gather_single(self, output: Any, input: Any, opts: Any) -> Any:
        x, out = self._views_to_gather(output, input)
        return _work(opts, [output], [self._all_gather(x, out, opts)], _copies([out]))

    _allgather_base = all_gather_single

    @collective("all_gather", c10d.AllgatherOptions)
    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
    ) -> Any:
        pairs = [self._views_to_gather(*each) for each in zip(outputs, inputs, strict=True)]
        calls = [self._all_gather(x, out, opts) for x, out in pairs]
        return _work(opts, outputs, calls, _copies([out for _, out in pairs]))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _views_to_gather(self, output: Any, input: Any) -> tuple[np.ndarray, np.ndarray]:
        x = array_of("all_gather", input, writes=False).reshape(-1)
        out = array_of("all_gather", output, writes=True)
        if out.size != self._size * x.size:
            raise ValueError(
                f"all_gather: the input has {counted(x.size, 'element')}, and the output "
                f"{out.size}; the output needs {self._size} times as many"
            )
        return x, out

    def _all_gather(self, x: np.ndarray, out: np.ndarray, opts: Any) -> Any:
        counts = [x.size] * self._size
        return self.comm.all_gather(x, counts=counts, out=room_for(out), **_how(opts))

    @collective("gather", c10d.GatherOptions, ("root", "timeout"))
    def gather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Any:
        (input,) = inputs
        x = array_of("gather", input, writes=False).reshape(-1)
        outs = []
        if opts.rootRank == self._rank:
            (pieces,) = outputs
            check_list("gather", pieces, self._size, "gather_list")
            outs = [array_of("gather", each, writes=True) for each in pieces]
            check_alike("gather", [x, *outs])
        call = self.comm.gather(x, opts.rootRank, counts=[x.size] * self._size, **_how(opts))
        tensors = [each for pieces in outputs for each in pieces]
        return _work(opts, tensors, [call], partial(deliver, outs) if outs else None)

    @collective("scatter", c10d.ScatterOptions, ("root", "timeout"))
    def scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any) -> Any:
        (output,) = outputs
        out = array_of("scatter", output, writes=True)
        whole = None
        if opts.rootRank == self._rank:
            (pieces,) = inputs
            check_list("scatter", pieces, self._size, "scatter_list")
            views = [array_of("scatter", each, writes=False) for each in pieces]
            check_alike("scatter", [*views, out])
            whole = np.concatenate([view.reshape(-1) for view in views])
        how = {"out": room_for(out), "counts": [out.size] * self._size, **_how(opts)}
        call = self.comm.scatter(whole, opts.rootRank, **how)
        return _work(opts, outputs, [call], _copies([out]))

    @collective("all_to_all", c10d.AllToAllOptions)
    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        check_list("all_to_all", outputs, self._size, "output_tensor_list")
        check_list("all_to_all", inputs, self._size, "input_tensor_list")
        xs = [array_of("all_to_all", each, writes=False).reshape(-1) for each in inputs]
        outs = [array_of("all_to_all", each, writes=True) for each in outputs]
        check_dtypes("all_to_all", [*xs, *outs])
        x, room = np.concatenate(xs), np.empty(sum(out.size for out in outs), outs[0].dtype)
        call = self._all_to_all(x, xs, outs, room, opts)
        return _work(opts, outputs, [call], partial(deliver, outs))

    @collective("all_to_all", c10d.AllToAllOptions, ("timeout",), of_lists=False)
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any
    ) -> Any:
        x = array_of("all_to_all", input, writes=False)
        out = array_of("all_to_all", output, writes=True)
        # The call writes to the tensor itself, unless it is strided or the input shares its memory.
        is_apart = out.flags.c_contiguous and not np.may_share_memory(x, out)
        room = out.reshape(-1) if is_apart else np.empty(out.size, out.dtype)
        if input_splits or output_splits:
            xs = pieces_of(x, input_splits, self._size, "input")
            outs = pieces_of(out, output_splits, self._size, "output")
            call = self._all_to_all(x.reshape(-1), xs, outs, room, opts)
        elif x.size == out.size and x.size % self._size == 0:
            call = self.comm.all_to_all(x.reshape(-1), out=room, **_how(opts))
        else:
            raise ValueError(
                f"all_to_all: the input has {counted(x.size, 'element')}, and the output "
                f"{out.size}; without split sizes they have as many, a multiple of {self._size}"
            )
        return _work(opts, [output], [call], None if is_apart else partial(deliver, [out]))

    alltoall_base = all_to_all_single

    def _all_to_all(
        self,
        x: np.ndarray,
        xs: Sequence[np.ndarray],
        outs: Sequence[np.ndarray],
        room: np.ndarray,
        opts: Any,
    ) -> Any:
        """Send the pieces `xs` of `x` to the ranks; receive pieces as large as `outs` in `room`."""
        counts, expected = tuple(each.size for each in xs), [each.size for each in outs]
        how = {"algorithm": "auto", "out": room, "expected": expected, **_how(opts)}
        return compound.all_to_all(self.comm._runner, x, counts, **how)

    # --- messages between two ranks ---

    @collective("send")
    def send(self, tensors: Sequence[Any], peer: int, tag: int) -> Any:
        (tensor,) = tensors
        x = array_of("send", tensor, writes=False).reshape(-1)
        return TensorMessage(self.comm.send(x, peer, tag, async_op=True), tensors, self._rank)

    @collective("recv")
    def recv(self, tensors: Sequence[Any], peer: int, tag: int) -> Any:
        return self._receive(tensors, peer, tag)

    @collective("recv")
    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> Any:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Sequence[Any], peer: int | None, tag: int) -> Any:
        """Receive a tensor from `peer`, or from any rank.

        In torch.distributed.pipelining several receives may write to one tensor, which it does not
        read: all but the first go to memory of their own, and are copied.
        """
        (tensor,) = tensors
        out = array_of("recv", tensor, writes=True)
        room = room_for(out)
        if self.comm._engine.endpoint.is_received_into(room):
            room = np.empty_like(room)
        copy = None if np.may_share_memory(room, out) else partial(deliver, [out])
        return TensorMessage(self.comm.recv(room, peer, tag, async_op=True), tensors, peer, copy)

    # --- barriers, the end ---

    @collective("barrier", c10d.BarrierOptions, ("timeout",))
    def barrier(self, opts: Any) -> Any:
        return _work(opts, [], [self.comm.barrier(**_how(opts))])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        # The error of a barrier names all ranks that are missing, with `wait_all_ranks` or without.
        self.comm.barrier(timeout_s=seconds_of(timeout))

    def shutdown(self) -> None:
        """End the group.  Logs errors, such as the loss of a rank: torch has more groups to end.

        Other ranks may end groups in another order.  So this rank waits only `ENDING_S` for them.
        """
        self._end("its process group", ENDING_S)

    def _end(self, place: str, seconds: float) -> bool:
        """End the group at the end of `place`; return whether other ranks were gone.

        Waits for the others for at most `seconds`; over MPI until the timeout: a broken
        group ends the process.
        """
        comm, others_gone = self.comm, False
        may_break, had_errors = is_forgettable(comm), comm.broken or comm._ending.is_busy
        try:
            comm._ending.close(place, seconds if may_break else None)
        except Exception as error:
            # Other ranks may have ended before, or end later: that is no error.  The error of an
            # asynchronous call is one.
            gone = isinstance(error, rr.PeerLostError | rr.PeerTimeoutError)
            others_gone = gone and not had_errors and not comm._ending.closed
            level = logging.INFO if others_gone else logging.WARNING
            _log.log(level, "process group %s ended with an error: %s", self._name, error)
            if may_break:
                comm.leave(_ENDED)
        finally:
            forget(comm)
        return others_gone

    def abort(self) -> None:
        """End the group without the other ranks, whose next call raises PeerLostError."""
        self.comm.leave("its process group was aborted")
        forget(self.comm)


def _ranks_here(comm: rr.Communicator) -> int:
    """Return the number of the job's ranks on this host; `comm` is that of the group being made.

    If the group of all ranks is of another backend, return the number of all ranks.
    """
    if not dist.is_initialized():
        return comm.local_size
    world = dist.group.WORLD
    return world.comm.local_size if isinstance(world, RingReduceGroup) else dist.get_world_size()


_ENDED = "its process group was destroyed"
"""Text of the reason why this rank leaves, for the other ranks."""


def _how(opts: Any) -> dict[str, Any]:
    return {"timeout_s": seconds_of(opts.timeout), "async_op": opts.asyncOp}


def _is_of_a_bucket() -> bool:
    """Return whether DistributedDataParallel calls `allreduce` on a bucket, in a backward pass.

    No other library keeps the address of a bucket, and no program resizes a bucket.
    """
    # The caller is the first function outside this package: with a profiler, more functions of this
    # package are between.
    frame: Any = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _BACKWARD


def _copies(outs: Sequence[np.ndarray]) -> Callable[..., None] | None:
    """Return the function that copies results to strided arrays; None if no array is strided."""
    return None if all(out.flags.c_contiguous for out in outs) else partial(deliver_each, outs)


def _work(
    opts: Any,
    tensors: Sequence[Any],
    calls: Sequence[Any] = (),
    deliver: Callable[..., None] | None = None,
) -> Any:
    """Return the Work of `calls`, results or Works; `deliver` copies the results to `tensors`."""
    if opts.asyncOp:
        return AsyncWork(calls, tensors, deliver)
    if deliver is not None:
        deliver(*calls)
    return _DONE
