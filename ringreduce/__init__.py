"""All-reduce for Python over MPI: algorithms that are proven, priced, drawn, and run.

A name is imported when it is first used, so that the command line and each rank start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringreduce.algorithms.register import register_algorithm
    from ringreduce.bootstrap import init, spawn
    from ringreduce.calls.communicator import Communicator
    from ringreduce.calls.queue import Work
    from ringreduce.config import Config
    from ringreduce.errors import (
        MismatchError,
        PeerLostError,
        PeerTimeoutError,
        RingReduceError,
        ScheduleError,
    )

__all__ = [
    "Communicator",
    "Config",
    "MismatchError",
    "PeerLostError",
    "PeerTimeoutError",
    "RingReduceError",
    "ScheduleError",
    "Work",
    "init",
    "register_algorithm",
    "spawn",
]
__version__ = "0.1.0"

_MODULES = {
    "Communicator": "calls.communicator",
    "Config": "config",
    "Work": "calls.queue",
    "init": "bootstrap",
    "register_algorithm": "algorithms.register",
    "spawn": "bootstrap",
}


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("ringreduce.train")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"ringreduce.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
