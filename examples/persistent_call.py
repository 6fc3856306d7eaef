"""Plan a call once and repeat it in a tight loop.

`comm.plan` checks, plans and binds a call to its arrays.  Each call of the function that it returns
reads the present values of the array.  Here all ranks need the largest error of any rank after each
step, to stop at the same step.

    ringreduce run -n 2 examples/persistent_call.py

prints

    2 ranks stop after 9 steps
    rank 0 alone would have stopped after 7
    every root is right: True
"""

import numpy as np

import ringreduce as rr

TOLERANCE = 1e-9

with rr.init() as comm:
    numbers = np.arange(1.0, 101.0) * 10.0**comm.rank
    roots = np.ones_like(numbers)
    error = np.empty(1)
    largest_of_all_ranks = comm.plan("all_reduce", error, op="max", out=error)

    steps = alone = 0
    error[0] = np.inf
    while error[0] > TOLERANCE:
        roots = (roots + numbers / roots) / 2  # Heron's method
        mine = np.abs(roots**2 / numbers - 1).max()
        error[0] = mine
        largest_of_all_ranks()
        steps += 1
        if mine <= TOLERANCE and not alone:
            alone = steps  # the step after which this rank alone would stop
    right = np.allclose(roots, np.sqrt(numbers), rtol=TOLERANCE)

    if comm.rank == 0:
        print(f"{comm.size} ranks stop after {steps} steps")
        print(f"rank 0 alone would have stopped after {alone}")
        print("every root is right:", right)
