"""Communicators of mpi4py whose reductions ringreduce makes: `wrap`."""

# ruff: noqa: N802 - the names of methods are mpi4py's

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from operator import index
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from ringreduce.errors import shown

if TYPE_CHECKING:
    _Intracomm = MPI.Intracomm
else:
    _Intracomm = object  # each kind of communicator has it as another base

_ON_NUMBERS = {"SUM": "iufc", "PROD": "iufc"}
_ON_BITS = {"BAND": "iu", "BOR": "iu", "BXOR": "iu"}
_OTHERS = {"MIN": "iuf", "MAX": "iuf", "LAND": "b", "LOR": "b", "LXOR": "b"}
_OPS = {
    getattr(MPI, op).handle: (op.lower().lstrip("bl"), kinds)
    for op, kinds in {**_ON_NUMBERS, **_ON_BITS, **_OTHERS}.items()
}
"""Handle of an op -> ringreduce's name of the op, and the kinds of dtypes that both reduce."""
_OPS_OF_OBJECTS = {
    getattr(MPI, op).handle: (op.lower().lstrip("b"), kinds + "b" * (op in _ON_BITS))
    for op, kinds in {**_ON_NUMBERS, **_ON_BITS}.items()
}
"""The same for the ops that mpi4py applies to arrays element by element."""
_ON_BYTES = [getattr(MPI, op).handle for op in _ON_BITS]
_NOT_NUMPYS = ("PACKED", "REAL16", "COMPLEX", "INTEGER16", "F_BOOL", "LOGICAL")
"""Prefixes of types whose elements NumPy lacks, or has in another way than mpi4py says."""
_COMPLEX = ("COMPLEX", "COMPLEX8", "COMPLEX16")
"""Types with such a prefix that NumPy has."""
_DTYPES = {
    datatype.handle: np.dtype(datatype.typestr)
    for name, datatype in vars(MPI).items()
    if isinstance(datatype, MPI.Datatype) and datatype != MPI.DATATYPE_NULL
    if datatype.typestr[0] in "biufc" and (name in _COMPLEX or not name.startswith(_NOT_NUMPYS))
}
"""Handle of a basic type -> its dtype."""
_NO_OP = ("", "")
_ALLREDUCE = ("Allreduce", "ringreduce")
_MAKERS = (
    *("Split", "Split_type", "Create", "Create_group", "Create_cart", "Create_graph", "Sub"),
    *("Create_dist_graph", "Create_dist_graph_adjacent"),
)
"""Methods that make communicators, which are to be wrapped, too."""


_Elements = tuple[MPI.Datatype, Any]
"""The type of a buffer specification, and a flat array over its elements."""


def _parts(spec: Any) -> tuple[Any, Any, Any, Any]:
    """Return the buffer, count, displacement and type of a specification; None: not given."""
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    buffer, *rest = spec
    if len(rest) == 3:
        return buffer, *rest
    if len(rest) == 1 and isinstance(rest[0], (MPI.Datatype, str)):
        return buffer, None, None, rest[0]
    count, datatype = rest if len(rest) == 2 else (*rest, None)
    count, displacement = count if isinstance(count, (list, tuple)) else (count, None)
    return buffer, count, displacement, datatype


def _typecode(buffer: Any) -> str:
    """Return mpi4py's key of the type of a buffer."""
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is not None:
        return str(np.dtype(interface["typestr"]).char)
    try:
        code = memoryview(buffer).format.lstrip("@<")
    except TypeError:
        code = np.from_dlpack(buffer).dtype.char
    if code.startswith(">"):
        raise BufferError(f"message: format {code!r} has not this machine's byte order")
    return str(code)


def _bytes(buffer: Any, writable: bool) -> Any:
    """View the memory of a buffer; None: on a GPU, without CuPy.  Raises what mpi4py raises."""
    if hasattr(buffer, "__cuda_array_interface__"):
        if find_spec("cupy") is None:
            return None
        import cupy

        array = cupy.asarray(buffer)
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            raise BufferError("message: the memory on the GPU is not contiguous")
        return array.ravel("K").view(np.uint8)
    with contextlib.suppress(TypeError, ValueError):
        view = np.asarray(memoryview(buffer))
        if view.flags.f_contiguous:
            buffer = view.T  # mpi4py's buffers are C-ordered; the elements stay in their order
    memory: Any = bytearray() if buffer is None else MPI.buffer.frombuffer(buffer, not writable)
    return np.frombuffer(memory, np.uint8)


def _message(spec: Any, blocks: int, writable: bool = False) -> _Elements | None:
    """Read a specification.  Its count is the number of elements of one of `blocks` blocks.

    None: its type has no dtype, or its memory cannot be viewed.  Raises what mpi4py raises.
    """
    buffer, count, displacement, datatype = _parts(spec)
    data = _bytes(buffer, writable)
    if datatype is None:
        datatype = _typecode(buffer)
    if isinstance(datatype, str):
        datatype = MPI._typedict[datatype]
    if data is None or datatype.handle not in _DTYPES:
        return None
    dtype = _DTYPES[datatype.handle]
    begin, room = index(displacement or 0) * dtype.itemsize, dtype.itemsize * blocks
    if count is None:
        count, left = divmod(len(data) - begin, room)
        if left:
            raise ValueError(f"message: {left} bytes are no block of {blocks} {dtype}")
    end = begin + index(count) * room
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"message: bytes {begin} to {end} of a buffer of {len(data)}")
    return datatype, data[begin:end].view(dtype)


def _is_in_place(sendbuf: Any) -> bool:
    return sendbuf is None or sendbuf is MPI.IN_PLACE


def _raising(name: str) -> Callable[..., Any]:
    @wraps(getattr(MPI.Grequest, name))
    def raising(request: _Request, status: MPI.Status | None = None) -> Any:
        try:
            return getattr(super(_Request, request), name)(status)
        except MPI.Exception as error:
            raise (request.errors[0].with_traceback(None) if request.errors else error) from None

    return raising


class _Request(MPI.Grequest):
    """A request of MPI for a Work.  If waited for by itself, it raises the Work's error."""

    errors: list[Exception]
    Wait, Test, wait, test = map(_raising, ("Wait", "Test", "wait", "test"))

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

        started = MPI.Grequest.Start(fail, lambda: None, lambda _: None)
        self = super().__new__(cls, started)
        self.errors = errors
        work.then(complete)
        return self


def _wrapping(name: str) -> Callable[..., Any]:
    @wraps(getattr(MPI.Cartcomm, name))
    def wrapping(self: _Routed, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(getattr(super(_Routed, self), name)(*args, **kwargs))

    return wrapping


class _Routed(_Intracomm):
    """The methods of wrapped communicators that are not MPI's."""

    routes: Counter[tuple[str, str]]
    _made: rr.Communicator | None
    _is_threaded: bool
    """Whether all ranks have MPI_THREAD_MULTIPLE, so that another thread may complete requests."""
    _likeness: np.ndarray
    """Memory for `_if_alike`."""

    def __new__(cls, comm: Any = None) -> Self:
        """Return an object over the handle of `comm`.  mpi4py makes duplicates without it."""
        self = super().__new__(cls, comm)
        self.routes, self._made = Counter(), None
        return self

    def __reduce__(self) -> Any:
        return wrap, (type(self).__mro__[2](self),)

    def _make(self) -> rr.Communicator:
        self._made = comm = rr.init(MPI.Intracomm(self))
        level = comm.all_reduce(np.array(MPI.Query_thread()), "min")
        self._is_threaded, self._likeness = level == MPI.THREAD_MULTIPLE, np.empty(2, np.int64)
        return comm

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        x = recvbuf if type(sendbuf) is not np.ndarray and _is_in_place(sendbuf) else sendbuf
        if type(x) is np.ndarray and type(recvbuf) is np.ndarray and x.dtype is recvbuf.dtype:
            name, kinds = _OPS.get(getattr(op, "handle", None), _NO_OP)
            is_flat = x.flags.c_contiguous and recvbuf.flags.carray
            if is_flat and x.dtype.kind in kinds:  # the quick way
                if x.ndim != 1 or recvbuf.ndim != 1:
                    x, recvbuf = x.reshape(-1), recvbuf.reshape(-1)
                (self._made or self._make()).all_reduce(x, name, out=recvbuf)
                self.routes[_ALLREDUCE] += 1
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
        is_mpis = async_op and (self._made is None or not self._is_threaded)
        if call is None or is_mpis:
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
        if getattr(op, "handle", None) not in _OPS or root not in (None, *range(size)):
            return None
        how = {"op": _OPS[op.handle][0], **({} if root is None else {"root": root})}
        blocks = size if method == "Reduce_scatter_block" else 1
        received: Any = None
        if root in (None, me):
            received = _message(recvbuf, blocks if in_place else 1, writable=True)
        sent = received if in_place else _message(sendbuf, blocks)
        if sent is None or sent[1].dtype.kind not in _OPS[op.handle][1]:
            return None
        if sent[0] == MPI.BYTE and op.handle not in _ON_BYTES:
            return None
        if root not in (None, me):
            return "reduce", sent[1], None, how
        if received is None or received[0] != sent[0]:
            raise ValueError(f"{method}: mismatch in send and receive MPI datatypes")
        x, out, share = sent[1], received[1], len(sent[1])
        if "scatter" in method:
            if method == "Reduce_scatter" and counts is None and not in_place:
                counts = super().allgather(len(out))  # as mpi4py does
            split = [len(x) // size + (rank < len(x) % size) for rank in range(size)]
            if counts is not None and list(counts) != split:
                return None
            share = split[me]
            if in_place:
                x, out = x.copy(), out[:share]
        if len(out) != share:
            raise ValueError(f"{method}: mismatch in send count and receive count {len(out)}")
        collective = "reduce_scatter" if "scatter" in method else "all_reduce"
        return collective if root is None else "reduce", x, out, how

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        ours = self._if_alike("allreduce", sendobj, op)
        return ours[0].all_reduce(sendobj, ours[1]) if ours else super().allreduce(sendobj, op)

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        ours = self._if_alike("reduce", sendobj, op)
        return ours[0].reduce(sendobj, root, ours[1]) if ours else super().reduce(sendobj, op, root)

    def _if_alike(self, method: str, x: Any, op: Any) -> tuple[rr.Communicator, str] | None:
        """Return the communicator and the op, if all ranks pass arrays of one dtype and shape.

        Collective for the ops of `_OPS_OF_OBJECTS`.
        """
        name, kinds = _OPS_OF_OBJECTS.get(getattr(op, "handle", None), _NO_OP)
        if name:
            comm, number = self._made or self._make(), 0
            if type(x) is np.ndarray and x.ndim and x.dtype.isnative and x.dtype.kind in kinds:
                number = abs(hash((ord(x.dtype.char), *x.shape))) >> 1 | 1
            both = self._likeness
            both[0], both[1] = number, -number
            comm.all_reduce(both, "min", out=both)
            if both[0] == -both[1] != 0:
                self.routes[method, "ringreduce"] += 1
                return comm, name
        self.routes[method, "MPI"] += 1
        return None

    def Free(self) -> None:
        try:
            self._close()
        finally:
            super().Free()

    def Disconnect(self) -> None:
        try:
            self._close()
        finally:
            super().Disconnect()

    def _close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.close()


@cache
def _wrapped_kind(kind: Any) -> Any:
    """Return the class of wrapped communicators of a class of mpi4py's, or of a subclass."""
    makers = {name: _wrapping(name) for name in _MAKERS if hasattr(kind, name)}
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
