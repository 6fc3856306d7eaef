"""Let the other ranks of this host read and write an array in place.

`comm.empty` makes a registered array, which is in memory that the ranks share.  No call copies it,
nor a view of it.  It is a NumPy array like any other.  Here it holds all gradients of a model.

    ringreduce run -n 2 examples/registered_arrays.py

prints, with a time for each …

    ordinary array of 4 MiB    … ms
    registered array           … ms
    weights and bias are reduced: True

Where the ranks do not share memory, as on several hosts, `comm.empty` makes an ordinary array.
"""

import statistics
import time

import numpy as np

import ringreduce as rr


def median_ms(comm, x):
    """Return the median time of 20 all-reduces of x, in place, in milliseconds."""
    times = []
    for _ in range(20):
        comm.barrier()
        start = time.perf_counter()
        comm.all_reduce(x, op="max", out=x)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


with rr.init() as comm:
    ordinary = np.zeros(1 << 20, np.float32)
    registered = comm.empty(1 << 20, np.float32)

    bias = registered[:1024]  # views are registered as well
    weights = registered[1024:].reshape(1023, 1024)
    bias[:] = comm.rank
    weights[:] = 10 + comm.rank
    comm.all_reduce(registered, out=registered)
    ranks = comm.size * (comm.size - 1) / 2
    right = np.all(bias == ranks) and np.all(weights == 10 * comm.size + ranks)

    ordinary_ms, registered_ms = median_ms(comm, ordinary), median_ms(comm, registered)
    if comm.rank == 0:
        print(f"ordinary array of 4 MiB {ordinary_ms:8.2f} ms")
        print(f"registered array        {registered_ms:8.2f} ms")
        print("weights and bias are reduced:", right)
