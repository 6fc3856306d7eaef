"""Find the other ranks by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

All ranks are on one host.  So rank 0 listens at an abstract Unix address that all ranks derive from
these variables, and not at MASTER_PORT, where a store of torch may listen.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ringreduce.errors import PeerLostError, PeerTimeoutError
from ringreduce.rendezvous.definition import Rendezvous
from ringreduce.system import place
from ringreduce.system.unix_sockets import BACKLOG, LONGEST_WAIT_S, connect, peer_process
from ringreduce.transports.base import not_assembled

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_THE_JOB = (
    *("MASTER_ADDR", "MASTER_PORT", "RINGREDUCE_TOKEN"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
"""At least one of these variables differs between two jobs, and between a job and its restart."""
_LINE_S = 5.0
"""Seconds that a rank which has connected may take to send its line."""
_LINE_BYTES = 1 << 20
"""The longest line of a rank.  The answer of rank 0 has at most as much for each rank."""


@dataclass
class _Completed:
    """How many rendezvous this process has completed, and so the number of the next one."""

    number: int = 0


_completed = _Completed()


def of_environment(
    rank: int | None,
    size: int | None,
    timeout_s: float,
    variables: Mapping[str, str] = os.environ,
) -> Rendezvous:
    """Return the rendezvous that the variables name, or those of the launcher in their place.

    `rank` and `size` replace RANK and WORLD_SIZE.  Raises ValueError if a variable is missing
    or no number, or names another host.
    """
    variables = place.of_launcher(variables) | dict(variables)
    given = {"RANK": rank, "WORLD_SIZE": size}
    missing = [name for name in _NAMES if not variables.get(name) and given.get(name) is None]
    if missing:
        there = [name for name in _NAMES if name not in missing]
        raise ValueError(
            f"init: rendezvous 'env://' needs {', '.join(_NAMES)}; missing: {', '.join(missing)}"
            + (f" (set: {', '.join(there)})" if there else "")
        )
    rank = _whole("RANK", variables) if rank is None else rank
    size = _whole("WORLD_SIZE", variables) if size is None else size
    if not 0 <= rank < size:
        raise ValueError(f"init: RANK is {rank} and WORLD_SIZE is {size}; ranks count from 0")
    _check_one_host(size, variables)

    def collect(mine: bytes) -> list[bytes]:
        address = _address(variables, _completed.number)
        try:
            if rank == 0:
                entries = _serve(address, size, mine, timeout_s)
            else:
                entries = _ask(address, rank, size, mine, timeout_s)
        except PeerTimeoutError as error:
            here = " and ".join(f"{name}={variables.get(name, '')}" for name in _OF_THE_JOB[:2])
            raise PeerTimeoutError(
                f"{error}; ranks meet only if they spell MASTER_ADDR and MASTER_PORT alike: "
                f"rank {rank} has {here}",
                error.ranks,
            ) from None
        _completed.number += 1  # not after an error: a rank may call `init` again
        return entries

    return Rendezvous(collect, rank, size)


def _whole(name: str, variables: Mapping[str, str]) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ValueError(f"init: {name} is {variables[name]!r}; wanted a whole number") from None


def _check_one_host(size: int, variables: Mapping[str, str]) -> None:
    several = "Without MPI all ranks have to be on one host; start these with mpirun or srun"
    here = variables.get("LOCAL_WORLD_SIZE", "")
    if here.isdigit() and int(here) < size:
        raise ValueError(f"init: {here} of {size} ranks are on this host.  {several}")
    master = variables["MASTER_ADDR"]
    if not place.is_here(master):
        raise ValueError(f"init: MASTER_ADDR {master} is no address of this host.  {several}")


def _address(variables: Mapping[str, str], number: int) -> bytes:
    job = [os.geteuid(), *(variables.get(name, "") for name in _OF_THE_JOB), number]
    name = blake2b(json.dumps(job).encode(), digest_size=16).hexdigest()
    return f"\0ringreduce-{name}".encode()


def _serve(address: bytes, size: int, mine: bytes, timeout_s: float) -> list[bytes]:
    """As rank 0: receive the bytes of the other ranks, and send those of all ranks to each."""
    entries: dict[int, bytes] = {0: mine}
    waiting: list[socket.socket] = []
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as listening:
        _listen(listening, address)
        try:
            while len(entries) < size:
                left = deadline - time.monotonic()
                listening.settimeout(min(max(left, 0.001), LONGEST_WAIT_S))
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    if time.monotonic() < deadline:
                        continue
                    missing = sorted(set(range(size)) - set(entries))
                    _answer(waiting, {"missing": missing})
                    raise not_assembled(timeout_s, missing) from None
                line = _line_of(connection)
                if line is None:
                    connection.close()
                    continue
                waiting.append(connection)
                if complaint := _complaint(line, entries, size):
                    _answer(waiting, {"complaint": complaint})
                    raise ValueError(complaint)
                entries[line["rank"]] = bytes.fromhex(line["entry"])
            _answer(waiting, {"entries": [entries[each].hex() for each in range(size)]})
        finally:
            for connection in waiting:
                connection.close()
    return [entries[each] for each in range(size)]


def _listen(listening: socket.socket, address: bytes) -> None:
    try:
        listening.bind(address)
    except OSError:
        raise ValueError(
            "init: another process is rank 0 of this MASTER_ADDR and MASTER_PORT; give each job "
            "its own port, and each rank its own RANK"
        ) from None
    listening.listen(BACKLOG)


def _line_of(connection: socket.socket) -> dict[str, Any] | None:
    """Return the line of a rank; None if the process is no rank, or belongs to another user."""
    try:
        if peer_process(connection) is None:
            return None
        connection.settimeout(_LINE_S)
        line = json.loads(_received_line(connection, _LINE_BYTES))
        match line:
            case {"rank": int(), "size": int(), "entry": str(entry)}:
                bytes.fromhex(entry)
                return dict(line)
    except (OSError, ValueError):
        pass
    return None


def _complaint(line: Mapping[str, Any], entries: Mapping[int, bytes], size: int) -> str:
    """Return the text of an error in the line of a rank; "" if the line is right."""
    rank = line["rank"]
    if line["size"] != size:
        return f"init: WORLD_SIZE is {size} on rank 0, and {line['size']} on rank {rank}"
    if rank in entries:
        return f"init: two processes have RANK {rank}"
    if not 0 <= rank < size:
        return f"init: RANK is {rank} on a rank of {size}; ranks count from 0"
    return ""


def _answer(waiting: Iterable[socket.socket], answer: Mapping[str, Any]) -> None:
    line = json.dumps(answer).encode() + b"\n"
    for connection in waiting:
        try:
            connection.settimeout(_LINE_S)
            connection.sendall(line)
        except OSError:  # the rank has ended: those who connect to it notice
            continue


def _ask(address: bytes, rank: int, size: int, mine: bytes, timeout_s: float) -> list[bytes]:
    """As another rank: send this rank's bytes to rank 0, and receive those of all ranks."""
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as connection:
        line = json.dumps({"rank": rank, "size": size, "entry": mine.hex()}).encode()
        try:
            connect(connection, address, deadline, awaits=True)
            if peer_process(connection) is None:
                raise ValueError("init: a process of another user listens in place of rank 0")
            # Rank 0 gives up after `timeout_s`, too, and then says who is missing.
            left = max(deadline - time.monotonic(), 0.0) + _LINE_S
            connection.settimeout(min(left, LONGEST_WAIT_S))
            connection.sendall(line + b"\n")
            answer = json.loads(_received_line(connection, _LINE_BYTES * size))
        except TimeoutError:
            raise not_assembled(timeout_s, [0]) from None
        except OSError:
            raise PeerLostError(
                "init: rank 0 has ended before the rendezvous was complete", (0,)
            ) from None
    match answer:
        case {"entries": [*entries]}:
            return [bytes.fromhex(entry) for entry in entries]
        case {"missing": [*missing]}:
            raise not_assembled(timeout_s, missing)
        case {"complaint": str(complaint)}:
            raise ValueError(complaint)
    raise ValueError(f"init: rank 0 answered {answer!r}; do all ranks have the same version?")


def _received_line(connection: socket.socket, most: int) -> bytes:
    """Receive a line.  Raises OSError if the connection ends before, ValueError if it is longer."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionResetError
        line += part
        if len(line) > most:
            raise ValueError(f"a line of more than {most} bytes")
    return bytes(line)
