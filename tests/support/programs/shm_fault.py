"""Rank 1 stops or is killed in the middle of many small calls through memory."""

import os
import signal
import sys

import numpy as np

import ringreduce as rr
from tests.support.mpi import report

comm = rr.init(transport="shm", timeout_s=120)  # a rank may take a while to start
one_shot = comm.plan("all_reduce", np.ones(3), algorithm="one_shot", timeout_s=1)
try:
    for turn in range(1 << 30):
        one_shot()
        if comm.rank == 1 and turn == 1000:
            os.kill(os.getpid(), signal.SIGSTOP if sys.argv[1] == "stop" else signal.SIGKILL)
except rr.RingReduceError as error:
    report(comm.rank, {"error": type(error).__name__, "text": str(error)})
