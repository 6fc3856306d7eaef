"""Multiply matrices while an all-reduce is under way.

With `async_op=True` a call returns a `Work` at once, and a thread of the communicator executes the
call.  `wait()` returns the result.  Do not change the arrays of the call before `wait()` returns.

    ringreduce run -n 2 examples/overlap.py

prints, with a time for each …

    all-reduce of 16 MiB        … ms
    matmul                      … ms
    matmul during all-reduce    … ms
    both results are right: True

Where a core is free to move the data, the third time is less than the sum of the first two.  If
all cores compute, as two ranks on two cores do, moving the data takes time from the matmul.
"""

import statistics
import time

import numpy as np

import ringreduce as rr


def median_ms(comm, call):
    """Return the median time of five calls, in milliseconds."""
    times = []
    for _ in range(5):
        comm.barrier()
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


with rr.init() as comm:
    x = np.full(4 << 20, comm.rank + 1, np.float32)
    total = np.empty_like(x)
    a, b = np.full((600, 600), 2.0), np.full((600, 600), 0.5)
    product = np.empty_like(a)

    def both():
        work = comm.all_reduce(x, out=total, async_op=True)
        np.matmul(a, b, out=product)
        work.wait()

    reduce_ms = median_ms(comm, lambda: comm.all_reduce(x, out=total))
    matmul_ms = median_ms(comm, lambda: np.matmul(a, b, out=product))
    both_ms = median_ms(comm, both)
    if comm.rank == 0:
        print(f"all-reduce of 16 MiB     {reduce_ms:8.1f} ms")
        print(f"matmul                   {matmul_ms:8.1f} ms")
        print(f"matmul during all-reduce {both_ms:8.1f} ms")
        right = np.all(product == 600) and np.all(total == comm.size * (comm.size + 1) / 2)
        print("both results are right:", right)
