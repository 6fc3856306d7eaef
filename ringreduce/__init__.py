"""All-reduce for Python over MPI: algorithms that are proven, priced, drawn, and run.

Every rank of an MPI job runs the same program::

    import ringreduce as rr

    with rr.init() as comm:
        mean = comm.all_reduce(gradient, op="mean")

- `init` returns the communicator of an MPI job; `spawn` runs ranks as threads, without MPI.
- `Communicator` has the collectives, and messages between two ranks.
- `Work` is an asynchronous call; `wait_any` waits for one of several.
- `ExactSum` adds arrays with the same bits for any number of ranks.
- `SharedArray` is an array that all ranks of a node add to.
- `State` keeps arrays that outlive a rank; `elastic` goes on with them after ranks are lost.
- `Config` has the settings; `register_algorithm` adds an algorithm; `span` traces a block.
- `MismatchError`, `PeerTimeoutError` and `PeerLostError` are raised on all ranks alike.
- `pipeline` has the schedules of pipelines, `train` has data-parallel training.

A name is imported when it is first used, so that the command line and each rank start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringreduce import pipeline, train
    from ringreduce.algorithms.register import register_algorithm
    from ringreduce.calls.communicator import Communicator
    from ringreduce.calls.exact import ExactSum
    from ringreduce.calls.shared_array import SharedArray
    from ringreduce.calls.work import Work, wait_any
    from ringreduce.config import Config
    from ringreduce.errors import (
        MismatchError,
        PeerLostError,
        PeerTimeoutError,
        RingReduceError,
        ScheduleError,
    )
    from ringreduce.recovery.change import Change
    from ringreduce.recovery.elastic import elastic, is_elastic
    from ringreduce.recovery.state import State
    from ringreduce.start.init import init
    from ringreduce.start.spawn import spawn
    from ringreduce.trace.recorder import span

__all__ = [
    "Change",
    "Communicator",
    "Config",
    "ExactSum",
    "MismatchError",
    "PeerLostError",
    "PeerTimeoutError",
    "RingReduceError",
    "ScheduleError",
    "SharedArray",
    "State",
    "Work",
    "elastic",
    "init",
    "is_elastic",
    "pipeline",
    "register_algorithm",
    "span",
    "spawn",
    "train",
    "wait_any",
    "wrap",
]
__version__ = "0.1.0"

_MODULES = {
    "Change": "recovery.change",
    "Communicator": "calls.communicator",
    "Config": "config",
    "ExactSum": "calls.exact",
    "SharedArray": "calls.shared_array",
    "State": "recovery.state",
    "Work": "calls.work",
    "elastic": "recovery.elastic",
    "init": "start.init",
    "is_elastic": "recovery.elastic",
    "register_algorithm": "algorithms.register",
    "span": "trace.recorder",
    "spawn": "start.spawn",
    "wait_any": "calls.work",
    "wrap": "mpi",
}
_PACKAGES = ("pipeline", "train")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"ringreduce.{name}")
    if name not in __all__:
        hint = "" if name.startswith("_") else _hint(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(import_module(f"ringreduce.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Return the name here of what another library calls `name`; "" if that is unknown."""
    from ringreduce.calls.communicator import Communicator
    from ringreduce.calls.elsewhere import (
        ATTRIBUTES,
        METHODS_ELSEWHERE,
        NAMES_ELSEWHERE,
        OPS_ELSEWHERE,
    )
    from ringreduce.errors import did_you_mean

    word = name.lower()
    if word in ("op", "reduceop", "sum", *OPS_ELSEWHERE, *OPS_ELSEWHERE.values()):
        return "; an op is a string, such as op='sum'"
    method = METHODS_ELSEWHERE.get(word, word)
    if method in ATTRIBUTES or method.partition("(")[0] in dir(Communicator):
        return f"; it belongs to a communicator: comm = ringreduce.init(), then comm.{method}"
    return did_you_mean(name, __all__, NAMES_ELSEWHERE)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
