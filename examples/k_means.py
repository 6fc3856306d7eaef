"""Cluster points that are spread over the ranks (k-means, Lloyd's algorithm).

Each rank assigns its own points to the nearest centre.  One call on a list sums the coordinates and
the number of the points of each cluster over all ranks.

    ringreduce run -n 2 examples/k_means.py

prints

    2 ranks, 3,000 points, 3 clusters
    centres [2. 1.] [8. 2.] [4. 7.]
    the same as on one rank: True
"""

import numpy as np

import ringreduce as rr

CENTRES = np.array([[2.0, 1.0], [8.0, 2.0], [4.0, 7.0]])


def k_means(comm, points, clusters=3, steps=20):
    """Return the centres of the clusters of all ranks' points."""
    points = np.array_split(points, comm.size)[comm.rank]  # this rank's
    centres = comm.broadcast(points[:clusters])  # those of rank 0
    for _ in range(steps):
        distances = np.linalg.norm(points[:, None] - centres, axis=2)
        members = np.eye(clusters)[distances.argmin(axis=1)]  # a row has a 1 for its cluster
        sums, counts = comm.all_reduce([members.T @ points, members.sum(axis=0)])
        centres = sums / np.maximum(counts, 1)[:, None]
    return centres


with rr.init() as comm:
    rng = np.random.default_rng(seed=0)
    points = np.tile(CENTRES, (1000, 1)) + 0.5 * rng.standard_normal((3000, 2))
    centres = k_means(comm, points)
    if comm.rank == 0:
        alone = rr.spawn(k_means, 1, points)[0]  # one rank: a thread of this process
        print(f"{comm.size} ranks, {len(points):,} points, {len(centres)} clusters")
        print("centres", *centres.round(1))
        print("the same as on one rank:", np.allclose(centres, alone))
