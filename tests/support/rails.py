"""What hierarchical all-reduce promises: nodes talk to each other along rails alone.

Read from the executor's message log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.control.executable import LoggedMessage

LAYOUTS = [(2, 2), (3, 1, 2), (1, 4), ((0, 2), (1, 3))]
"""Equal nodes, unequal nodes, a node of one rank, ranks dealt round-robin."""
COUNT = 24_000
CONFIG = rr.Config(slice_bytes=1 << 15, log_messages=True)


def size_of(layout: Sequence[Any]) -> int:
    """The number of ranks of a layout."""
    return sum(node if isinstance(node, int) else len(node) for node in layout)


def log_of_all_reduce(comm: rr.Communicator) -> tuple[Any, list[Any]]:
    """The nodes as the communicator sees them, and the messages of one hierarchical all-reduce."""
    before = len(comm.message_log)
    total = comm.all_reduce(np.full(COUNT, comm.rank + 1.0), algorithm="hierarchical")
    assert np.array_equal(total, np.full(COUNT, comm.size * (comm.size + 1) / 2))
    return comm.nodes, comm.message_log[before:]


def assert_only_rails_cross(outcomes: Sequence[tuple[Any, list[Any]]]) -> None:
    """`outcomes` is what `log_of_all_reduce` returned on each rank."""
    nodes = outcomes[0][0]
    home = {rank: index for index, node in enumerate(nodes) for rank in node}
    shares = {rank: _interval(rank, nodes) for rank in home}
    leaving = dict.fromkeys(range(len(nodes)), 0)
    for rank, (_, log) in enumerate(outcomes):
        for message in (LoggedMessage(*entry) for entry in log):
            if home[message.peer] == home[rank]:
                continue
            mine, theirs = shares[rank], shares[message.peer]
            assert max(mine[0], theirs[0]) < min(mine[1], theirs[1]), (
                f"ranks {rank} and {message.peer} are on no rail"
            )
            if message.direction == "send":
                leaving[home[rank]] += message.nbytes
    # Each node's data cross the network 2(H-1)/H times, however many ranks it has; borders between
    # chunks are rounded to elements, at most one for each chunk, slice and step.
    hosts, ranks, slices = len(nodes), len(home), -(-COUNT * 8 // CONFIG.slice_bytes)
    exact = 2 * (hosts - 1) / hosts * COUNT * 8
    for sent in leaving.values():
        assert sent == pytest.approx(exact, abs=8 * slices * 2 * (hosts - 1) * ranks)


def _interval(rank: int, nodes: Any) -> tuple[float, float]:
    """The part of the data that a rank owns in its node: ranks on one rail own some of the same."""
    node = next(node for node in nodes if rank in node)
    place = node.index(rank)
    return place / len(node), (place + 1) / len(node)
