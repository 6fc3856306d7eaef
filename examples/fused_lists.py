"""Reduce many arrays by one call.

`all_reduce` takes a list.  All arrays of one dtype are reduced together, so ten small gradients
cost as many messages as one array.  The result is a list of arrays with the shapes of the input.

    ringreduce run -n 2 examples/fused_lists.py

prints

    weights (64, 32) float32: every element is 3
    bias    (32,)    float32: every element is 30
    counts  (10,)    int64  : every element is 300
    the same as one call for each array: True
"""

import numpy as np

import ringreduce as rr

with rr.init() as comm:
    mine = comm.rank + 1
    arrays = {
        "weights": np.full((64, 32), mine, np.float32),
        "bias": np.full(32, 10 * mine, np.float32),
        "counts": np.full(10, 100 * mine, np.int64),
    }
    one_by_one = [comm.all_reduce(array) for array in arrays.values()]

    sums = comm.all_reduce(list(arrays.values()))  # two reductions: one for each dtype

    comm.all_reduce(list(arrays.values()), out=list(arrays.values()))  # the same in place
    same = all(
        np.array_equal(left, right) and np.array_equal(left, in_place)
        for left, right, in_place in zip(sums, one_by_one, arrays.values(), strict=True)
    )
    if comm.rank == 0:
        for name, array in zip(arrays, sums, strict=True):
            assert np.all(array == array.flat[0])
            kind = f"{array.shape!s:8} {array.dtype!s:7}"
            print(f"{name:7} {kind}: every element is {array.flat[0]:g}")
        print("the same as one call for each array:", same)
