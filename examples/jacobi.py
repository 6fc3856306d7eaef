"""Solve Laplace's equation on a square (Jacobi's method); each rank has a band of rows.

Neighbours need each other's rows at their border.  `split` makes a communicator for each pair of
neighbours: first 0-1, 2-3, and so on, then 1-2, 3-4, and so on.

    ringreduce run -n 2 examples/jacobi.py

prints

    2 ranks, 32 x 32 points: 1235 sweeps
    largest error below 1e-6: True
"""

import numpy as np

import ringreduce as rr

POINTS, TOLERANCE = 32, 1e-9


def swap_borders(pair, band):
    """Write the neighbour's border row into this rank's outermost row."""
    if pair.size == 2:  # else this rank has no neighbour on that side
        inner, outer = (-2, -1) if pair.rank == 0 else (1, 0)
        rows = pair.all_gather(band[inner][None], counts=(1, 1))
        band[outer] = rows[1 - pair.rank]


def sweep(band):
    """Replace each inner point by the mean of its four neighbours.  Returns the largest change."""
    mean = (band[:-2, 1:-1] + band[2:, 1:-1] + band[1:-1, :-2] + band[1:-1, 2:]) / 4
    change = np.abs(mean - band[1:-1, 1:-1]).max()
    band[1:-1, 1:-1] = mean
    return change


with rr.init() as comm:
    axis = np.linspace(0.0, 1.0, POINTS)
    exact = axis[:, None] ** 2 - axis**2  # solves the discrete equation, too
    mine = np.array_split(np.arange(1, POINTS - 1), comm.size)[comm.rank]
    exact = exact[mine[0] - 1 : mine[-1] + 2]  # with a row more above and below
    band = exact.copy()
    band[1:-1, 1:-1] = 0  # the boundary keeps its values
    pairs = [comm.split(comm.rank // 2), comm.split((comm.rank + 1) // 2)]
    sweeps, change = 0, np.inf
    while change > TOLERANCE:
        for pair in pairs:
            swap_borders(pair, band)
        change = comm.all_reduce(sweep(band), op="max")
        sweeps += 1
    error = comm.all_reduce(np.abs(band - exact).max(), op="max")
    if comm.rank == 0:
        print(f"{comm.size} ranks, {POINTS} x {POINTS} points: {sweeps} sweeps")
        print("largest error below 1e-6:", bool(error < 1e-6))
