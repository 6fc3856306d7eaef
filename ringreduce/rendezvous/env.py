"""Find the other ranks by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

Rank 0 listens at an abstract Unix address and at a TCP port that all ranks derive from these
variables, and not at MASTER_PORT, where a store of torch may listen.  It does so by TCP only if
there may be ranks on other hosts.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from ringreduce.config import Environment
from ringreduce.errors import PeerTimeoutError
from ringreduce.rendezvous.definition import Rendezvous
from ringreduce.rendezvous.meeting import Meeting
from ringreduce.system import place

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HINTED = ("MASTER_ADDR", "MASTER_PORT")
_OF_THE_JOB = (
    *("MASTER_PORT", "RINGREDUCE_TOKEN"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
"""At least one of these variables differs between two jobs, and between a job and its restart."""
_PORTS = 16
"""Rank 0 listens at the first free one of so many ports."""


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
    or no number.
    """
    environment = Environment.read(variables)
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
    _check_reachable(size, variables)
    one_host = _is_on_one_host(size, variables)

    def collect(mine: bytes) -> list[bytes]:
        meeting = _meeting(size, timeout_s, environment, variables)
        try:
            entries = meeting.serve(size, mine) if rank == 0 else meeting.ask(rank, size, mine)
        except PeerTimeoutError as error:
            here = " and ".join(f"{name}={variables.get(name, '')}" for name in _HINTED)
            raise PeerTimeoutError(
                f"{error}; ranks meet only if they spell MASTER_ADDR and MASTER_PORT alike: "
                f"rank {rank} has {here}",
                error.ranks,
            ) from None
        _completed.number += 1  # not after an error: a rank may call `init` again
        return entries

    return Rendezvous(collect, rank, size, one_host)


def _whole(name: str, variables: Mapping[str, str]) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ValueError(f"init: {name} is {variables[name]!r}; wanted a whole number") from None


def _meeting(
    size: int, timeout_s: float, environment: Environment, variables: Mapping[str, str]
) -> Meeting:
    """Return the next meeting of this process's job."""
    job = [*(variables.get(name, "") for name in _OF_THE_JOB), _completed.number]
    here = blake2b(json.dumps([os.geteuid(), variables["MASTER_ADDR"], *job]).encode())
    number = blake2b(json.dumps(job).encode(), digest_size=16)
    first = place.port_of(number.hexdigest())
    return Meeting(
        number.digest(),
        environment.secret_key,
        f"\0ringreduce-{here.hexdigest()[:32]}".encode(),
        "" if _is_on_one_host(size, variables) else variables["MASTER_ADDR"],
        range(first, first + _PORTS) if environment.port is None else (environment.port,),
        timeout_s,
    )


def _check_reachable(size: int, variables: Mapping[str, str]) -> None:
    here, master = variables.get("LOCAL_WORLD_SIZE", ""), variables["MASTER_ADDR"]
    if here.isdecimal() and int(here) < size and _is_loopback(master):
        raise ValueError(
            f"init: {here} of {size} ranks are on this host, and MASTER_ADDR is {master}, which "
            "other hosts cannot reach; set it to an address of the host of rank 0, on all ranks"
        )


def _is_on_one_host(size: int, variables: Mapping[str, str]) -> bool:
    """Return whether all ranks are known to be on this host."""
    return variables.get("LOCAL_WORLD_SIZE") == str(size) or _is_loopback(variables["MASTER_ADDR"])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
