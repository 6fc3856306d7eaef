"""A process group of torch whose collectives are calls of a communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

import ringreduce as rr
from ringreduce.torch.profiles import profiled
from ringreduce.torch.sparse import all_reduce_sparse
from ringreduce.torch.tensors import array_of, check_list, flat
from ringreduce.torch.works import Finished, FromAnyRank, UnderWay, seconds_of

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
_DONE = Finished()


class RingReduceGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch has no types here
    """The group of the ranks that share a store."""

    def __init__(self, options: Any, backend: str) -> None:
        """Connect the ranks by the store in `options`.  Collective among them.

        `backend` is the name of the backend.
        """
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        seconds = options.timeout.total_seconds()
        self.comm: rr.Communicator = rr.init(
            rendezvous=options.store, rank=rank, size=size, timeout_s=min(seconds, _LONGEST_S)
        )
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

    @profiled("all_reduce")
    def allreduce(self, tensors: Sequence[Any], opts: Any) -> Any:
        for tensor in tensors:
            if tensor.is_sparse:
                timeout_s = seconds_of(opts.timeout)
                all_reduce_sparse(self.comm, tensor, opts.reduceOp.op, timeout_s)
                continue
            x = array_of("all_reduce", tensor, writes=True, reduces=True)
            self._prepare(opts.reduceOp, x)
            self.comm.all_reduce(
                x, _op(opts.reduceOp, x), out=x, timeout_s=seconds_of(opts.timeout)
            )
        return _over(opts, tensors)

    @profiled("all_reduce")
    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any) -> Any:
        xs = [array_of("all_reduce", each, writes=True, reduces=True) for each in tensors]
        by_op: dict[str, list[np.ndarray]] = {}
        for x in xs:
            self._prepare(opts.reduceOp, x)
            by_op.setdefault(_op(opts.reduceOp, x), []).append(x)
        for op, alike in by_op.items():
            self.comm.all_reduce(alike, op, out=alike, timeout_s=seconds_of(opts.timeout))
        return _over(opts, tensors)

    @profiled("reduce")
    def reduce(self, tensors: Sequence[Any], opts: Any) -> Any:
        for tensor in tensors:
            x = array_of("reduce", tensor, writes=True, reduces=True)
            self._prepare(opts.reduceOp, x)
            out = x if opts.rootRank == self._rank else None
            op = _op(opts.reduceOp, x)
            self.comm.reduce(x, opts.rootRank, op, out=out, timeout_s=seconds_of(opts.timeout))
        return _over(opts, tensors)

    @profiled("reduce_scatter")
    def reduce_scatter(
        self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any
    ) -> Any:
        for output, pieces in zip(outputs, inputs, strict=True):
            check_list("reduce_scatter", pieces, self._size, "input_list")
            views = [
                array_of("reduce_scatter", each, writes=False, reduces=True) for each in pieces
            ]
            out = array_of("reduce_scatter", output, writes=True)
            _check_alike("reduce_scatter", [*views, out])
            self._reduce_scatter(np.concatenate([view.reshape(-1) for view in views]), out, opts)
        return _over(opts, outputs)

    @profiled("reduce_scatter")
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Any:
        x = flat("reduce_scatter", input, writes=False, reduces=True)
        out = flat("reduce_scatter", output, writes=True)
        if x.size != self._size * out.size:
            raise ValueError(
                f"reduce_scatter: the input has {x.size} elements, and the output {out.size}; "
                f"the input needs {self._size} times as many"
            )
        self._reduce_scatter(x, out, opts)
        return _over(opts, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
    ) -> Any:
        return _each(self.reduce_scatter_single, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, x: np.ndarray, out: np.ndarray, opts: Any) -> None:
        """Reduce `x`, and write this rank's part to `out`, which may be a part of `x`."""
        if opts.reduceOp.op == _PREMUL_SUM:
            x = x.copy()
        self._prepare(opts.reduceOp, x)
        op = _op(opts.reduceOp, x)
        if out.flags.c_contiguous:
            self.comm.reduce_scatter(x, op, out=out.reshape(-1), timeout_s=seconds_of(opts.timeout))
        else:
            part = self.comm.reduce_scatter(x, op, timeout_s=seconds_of(opts.timeout))
            out[...] = part.reshape(out.shape)

    def _prepare(self, op: Any, x: np.ndarray) -> None:
        """Multiply `x` by the factor of PREMUL_SUM."""
        if op.op == _PREMUL_SUM:
            factor = op.factor
            x *= x.dtype.type(factor) if isinstance(factor, float) else factor.numpy()

    # --- copies ---

    @profiled("broadcast")
    def broadcast(self, tensors: Sequence[Any], opts: Any) -> Any:
        for tensor in tensors:
            x = array_of("broadcast", tensor, writes=opts.rootRank != self._rank)
            self.comm.broadcast(x, opts.rootRank, out=x, timeout_s=seconds_of(opts.timeout))
        return _over(opts, tensors)

    @profiled("all_gather")
    def allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Any:
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
            found: np.ndarray = self.comm.all_gather(
                x, counts=counts, timeout_s=seconds_of(opts.timeout)
            )
            _deliver(found, outs)
        return _over(opts, [each for pieces in outputs for each in pieces])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any
    ) -> Any:
        return self.allgather(outputs, inputs, opts)

    @profiled("all_gather")
    def all_gather_single(self, output: Any, input: Any, opts: Any) -> Any:
        x = flat("all_gather", input, writes=False)
        out = flat("all_gather", output, writes=True)
        if out.size != self._size * x.size:
            raise ValueError(
                f"all_gather: the input has {x.size} elements, and the output {out.size}; "
                f"the output needs {self._size} times as many"
            )
        counts = [x.size] * self._size
        self.comm.all_gather(x, counts=counts, out=out, timeout_s=seconds_of(opts.timeout))
        return _over(opts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
    ) -> Any:
        return _each(self.all_gather_single, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @profiled("gather")
    def gather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Any:
        (input,) = inputs
        x = array_of("gather", input, writes=False).reshape(-1)
        outs = []
        if opts.rootRank == self._rank:
            (pieces,) = outputs
            check_list("gather", pieces, self._size, "gather_list")
            outs = [array_of("gather", each, writes=True) for each in pieces]
        found: np.ndarray | None = self.comm.gather(
            x, opts.rootRank, timeout_s=seconds_of(opts.timeout)
        )
        if found is not None:
            _deliver(found, outs)
        return _over(opts, [each for pieces in outputs for each in pieces])

    @profiled("scatter")
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
        found: np.ndarray = self.comm.scatter(
            whole, opts.rootRank, timeout_s=seconds_of(opts.timeout)
        )
        out[...] = found.reshape(out.shape)
        return _over(opts, outputs)

    @profiled("all_to_all")
    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        check_list("all_to_all", outputs, self._size, "output_tensor_list")
        check_list("all_to_all", inputs, self._size, "input_tensor_list")
        xs = [array_of("all_to_all", each, writes=False).reshape(-1) for each in inputs]
        outs = [array_of("all_to_all", each, writes=True) for each in outputs]
        self._exchange(xs, outs, opts)
        return _over(opts, outputs)

    @profiled("all_to_all")
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any
    ) -> Any:
        x = array_of("all_to_all", input, writes=False)
        out = array_of("all_to_all", output, writes=True)
        if not output_splits and not input_splits and _can_be_cut(x, out, self._size):
            self.comm.all_to_all(
                x.reshape(-1), out=out.reshape(-1), timeout_s=seconds_of(opts.timeout)
            )
            return _over(opts, [output])
        xs = _pieces(x, input_splits, self._size, "input")
        outs = _pieces(out, output_splits, self._size, "output")
        self._all_to_all_of_counts(x, [each.size for each in xs], out, outs, opts)
        return _over(opts, [output])

    alltoall_base = all_to_all_single

    def _all_to_all_of_counts(
        self, x: np.ndarray, counts: Sequence[int], out: np.ndarray, outs: Any, opts: Any
    ) -> None:
        """Send the pieces of `x`, of so many elements; `outs` are the pieces of `out`."""
        expected = [each.size for each in outs]
        is_apart = out.flags.c_contiguous and not np.may_share_memory(x, out)
        room = out.reshape(-1) if is_apart else np.empty(out.size, out.dtype)
        timeout_s = seconds_of(opts.timeout)
        self.comm.all_to_all_checked(x.reshape(-1), counts, expected, room, timeout_s)
        if not is_apart:
            out[...] = room.reshape(out.shape)

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

    @profiled("send")
    def send(self, tensors: Sequence[Any], peer: int, tag: int) -> Any:
        (tensor,) = tensors
        x = array_of("send", tensor, writes=False).reshape(-1)
        return UnderWay(self.comm.send(x, peer, tag, async_op=True), tensors, self._rank)

    @profiled("recv")
    def recv(self, tensors: Sequence[Any], peer: int, tag: int) -> Any:
        (tensor,) = tensors
        out = flat("recv", tensor, writes=True)
        return UnderWay(self.comm.recv(out, peer, tag, async_op=True), tensors, peer)

    @profiled("recv")
    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> Any:
        (tensor,) = tensors
        return FromAnyRank(self.comm, flat("recv", tensor, writes=True), tag, tensors)

    # --- barriers, the end ---

    @profiled("barrier")
    def barrier(self, opts: Any = None) -> Any:
        self.comm.barrier(timeout_s=None if opts is None else seconds_of(opts.timeout))
        return _DONE

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        # The error of a barrier names all ranks that are missing, with `wait_all_ranks` or without.
        self.comm.barrier(timeout_s=seconds_of(timeout))

    def shutdown(self) -> None:
        """End the group.  Collective."""
        self.comm.close()

    def abort(self) -> None:
        """End the group without the other ranks, whose next call raises PeerLostError."""
        self.comm.leave("its process group was aborted")


_LONGEST_S = float(threading.TIMEOUT_MAX)


def _over(opts: Any, tensors: Sequence[Any]) -> Any:
    """Return the Work of a call that is over: a Work of its own only if the caller asks for one."""
    return Finished(tensors) if opts.asyncOp else _DONE


def _each(
    call: Callable[..., Any], outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
) -> Any:
    """Make a call of one output and one input for each pair."""
    for output, input in zip(outputs, inputs, strict=True):
        call(output, input, opts)
    return _over(opts, outputs)


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


def _deliver(found: np.ndarray, outs: Sequence[np.ndarray]) -> None:
    """Copy the parts of `found` to `outs`, one after another."""
    begin = 0
    for out in outs:
        out[...] = found[begin : begin + out.size].reshape(out.shape)
        begin += out.size
