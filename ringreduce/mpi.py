"""Communicators of mpi4py whose reductions ringreduce makes: `wrap`."""

# ruff: noqa: N802 - the names of methods are mpi4py's

from __future__ import annotations

import contextlib
from collections import Counter
from functools import cache, partialmethod
from importlib.util import find_spec
from operator import index
from sys import intern
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from ringreduce.errors import shown

if TYPE_CHECKING:
    _Intracomm = MPI.Intracomm
else:
    _Intracomm = object  # each kind of communicator has it as another base

_KINDS = {"SUM PROD": "iufc", "MIN MAX": "iuf", "BAND BOR BXOR": "iu", "LAND LOR LXOR": "b"}
"""Ops of MPI -> the kinds of dtypes that both libraries reduce."""
_OPS = {
    getattr(MPI, op).handle: (intern(op.lower().lstrip("bl")), kinds)
    for ops, kinds in _KINDS.items()
    for op in ops.split()
}
"""Handle of an op -> ringreduce's name of the op, and these kinds."""
_KINDS_OF_OBJECTS = {"iufc": "iufc", "iu": "iub"}
"""The same kinds -> the kinds of arrays that mpi4py's op of objects reduces by elements."""
_NOT_NUMPYS = ("PACKED", "REAL16", "COMPLEX4", "COMPLEX32", "INTEGER16", "F_BOOL", "LOGICAL")
"""Prefixes of types whose elements NumPy lacks, or has in another way than mpi4py says."""
_DTYPES = {
    datatype.handle: np.dtype(datatype.typestr)
    for name, datatype in vars(MPI).items()
    if isinstance(datatype, MPI.Datatype) and datatype != MPI.DATATYPE_NULL
    if datatype.typestr[0] in "biufc" and not name.startswith(_NOT_NUMPYS)
}
"""Handle of a basic type -> its dtype."""
_MAKERS = (
    *("Split", "Split_type", "Create", "Create_group", "Create_cart", "Create_graph", "Sub"),
    *("Create_dist_graph", "Create_dist_graph_adjacent"),
)
"""Methods that make communicators, which are to be wrapped, too."""


def _memory(buffer: Any, writable: bool) -> tuple[str, Any]:
    """Return mpi4py's key of the type of a buffer, and its bytes.  Raises what mpi4py raises.

    The key is "" if only DLPack has it.  The bytes are None on a GPU, unless CuPy can view them.
    """
    if buffer is None or buffer is MPI.BOTTOM:
        return "none", np.empty(0, np.uint8)
    if hasattr(buffer, "__cuda_array_interface__"):
        if find_spec("cupy") is None:
            return "none", None
        import cupy

        array = cupy.asarray(buffer)
        is_contiguous = array.flags.c_contiguous or array.flags.f_contiguous
        return array.dtype.char, array.ravel("K").view(np.uint8) if is_contiguous else None
    key = ""
    with contextlib.suppress(TypeError, ValueError):
        view = memoryview(buffer)
        key = view.format.lstrip("@<")
        if view.f_contiguous:
            buffer = np.asarray(view).T  # mpi4py's buffers are C-ordered; the memory is the same
    memory: Any = MPI.buffer.frombuffer(buffer, not writable)
    return key, np.frombuffer(memory, np.uint8)


def _message(spec: Any, blocks: int, writable: bool = False) -> tuple[MPI.Datatype, Any] | None:
    """Return the type of a specification of a buffer, and a flat array over its elements.

    Its count is that of one of `blocks` blocks.  None: MPI makes the call, or raises an error.
    """
    buffer, *rest = spec if isinstance(spec, (list, tuple)) else (spec, None)
    if len(rest) == 1:
        rest = [None, *rest] if isinstance(rest[0], (MPI.Datatype, str)) else [*rest, None]
    if len(rest) == 2:
        count, datatype = rest
        rest = [*(count if isinstance(count, (list, tuple)) else (count, None)), datatype]
    count, displacement, datatype = rest
    key, data = _memory(buffer, writable)
    if not isinstance(datatype, MPI.Datatype):
        key = datatype or key or np.from_dlpack(buffer).dtype.char
        datatype = MPI._typedict.get(key, MPI.DATATYPE_NULL)
    dtype = _DTYPES.get(datatype.handle)
    if dtype is None or data is None:
        return None
    begin, room = index(displacement or 0) * dtype.itemsize, dtype.itemsize * blocks
    if count is None and (len(data) - begin) % room:
        return None
    end = len(data) if count is None else begin + index(count) * room
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"message: bytes {begin} to {end} of a buffer of {len(data)}")
    return datatype, data[begin:end].view(dtype)


def _is_in_place(sendbuf: Any) -> bool:
    return sendbuf is None or sendbuf is MPI.IN_PLACE


class _Request(MPI.Grequest):
    """A request of MPI for a Work.  If waited for by itself, it raises the Work's error."""

    errors: list[Exception]

    def __new__(cls, work: rr.Work[Any]) -> Self:
        errors: list[Exception] = []

        def fail(_: MPI.Status) -> None:
            if errors:
                raise errors[0]

        def complete(work: rr.Work[Any]) -> None:
            try:
                work.wait()
            except Exception as error:
                errors.append(error)
            started.Complete()

        started = MPI.Grequest.Start(fail)
        self = super().__new__(cls, started)
        self.errors = errors
        work.then(complete)
        return self

    def _complete(self, method: str, status: MPI.Status | None = None) -> Any:
        try:
            return getattr(super(), method)(status)
        except MPI.Exception as error:
            raise (self.errors[0].with_traceback(None) if self.errors else error) from None

    Wait: Any = partialmethod(_complete, "Wait")
    Test: Any = partialmethod(_complete, "Test")
    wait: Any = partialmethod(_complete, "wait")
    test: Any = partialmethod(_complete, "test")


class _Routed(_Intracomm):
    """The methods of wrapped communicators that are not MPI's."""

    routes: Counter[tuple[str, str]]
    _made: Any
    """The Communicator; None: not yet made."""
    _is_threaded = False
    """Whether all ranks have MPI_THREAD_MULTIPLE, so that another thread may complete requests."""
    _likeness: np.ndarray
    """Memory for `_run_on_objects`."""

    def __new__(cls, comm: Any = None) -> Self:
        """Return an object over the handle of `comm`.  mpi4py makes duplicates without it."""
        self = super().__new__(cls, comm)
        self.routes, self._made = Counter(), None
        return self

    def __reduce__(self) -> Any:
        return wrap, (type(self).__mro__[2](self),)

    def _make(self) -> Any:
        self._made = comm = rr.init(MPI.Intracomm(self))
        level = comm.all_reduce(np.array(MPI.Query_thread()), "min")
        self._is_threaded, self._likeness = level == MPI.THREAD_MULTIPLE, np.empty(2, np.int64)
        return comm

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        x = recvbuf if type(sendbuf) is not np.ndarray and _is_in_place(sendbuf) else sendbuf
        if type(x) is np.ndarray and type(recvbuf) is np.ndarray and x.dtype is recvbuf.dtype:
            name, kinds = _OPS.get(getattr(op, "handle", None), ("", ""))
            is_flat = x.flags.c_contiguous and recvbuf.flags.carray
            if is_flat and x.dtype.kind in kinds:  # the quick way
                if x.ndim != 1 or recvbuf.ndim != 1:
                    x, recvbuf = x.reshape(-1), recvbuf.reshape(-1)
                (self._made or self._make()).all_reduce(x, name, out=recvbuf)
                self.routes["Allreduce", "ringreduce"] += 1
                return
        self._run("Allreduce", sendbuf, recvbuf, op)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Any:
        return self._run("Iallreduce", sendbuf, recvbuf, op)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> None:
        self._run("Reduce", sendbuf, recvbuf, op, root)

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        return self._run("Ireduce", sendbuf, recvbuf, op, root)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        self._run("Reduce_scatter_block", sendbuf, recvbuf, op)

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM
    ) -> None:
        self._run("Reduce_scatter", sendbuf, recvbuf, recvcounts, op)

    def _run(self, method: str, *given: Any) -> Any:
        """Make the call of mpi4py's `method` with these arguments."""
        call, async_op = self._call(method, *given), method[0] == "I"
        # To make ours would block in a call that must not.  All ranks have made it, or none.
        if call is None or (async_op and not self._is_threaded):
            self.routes[method, "MPI"] += 1
            return getattr(super(), method)(*given)
        collective, x, out, how = call
        done = getattr(self._made or self._make(), collective)(x, out=out, async_op=async_op, **how)
        self.routes[method, "ringreduce"] += 1
        return _Request(done) if async_op else None

    def _call(self, method: str, sendbuf: Any, recvbuf: Any, *rest: Any) -> Any:
        """Return the collective, its arrays and its arguments; None: MPI makes the call."""
        me, size, in_place = self.Get_rank(), self.Get_size(), _is_in_place(sendbuf)
        counts, op = rest if method == "Reduce_scatter" else (None, rest[0])
        root = rest[1] if method in ("Reduce", "Ireduce") else None
        name, kinds = _OPS.get(getattr(op, "handle", None), ("", ""))
        if not name or root not in (None, *range(size)):
            return None
        gets, blocks = root in (None, me), size if method == "Reduce_scatter_block" else 1
        received: Any = None, None
        if gets:
            received = _message(recvbuf, blocks if in_place else 1, writable=True)
        sent = received if in_place and gets else _message(sendbuf, blocks)
        if sent is None or received is None:
            return None
        (datatype, x), (wanted, out) = sent, received
        if x.dtype.kind not in kinds or (datatype == MPI.BYTE and kinds != "iu"):
            return None
        if wanted not in (None, datatype):
            raise ValueError(f"{method}: mismatch in send and receive MPI datatypes")
        if root is not None:
            return "reduce", x, out, {"op": name, "root": root}
        if "scatter" not in method:
            return "all_reduce", x, out, {"op": name}
        if method == "Reduce_scatter" and counts is None and not in_place:
            counts = super().allgather(len(out))  # as mpi4py does
        total = len(x) if counts is None else sum(counts)
        split = [total // size + (rank < total % size) for rank in range(size)]
        if counts is not None and list(counts) != split:
            return None
        if in_place:
            x, out = x.copy(), out[: split[me]]
        return "reduce_scatter", x, out, {"op": name}

    def _run_on_objects(self, method: str, x: Any, op: Any, *root: int) -> Any:
        """Make the call of mpi4py's `method`.  Collective, if the op has `_KINDS_OF_OBJECTS`."""
        name, kinds = _OPS.get(getattr(op, "handle", None), ("", ""))
        if kinds in _KINDS_OF_OBJECTS:
            comm, number, both = self._made or self._make(), 0, self._likeness
            is_array = type(x) is np.ndarray and x.ndim and x.dtype.isnative
            if is_array and x.dtype.kind in _KINDS_OF_OBJECTS[kinds]:
                number = abs(hash((ord(x.dtype.char), *x.shape))) >> 1 | 1
            both[0], both[1] = number, -number
            comm.all_reduce(both, "min", out=both)
            if both[0] == -both[1] != 0:  # all ranks have arrays of one dtype and shape
                self.routes[method, "ringreduce"] += 1
                return comm.reduce(x, *root, name) if root else comm.all_reduce(x, name)
        self.routes[method, "MPI"] += 1
        return getattr(super(), method)(x, op, *root)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        return self._run_on_objects("allreduce", sendobj, op)

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        return self._run_on_objects("reduce", sendobj, op, root)

    def _make_wrapped(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(getattr(super(), method)(*args, **kwargs))

    def _end(self, method: str) -> None:
        made, self._made, self._is_threaded = self._made, None, False
        try:
            if made is not None:
                made.close()
        finally:
            getattr(super(), method)()

    Free: Any = partialmethod(_end, "Free")
    Disconnect: Any = partialmethod(_end, "Disconnect")


@cache
def _wrapped_kind(kind: Any) -> Any:
    """Return the class of wrapped communicators of a class of mpi4py's, or of a subclass."""
    names = [name for name in _MAKERS if hasattr(kind, name)]
    makers = {name: partialmethod(_Routed._make_wrapped, name) for name in names}
    return type(kind.__name__, (_Routed, kind), {**makers, "__doc__": kind.__doc__})


def _wrapped(found: Any) -> Any:
    """Wrap an intracommunicator; return MPI.COMM_NULL and wrapped ones as they are."""
    if isinstance(found, _Routed) or found == MPI.COMM_NULL:
        return found
    kind: Any = type(found)
    return _wrapped_kind(kind)(found)


def wrap(comm: MPI.Intracomm) -> Any:
    """Return a communicator of mpi4py whose reductions ringreduce makes.

    Not collective.  It is over the same handle as `comm`, and equal to it.  Allreduce, Reduce,
    Reduce_scatter_block, Reduce_scatter, Iallreduce, Ireduce, and allreduce and reduce of NumPy
    arrays are calls of ringreduce, for predefined ops on numbers; everything else is MPI's.  The
    first of these calls that blocks makes a `Communicator`, which Free and Disconnect close.

    Args:
        comm: an intracommunicator of mpi4py, such as ``MPI.COMM_WORLD``.

    Returns:
        An object of a subclass of comm's class.  Its `routes` counts calls by method and library:
        ``("Allreduce", "ringreduce")`` or ``("Allreduce", "MPI")`` -> the number of calls.

    Raises:
        TypeError: `comm` is no communicator of mpi4py.
        ValueError: `comm` is ``MPI.COMM_NULL`` or an intercommunicator.

    Example:
        On two ranks, started by ``mpirun -n 2``:

        >>> from mpi4py import MPI
        >>> comm = rr.wrap(MPI.COMM_WORLD)
        >>> comm.allreduce(np.array([1.0, 2.0]))
        array([2., 4.])
    """
    if isinstance(comm, MPI.Comm) and (comm == MPI.COMM_NULL or comm.Is_inter()):
        which = "MPI.COMM_NULL" if comm == MPI.COMM_NULL else "an intercommunicator"
        raise ValueError(f"wrap: comm is {which}; pass an intracommunicator")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            f"wrap: comm is {shown(comm)}; pass an intracommunicator, such as MPI.COMM_WORLD"
        )
    return _wrapped(comm)
