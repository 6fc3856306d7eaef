"""Register algorithms that users write in their own scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ringreduce.algorithms.definition import algorithm
from ringreduce.errors import ScheduleError, shown, unknown
from ringreduce.schedules.collectives import COLLECTIVES
from ringreduce.schedules.schedule import Step, Steps


def register_algorithm(
    name: str,
    steps: Callable[..., Iterable[Step]],
    *,
    collective: str = "all_reduce",
    chunks: Callable[[int], int] | None = None,
) -> None:
    """Make your own schedule available as ``algorithm=name``.  Register the same on every rank.

    The schedule is proven when it is first built for a number of ranks: a wrong schedule raises
    ScheduleError on every rank, and nothing is sent.  A later registration under the same name
    replaces the earlier one.

    Args:
        name: an identifier that no algorithm of this collective has.
        steps: ``steps(size, rank)`` yields the steps of `rank`; for broadcast, reduce, gather and
            scatter the call is ``steps(size, rank, root)``.
        collective: the collective that the schedule carries out.
        chunks: ``chunks(size)`` is the number of equal chunks that all_reduce, broadcast or reduce
            divides the array into; by default one for each rank.  In the other collectives chunk i
            belongs to rank i, and in all_to_all chunk ``i * size + j`` goes from rank i to rank j.

    Raises:
        ValueError: the name is taken or is no identifier, or the collective is unknown.
        TypeError: `steps` or `chunks` is no function.

    Example:
        >>> from ringreduce.schedules.schedule import Recv, Send, Step
        >>> def hub(size, rank):
        ...     others = range(1, size)
        ...     if rank == 0:
        ...         yield Step(recvs=tuple(Recv(peer, (0,), reduce=True) for peer in others))
        ...         yield Step(sends=tuple(Send(peer, (0,)) for peer in others))
        ...     else:
        ...         yield Step(sends=(Send(0, (0,)),))
        ...         yield Step(recvs=(Recv(0, (0,)),))
        >>> rr.register_algorithm("hub", hub, chunks=lambda size: 1)
        >>> rr.spawn(lambda comm: comm.all_reduce(comm.rank, algorithm="hub").item(), 3)
        [3, 3, 3]
    """
    from ringreduce.algorithms import ALGORITHMS  # imports this file

    known = [each for each in COLLECTIVES if each != "barrier"]
    if collective not in known:
        raise ValueError(f"register_algorithm: {unknown('collective', collective, known)}")
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(
            f"register_algorithm: name is {name!r}; "
            "choose letters, digits and _, with no digit first"
        )
    if name in ALGORITHMS[collective] or name == "auto":
        raise ValueError(
            f"register_algorithm: {name!r} is taken by the library; choose another name"
        )
    functions = {"steps": steps} if chunks is None else {"steps": steps, "chunks": chunks}
    for what, function in functions.items():
        if not callable(function):
            kind = type(function).__name__
            raise TypeError(f"register_algorithm: {what} is {kind}; pass a function")

    @algorithm(collective, name, None, chunks)
    def in_group(group: Sequence[int], me: int, *given: Any) -> Steps:
        *root, _ = given  # without the chunks, which have the same numbers in every group
        made = steps(len(group), group[me], *(group[place] for place in root))
        return _checked(f"{collective} {name}", made)


def _checked(where: str, steps: object) -> Steps:
    """Yield the steps of a rank.  Raises ScheduleError if they are anything else."""
    if not isinstance(steps, Iterable):
        raise ScheduleError(f"{where}: steps returned {shown(steps)}; yield a Step for each step")
    for step in steps:
        if not isinstance(step, Step):
            raise ScheduleError(f"{where}: steps yielded {shown(step)}; yield a Step for each step")
        yield step
