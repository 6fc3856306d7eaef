"""A process group of torch whose collectives are calls of a communicator."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import ringreduce as rr
from ringreduce.cores import cores
from ringreduce.process_exit import forget
from ringreduce.torch.calling import collective
from ringreduce.torch.shared import LEAST_BYTES, SharedStorages
from ringreduce.torch.sparse import all_reduce_sparse
from ringreduce.torch.tensors import array_of, check, check_list, flat
from ringreduce.torch.works import Finished, FromAnyRank, Message, UnderWay, seconds_of

_log = logging.getLogger("ringreduce.torch")
_PREMUL_SUM = dist.ReduceOp.RedOpType.PREMUL_SUM
_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
    _PREMUL_SUM: "sum",
}
_OF_BOOLS = {"sum": "or", "prod": "and"}
"""The ops for arrays of truth values, in place of arithmetic."""
_PIECES_TAG = 1 << 30
"""The tag of the messages of `alltoall`, above the tags of torch's send and recv."""
_WAITS_S = 0.01
"""Seconds that an asynchronous call waits for other ranks in the caller's thread, where ranks have
no second core each.  Training is faster so than by a thread that takes a core from the backward
pass; and a call that waits longer may be behind one of another group."""
_BACKWARD = torch.autograd.graph.__name__
"""The module whose functions run backward passes."""
_DONE = Finished()


class RingReduceGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch has no types here
    """The group of the ranks that share a store."""

    def __init__(self, options: Any, backend: str, moves: bool) -> None:
        """Connect the ranks by the store in `options`.  Collective among them.

        `backend` is the name of the backend.  `moves`: tensors that are reduced again are moved to
        registered memory.
        """
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        seconds = options.timeout.total_seconds()
        self.comm: rr.Communicator = rr.init(
            rendezvous=options.store, rank=rank, size=size, timeout_s=min(seconds, _LONGEST_S)
        )
        ranks = dist.get_world_size() if dist.is_initialized() else size
        if cores() < 2 * ranks:
            self.comm.begin_calls_here(_WAITS_S)
        self.storages = SharedStorages(self.comm) if size > 1 else None
        """The storages in registered memory."""
        self._moves = moves
        self._rank, self._size, self._backend = rank, size, backend
        self._name, self._description = options.group_id, "undefined"

    # --- attributes of a group that torch reads ---

    def getBackendName(self) -> str:  # noqa: N802 - torch's names
        return self._backend

    def getRank(self) -> int:  # noqa: N802
        return int(self._rank)

    def getSize(self) -> int:  # noqa: N802
        return int(self._size)

    def getGroupName(self) -> str:  # noqa: N802
        return str(self._name)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def _get_backend(self, device: Any) -> Any:
        if device.type != "cpu":
            raise RuntimeError(f"the group has no backend for {device}: it is for the CPU")
        return self

    def rank(self) -> int:
        return int(self._rank)

    def size(self) -> int:
        return int(self._size)

    def name(self) -> str:
        return self._backend

    @property
    def group_name(self) -> str:
        return str(self._name)

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    # --- reductions ---

    @collective("all_reduce", c10d.AllreduceOptions, ("op", "timeout"))
    def allreduce(self, tensors: Sequence[Any], opts: Any) -> Any:
        timeout_s, is_async, calls = seconds_of(opts.timeout), opts.asyncOp, []
        for tensor in tensors:
            if tensor.is_sparse:
                all_reduce_sparse(self.comm, tensor, opts.reduceOp.op, timeout_s)
                continue
            x = self._to_reduce(tensor)
            self._prepare(opts.reduceOp, x)
            op = _op(opts.reduceOp, x)
            calls += [self.comm.all_reduce(x, op, out=x, timeout_s=timeout_s, async_op=is_async)]
        return _work(opts, tensors, calls)

    def _to_reduce(self, tensor: Any) -> np.ndarray:
        """Return the array of a tensor to be all-reduced, in registered memory if it is there."""
        if self.storages is not None and tensor.nbytes >= LEAST_BYTES and tensor.is_contiguous():
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
            self._prepare(opts.reduceOp, x)
            by_op.setdefault(_op(opts.reduceOp, x), []).append(x)
        calls = [
            self.comm.all_reduce(alike, op, out=alike, **_how(opts)) for op, alike in by_op.items()
        ]
        return _work(opts, tensors, calls)

    @collective("reduce", c10d.ReduceOptions, ("root", "op", "timeout"))
    def reduce(self, tensors: Sequence[Any], opts: Any) -> Any:
        calls = []
        for tensor in tensors:
            x = array_of("reduce", tensor, writes=True, reduces=True)
            self._prepare(opts.reduceOp, x)
            out = x if opts.rootRank == self._rank else None
            op = _op(opts.reduceOp, x)
            calls += [self.comm.reduce(x, opts.rootRank, op, out=out, **_how(opts))]
        return _work(opts, tensors, calls)

    @collective("reduce_scatter", c10d.ReduceScatterOptions, ("op", "timeout"))
    def reduce_scatter(
        self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any
    ) -> Any:
        calls, outs = [], []
        for output, pieces in zip(outputs, inputs, strict=True):
            check_list("reduce_scatter", pieces, self._size, "input_list")
            views = [
                array_of("reduce_scatter", each, writes=False, reduces=True) for each in pieces
            ]
            out = array_of("reduce_scatter", output, writes=True)
            _check_alike("reduce_scatter", [*views, out])
            x = np.concatenate([view.reshape(-1) for view in views])
            calls += [self._reduce_scatter(x, out, opts)]
            outs += [out]
        return _work(opts, outputs, calls, partial(_deliver_each, outs))

    @collective("reduce_scatter", c10d.ReduceScatterOptions, of_lists=False)
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Any:
        return _work(opts, [output], [self._reduce_scatter_single(output, input, opts)])

    _reduce_scatter_base = reduce_scatter_single

    @collective("reduce_scatter", c10d.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
    ) -> Any:
        return _work(opts, outputs, _each(self._reduce_scatter_single, outputs, inputs, opts))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Any:
        x = flat("reduce_scatter", input, writes=False, reduces=True)
        out = flat("reduce_scatter", output, writes=True)
        if x.size != self._size * out.size:
            raise ValueError(
                f"reduce_scatter: the input has {x.size} elements, and the output {out.size}; "
                f"the input needs {self._size} times as many"
            )
        return self._reduce_scatter(x, out, opts)

    def _reduce_scatter(self, x: np.ndarray, out: np.ndarray, opts: Any) -> Any:
        """Reduce `x`; write this rank's part to `out`, which may be a part of `x`, if contiguous.

        Returns the part, or its Work.
        """
        if opts.reduceOp.op == _PREMUL_SUM:
            x = x.copy()
        self._prepare(opts.reduceOp, x)
        into = out.reshape(-1) if out.flags.c_contiguous else None
        return self.comm.reduce_scatter(x, _op(opts.reduceOp, x), out=into, **_how(opts))

    def _prepare(self, op: Any, x: np.ndarray) -> None:
        """Multiply `x` by the factor of PREMUL_SUM."""
        if op.op == _PREMUL_SUM:
            _, factor = op.__getstate__()  # torch 2.9 has no attribute for it
            x *= x.dtype.type(factor) if isinstance(factor, float) else factor.numpy()

    # --- copies ---

    @collective("broadcast", c10d.BroadcastOptions, ("root", "timeout"))
    def broadcast(self, tensors: Sequence[Any], opts: Any) -> Any:
        calls = []
        for tensor in tensors:
            x = array_of("broadcast", tensor, writes=opts.rootRank != self._rank)
            calls += [self.comm.broadcast(x, opts.rootRank, out=x, **_how(opts))]
        return _work(opts, tensors, calls)

    @collective("all_gather", c10d.AllgatherOptions, ("timeout",))
    def allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Any:
        return self._allgather(outputs, inputs, opts)

    def _allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Any:
        """Gather each of `inputs` from all ranks; `outputs` has a list of tensors for each."""
        calls, every = [], []
        for pieces, input in zip(outputs, inputs, strict=True):
            check_list("all_gather", pieces, self._size, "tensor_list")
            x = array_of("all_gather", input, writes=False).reshape(-1)
            outs = [array_of("all_gather", each, writes=True) for each in pieces]
            if outs[self._rank].size != x.size:
                raise ValueError(
                    f"all_gather: this rank's tensor has {x.size} elements, and its place in "
                    f"tensor_list {outs[self._rank].size}"
                )
            counts = [out.size for out in outs]
            calls += [self.comm.all_gather(x, counts=counts, **_how(opts))]
            every += [outs]
        tensors = [each for pieces in outputs for each in pieces]
        return _work(opts, tensors, calls, partial(_deliver_all, every))

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
        return _work(opts, [output], [self._all_gather_single(output, input, opts)])

    _allgather_base = all_gather_single

    @collective("all_gather", c10d.AllgatherOptions)
    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
    ) -> Any:
        return _work(opts, outputs, _each(self._all_gather_single, outputs, inputs, opts))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_single(self, output: Any, input: Any, opts: Any) -> Any:
        x = flat("all_gather", input, writes=False)
        out = flat("all_gather", output, writes=True)
        if out.size != self._size * x.size:
            raise ValueError(
                f"all_gather: the input has {x.size} elements, and the output {out.size}; "
                f"the output needs {self._size} times as many"
            )
        return self.comm.all_gather(x, counts=[x.size] * self._size, out=out, **_how(opts))

    @collective("gather", c10d.GatherOptions, ("root", "timeout"))
    def gather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Any:
        (input,) = inputs
        x = array_of("gather", input, writes=False).reshape(-1)
        outs = []
        if opts.rootRank == self._rank:
            (pieces,) = outputs
            check_list("gather", pieces, self._size, "gather_list")
            outs = [array_of("gather", each, writes=True) for each in pieces]
        call = self.comm.gather(x, opts.rootRank, **_how(opts))
        tensors = [each for pieces in outputs for each in pieces]
        return _work(opts, tensors, [call], partial(_deliver, outs) if outs else None)

    @collective("scatter", c10d.ScatterOptions, ("root", "timeout"))
    def scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any) -> Any:
        (output,) = outputs
        out = array_of("scatter", output, writes=True)
        whole = None
        if opts.rootRank == self._rank:
            (pieces,) = inputs
            check_list("scatter", pieces, self._size, "scatter_list")
            views = [array_of("scatter", each, writes=False) for each in pieces]
            _check_alike("scatter", [*views, out])
            whole = np.concatenate([view.reshape(-1) for view in views])
        call = self.comm.scatter(whole, opts.rootRank, **_how(opts))
        return _work(opts, outputs, [call], partial(_deliver, [out]))

    @collective("all_to_all", c10d.AllToAllOptions)
    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        check_list("all_to_all", outputs, self._size, "output_tensor_list")
        check_list("all_to_all", inputs, self._size, "input_tensor_list")
        xs = [array_of("all_to_all", each, writes=False).reshape(-1) for each in inputs]
        outs = [array_of("all_to_all", each, writes=True) for each in outputs]
        self._exchange(xs, outs, opts)
        return _work(opts, outputs)

    @collective("all_to_all", c10d.AllToAllOptions, ("timeout",), of_lists=False)
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any
    ) -> Any:
        x = array_of("all_to_all", input, writes=False)
        out = array_of("all_to_all", output, writes=True)
        if not output_splits and not input_splits and _can_be_cut(x, out, self._size):
            call = self.comm.all_to_all(x.reshape(-1), out=out.reshape(-1), **_how(opts))
            return _work(opts, [output], [call])
        xs = _pieces(x, input_splits, self._size, "input")
        outs = _pieces(out, output_splits, self._size, "output")
        # The call writes to the tensor itself, unless it is strided or the input shares its memory.
        is_apart = out.flags.c_contiguous and not np.may_share_memory(x, out)
        room = out.reshape(-1) if is_apart else np.empty(out.size, out.dtype)
        counts, expected = [each.size for each in xs], [each.size for each in outs]
        call = self.comm.all_to_all_checked(x.reshape(-1), counts, expected, room, **_how(opts))
        return _work(opts, [output], [call], None if is_apart else partial(_deliver, [out]))

    alltoall_base = all_to_all_single

    def _exchange(self, xs: Sequence[np.ndarray], outs: Sequence[np.ndarray], opts: Any) -> None:
        """Send the j-th of `xs` to rank j; the j-th of `outs` gets what rank j sends."""
        mine = self._rank
        if xs[mine].size != outs[mine].size:
            raise ValueError(
                f"all_to_all: this rank sends {xs[mine].size} elements to itself, and receives "
                f"{outs[mine].size}"
            )
        peers = [peer for peer in range(self._size) if peer != mine]
        sends = {peer: xs[peer] for peer in peers if xs[peer].size}
        came = {peer: np.empty(outs[peer].size, outs[peer].dtype) for peer in peers}
        recvs = {peer: room for peer, room in came.items() if room.size}
        kept = xs[mine].copy()
        self.comm.exchange(sends, recvs, _PIECES_TAG, timeout_s=seconds_of(opts.timeout))
        for peer in peers:
            outs[peer][...] = came[peer].reshape(outs[peer].shape)
        outs[mine][...] = kept.reshape(outs[mine].shape)

    # --- messages between two ranks ---

    @collective("send")
    def send(self, tensors: Sequence[Any], peer: int, tag: int) -> Any:
        (tensor,) = tensors
        x = array_of("send", tensor, writes=False).reshape(-1)
        return Message(self.comm.send(x, peer, tag, async_op=True), tensors, self._rank)

    @collective("recv")
    def recv(self, tensors: Sequence[Any], peer: int, tag: int) -> Any:
        (tensor,) = tensors
        out = flat("recv", tensor, writes=True)
        return Message(self.comm.recv(out, peer, tag, async_op=True), tensors, peer)

    @collective("recv")
    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> Any:
        (tensor,) = tensors
        return FromAnyRank(self.comm, flat("recv", tensor, writes=True), tag, tensors)

    # --- barriers, the end ---

    @collective("barrier", c10d.BarrierOptions, ("timeout",))
    def barrier(self, opts: Any) -> Any:
        return _work(opts, [], [self.comm.barrier(**_how(opts))])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        # The error of a barrier names all ranks that are missing, with `wait_all_ranks` or without.
        self.comm.barrier(timeout_s=seconds_of(timeout))

    def shutdown(self) -> None:
        """End the group.  Collective.  Logs the loss of a rank: torch has more groups to end."""
        try:
            self.comm.close()
        except (rr.PeerLostError, rr.PeerTimeoutError) as error:
            _log.warning("process group %s had lost ranks when it ended: %s", self._name, error)
        finally:
            forget(self.comm)

    def abort(self) -> None:
        """End the group without the other ranks, whose next call raises PeerLostError."""
        self.comm.leave("its process group was aborted")


_LONGEST_S = float(threading.TIMEOUT_MAX)


def _how(opts: Any) -> dict[str, Any]:
    """Return what torch's options ask of a call: its timeout, and whether to wait for it."""
    return {"timeout_s": seconds_of(opts.timeout), "async_op": opts.asyncOp}


def _is_of_a_bucket() -> bool:
    """Whether the backward pass calls `allreduce` by itself, as DistributedDataParallel has it do.

    Nobody else keeps the address of such a tensor, and it is not resized.
    """
    # Below this function: _to_reduce, allreduce, the wrapper of `collective`, the caller.
    frame: Any = sys._getframe()
    for _ in range(4):
        frame = frame and frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _BACKWARD


def _work(
    opts: Any,
    tensors: Sequence[Any],
    calls: Sequence[Any] = (),
    deliver: Callable[..., None] | None = None,
) -> Any:
    """Return the Work of calls on tensors.

    `calls` are their results, or their Works if torch does not wait at once.  `deliver` copies the
    results to the tensors.
    """
    if opts.asyncOp:
        return UnderWay(calls, tensors, deliver)
    if deliver is not None:
        deliver(*calls)
    return _DONE


def _each(
    call: Callable[..., Any], outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
) -> list[Any]:
    """Make a call of one output and one input for each pair."""
    pairs = zip(outputs, inputs, strict=True)
    return [call(output, input, opts) for output, input in pairs]


def _op(op: Any, x: np.ndarray) -> str:
    """Return the name of a ReduceOp for arrays like `x`.  Raises ValueError for an unknown one."""
    name = _OPS.get(op.op)
    if name is None:
        known = ", ".join(dict.fromkeys(_OPS.values()))
        raise ValueError(f"unknown ReduceOp {op.op}; ringreduce has {known}")
    return _OF_BOOLS.get(name, name) if x.dtype == np.bool_ else name


def _check_alike(where: str, arrays: Sequence[np.ndarray]) -> None:
    """Check that arrays have as many elements, of one dtype.  Raises ValueError."""
    if len({(array.size, array.dtype) for array in arrays}) > 1:
        kinds = ", ".join(dict.fromkeys(f"{array.dtype}[{array.size}]" for array in arrays))
        raise ValueError(f"{where}: the tensors differ: {kinds}; all need the same size and dtype")


def _can_be_cut(x: np.ndarray, out: np.ndarray, size: int) -> bool:
    """Whether both are contiguous, of one size, and their first axes cut into equal parts."""
    even = all(array.ndim and array.shape[0] % size == 0 for array in (x, out))
    return even and x.size == out.size and x.flags.c_contiguous and out.flags.c_contiguous


def _pieces(
    array: np.ndarray, lengths: Sequence[int], size: int, what: str
) -> Sequence[np.ndarray]:
    """Cut the first axis into pieces of these lengths; without any, into equal ones."""
    first = array.shape[0] if array.ndim else 0
    if not lengths:
        if first % size:
            raise ValueError(
                f"all_to_all: the {what}'s first dimension is {first}, no multiple of {size}"
            )
        lengths = [first // size] * size
    if len(lengths) != size or sum(lengths) != first:
        raise ValueError(
            f"all_to_all: {what}_split_sizes is {list(lengths)}; pass {size} lengths that add up "
            f"to {first}"
        )
    return np.split(array, np.cumsum(lengths)[:-1])


def _deliver(outs: Sequence[np.ndarray], found: np.ndarray) -> None:
    """Copy the parts of `found` to `outs`, one after another."""
    begin = 0
    for out in outs:
        out[...] = found[begin : begin + out.size].reshape(out.shape)
        begin += out.size


def _deliver_all(every: Sequence[Sequence[np.ndarray]], *found: np.ndarray) -> None:
    """Copy the parts of each result to its list of arrays."""
    for outs, result in zip(every, found, strict=True):
        _deliver(outs, result)


def _deliver_each(outs: Sequence[np.ndarray], *parts: np.ndarray) -> None:
    """Copy each part to its array, unless it is there."""
    for out, part in zip(outs, parts, strict=True):
        if not out.flags.c_contiguous:
            out[...] = part.reshape(out.shape)
