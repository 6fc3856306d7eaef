"""Calls that ranks can disagree on, and programs in which they do: the same for every transport.

A program runs on every rank and returns plain data, for the test to compare between ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.control import agreement
from tests.support.cases import CONFIG, nodes_of

Make = Callable[[rr.Communicator], Any]
Arguments = dict[str, str]
"""What an error says of each argument of a call."""


@dataclass(frozen=True)
class Called:
    """A call that every rank can make, what must come of it, and what errors say of it."""

    collective: str
    make: Make
    wanted: Callable[[int, int], Any]
    """(rank, size) -> the result when all ranks make it."""
    said: Callable[[int], Arguments]
    """size -> the arguments in the words of an error."""


def ramp(rank: int, count: int, dtype: str = "float32") -> np.ndarray:
    """Different on every rank and at every index; sums are exact in float32."""
    return (np.arange(count) % 1000 * (rank + 1)).astype(dtype)


def ramps(size: int, count: int, dtype: str = "float32") -> list[np.ndarray]:
    return [ramp(rank, count, dtype) for rank in range(size)]


def said(array: str, algorithm: str = "auto", **arguments: str) -> Arguments:
    named = {name: f"{name}={value}" for name, value in arguments.items()}
    return {"array": array, **named, "algorithm": f"algorithm={algorithm!r}"}


def all_reduce(
    shape: tuple[int, ...], dtype: str = "float32", op: str = "sum", algorithm: str = "auto"
) -> Called:
    count = int(np.prod(shape))
    fold = {"sum": np.sum, "max": np.max}[op]
    return Called(
        "all_reduce",
        lambda c: c.all_reduce(ramp(c.rank, count, dtype).reshape(shape), op, algorithm=algorithm),
        lambda rank, size: fold(ramps(size, count, dtype), axis=0).reshape(shape),
        lambda size: said(f"{dtype}{list(shape)}", algorithm, op=repr(op)),
    )


def reduce_scatter(count: int) -> Called:
    return Called(
        "reduce_scatter",
        lambda c: c.reduce_scatter(ramp(c.rank, count)),
        lambda rank, size: np.array_split(np.sum(ramps(size, count), axis=0), size)[rank],
        lambda size: said(f"float32[{count}]", op="'sum'"),
    )


def all_gather(count: int, counted: bool = False, columns: int = 0) -> Called:
    """Rank r gives r rows more than `count`; `counted` states so with ``counts=``."""

    def rows(rank: int) -> np.ndarray:
        values = ramp(rank, (count + rank) * (columns or 1))
        return values.reshape(-1, columns) if columns else values

    def counts(size: int) -> tuple[int, ...] | None:
        return tuple(count + rank for rank in range(size)) if counted else None

    return Called(
        "all_gather",
        lambda c: c.all_gather(rows(c.rank), counts=counts(c.size)),
        lambda rank, size: np.concatenate([rows(other) for other in range(size)]),
        lambda size: said(
            f"float32[:, {columns}]" if columns else "float32[:]", counts=f"{counts(size)}"
        ),
    )


def broadcast(count: int, root: int) -> Called:
    return Called(
        "broadcast",
        lambda c: c.broadcast(ramp(c.rank, count), root),
        lambda rank, size: ramp(root, count),
        lambda size: said(f"float32[{count}]", root=f"{root}"),
    )


def reduce(count: int, root: int) -> Called:
    def wanted(rank: int, size: int) -> Any:
        return np.sum(ramps(size, count), axis=0) if rank == root else None

    return Called(
        "reduce",
        lambda c: c.reduce(ramp(c.rank, count), root),
        wanted,
        lambda size: said(f"float32[{count}]", root=f"{root}", op="'sum'"),
    )


def gather(count: int, root: int) -> Called:
    def wanted(rank: int, size: int) -> Any:
        return np.concatenate(ramps(size, count)) if rank == root else None

    return Called(
        "gather",
        lambda c: c.gather(ramp(c.rank, count), root),
        wanted,
        lambda size: said("float32[:]", root=f"{root}", counts="None"),
    )


def scatter(count: int, root: int, counted: bool = False) -> Called:
    """`counted`: with ``counts=``, which are those of the parts without it."""

    def counts(size: int) -> tuple[int, ...]:
        return tuple(len(part) for part in np.array_split(range(count), size))

    def make(c: rr.Communicator) -> Any:
        x = ramp(root, count) if c.rank == root else None
        if not counted:
            return c.scatter(x, root)
        out = np.empty(counts(c.size)[c.rank], np.float32)
        return c.scatter(x, root, out=out, counts=counts(c.size))

    return Called(
        "scatter",
        make,
        lambda rank, size: np.array_split(ramp(root, count), size)[rank],
        lambda size: said(
            "float32[:]" if counted else "an array",
            root=f"{root}",
            counts=f"{counts(size) if counted else None}",
        ),
    )


def all_to_all(rows: int) -> Called:
    """`rows` for each rank."""
    return Called(
        "all_to_all",
        lambda c: c.all_to_all(ramp(c.rank, rows * c.size)),
        lambda rank, size: np.concatenate(
            [np.split(ramp(other, rows * size), size)[rank] for other in range(size)]
        ),
        lambda size: said(f"float32[{rows * size}]"),
    )


def fused(*counts: int) -> Called:
    text = ", ".join(f"float32[{count}]" for count in counts)
    return Called(
        "all_reduce",
        lambda c: np.concatenate(c.all_reduce([ramp(c.rank, count) for count in counts])),
        lambda rank, size: np.concatenate([np.sum(ramps(size, n), axis=0) for n in counts]),
        lambda size: said(f"[{text}]", op="'sum'"),
    )


BARRIER = Called("barrier", lambda c: c.barrier(), lambda rank, size: None, lambda size: {})

CALLS = {
    "sum": all_reduce((8,)),
    "max": all_reduce((8,), op="max"),
    "int32": all_reduce((8,), "int32"),
    "longer": all_reduce((9,)),
    "2 x 4": all_reduce((2, 4)),
    "hierarchical": all_reduce((8,), algorithm="hierarchical"),
    "beside": all_reduce((3_500,)),
    "sliced": all_reduce((40_000,)),
    "sliced hierarchical": all_reduce((40_000,), algorithm="hierarchical"),
    "scatter": reduce_scatter(8),
    "sliced scatter": reduce_scatter(30_000),
    "gather": all_gather(2),
    "counted gather": all_gather(2, counted=True),
    "gather rows": all_gather(2, columns=2),
    "sliced gather": all_gather(10_000),
    "sliced counted gather": all_gather(10_000, counted=True),
    "broadcast 0": broadcast(8, root=0),
    "broadcast 1": broadcast(8, root=1),
    "sliced broadcast 1": broadcast(30_000, root=1),
    "reduce 0": reduce(8, root=0),
    "sliced reduce 1": reduce(40_000, root=1),
    "to root 1": gather(5, root=1),
    "from root 0": scatter(8, root=0),
    "sliced from root 1": scatter(30_000, root=1),
    "counted from root 0": scatter(8, root=0, counted=True),
    "all to all": all_to_all(3),
    "sliced all to all": all_to_all(9_000),
    "list": fused(3, 5),
    "another list": fused(5, 3),
    "barrier": BARRIER,
}
"""Small ones and large ones: signatures inside and beside, staged or not, one slice or several."""

Mixed = tuple[str, str, int]
"""(usual, odd, rank): `rank` makes the odd call, all others the usual one."""


def mixtures(usual: str, size: int) -> list[Mixed]:
    """`usual` with every other call, which the ranks make in turn.

    Of two ranks rank 1 makes it: if rank 0 did, the usual and the odd call would change places.
    Two all-gathers that exchange their counts may differ in them: that is no disagreement.
    """
    either_way = {"gather", "sliced gather"}
    odd_calls = [odd for odd in CALLS if odd != usual and {odd, usual} != either_way]
    return [(usual, odd, index % size if size > 2 else 1) for index, odd in enumerate(odd_calls)]


def expected_words(mixed: Mixed, size: int) -> list[str]:
    """What the error must say: who did what, and the odd one's own words."""
    usual, odd, rank = mixed
    others = [str(other) for other in range(size) if other != rank]
    many = len(others) > 1
    who = f"ranks {', '.join(others[:-1])} and {others[-1]}" if many else f"rank {others[0]}"
    usual_said, odd_said = CALLS[usual].said(size), CALLS[odd].said(size)
    if CALLS[usual].collective == CALLS[odd].collective:
        differing = [name for name in odd_said if odd_said[name] != usual_said[name]]
        odd_words, usual_words = (
            ", ".join(words[name] for name in differing) for words in (odd_said, usual_said)
        )
        does = "pass" if many else "passes"
        return [f"rank {rank} passes {odd_words}", f"{who} {does} {usual_words}"]
    does = "call" if many else "calls"
    return [
        f"rank {rank} calls {CALLS[odd].collective}({', '.join(odd_said.values())})",
        f"{who} {does} {CALLS[usual].collective}({', '.join(usual_said.values())})",
    ]


Ended = tuple[str, float]
"""The text of the MismatchError that a rank got, and how long the call took that raised it."""


def disagree(comm: rr.Communicator, make: Make) -> Ended:
    """Make a call that not all ranks make; one who had done its part hears of it at its next."""
    for call in (make, BARRIER.make):
        start = time.monotonic()
        try:
            call(comm)
        except rr.MismatchError as error:
            return str(error), time.monotonic() - start
    return "", 0.0


def check(comm: rr.Communicator, call: Called) -> None:
    """Make a call that all ranks make, and compare what comes of it."""
    wanted, result = call.wanted(comm.rank, comm.size), call.make(comm)
    assert (result is None) == (wanted is None)
    assert np.array_equal(result, wanted), f"rank {comm.rank}: wrong result of {call.collective}"


def in_turn(*calls: Called) -> Make:
    return lambda comm: [call.make(comm) for call in calls]


def odd_one(comm: rr.Communicator, rank: int, odd: Make, usual: Make) -> Ended:
    """`disagree` with `odd` on one rank and `usual` on the others."""
    return disagree(comm, odd if comm.rank == rank else usual)


# --- programs -------------------------------------------------------------------------------------


def mix(comm: rr.Communicator, mixed: Sequence[Mixed]) -> list[Ended]:
    """Mix calls, all of which were made correctly before, and make them correctly again after."""
    for call in CALLS.values():
        check(comm, call)
    ended = []
    for usual, odd, rank in mixed:
        ended.append(odd_one(comm, rank, CALLS[odd].make, CALLS[usual].make))
        check(comm, CALLS[odd])
        check(comm, CALLS[usual])
    return ended


def mix_all(comm: rr.Communicator) -> list[Ended]:
    return mix(comm, every_mixture(comm.size))


def every_mixture(size: int) -> list[Mixed]:
    """Every call with every other; of two ranks every second pair, half of them in either order."""
    place = {name: index for index, name in enumerate(CALLS)}

    def is_chosen(usual: str, odd: str) -> bool:
        in_order = place[usual] < place[odd]
        return in_order == ((place[usual] + place[odd]) % 2 == 0)

    every = [mixed for usual in CALLS for mixed in mixtures(usual, size)]
    return every if size > 2 else [mixed for mixed in every if is_chosen(*mixed[:2])][::2]


def swap(comm: rr.Communicator) -> list[Ended]:
    """The same two calls in another order on one rank."""
    names, ended = list(CALLS), []
    for index, (first, second) in enumerate(pairwise(names)):
        usual, odd = (in_turn(CALLS[a], CALLS[b]) for a, b in ((first, second), (second, first)))
        ended.append(odd_one(comm, index % comm.size, odd, usual))
        check(comm, CALLS[first])
    return ended


def mix_several_messages_a_step(comm: rr.Communicator) -> list[Ended]:
    """On uneven nodes, ranks receive several messages of one peer in a step, one of them signed.

    The odd call's second message is longer than the usual call's.
    """
    usual = all_reduce((600,), algorithm="hierarchical")
    ended = []
    for odd in (CALLS["sliced"], all_reduce((60_000,), algorithm="hierarchical")):
        for rank in (0, 3, 5):  # one of each node
            ended.append(odd_one(comm, rank, odd.make, usual.make))
            check(comm, usual)
    return ended


def close_too_early(comm: rr.Communicator) -> list[Ended]:
    """One rank closes, the others do not: it stays open on all."""
    ended = []
    for index, usual in enumerate(CALLS.values()):
        ended.append(odd_one(comm, index % comm.size, lambda c: c.close(), usual.make))
        check(comm, usual)
    return ended


def disagree_otherwise(comm: rr.Communicator) -> list[Ended]:
    return [*swap(comm), *close_too_early(comm), *all_roots(comm)]


def run_ahead(comm: rr.Communicator, calls: str) -> list[Ended]:
    """The root of so many different broadcasts, sent before anybody receives, against a barrier."""

    def broadcasts(c: rr.Communicator) -> None:
        for count in range(int(calls)):
            c.broadcast(ramp(c.rank, count % 50), root=0)

    ended = [odd_one(comm, 0, broadcasts, BARRIER.make)]
    check(comm, CALLS["sum"])
    return ended


def disagree_often(comm: rr.Communicator, times: str) -> list[Ended]:
    ended = []
    names = list(CALLS)
    for index in range(int(times)):
        odd, usual = (CALLS[names[(index * k + k) % len(names)]] for k in (3, 7))
        if odd is not usual:
            ended.append(odd_one(comm, index % comm.size, odd.make, usual.make))
    check(comm, CALLS["sliced"])
    return ended


def all_roots(comm: rr.Communicator) -> list[Ended]:
    """Every rank is the root of its own broadcast: over MPI, nobody receives."""
    ended = []
    for following in ("sum", "barrier", "sliced"):
        ended.append(disagree(comm, in_turn(broadcast(8, root=comm.rank), CALLS[following])))
        check(comm, CALLS["sum"])
    return ended


GUARD = -12345.0
"""What stands before and behind an array, where nobody may write."""
_GUARDED = 1 << 16
_LARGE = 1 << 18


def mix_large(comm: rr.Communicator) -> list[Ended]:
    """Calls of 1 MiB and more or less than that, on arrays between guards."""
    memory = np.full(comm.size * (_LARGE + comm.size) + 2 * _GUARDED, GUARD, np.float32)
    inner = memory[_GUARDED:-_GUARDED]

    def reduced(count: int) -> Make:
        return lambda c: c.all_reduce(inner[:count], out=inner[:count])

    def gathered(count: int) -> Make:
        x = ramp(comm.rank, count)
        return lambda c: c.all_gather(x, out=inner[: count * c.size], counts=[count] * c.size)

    makes = [reduced(_LARGE), reduced(_LARGE // 2), gathered(_LARGE), gathered(_LARGE // 4)]
    makes += [BARRIER.make, CALLS["sum"].make]
    ended = []
    for usual in makes[:4]:
        for odd in makes:
            if odd is not usual:
                ended.append(odd_one(comm, len(ended) % comm.size, odd, usual))
                check(comm, CALLS["sliced"])
    assert np.all(memory[:_GUARDED] == GUARD)
    assert np.all(memory[-_GUARDED:] == GUARD)
    inner[:] = comm.rank + 1
    total = comm.all_reduce(inner, out=inner)
    assert np.all(total == comm.size * (comm.size + 1) / 2)
    return ended


def wait_in_opposite_order(comm: rr.Communicator) -> tuple[str, list[float]]:
    """Rank 0 waits for rank 1 in one group, until it gives up and joins it in the other.

    Returns the error of rank 0, and the sum in the other group.
    """
    first, second = comm.split(0), comm.split(7)
    assert first is not None
    assert second is not None
    text = ""
    if comm.rank == 0:
        try:
            first.all_reduce(np.arange(3.0), timeout_s=0.5)
        except rr.PeerTimeoutError as error:
            text = f"{error.ranks} {error}"
    return text, second.all_reduce(np.arange(3.0)).tolist()


# --- where they run -------------------------------------------------------------------------------


def over_mpi(*programs: str) -> list[Any]:
    """Run programs of this module, each a name and its arguments, on MPI communicators."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    nodes = (3, 1, 2) if size == 6 else nodes_of("two", size)
    results = []
    for program, *arguments in map(str.split, programs):
        with rr.init(nodes=nodes, config=CONFIG, timeout_s=120) as comm:
            results.append(globals()[program](comm, *arguments))
    return results


def wait_in_opposite_order_over_mpi() -> Any:
    agreement._ROLL_CALL_S = 60.0  # more than a busy machine needs
    return wait_in_opposite_order(rr.init())


def close_late(comm: rr.Communicator) -> list[int]:
    """One communicator after another; each time a rank comes to `close` so late that others ask."""
    sums = []
    for late in range(2 * comm.size):
        with rr.init(timeout_s=120) as again:
            for _ in range(5 + late):
                sums.append(int(again.all_reduce(1)))
            if comm.rank == late % comm.size:
                time.sleep(0.3)
    return sums
