"""Choose the algorithm of a call by the cost model, and give the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from ringreduce.algorithms import ALGORITHMS, build, parse
from ringreduce.config import Config, Memory
from ringreduce.console.sections import table
from ringreduce.errors import counted
from ringreduce.planning.slices import SEGMENT_BYTES
from ringreduce.schedules.collectives import ROOTED
from ringreduce.schedules.cost import OnMessage, price
from ringreduce.schedules.formula import at_least, estimate
from ringreduce.schedules.schedule import Schedule
from ringreduce.system.topology import Nodes

STAGED_BYTES = 4 << 20
"""The longest slice that is copied in and out of shared memory, in bytes."""
_MOST_STAGED = 64, 8
"""The most slices of a staged call, unless slices of STAGED_BYTES are more.

Each slice is planned, and ranks wait for each other in each one.  A wait of ranks that share cores
takes a turn of the other processes on the core.
"""
_SLICE_BYTES = {
    ("all_reduce", "two_shot"): (1 << 20, 1 << 20),
    ("reduce_scatter", "direct"): (1 << 20, 1 << 20),
    ("reduce", "two_shot"): (1 << 20, 1 << 20),
    ("reduce", "star"): (256 << 10, 512 << 10),
    ("broadcast", "star"): (512 << 10, STAGED_BYTES),
    ("gather", "star"): (256 << 10, 1 << 20),
    ("all_gather", "direct"): (1 << 20, 1 << 20),
}
"""The least bytes of a staged slice.  Slices of this length stay in caches.

The first number is for ranks with a core each, the second for ranks that share cores: here, and in
the other tables.
"""
_ONE_WAY = (("broadcast", "star"), ("reduce", "star"), ("gather", "star"))
"""Collectives and algorithms of one step, in which data go from the root, or to it."""
_SHORT_BYTES, _SHORT_SLICE_BYTES = 1 << 20, 64 << 10
"""With a core for each rank, shorter arrays that go one way have slices of the second number: one
rank copies a slice in while others copy the last one out."""
_NEVER = 1 << 63
_SINGLE_COPY = {
    ("all_reduce", "two_shot"): (16 << 20, 32 << 20),
    ("reduce_scatter", "direct"): (32 << 20, 32 << 20),
    ("reduce", "two_shot"): (_NEVER, 32 << 20),
    ("reduce", "star"): (_NEVER, _NEVER),
    ("broadcast", "star"): (_NEVER, 8 << 20),
    ("gather", "star"): (16 << 20, 8 << 20),
    ("all_gather", "direct"): (8 << 20, 32 << 20),
    ("all_to_all", "direct"): (16 << 20, 32 << 20),
}
"""The least bytes that are single-copy; others begin at `Config.single_copy_from`."""
_QUICK = {
    ("all_reduce", "two_shot"): (128 << 10, 4 << 20),
    ("reduce", "two_shot"): (128 << 10, 4 << 20),
    ("reduce", "star"): (_NEVER, _NEVER),
    ("reduce_scatter", "direct"): (4 << 20, 4 << 20),
    ("broadcast", "star"): (24 << 10, 8 << 20),
    ("gather", "star"): (16 << 10, 192 << 10),
    ("scatter", "star"): (48 << 10, 4 << 20),
    ("all_gather", "direct"): (48 << 10, 32 << 20),
    ("all_to_all", "direct"): (48 << 10, 256 << 10),
}
"""The same where ranks may write, and the kernel is quick."""
_TWO_SHOT_REDUCE = {True: (2 << 20, 256 << 10), False: (_NEVER, 2 << 20)}
"""Whether the kernel is quick -> the least bytes of a reduce in which all ranks fold.

In a shorter one the root folds alone.
"""
_PRICED_SLICES = 8
"""The most slices of a pipelined call that are simulated.

With more slices the pipeline is full, and time grows with bytes alone.
"""
_TIE = 0.02
"""Candidates within this fraction of the lowest prediction count as equally fast."""
MOST_SIMULATED = 16
"""The most ranks among which algorithms are simulated.  Among more a formula prices them."""
_ONLY_SIMULATED = {
    "all_reduce": ("allgather_reduce", "tree", "double_tree", "torus", "star"),
    "broadcast": ("ring", "double_tree"),
    "reduce": ("ring", "double_tree"),
}
"""Algorithms that the formula does not fit: among many ranks they run by name alone."""
_FEW_MESSAGES, _MOST_OF_FEW = ("tree", "star"), 256
"""Algorithms of rooted collectives that are simulated among more ranks, up to the second number.

They have n-1 messages.  Not all ranks take part in a step, so the formula is up to 3.7 times too
high for short arrays.
"""
_DIRECT = ("one_shot", "two_shot", "direct", "star", "pairwise")
"""Algorithms in which a rank exchanges messages with all others."""
_BETWEEN_NODES = tuple(
    f"hierarchical({in_node}, {rails})"
    for in_node in ("leader", "two_shot")
    for rails in ("doubling", "halving_doubling")
)
"""Further candidates of an all-reduce on several nodes."""
MOST_DIRECT = 32
"""The most ranks for which the direct algorithms are priced."""


_Model = Callable[..., float]
"""A function with the parameters of `price`."""


@dataclass(frozen=True)
class Choice:
    """The algorithm that ``algorithm="auto"`` takes, and the prediction for every candidate.

    ``"auto"`` takes the first candidate in the list whose prediction is within 2 % of the cheapest.
    """

    collective: str
    nbytes: int
    """Bytes of the array."""
    algorithm: str
    """The algorithm that is taken."""
    predicted_s: Mapping[str, float]
    """Candidate -> predicted seconds.  The candidates are in the order of the list.

    Among more than 16 ranks, a candidate whose steps and bytes alone take longer is left out.
    """
    transport: str
    """How the ranks exchange data: ``"shm"``, through shared memory; ``"tcp"``, by messages between
    hosts without MPI; or ``"mpi"``, by other messages."""
    more_than_s: Mapping[str, float] = field(default_factory=dict)
    """Candidate that is not in `predicted_s` -> seconds that its steps and bytes alone take."""
    measured_s: Mapping[str, float] = field(default_factory=dict)
    """Candidate -> median seconds of a call, if `Communicator.explain` has measured them."""

    @property
    def cheapest(self) -> str:
        """The candidate with the lowest prediction."""
        return min(self.predicted_s, key=self.predicted_s.__getitem__)

    @property
    def is_tie(self) -> bool:
        """Whether several candidates are within 2 % of the cheapest."""
        return len(_equally_fast(self.predicted_s)) > 1

    @property
    def reason(self) -> str:
        """Why the algorithm is taken, such as: the cheapest."""
        if self.is_tie:
            return f"the first in the list within {100 * _TIE:.0f} % of the cheapest"
        others = len(self.predicted_s) + len(self.more_than_s) > 1
        return "the cheapest" if others else "the only candidate"

    def __str__(self) -> str:
        how = {"shm": "through shared memory", "tcp": "by tcp"}.get(self.transport, "by messages")
        ranked = sorted(self.predicted_s.items(), key=lambda item: item[1])
        text = f"{self.collective} of {counted(self.nbytes, 'byte')} {how}: {self.algorithm}, "
        text += self.reason
        if not self.measured_s:
            priced = ", ".join(f"{name} {seconds * 1e6:.1f} µs" for name, seconds in ranked)
            return f"{text} (predicted: {priced})"
        rows = [("candidate", "predicted", "measured")]
        for name, seconds in ranked:
            here = f"{1e6 * self.measured_s[name]:,.1f} µs" if name in self.measured_s else ""
            rows.append((name, f"{1e6 * seconds:,.1f} µs", here))
        return "\n".join([text, *table(rows)])


def is_single_copy(schedule: Schedule, nbytes: int, config: Config) -> bool:
    """Return whether peers read an array of `nbytes` directly from its private memory.

    If `pull_bytes` is set, it holds for all algorithms.
    """
    least, memory = config.single_copy_from, config.memory
    if least is None:
        return False
    if config.pull_bytes is None and memory is not None:
        table = _QUICK if memory.quick and memory.writes else _SINGLE_COPY
        kind = schedule.collective, schedule.algorithm
        if kind in table:
            least = table[kind][memory.crowded]
    return nbytes >= least


def pushed_part(schedule: Schedule, nbytes: int, config: Config) -> float:
    """Return the part of each message that its sender writes, and the receiver need not read.

    That is 0 unless the schedule only moves data in one step.  All ranks copy equally many
    bytes, except where measurements found other parts to be faster.
    """
    memory, short = config.memory, nbytes < 1 << 20
    if memory is None or not memory.writes:
        return 0.0
    if schedule.collective == "gather":
        return 0.5 if memory.quick and memory.crowded and short else 1.0
    if schedule.collective == "all_gather":
        return 1.0 if short or not memory.quick else 0.5
    if not memory.quick:
        return 0.0
    if schedule.collective == "broadcast":
        return 1 / schedule.size
    if schedule.collective == "all_to_all":
        return 1.0 if short else 0.5
    return 0.0


def slice_count(schedule: Schedule, nbytes: int, nodes: Nodes, config: Config) -> int:
    large = 64 << 20 if len(nodes) == 1 else 512 << 10
    if config.memory is not None and not is_single_copy(schedule, nbytes, config):
        large = _staged_slice_bytes(schedule, nbytes, config.memory.crowded)
    slice_bytes = config.slice_bytes or large
    return max(1, min(-(-nbytes // slice_bytes), config.most_slices))


def _staged_slice_bytes(schedule: Schedule, nbytes: int, crowded: bool) -> int:
    kind = schedule.collective, schedule.algorithm
    least = _SLICE_BYTES[kind][crowded] if kind in _SLICE_BYTES else STAGED_BYTES
    if kind in _ONE_WAY and not crowded and nbytes < _SHORT_BYTES:
        least = _SHORT_SLICE_BYTES
    return min(max(least, nbytes // _MOST_STAGED[crowded]), STAGED_BYTES)


def slices_in_flight(nodes: Nodes, config: Config) -> int:
    return config.in_flight or (1 if len(nodes) == 1 else 2)


def segment_bytes(nodes: Nodes, config: Config) -> int:
    """Return the bytes of a segment of a long message.

    Open MPI sends more than 64 KiB over TCP by a handshake, which waits behind other data.
    """
    return config.segment_bytes or (SEGMENT_BYTES if len(nodes) == 1 else 60 << 10)


def staged_bytes(nodes: Nodes, config: Config) -> int:
    if config.staged_bytes is not None:
        return config.staged_bytes
    return 16 << 10 if len(nodes) == 1 else 128 << 10


def candidates(
    collective: str, nodes: Nodes, memory: Memory | None = None, nbytes: int = 0
) -> list[str]:
    """Return the algorithms to price for these nodes; the first of equally fast ones is taken.

    Direct algorithms are left out among many ranks: they are slow there, and take longest to price.
    A gather or scatter keeps its star, which has n-1 messages in all.  Among more than 16 ranks,
    those that the formula does not fit are left out, too.  On several nodes the
    hierarchical algorithm comes first; on one node it is left out.  If the ranks of one node share
    `memory`, direct algorithms come first.  If they share cores too, or if they are two, a reduce
    has one algorithm, which depends on `nbytes` alone: a further step of crowded ranks takes far
    longer than `Profile.crowded_s`.

    The direct barrier is for shared memory alone.  There a rank has compared all headers of the
    call before.  By messages a rank would leave although another one is sent data of another call.
    """
    names = list(ALGORITHMS[collective])
    if collective == "barrier" and memory is None:
        names.remove("direct")
    ranks = sum(map(len, nodes))
    if ranks > MOST_SIMULATED:
        names = [name for name in names if name not in _ONLY_SIMULATED.get(collective, ())]
    if ranks > MOST_DIRECT and collective not in ("gather", "scatter"):
        names = [name for name in names if name not in _DIRECT]
    if len(nodes) == 1 and memory is not None:
        names.sort(key=lambda name: name not in _DIRECT)
        if collective == "reduce" and "star" in names:
            if nbytes >= _TWO_SHOT_REDUCE[memory.quick][memory.crowded]:
                names = ["two_shot"]
            elif memory.crowded or len(nodes[0]) == 2:
                names = ["star"]
    if len(nodes) == 1:
        return [name for name in names if name != "hierarchical"]
    if collective == "all_reduce":
        shots = ("one_shot", "two_shot")
        names = [*_BETWEEN_NODES, *(name for name in names if name not in shots)]
    return sorted(names, key=lambda name: name != "hierarchical")


def choose(collective: str, nodes: Nodes, nbytes: int, config: Config) -> Choice:
    """Choose the first candidate whose predicted time is within 2 % of the lowest.

    The choice is a pure function of the arguments, so all ranks make the same choice.
    """
    names = candidates(collective, nodes, config.memory, nbytes)
    predicted, more_than = _prices(collective, names, nodes, priced_bytes(nbytes), config)
    transport = "mpi" if config.memory is None else "shm"
    taken = _equally_fast(predicted)[0]
    return Choice(collective, nbytes, taken, predicted, transport, more_than)


def _prices(
    collective: str, names: Sequence[str], nodes: Nodes, nbytes: int, config: Config
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the prices of candidates, and the lower bounds of those that need no price."""
    calls = {name: (build(collective, name, nodes), nodes, nbytes, config) for name in names}
    found: dict[str, float] = {}
    bounds: dict[str, float] = {}
    for name, call in calls.items():
        if _model(call[0], name) is price:
            found[name] = _seconds(price, *call)
        else:
            bounds[name] = _seconds(at_least, *call)
    for name in sorted(bounds, key=bounds.__getitem__):
        enough, call = _enough(found), calls[name]
        if found and bounds[name] <= enough:
            bounds[name] = max(bounds[name], _seconds(partial(at_least, of_steps=True), *call))
        if bounds[name] <= enough:
            found[name] = _seconds(estimate, *call)
    predicted = {name: found[name] for name in names if name in found}
    return predicted, {name: bounds[name] for name in names if name not in found}


def _equally_fast(predicted_s: Mapping[str, float]) -> list[str]:
    return [name for name, seconds in predicted_s.items() if seconds <= _enough(predicted_s)]


def _enough(predicted_s: Mapping[str, float]) -> float:
    return min(predicted_s.values(), default=inf) * (1 + _TIE)


def priced_bytes(nbytes: int) -> int:
    """Return the next power of two, so that calls of similar size use the same algorithm."""
    return 1 << max(nbytes - 1, 0).bit_length()


def predict(collective: str, algorithm: str, nodes: Nodes, nbytes: int, config: Config) -> float:
    """Predict the seconds that a call takes.  Raises ValueError for an unknown algorithm."""
    schedule = build(collective, algorithm, nodes)
    return _seconds(_model(schedule, algorithm), schedule, nodes, nbytes, config)


def predict_messages(
    schedule: Schedule, nodes: Nodes, nbytes: int, config: Config, on_message: OnMessage
) -> float:
    """Simulate a call, with `on_message` as for `simulate`; return its seconds.

    Of a call whose slices follow one another the first slice is simulated.
    """
    return _seconds(partial(price, on_message=on_message), schedule, nodes, nbytes, config)


def _model(schedule: Schedule, algorithm: str) -> _Model:
    """Return the model that prices the schedule: the simulation, or the formula for many ranks."""
    parts, rooted = set(re.findall(r"\w+", algorithm)), schedule.collective in ROOTED
    few = rooted and schedule.size <= _MOST_OF_FEW and algorithm in _FEW_MESSAGES
    unfit = not parts.isdisjoint(_ONLY_SIMULATED.get(schedule.collective, ()))
    # A user's algorithm claims nothing: what it claims is counted from the steps of all ranks.
    unclaimed = bool(schedule.digest)
    simulated = schedule.size <= MOST_SIMULATED or few or unfit or unclaimed
    return price if simulated else estimate


def _seconds(model: _Model, schedule: Schedule, nodes: Nodes, nbytes: int, config: Config) -> float:
    """Return the seconds of a call by `model`."""
    profile = config.profile
    if config.memory is not None:
        profile = profile.of_memory(config.memory.crowded)
    in_flight = slices_in_flight(nodes, config)
    if config.memory is not None and in_flight == 1:
        return model(schedule, nodes, nbytes, profile)  # the model has no term for caches
    slices = slice_count(schedule, nbytes, nodes, config)
    if config.node_memory is not None and slices == 1:
        profile = profile.of_memory(config.node_memory.crowded)
    if in_flight == 1:
        return slices * model(schedule, nodes, nbytes / slices, profile)
    priced = min(slices, _PRICED_SLICES)
    return model(schedule, nodes, nbytes, profile, slices=priced, in_flight=in_flight)


def resolve(collective: str, algorithm: str, nodes: Nodes, nbytes: int, config: Config) -> str:
    """Return `algorithm`, or the choice for ``"auto"``.  Raises ValueError for an unknown name."""
    if algorithm != "auto":
        parse(collective, algorithm)
        return algorithm
    names = candidates(collective, nodes, config.memory, nbytes)
    if len(names) == 1:
        return names[0]
    return choose(collective, nodes, nbytes, config).algorithm
