"""The texts of errors that concern several ranks: what each did, and what all must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

CallText = Sequence[Any]
"""[collective, [[argument, value], ...]]"""


def describe_mismatch(calls: Mapping[int, Mapping[str, CallText]]) -> str:
    """What differs in the earliest call that ranks did not make alike.

    `calls` maps rank -> call number (as text) -> the call.
    """
    numbers = sorted({int(n) for mine in calls.values() for n in mine})
    for number in numbers:
        made = {rank: mine.get(str(number)) for rank, mine in calls.items()}
        known = {rank: call for rank, call in made.items() if call is not None}
        if len(known) > 1 and any(call != known[min(known)] for call in known.values()):
            return _describe_difference(number, known)
    return (
        "messages did not fit together although all ranks made the same calls: "
        "this is an error in ringreduce; please report it with the output of 'ringreduce doctor'"
    )


def _describe_difference(number: int, made: Mapping[int, CallText]) -> str:
    collectives = {call[0] for call in made.values()}
    if len(collectives) == 1:
        name = collectives.pop()
        arguments = {rank: dict(map(tuple, call[1])) for rank, call in made.items()}
        names = [key for key, _ in made[min(made)][1]]
        differing = [n for n in names if len({args.get(n) for args in arguments.values()}) > 1]
        passed = _by_rank(
            {
                rank: ", ".join(_say(n, args.get(n, "")) for n in differing)
                for rank, args in arguments.items()
            },
            "passes",
            "pass",
        )
        wanted = " and ".join(_WANTED.get(n, n) for n in differing)
        return f"{name}: {passed}; every rank must pass the same {wanted} (call {number})"
    made_calls = _by_rank({rank: _call(call) for rank, call in made.items()}, "calls", "call")
    return (
        f"call {number} is not the same on all ranks: {made_calls}; "
        "every rank must make the same calls in the same order"
    )


_WANTED = {"array": "dtype and shape"}


def _say(name: str, value: str) -> str:
    return value if name == "array" else f"{name}={value}"


def _call(call: CallText) -> str:
    return f"{call[0]}({', '.join(_say(name, value) for name, value in call[1])})"


def _by_rank(said: Mapping[int, str], one: str, many: str) -> str:
    """``rank 2 passes a, ranks 0, 1 and 3 pass b``: the odd ones out first."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(said.items()):
        groups.setdefault(text, []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
    return ", ".join(
        f"{ranks_text(ranks)} {one if len(ranks) == 1 else many} {text}" for text, ranks in ordered
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0 and 3``, ``ranks 0, 1 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def describe_timeout(
    size: int,
    statuses: Mapping[int, Mapping[str, Any]],
    waited_s: float,
    draw: Callable[[dict[int, int]], str],
) -> tuple[str, list[int]]:
    """Who did not answer the roll call, who waits for whom, and the drawing of the call.

    `statuses` are the answers: rank -> call number, step, and the peers that it waits for.
    """
    silent = [rank for rank in range(size) if rank not in statuses]
    if silent:
        head = f"{ranks_text(silent)} stopped answering"
    else:
        head = "all ranks answer but none gets on"
    waiting = [
        f"  rank {rank} is waiting for {ranks_text(status['waits_for'])}"
        + (f" in step {status['step']}" if status["step"] is not None else "")
        + f" of call {status['number']}"
        for rank, status in sorted(statuses.items())
        if status["waits_for"]
    ]
    steps = {rank: s["step"] for rank, s in statuses.items() if s["step"] is not None}
    lines = [f"{head}: no progress for {waited_s:.1f} s", *waiting, draw(steps)]
    return "\n".join(line for line in lines if line), silent
