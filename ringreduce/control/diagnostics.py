"""Write the texts of errors that concern several ranks: what each did, what all must do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ringreduce.schedules.draw import draw
from ringreduce.schedules.schedule import Schedule

CallText = Sequence[Any]
"""[collective, [[argument, value], ...]]"""

_MOST_STEPS = 20_000
"""Steps of all ranks together, up to which a schedule is followed to find the ranks to blame."""


def describe_mismatch(reports: Mapping[int, Mapping[str, Any]]) -> tuple[str, list[list[int]]]:
    """Describe the earliest call that differs between ranks; return also the groups of equal calls.

    A report has the number of the `first` call that its rank remembers.  Its `calls` are, for
    this call and each later one, the index of the signature in `signatures`.  If the rank
    closes at an end, such as that of the program, `end_of` names it.
    """
    latest = {rank: r["first"] + len(r["calls"]) - 1 for rank, r in reports.items()}
    first = min(report["first"] for report in reports.values())
    for number in range(first, max(latest.values()) + 1):
        made = {rank: call for rank, r in reports.items() if (call := _call_of(r, number))}
        if made and any(call != made[min(made)] for call in made.values()):
            ends = {rank: _end(reports[rank], call) for rank, call in made.items()}
            kinds = {rank: f"{call} {ends[rank]}" for rank, call in made.items()}
            return _describe_difference(number, made, ends), _groups(kinds)
    behind = min(latest, key=lambda rank: latest[rank])
    ahead = [rank for rank in sorted(reports) if reports[rank]["first"] > latest[behind]]
    if ahead:
        text = (
            f"{ranks_text(ahead)} had gone on to call {latest[ahead[0]]} while rank {behind} is at "
            f"call {latest[behind]}, and can no longer tell which call was not the same; "
            "every rank must make the same calls in the same order"
        )
        return text, [ahead]
    text = (
        "messages did not fit together although all ranks made the same calls: "
        "this is an error in ringreduce; please report it with the output of 'ringreduce doctor'"
    )
    return text, [sorted(reports)]


def _call_of(report: Mapping[str, Any], number: int) -> CallText | None:
    place = number - report["first"]
    if not 0 <= place < len(report["calls"]):
        return None
    signature: CallText = report["signatures"][report["calls"][place]]
    return signature


def _end(report: Mapping[str, Any], call: CallText) -> str:
    """Return where the end is for which the rank closes, if `call` is that close; else ""."""
    return str(report.get("end_of", "")) if call[0] == "close" else ""


def _describe_difference(number: int, made: Mapping[int, CallText], ends: Mapping[int, str]) -> str:
    if len({call[0] for call in made.values()}) == 1:
        return _describe_arguments(number, made)
    ended = {rank: f"the end of {place}" for rank, place in ends.items() if place}
    calls = {rank: call_text(call) for rank, call in made.items() if rank not in ended}
    wanted = "every rank must make the same calls in the same order"
    if ended:
        reached = _by_rank(ended, "reached", "reached")
        return f"{reached} while {_by_rank(calls, 'is in', 'are in')}; {wanted} (call {number})"
    said = _by_rank(calls, "calls", "call")
    return f"call {number} is not the same on all ranks: {said}; {wanted}"


def _describe_arguments(number: int, made: Mapping[int, CallText]) -> str:
    name = made[min(made)][0]
    arguments = {rank: dict(map(tuple, call[1])) for rank, call in made.items()}
    names = dict.fromkeys(name for args in arguments.values() for name in args)
    differing = [n for n in names if len({args.get(n) for args in arguments.values()}) > 1]
    passed = _by_rank(
        {
            rank: ", ".join(_say(n, args.get(n)) for n in differing)
            for rank, args in arguments.items()
        },
        "passes",
        "pass",
    )
    wanted = " and ".join(_WANTED.get(n, n) for n in differing)
    return f"{name}: {passed}; every rank must pass the same {wanted} (call {number})"


_WANTED = {"array": "dtype and shape", "memory": "kind of memory"}
"""Names for users of the arguments whose own names do not say what ranks must pass alike."""


def _say(name: str, value: str | None) -> str:
    if name == "memory":
        return f"memory of a {value}" if value else "memory of the host"
    if value is None:
        return f"no {name}"
    return value if name == "array" else f"{name}={value}"


def call_text(call: CallText) -> str:
    return f"{call[0]}({', '.join(_say(name, value) for name, value in call[1])})"


def _by_rank(said: Mapping[int, str], one: str, many: str) -> str:
    """``rank 2 passes a, ranks 0, 1 and 3 pass b``: the smallest group of ranks first."""
    return ", ".join(
        f"{ranks_text(ranks)} {one if len(ranks) == 1 else many} {said[ranks[0]]}"
        for ranks in _groups(said)
    )


def _groups(said: Mapping[int, str]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(said.items()):
        groups.setdefault(text, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (len(ranks), ranks))


def ranks_text(ranks: Sequence[int]) -> str:
    """List ranks: ``rank 2``, ``ranks 0 and 3``, ``ranks 0, 1 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def describe_timeout(
    schedule: Schedule,
    statuses: Mapping[int, Mapping[str, Any]],
    timeout_s: float,
    elsewhere: Mapping[int, Mapping[str, Any]] = {},
) -> tuple[str, list[int]]:
    """Describe a timeout; return also the ranks to blame.

    The text names these ranks, then the peers that each rank waits for, and ends with a drawing
    of `schedule`, of the lowest rank that answered.  `statuses` are the answers to a roll call:
    rank -> number of the call, step, awaited peers.  `elsewhere`: ranks that waited in another
    communicator, with the number of their latest call here and the text of the call there.
    """
    there = {rank: said for rank, said in elsewhere.items() if rank not in statuses}
    number = statuses[min(statuses)]["number"]
    silent = [rank for rank in range(schedule.size) if rank not in {*statuses, *there}]
    culprits = _culprits(schedule, silent, {**statuses, **there}, number)
    there = {rank: said for rank, said in there.items() if said["number"] < number}
    bystanders = [rank for rank in silent if rank not in culprits]
    head = "all ranks that are waited for answer, but none gets on"
    if culprits:
        head = f"{ranks_text(culprits)} stopped answering"
    elif there:
        head = f"{ranks_text(sorted(there))} waited in another communicator"
    lines = [f"{head}: no progress within the timeout of {timeout_s:.1f} s"]
    if bystanders:
        does, its = ("does", "its") if len(bystanders) == 1 else ("do", "their")
        who = ranks_text(bystanders)
        lines.append(f"  {who} {does} not answer either, but may have done {its} part")
    for rank, said in sorted(there.items()):
        text = f"  rank {rank} waited in another communicator, in {said['text']}; "
        lines.append(text + "every rank must use its communicators in the same order")
    for rank, status in sorted(statuses.items()):
        if status["waits_for"]:
            step = "" if status["step"] is None else f"step {status['step']} of "
            peers = ranks_text(status["waits_for"])
            lines.append(f"  rank {rank} is waiting for {peers} in {step}call {status['number']}")
    steps = {
        rank: status["step"]
        for rank, status in statuses.items()
        if status["step"] is not None and status["number"] == number
    }
    return "\n".join([*lines, draw(schedule, failed=steps)]), culprits


def _culprits(
    schedule: Schedule,
    silent: Sequence[int],
    statuses: Mapping[int, Mapping[str, Any]],
    number: int,
) -> list[int]:
    """Return the silent ranks that others wait for, or that cannot have finished the call.

    Any other silent rank may have done its part, and be busy outside of the library.
    """
    awaited = {peer for status in statuses.values() for peer in status["waits_for"]}
    if not awaited.issuperset(silent):
        stuck = {}
        for rank, status in statuses.items():
            if status["number"] < number:
                stuck[rank] = -1
            elif status["number"] == number and status["step"] is not None:
                stuck[rank] = status["step"]
        awaited |= set(silent) - _may_have_finished(schedule, stuck)
    return [rank for rank in silent if rank in awaited]


def _may_have_finished(schedule: Schedule, stuck: Mapping[int, int]) -> set[int]:
    """Return the ranks that can finish all their steps although others are stuck.

    `stuck` has the step that a rank never ends; -1 if it never begins the first.  Sends are taken
    not to wait for their receives.  Empty if the schedule is too long to follow.
    """
    ranks = range(schedule.size)
    if sum(schedule.claim(rank).steps for rank in ranks) > _MOST_STEPS:
        return set()
    steps = [list(schedule.steps(rank)) for rank in ranks]
    sent: Counter[tuple[int, int]] = Counter()
    received: list[Counter[int]] = [Counter() for _ in ranks]
    at = dict.fromkeys(ranks, -1)
    movable = set(ranks)
    while movable:
        rank = movable.pop()
        entered = at[rank]
        if entered == stuck.get(rank, len(steps[rank])):
            continue
        if entered >= 0:
            wanted = received[rank] + Counter(recv.peer for recv in steps[rank][entered].recvs)
            if any(sent[peer, rank] < count for peer, count in wanted.items()):
                continue
            received[rank] = wanted
        at[rank] += 1
        movable.add(rank)
        if at[rank] < len(steps[rank]):
            peers = [send.peer for send in steps[rank][at[rank]].sends]
            sent.update((rank, peer) for peer in peers)
            movable.update(peers)
    return {rank for rank in ranks if at[rank] == len(steps[rank])}
