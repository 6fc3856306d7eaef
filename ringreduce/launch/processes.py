"""Start the ranks of a job on this host without MPI.  The words are those of hydra's mpiexec:

    python -P -m ringreduce.launch.processes -n RANKS [-prepend-rank] COMMAND...

The ranks meet by `env://`.  The first rank that fails ends the others, unless it has told this
process that they can go on without it.  Each rank has a session of its own: the terminal sends its
signals to this process alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import IO

from ringreduce.supervisor.banner import DRAIN_S
from ringreduce.supervisor.launcher import exit_code
from ringreduce.supervisor.signals import ENDING, GRACE_S, Signals, heed_again
from ringreduce.system.place import HYDRA, OPEN_MPI, RANK_VARIABLES, SET_BY, SRUN, SURVIVED, port_of
from ringreduce.system.prctl import die_with_parent

_OF_MPIS = {"PMI_FD", *RANK_VARIABLES, *HYDRA, *OPEN_MPI, *SRUN}
"""Variables of a launcher in whose job this one runs: no rank may take itself for one of that."""
_GRACE_S = GRACE_S - 1.0
"""Seconds that ranks may take to end after a signal that should end them."""
_FOR_EVER_S = 3600.0


def main() -> int:
    _, ranks, *command = sys.argv[1:]
    tags, launcher = command[0] == "-prepend-rank", os.getpid()
    others = {name: value for name, value in os.environ.items() if name not in _OF_MPIS}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port_of(str(launcher)))} | others
    told, tells = os.pipe()
    os.set_blocking(told, False)
    place |= {SURVIVED: str(tells)}
    place |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, SET_BY: str(launcher)}
    with Signals() as signals:
        started = [
            subprocess.Popen(
                command[tags:],
                env=place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE if tags else None,
                stderr=subprocess.PIPE if tags else None,
                start_new_session=True,
                pass_fds=(tells,),
                preexec_fn=partial(_begin, launcher),
            )
            for rank in range(int(ranks))
        ]
        tagging = [
            threading.Thread(target=_tag, args=(source, target, b"[%d] " % rank), daemon=True)
            for rank, each in enumerate(started)
            for target, source in ((1, each.stdout), (2, each.stderr))
            if source is not None
        ]
        for thread in tagging:
            thread.start()
        code = _code_of(started, signals, told)
    for thread in tagging:
        thread.join(DRAIN_S)
    return exit_code(code, 0)


def _begin(launcher: int) -> None:
    heed_again()
    die_with_parent(signal.SIGKILL, launcher)


def _code_of(started: list[subprocess.Popen[bytes]], signals: Signals, told: int) -> int:
    """Wait for the end of all ranks, and pass signals on.  Returns the code of the first failure.

    The end of a rank that the others survive, as they have `told` by a pipe, is no failure.  A
    signal that ends jobs ends the ranks as SIGTERM does, with the processes that they started.
    """
    code, kill_at, left = 0, float("inf"), started
    survived: set[int] = set()
    while left:
        patience_s = max(0.0, min(kill_at - time.monotonic(), _FOR_EVER_S))
        select.select(signals.woken, [], [], patience_s)
        came = [number for number, _ in signals.taken() if number != signal.SIGCHLD]
        ended = [each for each in left if each.poll()]
        _note(told, survived)
        failed = [each.returncode for each in ended if started.index(each) not in survived]
        left = [each for each in left if each.returncode is None]
        if failed and not code:
            # A signal, which is negative, goes first.  Ranks that lost another rank end with 1.
            code = min(failed, key=lambda code: (code > 0, -code))
            came.append(signal.SIGTERM)
        if time.monotonic() >= kill_at:
            came, kill_at = [signal.SIGKILL], float("inf")
        for number in came:
            if number in ENDING:
                number, kill_at = signal.SIGTERM, min(kill_at, time.monotonic() + _GRACE_S)
            for each in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.pid, number)
    return code


def _note(told: int, survived: set[int]) -> None:
    """Read which ranks the others survive: ``+3`` is one, ``-3`` is one no more."""
    with contextlib.suppress(BlockingIOError):
        for line in os.read(told, 1 << 16).split():
            (survived.add if line[:1] == b"+" else survived.discard)(int(line[1:]))


def _tag(source: IO[bytes], target: int, tag: bytes) -> None:
    """Write the lines of `source` to a descriptor, each after a tag and in one piece."""
    with source:
        for line in source:
            with contextlib.suppress(OSError):  # a rank must not wait because nobody reads
                os.write(target, tag + line.removesuffix(b"\n") + b"\n")


if __name__ == "__main__":
    sys.exit(main())
