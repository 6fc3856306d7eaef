"""The program of the proofs: count samples until a file exists, then to the end of the epoch.

    python -m tests.long_recovery.counting STOP [PLAN]

PLAN is a file of `tests.long_recovery.kill_points`: this rank kills itself at some of its points.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import ringreduce as rr
from benchmarks.rows import environment
from tests.long_recovery.deaths import Deaths

_SAMPLES, _BATCH, _STEP_S = 96, 32, 0.005


def main(stop: Path, deaths: Deaths) -> None:
    sampler = rr.train.Sampler(_SAMPLES, _BATCH, seed=1)

    def train(comm: rr.Communicator, state: rr.State) -> None:
        deaths.begin(comm, state)
        while not state["stops"][0] or state.step % sampler.epoch_steps:
            mine = np.zeros(_SAMPLES, np.int64)
            mine[sampler.indices(state.step, comm)] = 1
            time.sleep(_STEP_S)
            (total,) = comm.all_reduce([mine])
            stops = comm.all_reduce(np.array([stop.exists()], np.int64))
            comm.barrier()
            with state.update():
                deaths.at("update begun")
                state["counts"] += total
                deaths.at("update half written")
                state["stops"] += stops
                deaths.at("update written")
            deaths.at("update committed")
        if comm.rank == 0:
            counts = state["counts"]
            found = {"least": int(counts.min()), "most": int(counts.max())}
            found["epochs"] = state.step // sampler.epoch_steps
            print(json.dumps({**found, "environment": environment("")}), flush=True)

    zeros = np.zeros(_SAMPLES, np.int64)
    rr.elastic(train, rr.State({"counts": zeros, "stops": np.zeros(1, np.int64)}, sampler))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Deaths(Path(sys.argv[2]) if len(sys.argv) > 2 else None))
