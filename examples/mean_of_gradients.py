"""Fit a linear model to data that is spread over the ranks, by the mean of all gradients.

Each rank has samples of its own and computes the gradient of its own loss.  One `all_reduce` makes
the mean, in place, with the same bits on every rank.  So all ranks take the same step.

    ringreduce run -n 2 examples/mean_of_gradients.py

prints

    2 ranks, 1,000 samples each
    found [ 1.998 -0.996  0.5  ]
    as least squares over all samples does: True
"""

import numpy as np

import ringreduce as rr

SAMPLES = 1_000
TRUE = np.array([2.0, -1.0, 0.5])

with rr.init() as comm:
    rng = np.random.default_rng(seed=comm.rank)
    x = rng.standard_normal((SAMPLES, len(TRUE)))
    y = x @ TRUE + 0.1 * rng.standard_normal(SAMPLES)

    w = np.zeros(len(TRUE))
    for _ in range(200):
        gradient = x.T @ (x @ w - y) / SAMPLES
        comm.all_reduce(gradient, op="mean", out=gradient)
        w -= 0.2 * gradient

    all_x, all_y = comm.all_gather(x), comm.all_gather(y)
    expected = np.linalg.lstsq(all_x, all_y)[0]
    if comm.rank == 0:
        print(f"{comm.size} ranks, {SAMPLES:,} samples each")
        print("found", w.round(3))
        print("as least squares over all samples does:", np.allclose(w, expected))
