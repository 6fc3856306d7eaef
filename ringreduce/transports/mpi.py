"""Point-to-point messages of any MPI, through mpi4py.

Uses two duplicates of the caller's communicator, one for data and one for control, so no message of
ours can meet one of the caller's.  Nothing here blocks: every wait of the library is a loop of
polls above it.  Importing this module imports mpi4py.MPI and so initialises MPI.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from mpi4py import MPI

from ringreduce.compiler.jit import can_exchange
from ringreduce.errors import PeerLostError, PeerTimeoutError
from ringreduce.shm.layout import BLOCK_BYTES, RING
from ringreduce.shm.segments import SharedBlocks, share
from ringreduce.transports.base import SharedMemory

_CONTROL_TAG = 0
_YIELDS = 2000
"""Idle polls that only yield the core, before polls begin to sleep."""
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 5e-5, 1e-3
_HOST_BYTES = 16
_MOST_CORES = 4096
_WORD_BYTES = 8
_GROUP_TAGS = 1 << 15
"""Tags that every MPI has."""
_ASSEMBLY_ROLL_CALL_S = 0.25
"""How long a rank in init has to answer one that gives up."""
_SPINS = 200
"""Idle polls that do nothing but poll, where every rank has a core of its own."""


class MpiTransport:
    """One rank's end of two duplicates of an MPI communicator.  Collective over `parent`."""

    name = "mpi"

    def __init__(
        self,
        parent: MPI.Comm | None = None,
        timeout_s: float = 600.0,
        synchronous_sends: bool = False,
        shares: bool = False,
    ) -> None:
        parent = MPI.COMM_WORLD if parent is None else parent
        self.rank, self.size = parent.Get_rank(), parent.Get_size()
        assembly = _Assembly(parent, timeout_s)
        self._data, self._control = assembly.duplicate(), assembly.duplicate()
        self._nodes = _nodes(assembly.collect(_host()), _HOST_BYTES)
        data = self._data
        self._synchronous_sends, self._shares = synchronous_sends, shares
        self._send_init = data.Ssend_init if synchronous_sends else data.Send_init
        here = next(node for node in self._nodes if self.rank in node)
        told = np.frombuffer(assembly.collect(bytes((shares,)) + _cores()), np.uint8)
        told = told.reshape(self.size, -1)
        self.wishes = set(told[:, 0].tolist())
        """What ranks have said about sharing memory: 0, 1."""
        masks = np.unpackbits(told[list(here), 1:], axis=1)
        cores = int(masks.any(axis=0).sum())
        self.spins = _SPINS if len(here) <= cores else 0
        self._window: MPI.Win | None = None
        """Of MPI's shared memory, where ours is not to be had."""
        self.memory: SharedMemory | None = None
        if self.wishes == {1} and len(self._nodes) == 1:
            able = can_exchange()
            self.memory = share(BLOCK_BYTES, assembly.collect, self.rank, able)
            if self.memory is None:
                able = _together(data) and able
                if 0 not in assembly.collect(bytes((able,))):
                    self._window = _shared_window(data)
                    self.memory = _in_window(self._window, assembly.collect, self.rank, self.size)
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._withdrawing: set[int] = set()
        self._discarding: dict[int, MPI.Request] = {}
        self._telling: dict[int, list[MPI.Request]] = {}
        self._hearing: tuple[MPI.Request, int, bytearray] | None = None

    # --- data ---

    def sender(self, peer: int, flow: int, buffer: memoryview) -> Any:
        return self._send_init([buffer, MPI.BYTE], peer, flow)

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> Any:
        return self._data.Recv_init([buffer, MPI.BYTE], peer, flow)

    def translate(self, error: Exception) -> Exception:
        if not isinstance(error, MPI.Exception):
            return error
        return PeerLostError(f"MPI reports: {error}; the communicator is broken")

    def withdraw(self, receiver: Any) -> bool | None:
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

    def tell(self, peer: int, message: bytes) -> None:
        request = self._control.Isend([message, MPI.BYTE], peer, _CONTROL_TAG)
        under_way = [earlier for earlier in self._telling.get(peer, ()) if not earlier.Test()]
        self._telling[peer] = [*under_way, request]

    def told(self, peers: Iterable[int]) -> bool:
        return all(request.Test() for peer in peers for request in self._telling.get(peer, ()))

    def hear(self) -> list[tuple[int, bytes]]:
        heard = []
        while self._hearing is not None or self._next_control():
            assert self._hearing is not None
            request, peer, buffer = self._hearing
            if not request.Test():
                break
            heard.append((peer, bytes(buffer)))
            self._hearing = None
        return heard

    def _next_control(self) -> bool:
        status = MPI.Status()
        message = self._control.Improbe(MPI.ANY_SOURCE, _CONTROL_TAG, status)
        if message is None:
            return False
        buffer = bytearray(status.Get_count(MPI.BYTE))
        self._hearing = (message.Irecv([buffer, MPI.BYTE]), status.Get_source(), buffer)
        return True

    # --- waiting, topology, end ---

    def pause(self, idle: int) -> None:
        if idle < _YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(_SHORTEST_SLEEP_S * (idle / _YIELDS), _LONGEST_SLEEP_S))

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        return self._nodes

    def split(self, members: Sequence[int], number: int, timeout_s: float) -> MpiTransport:
        """MPI makes groups in calls that cannot be given up: a thread makes it, if it may."""
        made: list[MPI.Comm] = []

        def make() -> None:
            assert isinstance(self._data, MPI.Intracomm)
            group = self._data.Get_group().Incl(list(members))
            made.append(self._data.Create_group(group, number % _GROUP_TAGS))

        if self.threads:
            thread = threading.Thread(target=make, daemon=True)
            thread.start()
            thread.join(timeout_s)
        else:
            make()
        if not made:
            raise PeerTimeoutError(f"split: no group within {timeout_s:g} s", ranks=())
        part = MpiTransport(made[0], timeout_s, self._synchronous_sends, self._shares)
        made[0].Free()
        return part

    def close(self) -> None:
        if self._window is not None:
            self._window.Free()
        self._data.Free()
        self._control.Free()


class _Assembly:
    """The ranks of `parent` in their first collectives, which are MPI's and cannot be given up.

    A rank whose patience ends tells all others on `parent` itself, under the highest tag there is;
    so do they when they hear it; whoever does not is named.
    """

    def __init__(self, parent: MPI.Comm, timeout_s: float) -> None:
        self._parent, self._timeout_s = parent, timeout_s
        self._deadline = time.monotonic() + timeout_s
        tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # Open MPI says it of no other
        assert isinstance(tag, int), "MPI has no highest tag"
        self._tag = tag
        self._others = set(range(parent.Get_size())) - {parent.Get_rank()}
        self._gave_up: set[int] = set()

    def duplicate(self) -> MPI.Comm:
        comm, request = self._parent.Idup()
        self._finish(request)
        return comm

    def collect(self, mine: bytes) -> bytearray:
        """What every rank passes, one behind the other; all pass as much."""
        everybody = bytearray(len(mine) * self._parent.Get_size())
        self._finish(self._parent.Iallgather([mine, MPI.BYTE], [everybody, MPI.BYTE]))
        return everybody

    def _finish(self, request: MPI.Request) -> None:
        while not request.Test():
            self._listen()
            if self._gave_up or time.monotonic() > self._deadline:
                raise self._give_up()
            time.sleep(1e-4)

    def _listen(self) -> None:
        status = MPI.Status()
        while message := self._parent.Improbe(MPI.ANY_SOURCE, self._tag, status):
            message.Recv([bytearray(), MPI.BYTE])
            self._gave_up.add(status.Get_source())

    def _give_up(self) -> PeerTimeoutError:
        for peer in self._others:
            self._parent.Isend([b"", MPI.BYTE], peer, self._tag)
        end = time.monotonic() + _ASSEMBLY_ROLL_CALL_S
        while self._gave_up != self._others and time.monotonic() < end:
            self._listen()
            time.sleep(1e-3)
        missing = sorted(self._others - self._gave_up)
        absent = f"not there: {', '.join(map(str, missing))}" if missing else "none gets on"
        return PeerTimeoutError(
            f"init: waited {self._timeout_s:g} s for all ranks of the communicator; {absent}",
            tuple(missing),
        )


def _host() -> bytes:
    return blake2b(socket.gethostname().encode(), digest_size=_HOST_BYTES).digest()


def _together(comm: MPI.Comm) -> bool:
    """Whether MPI, too, thinks that all ranks share a host: two may have one name."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = here.Get_size()
    here.Free()
    return size == comm.Get_size()


def _shared_window(comm: MPI.Comm) -> MPI.Win:
    assert isinstance(comm, MPI.Intracomm)
    return MPI.Win.Allocate_shared(BLOCK_BYTES, 1, MPI.INFO_NULL, comm)


def _in_window(
    window: MPI.Win, collect: Callable[[bytes], bytearray], rank: int, size: int
) -> SharedMemory | None:
    """The ranks' blocks in a window; None, on all ranks, if some are not aligned."""
    buffers: list[Any] = [window.Shared_query(each)[0] for each in range(size)]
    blocks = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    blocks[rank][:RING] = 0
    aligned = all(block.ctypes.data % _WORD_BYTES == 0 for block in blocks)
    if 0 in collect(bytes((aligned,))):  # and all slots are zero
        return None
    return SharedBlocks(blocks, rank, BLOCK_BYTES, [0] * size, pulls=False)


def _cores() -> bytes:
    """A mask of the cores that this rank may use, which its MPI may have told apart by rank."""
    mask = np.zeros(_MOST_CORES, np.uint8)
    mask[[core % _MOST_CORES for core in os.sched_getaffinity(0)]] = 1
    return np.packbits(mask).tobytes()


def _nodes(hosts: bytearray, size: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, by host of `size` bytes; nodes in the order of their lowest rank."""
    nodes: dict[bytes, list[int]] = {}
    for rank in range(len(hosts) // size):
        nodes.setdefault(bytes(hosts[size * rank : size * (rank + 1)]), []).append(rank)
    return tuple(map(tuple, nodes.values()))
