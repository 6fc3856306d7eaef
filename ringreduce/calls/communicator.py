"""The communicator: a group of ranks, its collectives, planned calls, split and close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from ringreduce.algorithms import ALGORITHMS
from ringreduce.calls import collectives, point_to_point
from ringreduce.calls.arguments import (
    as_dtype,
    as_shape,
    check_root,
    check_selectors,
    shown,
)
from ringreduce.calls.arrays import as_array, gpu_of_name
from ringreduce.calls.elsewhere import METHODS_ELSEWHERE
from ringreduce.calls.ending import Ending
from ringreduce.calls.measured import time_candidates
from ringreduce.calls.ops import check_addable, check_movable
from ringreduce.calls.persistent import Again, plan, planned_call
from ringreduce.calls.point_to_point import PointToPoint
from ringreduce.calls.refusals import refuse_copy
from ringreduce.calls.runner import Runner
from ringreduce.calls.shared_array import SharedArray
from ringreduce.config import Config, as_seconds
from ringreduce.control.diagnostics import ranks_text
from ringreduce.control.executable import LoggedMessage
from ringreduce.devices.base import Device
from ringreduce.errors import counted, did_you_mean, unknown
from ringreduce.planning.select import Choice, choose
from ringreduce.shm.segments import Segments, share_segments
from ringreduce.system.topology import Topology
from ringreduce.transports.base import Transport

if TYPE_CHECKING:
    from ringreduce.calls.signatures import Collectives
else:
    from ringreduce.calls.collectives import Collectives

S = TypeVar("S", bound=np.generic)

_RANK_BYTES = 4
_WAYS = {
    "mpi": "over MPI messages",
    "sockets": "over Unix sockets",
    "tcp": "over tcp",
    "thread": "among threads",
}
"""How ranks exchange data, by the name of the transport, as `repr` shows it."""
_MOST_LISTED = 16
"""The most ranks for which `repr` lists the ranks of each node."""


class Communicator(Collectives, PointToPoint):
    """A group of ranks that compute together.  Every rank makes the same calls in the same order.

    `init` and `spawn` make a communicator.  It is a context manager: at the end of the ``with``
    block it is closed.

    The arrays of a call are NumPy arrays, objects that NumPy views without a copy, CuPy arrays, or
    numbers (0-d).  With ``async_op=True`` a call returns a `Work` at once; do not use its arrays
    before `Work.wait` returns.

    Attributes:
        rank: this rank, from 0 to ``size - 1``.
        size: the number of ranks.
        local_rank: index of this rank among the ranks of its node.
        local_size: number of ranks on this node.
        cross_rank: index of this rank among the ranks that have its `local_rank` on their nodes.
        cross_size: number of nodes that have a rank of this `local_rank`.
        nodes: the ranks of each node, ``((0, 1), (2, 3))``.
        config: the `Config` of this communicator.

    Example:
        >>> def program(comm):
        ...     return comm.rank, comm.size, comm.local_rank, comm.nodes
        >>> rr.spawn(program, 4, nodes=(2, 2))[3]
        (3, 4, 1, ((0, 1), (2, 3)))
    """

    __module__ = "ringreduce"

    __reduce__ = refuse_copy

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        device: Device,
        config: Config,
        timeout_s: float,
        segments: Segments | None = None,
        adopt: Callable[[Ending], None] | None = None,
    ) -> None:
        runner = Runner(transport, topology, device, config, timeout_s, segments)
        super().__init__(runner)
        self.rank, self.size, self.config = runner.rank, runner.size, runner.config
        self.local_rank, self.local_size = topology.local_rank, topology.local_size
        self.cross_rank, self.cross_size = topology.cross_rank, topology.cross_size
        self.nodes = topology.nodes
        self._transport, self._engine = transport, runner.engine
        self._ending = Ending(runner.engine, runner.calls.meeting("close", ()))
        """Other packages use this, the engine, the runner, and public methods."""
        self._adopt = adopt
        """Called with the end of this communicator, and of all that `split` or `shrink` make."""
        vars(self).update(collectives.compiled_entries(runner, type(self)))
        vars(self).update(point_to_point.compiled_entries(runner, type(self)))
        runner.meet("init", (("nodes", repr(self.nodes)), *self.config.of_all_ranks), timeout_s)
        if adopt is not None:
            adopt(self._ending)

    def __repr__(self) -> str:
        nodes = [f"({', '.join(map(str, node))})" for node in self.nodes]
        layout = counted(len(nodes), "node")
        if self.size <= _MOST_LISTED:
            layout = f"node{'s' * (len(nodes) > 1)} {', '.join(nodes)}"
        way = _WAYS.get(self._transport.name, f"over {self._transport.name}")
        if self.config.memory is not None and self._transport.name != "thread":
            way = "over shared memory"
        ended = str(self._engine.ended or "").partition(";")[0]
        state = "broken" if self.broken else ended.removeprefix("the communicator is ")
        parts = [f"rank {self.rank} of {self.size}", layout, way, *[state] * bool(state)]
        return f"<ringreduce.Communicator: {', '.join(parts)}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with the name here of what other libraries call `name`."""
            meant = ""
            if not name.startswith("_"):
                words = [word for word in dir(self) if not word.startswith("_")]
                meant = did_you_mean(name, words, METHODS_ELSEWHERE)
            raise AttributeError(f"a communicator has no attribute {name!r}{meant}")

    # --- other forms ---

    @overload
    def empty(self, shape: int | tuple[int, ...]) -> NDArray[np.float64]: ...
    @overload
    def empty(
        self,
        shape: int | tuple[int, ...],
        dtype: type[S] | np.dtype[S],
        device: Literal["cpu"] = "cpu",
    ) -> NDArray[S]: ...
    @overload
    def empty(
        self, shape: int | tuple[int, ...], dtype: Any = float, device: str = "cpu"
    ) -> Any: ...
    def empty(self, shape: int | tuple[int, ...], dtype: Any = float, device: str = "cpu") -> Any:
        """Return an uninitialised array in shared memory.  Not collective.

        The other ranks of this node read and write the array directly.  Slices and views of it are
        shared too.  Its memory is reused after the last reference is dropped.  Without shared
        memory, without space, or after a rank was lost, the array is private.

        Args:
            shape: an int or a tuple of ints, as for ``numpy.empty``.
            dtype: as for ``numpy.empty``.
            device: ``"cpu"``, or ``"cuda"`` or ``"cuda:1"`` for a CuPy array on that GPU.

        Returns:
            A NumPy array, or a CuPy array for a GPU.

        Raises:
            TypeError: the dtype cannot be sent.
            ValueError: another wrong argument.

        Example:
            >>> def program(comm):
            ...     x = comm.empty((2, 3), np.float32)
            ...     x[...] = comm.rank + 1
            ...     return comm.all_reduce(x, out=x).sum()
            >>> rr.spawn(program, 2)[0]
            np.float32(18.0)
        """
        dtype = as_dtype("empty", dtype)
        check_movable("empty", dtype)
        sizes = as_shape("empty", shape)
        if device != "cpu":
            on_gpu = self._runner.calls_on_gpu(gpu_of_name("empty", device))
            return on_gpu.device.empty(sizes, dtype)
        if self._engine.executables.arena is None:
            return np.empty(sizes, dtype)
        with self._engine.queue.lock:
            self._engine.free_if_idle()
            return self._engine.executables.reachable(sizes, dtype)

    @overload
    def shared(
        self, shape: int | tuple[int, ...], dtype: type[S] | np.dtype[S], owner: int = 0
    ) -> SharedArray[S]: ...
    @overload
    def shared(
        self, shape: int | tuple[int, ...], dtype: Any, owner: int = 0
    ) -> SharedArray[Any]: ...
    def shared(self, shape: int | tuple[int, ...], dtype: Any, owner: int = 0) -> SharedArray[Any]:
        """Return an array of zeros in one memory that all ranks map.  Collective.

        All ranks must be on one node.  Afterwards each rank adds to the array and reads it at any
        time, without the other ranks: see `SharedArray`.

        Args:
            shape: an int or a tuple of ints, as for ``numpy.zeros``; the same on every rank.
            dtype: a dtype of numbers; the same on every rank.
            owner: the rank in whose memory the array is; the same on every rank.

        Returns:
            The shared array.

        Raises:
            TypeError: `dtype` has no sum, or another wrong argument.
            ValueError: a wrong argument; the ranks are on several nodes; or a rank cannot share
                memory, which takes Linux and Numba.
            MemoryError: the owner cannot allocate the array.
            MismatchError, PeerTimeoutError, PeerLostError: as for `all_reduce`.

        Example:
            >>> def program(comm):
            ...     total = comm.shared(2, np.float64)
            ...     total.add(np.array([1.0, comm.rank]))
            ...     comm.barrier()
            ...     return total.read()
            >>> rr.spawn(program, 4)[0]
            array([4., 6.])
        """
        sizes, dtype = as_shape("shared", shape), as_dtype("shared", dtype)
        check_addable("shared", dtype)
        check_selectors("shared", owner=owner)
        check_root("shared", owner, self.size, "owner")
        if len(self.nodes) > 1:
            nodes = " / ".join(map(ranks_text, self.nodes))
            raise ValueError(
                f"shared: the ranks are on {len(self.nodes)} nodes: {nodes}; only ranks of one "
                "node share memory, so split the communicator by node"
            )
        return SharedArray(self._runner.share(sizes, dtype, int(owner)), sizes, int(owner))

    def plan(self, collective: str, x: Any, *, out: Any = None, **arguments: Any) -> Again:
        """Check, plan and bind a call on these arrays once, to repeat it.

        Args:
            collective: ``"all_reduce"``, ``"reduce_scatter"``, ``"reduce"``, ``"broadcast"``,
                ``"all_to_all"``, or with `counts` ``"all_gather"``, ``"gather"`` or ``"scatter"``.
            x: the input, as for the collective.  The caller must not resize it.
            out: array for the result, as for the collective.  None: a new array.
            **arguments: the other arguments of the collective, but for `async_op`.

        Returns:
            A function without arguments, collective as the planned call is.  Each call of it reads
            the present values of `x`, and returns the result: the same array each time.

        Raises:
            TypeError, ValueError: wrong arguments.  The function raises the other errors of the
                collective.

        Example:
            >>> def program(comm):
            ...     x = np.empty(2)
            ...     mean = comm.plan("all_reduce", x, out=x, op="mean")
            ...     for step in range(3):
            ...         x[:] = step + comm.rank
            ...         mean()
            ...     return x
            >>> rr.spawn(program, 2)[0]
            array([2.5, 2.5])
        """
        return plan(self._runner, collective, x, out, arguments)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of the ranks with the same `color`, ordered by `key`, then rank.

        Collective.  Nodes, settings and timeout are those of this communicator.  It also closes
        what earlier calls have made, if the programs of all its ranks have dropped it.

        Args:
            color: an int of at least 0.  None: this rank takes part in the call, and gets None.
            key: the new ranks are in the order of their keys.

        Returns:
            The new communicator, or None.

        Raises:
            ValueError: `color` is neither None nor an int of at least 0.
            RuntimeError: MPI has no more communicators; `close` frees some.
            MismatchError, PeerTimeoutError, PeerLostError: as for `all_reduce`.

        Example:
            >>> def program(comm):
            ...     with comm.split(comm.rank % 2) as part:
            ...         return part.all_gather(np.array([comm.rank])).tolist()
            >>> rr.spawn(program, 5)
            [[0, 2, 4], [1, 3], [0, 2, 4], [1, 3], [0, 2, 4]]
        """
        if color is not None and not (_is_int64(color) and color >= 0):
            raise ValueError(f"split: color is {shown(color)}; pass an int of at least 0, or None")
        if not _is_int64(key):
            raise ValueError(f"split: key is {shown(key)}; pass an int")
        colored = -1 if color is None else color
        runner, parts = self._runner, self._ending.parts
        with runner.engine.queue.lock:
            runner.engine.check_usable()
            mine = np.array([colored, key, *parts.dropped()], np.int64)
            call = runner.calls.exchange("split", (), mine.nbytes)
            pairs = runner.run(call, mine.view(np.uint8), None, None, False).view(np.int64)
        parts.close_dropped(pairs[:, 2:].tolist())
        ranks = sorted(range(self.size), key=lambda rank: (pairs[rank, 1], rank))
        members = [rank for rank in ranks if pairs[rank, 0] == colored]
        if color is None:
            return None
        number = parts.exchanges
        part = self._transport.split(members, number, runner.timeout_s)
        part.job_ranks = [self._transport.job_ranks[member] for member in members]
        made = self._with(part, members)
        parts.add(made._ending, made._runner, members)
        made._engine.origin = (
            f"{counted(part.size, 'rank')} of split {number} (color {color}) of "
            f"{self._engine.origin}"
        )
        return made

    def shrink(self) -> Communicator:
        """Return a communicator of the ranks that are not lost, in the same order.

        Collective among these ranks, after a call has raised `PeerLostError`; ranks whose calls
        have not raised yet get one.  No further call can be made on this communicator.  It needs
        Open MPI 5 and ``mpiexec --with-ft ulfm``, as ``ringreduce run --elastic`` starts it; other
        MPIs end the whole job.  `elastic` calls it, and has a supervisor end what hangs.

        Returns:
            The new communicator.

        Raises:
            NotImplementedError: the MPI of this job cannot; the text says why.
            ValueError: the communicator is closed.
            PeerLostError, PeerTimeoutError: another rank was lost meanwhile; call it again.

        Example:
            >>> def program(comm):
            ...     try:
            ...         comm.shrink()
            ...     except NotImplementedError as error:
            ...         return str(error)
            >>> rr.spawn(program, 2)[0]
            'shrink: the ranks are threads of one process, which end together'
        """
        self._ending.check_shrinkable()
        transport = self._transport.shrunk(self._runner.timeout_s)
        self._ending.supersede()
        before = transport.collect(self.rank.to_bytes(_RANK_BYTES))
        at = range(0, len(before), _RANK_BYTES)
        return self._with(transport, [int.from_bytes(before[i : i + _RANK_BYTES]) for i in at])

    def _with(self, transport: Transport, members: Sequence[int]) -> Communicator:
        """Return a communicator on a transport between some ranks of this one."""
        placed = [[members.index(r) for r in node if r in members] for node in self.nodes]
        nodes = tuple(tuple(sorted(node)) for node in placed if node)
        topology = Topology(nodes, transport.rank)
        # A device of its own: both communicators may reduce at the same time.
        runner = self._runner
        device = type(runner.calls.device)()
        segments = share_segments(transport, nodes) if runner.given.shared_memory else None
        how = runner.given, runner.timeout_s, segments, self._adopt
        return Communicator(transport, topology, device, *how)

    # --- inspection ---

    def explain(
        self,
        nbytes: int,
        dtype: Any = "float32",
        collective: str = "all_reduce",
        *,
        measured: bool = False,
    ) -> Choice:
        """Return the algorithm that ``"auto"`` takes for an array of `nbytes`, and the reason.

        Not collective, unless `measured`.  ``ringreduce explain`` prints the same choice without a
        job.

        Args:
            nbytes: bytes of the array.
            dtype: dtype of the array.
            collective: name of the collective.
            measured: also time each candidate that has a price, for about 0.1 s.  Collective: all
                ranks pass the same arguments.  A rank allocates up to three times `nbytes`.

        Returns:
            A `Choice`: its `algorithm`, the `cheapest` candidate, the `reason`, the `transport`,
            and `predicted_s`, the predicted seconds of every candidate but, among more than 16
            ranks, those in `more_than_s`.  If `measured`, also `measured_s`, the same on every
            rank; ``print`` shows both in one table.

        Raises:
            TypeError: unknown dtype, or `measured` is no bool.
            ValueError: unknown collective.
            MismatchError: `measured`, and ranks passed different arguments or made different calls.
            PeerTimeoutError, PeerLostError: `measured`, and a rank stopped answering, or left.

        Example:
            >>> choice = rr.spawn(lambda comm: comm.explain(64 << 20), 4)[0]
            >>> choice.algorithm, f"{1e3 * choice.predicted_s['ring']:.0f} ms"
            ('ring', '19 ms')
        """
        check_selectors("explain", collective=collective)
        if collective not in ALGORITHMS:
            raise ValueError(f"explain: {unknown('collective', collective, ALGORITHMS)}")
        if not _is_int64(nbytes) or nbytes < 0:
            raise ValueError(
                f"explain: nbytes is {shown(nbytes)}; pass bytes, an int of at least 0"
            )
        if not isinstance(measured, bool):
            raise TypeError(f"explain: measured is {shown(measured)}; pass True or False")
        of = as_dtype("explain", dtype)
        choice = choose(collective, self.nodes, nbytes // of.itemsize * of.itemsize, self.config)
        if self._transport.name == "tcp":
            choice = replace(choice, transport="tcp")
        if not measured:
            return choice
        given = {"nbytes": nbytes, "dtype": of, "collective": collective, "measured": True}
        self._runner.meet("explain", tuple((name, str(value)) for name, value in given.items()))
        return time_candidates(self, self.rank, self.size, choice, of)

    def sent_bytes(self, collective: str, x: Any, **arguments: Any) -> int:
        """Return the bytes of data that this rank sends in a call.  Not collective.

        These are the bytes of the algorithm's messages, whether they are sent or, between ranks
        that share memory, read by the other rank.

        Args:
            collective: as for `plan`.
            x: array of the call; only its shape, dtype and place matter.  In a scatter, `out` on
                all ranks but the root.
            **arguments: as for `plan`.

        Returns:
            Bytes.

        Raises:
            TypeError, ValueError: as for `plan`.

        Example:
            >>> x = np.zeros(1000)
            >>> rr.spawn(lambda comm: comm.sent_bytes("all_reduce", x, algorithm="ring"), 4)[0]
            12000
        """
        array = as_array("sent_bytes", x)
        return planned_call(self._runner.calls_on(array), collective, array, arguments).sent_bytes

    def shards(self, x: Any) -> list[list[slice]]:
        """Return which elements of `x` each rank sums up in an all-reduce of two halves.

        ``"ring"`` and ``"two_shot"`` are a reduce-scatter and an all-gather.  Between the two, a
        rank has the final values of its shard: a part of each slice of the flattened array.  A
        program that works on shards between a `reduce_scatter` and an `all_gather` of the same
        parts gets bitwise the values of the `all_reduce`.  Not collective.

        Args:
            x: array of any shape; only its shape, dtype and place matter.

        Returns:
            For each rank, slices of the flattened array in ascending order.  Together they have
            each element once.

        Raises:
            TypeError: `x` is no array.

        Example:
            >>> rr.spawn(lambda comm: comm.shards(np.zeros(10)), 3)[0]
            [[slice(0, 3, None)], [slice(3, 6, None)], [slice(6, 10, None)]]
        """
        array = as_array("shards", x)
        return self._runner.calls_on(array).shards(array)

    @property
    def message_log(self) -> list[LoggedMessage]:
        """The messages of the runs that this rank has started, if ``Config(log_messages=True)``."""
        return self._engine.log or []

    # --- the end ---

    def close(self, *, timeout_s: float | None = None) -> None:
        """Close the communicator.  Collective: all ranks close, or all raise MismatchError.

        Waits for asynchronous calls.  A broken or closed communicator returns at once.  The end of
        a ``with`` block closes as well.

        Args:
            timeout_s: seconds to wait for messages, and then for the other ranks; None: those of
                `init`.  Asynchronous collectives have timeouts of their own.

        Raises:
            MismatchError: other ranks made another call.
            PeerTimeoutError, PeerLostError: a rank stopped answering, or left.
            Exception: the error of an asynchronous call that was never waited for.

        Example:
            >>> def program(comm):
            ...     part = comm.split(0)
            ...     part.close()
            ...     return str(part)
            >>> rr.spawn(program, 2)[0]
            '<ringreduce.Communicator: rank 0 of 2, node (0, 1), among threads, closed>'
        """
        self._ending.close(timeout_s=as_seconds("close", timeout_s))

    def leave(self, reason: str) -> None:
        """Leave without the other ranks; their next call raises PeerLostError with `reason`.

        Args:
            reason: why this rank leaves.

        Example:
            >>> def program(comm):
            ...     if comm.rank == 1:
            ...         return comm.leave("the disk is full")
            ...     try:
            ...         comm.barrier()
            ...     except rr.PeerLostError as error:
            ...         return "the disk is full" in str(error)
            >>> rr.spawn(program, 3)
            [True, None, True]
        """
        self._ending.leave(reason)

    @property
    def broken(self) -> bool:
        """Whether no further call is possible, since a rank was lost or stopped answering."""
        return self._engine.broken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._ending.close("its with block")
        else:
            self.leave(f"{type(error).__name__}: {error}")


def _is_int64(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and -(1 << 63) <= int(value) < 1 << 63
