"""Calls in which some ranks fail: ``fault.py how victims ending``, see `main`."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ringreduce as rr
from tests.support.mpi import place, report

TIMEOUT_S = 1.0
LONG_S = 3600
"""Longer than a test waits for its job."""
RANK, SIZE = place()


def fail(how: str, comm: rr.Communicator) -> None:
    """End, or stop, or do something else than the others."""
    report(RANK, {"failed_at": time.time()})
    match how:
        case "never":
            time.sleep(LONG_S)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise" | "raise slowly":
            raise ValueError("the victim's own error")
        case "exit":
            sys.exit(3)
        case "vanish":
            os._exit(0)
        case "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            comm.barrier()
        case _:
            raise AssertionError(how)


def slowly_print(kind: type, error: BaseException, trace: Any) -> None:
    """An excepthook that gives others time to end the job before it has said anything."""
    if kind is ValueError:
        time.sleep(0.3)
    sys.__excepthook__(kind, error, trace)


def caught(comm: rr.Communicator, call: Callable[[], Any]) -> dict[str, Any]:
    """The error that a call ends in, and what later calls raise."""
    try:
        call()
    except rr.RingReduceError as error:
        raised_at = time.time()
        later = []
        for again in (call, comm.barrier, lambda: comm.broadcast(1)):
            try:
                again()
            except rr.RingReduceError as same:
                later.append(str(same))
        comm.close()
        return {
            "error": type(error).__name__,
            "text": str(error),
            "ranks": getattr(error, "ranks", None),
            "raised_at": raised_at,
            "later": later,
        }
    return {"error": None}


def main(how: str, victims: str, ending: str) -> None:
    """The ranks `victims` fail as `how` says, the others call on.

    `ending` is what the others do with the error: "caught" reports it and returns, "uncaught" lets
    it pass, "with" too, while the victim fails in a with block; "asleep" makes no call at all.
    """
    if how == "raise slowly":
        sys.excepthook = slowly_print
    comm = rr.init(timeout_s=LONG_S)
    # Other ends than these are noticed without a timeout.
    timeout_s = TIMEOUT_S if how in ("never", "stop") else LONG_S
    x = np.arange(300_000, dtype=np.float32)
    for _ in range(3):  # the first loads machine code, which takes its time on a busy machine
        comm.all_reduce(x)
    if str(RANK) in victims.split(","):
        if ending == "with":
            with comm:
                fail(how, comm)
        fail(how, comm)
    elif ending == "caught":
        report(RANK, caught(comm, lambda: comm.all_reduce(x, timeout_s=timeout_s)))
    elif ending == "asleep":
        report(RANK, {"asleep": True})
        time.sleep(LONG_S)
    else:
        comm.all_reduce(x, timeout_s=timeout_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
