"""All-reduce for Python over MPI: algorithms that are proven, priced, drawn, and run."""

from ringreduce.communicator import Communicator
from ringreduce.config import Config
from ringreduce.errors import (
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    RingReduceError,
    ScheduleError,
)
from ringreduce.start import init, spawn

__all__ = [
    "Communicator",
    "Config",
    "MismatchError",
    "PeerLostError",
    "PeerTimeoutError",
    "RingReduceError",
    "ScheduleError",
    "init",
    "spawn",
]
__version__ = "0.1.0"
