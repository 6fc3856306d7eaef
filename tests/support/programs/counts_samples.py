"""Count each sample of each epoch, with `rr.elastic`; rank 0 prints the counts at the end.

Arguments: the number of samples, the batch, the epochs, and the seconds of a step.
"""

import sys
import time

import numpy as np

import ringreduce as rr

samples, batch, epochs = map(int, sys.argv[1:4])
step_s = float(sys.argv[4])
sampler = rr.train.Sampler(samples, batch, seed=7)


def train(comm, state):
    while state.step < sampler.steps(epochs):
        mine = np.zeros(samples, np.int64)
        mine[sampler.indices(state.step, comm)] = 1
        time.sleep(step_s)
        total = comm.all_reduce(mine)
        with state.update():
            state["counts"] += total
    if comm.rank == 0:
        counts = np.unique(state["counts"]).tolist()
        print(f"{comm.size} ranks, step {state.step}: counted {counts} times", flush=True)


state = rr.State({"counts": np.zeros(samples, np.int64)}, sampler)
state.on_resize(lambda change: print(f"resized {change}", flush=True))
rr.elastic(train, state)
