"""Point-to-point messages of any MPI, through mpi4py.

Data and control messages each have a communicator of their own, a duplicate of the caller's: a
message of the library never matches a receive of the caller.

Data and control messages never block, because a blocking call of MPI cannot be given up when a peer
dies: the library polls with a deadline, above this module.  MPI makes progress only inside its
calls, so every poll is one.  Importing this module imports mpi4py.MPI, which initialises MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from mpi4py import MPI

from ringreduce.errors import PeerLostError, PeerTimeoutError
from ringreduce.system.cores import allowed
from ringreduce.transports.base import NativeMessages, Transport, lost, not_assembled
from ringreduce.transports.yielding import YIELDS, Yielding

_CONTROL_TAG, _ENVELOPE_TAG, _FIRST_DATA_TAG = range(3)
"""Tags on the control communicator: of control messages; of a channel's envelopes; from the third
on, of a channel's data."""
_FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"
"""The environment variable that ``mpiexec --with-ft ulfm`` of Open MPI sets."""
_HOST_BYTES = 16
_MOST_CORES = 4096
"""Bits in the mask of a rank's cores."""
_PLACE = np.dtype([("host", f"V{_HOST_BYTES}"), ("mask", "u1", _MOST_CORES // 8), ("quota", "<u4")])
"""Where a rank runs, the cores that it may use there, and how many of them its quota allows."""
_GROUP_TAGS = 1 << 15
"""Number of tags that every MPI has, from 0."""
_ASSEMBLY_ROLL_CALL_S = 0.25
"""Seconds in which a rank in `init` has to answer a rank that gives up."""
_open: set[int] = set()
"""Identities of the transports whose communicators of MPI are not freed."""
PARTS = MPI.Comm.Create_keyval()
"""The attribute in which MPI's communicators keep what `init` has made of them."""
_world: list[MPI.Intracomm] = []
"""The communicator of all ranks of the job that are not lost; none before the first loss."""


def world() -> MPI.Intracomm:
    return _world[0] if _world else MPI.COMM_WORLD


class MpiTransport(Transport):
    name = "mpi"
    one_process = False

    def __init__(
        self,
        parent: MPI.Comm | None = None,
        timeout_s: float = 600.0,
        synchronous_sends: bool = False,
        owns_parent: bool = False,
    ) -> None:
        """Make a transport between the ranks of `parent`.  Collective over `parent`.

        `owns_parent`: data are sent on `parent` itself, which `close` frees, not on a
        duplicate.  `synchronous_sends`: a send completes only once its receive is posted,
        so that a schedule which relies on MPI's buffering hangs.
        """
        where = "split" if owns_parent else "init"
        parent = self._parent = world() if parent is None else parent
        self.rank, self.size = parent.Get_rank(), parent.Get_size()
        self.job_ranks: Sequence[int] = range(self.size)
        self._assembly = Assembly(parent, timeout_s)
        data = self._data = parent if owns_parent else self._assembly.duplicate(where)
        try:
            self._control = self._assembly.duplicate(where)
        except RuntimeError:  # on all ranks
            data.Free()
            raise
        _open.add(id(self))
        self._synchronous_sends = synchronous_sends
        self._send_init = data.Ssend_init if synchronous_sends else data.Send_init
        mine = np.array((_host(), _cores(), allowed()), _PLACE)
        places = np.frombuffer(self.collect(mine.tobytes()), _PLACE)
        self._nodes = _nodes([host.tobytes() for host in places["host"]])
        here = places[list(next(node for node in self._nodes if self.rank in node))]
        cores = np.unpackbits(here["mask"], axis=1).any(axis=0).sum()
        self.yielding = Yielding(crowded=bool(len(here) > min(cores, here["quota"].min())))
        self._window: MPI.Win | None = None
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        """MPI_THREAD_MULTIPLE: other threads of the process may call MPI at the same time."""
        self._withdrawing: set[int] = set()
        """Identities of receives that were cancelled and are not complete yet."""
        self._discarding: dict[int, MPI.Request] = {}
        """By peer: the receive of a message that is dropped."""
        self._control_messages = _ShortMessages(self._control, _CONTROL_TAG)
        self._channel: MpiChannel | None = None

    # --- data ---

    def sender(self, peer: int, flow: int, buffer: memoryview) -> Any:
        return self._send_init([buffer, MPI.BYTE], peer, flow)

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> Any:
        return self._data.Recv_init([buffer, MPI.BYTE], peer, flow)

    def translate(self, error: Exception) -> Exception:
        return _lost(error, self._data) if isinstance(error, MPI.Exception) else error

    def withdraw(self, receiver: Any) -> bool | None:
        # MPI_Cancel may lose against a message: only the status of the completed receive tells.
        status = MPI.Status()
        if receiver.Test(status):
            self._withdrawing.discard(id(receiver))
            return status.Is_cancelled()
        if id(receiver) not in self._withdrawing:
            receiver.Cancel()
            self._withdrawing.add(id(receiver))
        return None

    def discard(self, peer: int) -> bool:
        if peer not in self._discarding:
            status = MPI.Status()
            # A matched probe gives the length: a receive of any fixed length could be too short.
            message = self._data.Improbe(peer, MPI.ANY_TAG, status)
            if message is None:
                return False
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self._discarding[peer] = message.Irecv([buffer, MPI.BYTE])
        if not self._discarding[peer].Test():
            return False
        del self._discarding[peer]
        return True

    # --- control ---

    def send_control(self, peer: int, message: bytes) -> None:
        self._control_messages.post(peer, message)

    def control_sent(self, peers: Iterable[int]) -> bool:
        return all(map(self._control_messages.is_sent, peers))

    def poll_control(self) -> list[tuple[int, bytes]]:
        return self._control_messages.poll(MPI.ANY_SOURCE)

    def channel(self) -> MpiChannel:
        if self._channel is None:
            self._channel = MpiChannel(self, self._control)
        return self._channel

    # --- waiting, topology, end ---

    def pause(self, idle: int) -> None:
        self.yielding.pause(idle, YIELDS, time.sleep)

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        return self._nodes

    def collect(self, mine: bytes, patience_s: float = 0.0) -> bytes:
        return bytes(self._assembly.collect(mine, patience_s))

    def allocate_shared(self, nbytes: int) -> Sequence[Any] | None:
        assert isinstance(self._data, MPI.Intracomm)
        try:
            if 0 in self.collect(bytes((_on_one_host(self._data),))):
                return None
            self._window = MPI.Win.Allocate_shared(nbytes, 1, MPI.INFO_NULL, self._data)
        except MPI.Exception as error:
            self.close()
            raise _not_made("shared memory", error, self._parent) from None
        return [self._window.Shared_query(rank)[0] for rank in range(self.size)]

    def native(self) -> NativeMessages | None:
        """See `Transport.native`.  Other threads call MPI at the same time, which it must allow."""
        if not self.threads or self._synchronous_sends:
            return None
        library = ctypes.CDLL(MPI.__file__)
        try:
            names = ("MPI_Isend", "MPI_Irecv", "MPI_Test")
            isend, irecv, test = (_address(getattr(library, name)) for name in names)
        except AttributeError:
            return None
        handles = self._data.handle, MPI.BYTE.handle
        how = MPI.Exception, MPI.Request.fromhandle
        return NativeMessages(isend, irecv, test, *handles, *how)

    def split(self, members: Sequence[int], number: int, timeout_s: float) -> MpiTransport:
        """See `Transport.split`.  Raises PeerTimeoutError if a member does not take part.

        MPI_Comm_create_group cannot be given up, so another thread calls it, if MPI allows
        threads.  Otherwise this rank may wait for ever.
        """
        made: list[MPI.Comm | MPI.Exception] = []
        every = self._data.Get_group()
        group = every.Incl(list(members))
        every.Free()

        def make() -> None:
            assert isinstance(self._data, MPI.Intracomm)
            try:
                made.append(self._data.Create_group(group, number % _GROUP_TAGS))
            except MPI.Exception as error:
                made.append(error)
            group.Free()

        if self.threads:
            thread = threading.Thread(target=make, daemon=True)
            thread.start()
            thread.join(timeout_s)
        else:
            make()
        if not made:
            raise PeerTimeoutError(f"split: no group within {timeout_s:g} s", ranks=())
        if isinstance(made[0], MPI.Exception):
            raise _not_made("split", made[0], self._data)
        return MpiTransport(made[0], timeout_s, self._synchronous_sends, owns_parent=True)

    def shrunk(self, timeout_s: float) -> MpiTransport:
        """See `Transport.shrunk`.  MPI_Comm_shrink blocks, and cannot be given up."""
        if reason := why_not_shrink():
            raise NotImplementedError(f"shrink: {reason}")
        assert isinstance(self._parent, MPI.Intracomm)
        try:
            self._data.Revoke()
            self._control.Revoke()
            return MpiTransport(self._parent.Shrink(), timeout_s, self._synchronous_sends)
        except MPI.Exception as error:
            raise _lost(error, self._parent) from None

    def replace_world(self) -> None:
        assert isinstance(self._parent, MPI.Intracomm)
        _world[:] = [self._parent]

    def close(self) -> None:
        _open.discard(id(self))
        try:
            if self._window is not None:
                self._window.Free()
            self._data.Free()
            self._control.Free()
        except MPI.Exception as error:
            raise self.translate(error) from None


class MpiChannel:
    def __init__(self, transport: MpiTransport, comm: MPI.Comm) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.translate, self.pause = transport.translate, transport.pause
        self._comm = comm
        self._envelopes: dict[int, _ShortMessages] = {}
        """By peer: so a lost peer is noticed by its own messages alone."""

    def post(self, peer: int, envelope: bytes) -> None:
        self._messages(peer).post(peer, envelope)

    def poll(self, peer: int) -> list[bytes]:
        return [envelope for _, envelope in self._messages(peer).poll(peer)]

    def _messages(self, peer: int) -> _ShortMessages:
        if peer not in self._envelopes:
            self._envelopes[peer] = _ShortMessages(self._comm, _ENVELOPE_TAG)
        return self._envelopes[peer]

    def sender(self, peer: int, flow: int, buffer: memoryview) -> Any:
        return self._comm.Send_init([buffer, MPI.BYTE], peer, _FIRST_DATA_TAG + flow)

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> Any:
        return self._comm.Recv_init([buffer, MPI.BYTE], peer, _FIRST_DATA_TAG + flow)

    def close(self) -> None:
        for peer in self._envelopes:
            with contextlib.suppress(MPI.Exception):  # a lost peer has nothing more to say
                self.poll(peer)


class _ShortMessages:
    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        self._comm, self._tag = comm, tag
        self._sends: dict[int, list[MPI.Request]] = {}
        """By peer: messages that were not complete when the latest was sent."""
        self._receive: tuple[MPI.Request, int, bytearray] | None = None

    def post(self, peer: int, message: bytes) -> None:
        request = self._comm.Isend([message, MPI.BYTE], peer, self._tag)
        under_way = [earlier for earlier in self._sends.get(peer, ()) if not earlier.Test()]
        self._sends[peer] = [*under_way, request]

    def is_sent(self, peer: int) -> bool:
        return all(request.Test() for request in self._sends.get(peer, ()))

    def poll(self, source: int) -> list[tuple[int, bytes]]:
        """Return the messages from `source` that have arrived, each with its sender."""
        arrived = []
        while self._receive is not None or self._next(source):
            assert self._receive is not None
            request, peer, buffer = self._receive
            if not request.Test():
                break
            arrived.append((peer, bytes(buffer)))
            self._receive = None
        return arrived

    def _next(self, source: int) -> bool:
        status = MPI.Status()
        message = self._comm.Improbe(source, self._tag, status)
        if message is None:
            return False
        buffer = bytearray(status.Get_count(MPI.BYTE))
        self._receive = (message.Irecv([buffer, MPI.BYTE]), status.Get_source(), buffer)
        return True


class Assembly:
    """The collectives of MPI over `parent` before the first call, with a deadline for all of them.

    MPI cannot cancel a collective.  A rank whose deadline passes sends an empty message to all
    ranks on `parent`, with the highest tag that MPI has.  A rank that receives one gives up, too,
    and sends its own.  The error names the ranks that have sent none.
    """

    def __init__(self, parent: MPI.Comm, timeout_s: float) -> None:
        self._parent, self._timeout_s = parent, timeout_s
        self._deadline = time.monotonic() + timeout_s
        tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # Open MPI: no attribute of others
        assert isinstance(tag, int), "MPI has no highest tag"
        self._tag = tag
        self._others = set(range(parent.Get_size())) - {parent.Get_rank()}
        self._gave_up: set[int] = set()

    def duplicate(self, where: str) -> MPI.Comm:
        made: list[MPI.Comm] = []

        def begin() -> MPI.Request:
            comm, request = self._parent.Idup()
            made.append(comm)
            return request

        try:
            self._finish(begin)
        except MPI.Exception as error:
            raise _not_made(where, error, self._parent) from None
        return made[0]

    def collect(self, mine: bytes, patience_s: float = 0.0) -> bytearray:
        self._deadline += patience_s
        everybody = bytearray(len(mine) * self._parent.Get_size())
        how = [mine, MPI.BYTE], [everybody, MPI.BYTE]
        try:
            self._finish(lambda: self._parent.Iallgather(*how))
        except MPI.Exception as error:
            raise _lost(error, self._parent) from None
        return everybody

    def _finish(self, begin: Callable[[], MPI.Request]) -> None:
        request = begin()
        while not request.Test():
            self._poll()
            if self._gave_up or time.monotonic() > self._deadline:
                raise self._give_up()
            time.sleep(1e-4)

    def _poll(self) -> None:
        status = MPI.Status()
        while message := self._parent.Improbe(MPI.ANY_SOURCE, self._tag, status):
            message.Recv([bytearray(), MPI.BYTE])
            self._gave_up.add(status.Get_source())

    def _give_up(self) -> PeerTimeoutError:
        for peer in self._others:
            self._parent.Isend([b"", MPI.BYTE], peer, self._tag)
        end = time.monotonic() + _ASSEMBLY_ROLL_CALL_S
        while self._gave_up != self._others and time.monotonic() < end:
            self._poll()
            time.sleep(1e-3)
        return not_assembled(self._timeout_s, sorted(self._others - self._gave_up))


def _not_made(where: str, error: MPI.Exception, comm: MPI.Comm) -> Exception:
    """Return the error of ranks for which MPI makes no communicator or no shared memory."""
    if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
        return _lost(error, comm)
    said = " ".join(str(error).split())
    if "context ID" not in said:
        try:  # the text of MPICH's Idup does not tell
            MPI.COMM_SELF.Dup().Free()
        except MPI.Exception:
            pass
        else:
            return RuntimeError(f"{where}: MPI reports: {said}")
    return RuntimeError(
        f"{where}: this MPI has no more communicators; {len(_open)} of ringreduce are open: close "
        f"those that you do not need, close() frees them (MPI reports: {said})"
    )


def _lost(error: MPI.Exception, comm: MPI.Comm) -> PeerLostError:
    if error.Get_error_class() == MPI.ERR_PROC_FAILED != MPI.ERR_REVOKED:
        failed = comm.Get_failed()
        if ranks := sorted(failed.Translate_ranks(None, comm.Get_group())):
            return lost(ranks)
    return PeerLostError(f"MPI reports: {error}; the communicator is broken", ())


def why_not_shrink() -> str:
    """Return why ranks of this job cannot go on after a loss; "" if they can."""
    name = MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")
    if MPI.ERR_PROC_FAILED == MPI.ERR_REVOKED:
        return f"{name} ends the whole job if a rank is lost; Open MPI 5 does not"
    if os.environ.get(_FAULT_TOLERANT) not in ("1", "true"):
        return f"{name} was started without fault tolerance; use `mpiexec --with-ft ulfm`"
    return ""


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _host() -> bytes:
    return blake2b(os.fsencode(socket.gethostname()), digest_size=_HOST_BYTES).digest()


def _on_one_host(comm: MPI.Comm) -> bool:
    """Return whether MPI, too, finds all ranks on one host: two hosts may have one name."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = here.Get_size()
    here.Free()
    return size == comm.Get_size()


def _cores() -> Any:
    """Return a mask of the cores that this rank may use."""
    mask = np.zeros(_MOST_CORES, np.uint8)
    mask[[core % _MOST_CORES for core in os.sched_getaffinity(0)]] = 1
    return np.packbits(mask)


def _nodes(hosts: Sequence[bytes]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, given each rank's host; nodes in order of lowest rank."""
    nodes: dict[bytes, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return tuple(map(tuple, nodes.values()))
