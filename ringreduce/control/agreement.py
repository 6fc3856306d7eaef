"""Do all ranks mean the same call, and are they all alive?

Every call has a number and a signature; both travel with the first message that each pair of ranks
exchanges in it.  Whoever sees a foreign signature, or finds out while waiting that a peer is in
another call, aborts that call on the control channel, which every wait polls.  All ranks then
exchange their recent calls, build the same text, drop what is under way, and go on.

Nobody waits for ever: a wait without progress for `timeout_s` raises the alarm, on which every
living rank tells where it stands; whoever stays silent is named.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from ringreduce.control.diagnostics import describe_mismatch, describe_timeout
from ringreduce.errors import MismatchError, PeerLostError, PeerTimeoutError, RingReduceError
from ringreduce.schedules.schedule import Schedule
from ringreduce.transports.base import Transport

DIGEST_BYTES, HEADER_BYTES = 16, 24
"""A header is the signature's digest and 8 bytes of call number, the least significant first."""

_REMEMBERED_CALLS = 4096
"""A root whose sends are buffered may be that far ahead, and still tell what its calls were."""
_LISTEN_EVERY = 16
"""Idle polls between two looks at the control channel."""
_PATIENT_POLLS = 2000
"""After so many idle polls they are rare enough to look at each."""
_STALL_S = 0.1
"""After so long without progress a rank asks the others whether they are in the same call."""
_ABSENT_S = 1.0
"""A rank that has not looked for longer was itself stopped: that was no waiting."""
_GAP_COUNTS_S = 0.1
"""What such a time counts all the same, so that a rank which is always late gives up some day."""
_ROLL_CALL_S = 0.25
"""How long a rank has to answer an alarm before it counts as silent."""
_VERDICT_S = 0.1
"""How long to wait for the lowest rank's verdict before building one alone."""
_CROSSING_S = 0.05
"""How long a verdict may be on its way: of two that cross, all take the lower rank's."""
_LONGEST_REASON = 1000
"""Characters of a reason for leaving: a short message needs nobody's help to arrive."""


@dataclass(frozen=True)
class Signature:
    """What a rank means by a call: the collective, and every argument that all must agree on."""

    collective: str
    arguments: tuple[tuple[str, str], ...]
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        text = json.dumps([self.collective, self.arguments])
        object.__setattr__(
            self, "digest", blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        )


class Interrupt(Exception):  # noqa: N818 - no error: it never leaves the library
    """Raised out of a wait, caught by the communicator: the call cannot go on."""


class Aborted(Interrupt):
    """Some call up to this one was not the same on all ranks."""


class Alarmed(Interrupt):
    """Some rank has waited too long."""


class PeerLeft(Interrupt):
    """A rank has left, so that this call can never complete."""


class Recovery(Protocol):
    """What the agreement needs of the executor when a call breaks off."""

    def where(self) -> tuple[int | None, list[int]]: ...
    def withdraw(self) -> bool: ...
    def tally(self) -> tuple[Any, Any]: ...
    def sends_done(self) -> bool: ...
    @property
    def exchanges(self) -> int: ...
    def start_afresh(self, exchanges: int) -> None: ...


class Agreement:
    """One communicator's account of its calls, and its ear on the control channel."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self.transport = transport
        self.timeout_s = timeout_s
        self.number = -1
        """The number of the latest call begun."""
        self.completed = 0
        """Calls whose part this rank has done, as the engine counts: the next one's number."""
        self.calls: deque[Signature] = deque(maxlen=_REMEMBERED_CALLS)
        """The latest calls of this epoch, up to the one with `number`."""
        self.remember = self.calls.append
        self.end_of = ""
        """Where the end is for which this rank closes, such as "the program"; else ""."""
        self._epoch = 0
        """How often ranks have disagreed and gone on."""
        self._abort_at: int | None = None
        self.warned = False
        """Whether other ranks have said something about calls that were yet to begin."""
        self._expected: dict[int, str] = {}
        self._reports: dict[int, dict[str, Any]] = {}
        self._statuses: dict[int, dict[str, Any]] = {}
        self._left: dict[int, dict[str, Any]] = {}
        self._alarm: dict[str, Any] | None = None
        self._verdicts: dict[int, dict[str, Any]] = {}
        self._partings: set[int] = set()
        self._farewells: set[int] = set()
        self._early: list[tuple[int, dict[str, Any]]] = []
        self._waiting_since = 0.0
        self._looked_at = 0.0
        self._asked = False
        self.deadline_s = timeout_s
        """Of the call under way."""

    # --- one call ---

    def begin(self, signature: Signature, timeout_s: float | None = None) -> bytes:
        """Give the call its number and return the header that its first messages carry."""
        number = self.number = self.completed
        self.calls.append(signature)
        self.deadline_s = timeout_s or self.timeout_s
        if self.warned:
            self.heed_warnings(signature)
        return signature.digest + number.to_bytes(8, "little")

    def heed_warnings(self, signature: Signature) -> None:
        """Raise an Interrupt if it is known by now that the call just begun cannot go on."""
        self._compare_expected(self.number, signature)
        if self._abort_at is not None and self._abort_at <= self.number:
            raise Aborted
        self.warned = bool(self._expected) or self._abort_at is not None

    def foreign(self, peer: int, header: bytes) -> None:
        """A message of another call has come: abort the earlier of the two numbers."""
        theirs = int.from_bytes(header[DIGEST_BYTES:HEADER_BYTES], "little")
        self._abort(min(theirs, self.number))

    def wait(self, idle: int, ahead: int = 0) -> None:
        """Called at each poll that moved nothing, with their count since the last progress.

        With `ahead` it grows patient that many polls earlier.  Listens to the control channel,
        leaves the core to others, and raises an Interrupt when the call cannot go on or has made
        no progress for the timeout.
        """
        if idle == 1:
            self._waiting_since = self._looked_at = time.monotonic()
            self._asked = False
        if idle % _LISTEN_EVERY == 0 or idle + ahead > _PATIENT_POLLS:
            self.listen()
            self._raise_interrupts()
            waited = self._waited()
            if waited > min(_STALL_S, self.deadline_s / 2) and not self._asked:
                self._asked = True
                self._tell_all("stall", number=self.number, digest=self._digest_of(self.number))
            if waited > self.deadline_s:
                self._raise_alarm(waited)
        self.transport.pause(idle + ahead)

    def _waited(self) -> float:
        now = time.monotonic()
        if now - self._looked_at > _ABSENT_S:
            self._waiting_since += now - self._looked_at - _GAP_COUNTS_S
        self._looked_at = now
        return now - self._waiting_since

    def _raise_alarm(self, waited_s: float) -> None:
        self._alarm = {"waited_s": waited_s}
        self._tell_all("alarm", **self._alarm)
        raise Alarmed

    def _raise_interrupts(self) -> None:
        if self._alarm is not None:
            raise Alarmed
        if self._abort_at is not None and self._abort_at <= self.number:
            raise Aborted
        if any(message["completed"] <= self.number for message in self._left.values()):
            raise PeerLeft

    def _abort(self, number: int) -> None:
        self._tell_all("abort", number=number)
        self._note_abort(number)
        raise Aborted

    def _note_abort(self, number: int) -> None:
        self._abort_at = number if self._abort_at is None else min(number, self._abort_at)
        self.warned = True

    # --- the control channel ---

    def _tell_all(self, kind: str, **content: Any) -> None:
        for peer in self._others():
            self._tell(peer, kind, **content)

    def _tell(self, peer: int, kind: str, **content: Any) -> None:
        message = {"kind": kind, "epoch": self._epoch, **content}
        self.transport.tell(peer, json.dumps(message).encode())

    def listen(self) -> None:
        """Take in what the other ranks have said; what belongs to the next epoch waits for it."""
        early, self._early = self._early, []
        heard = [(peer, json.loads(message)) for peer, message in self.transport.hear()]
        for peer, message in (*early, *heard):
            kind = message["kind"]
            if message["epoch"] > self._epoch and kind not in _AT_ANY_TIME:
                self._early.append((peer, message))
            elif message["epoch"] == self._epoch or kind not in _IN_ITS_EPOCH:
                getattr(self, f"_hear_{kind}")(peer, message)

    def _hear_abort(self, peer: int, message: dict[str, Any]) -> None:
        self._note_abort(message["number"])

    def _hear_report(self, peer: int, message: dict[str, Any]) -> None:
        self._reports[peer] = message

    def _hear_parting(self, peer: int, message: dict[str, Any]) -> None:
        self._partings.add(peer)

    def _hear_stall(self, peer: int, message: dict[str, Any]) -> None:
        number = message["number"]
        if number > self.number:
            self._expected[number] = message["digest"]
            self.warned = True
        elif self._digest_of(number) not in ("", message["digest"]):
            self._tell_all("abort", number=number)
            self._note_abort(number)

    def _hear_alarm(self, peer: int, message: dict[str, Any]) -> None:
        self._alarm = self._alarm or message

    def _hear_status(self, peer: int, message: dict[str, Any]) -> None:
        self._alarm = self._alarm or message
        self._statuses[peer] = message

    def _hear_verdict(self, peer: int, message: dict[str, Any]) -> None:
        self._alarm = self._alarm or message
        self._verdicts[peer] = message

    def _hear_left(self, peer: int, message: dict[str, Any]) -> None:
        self._left[peer] = message

    def _hear_farewell(self, peer: int, message: dict[str, Any]) -> None:
        self._farewells.add(peer)

    def _compare_expected(self, number: int, signature: Signature) -> None:
        for expected in [n for n in self._expected if n <= number]:
            digest = self._expected.pop(expected)
            if expected == number and digest != signature.digest.hex():
                self._tell_all("abort", number=number)
                self._note_abort(number)

    def _digest_of(self, number: int) -> str:
        place = number - self._first_remembered
        return self.calls[place].digest.hex() if 0 <= place < len(self.calls) else ""

    @property
    def _first_remembered(self) -> int:
        return self.number - len(self.calls) + 1

    # --- when a call breaks off, or the communicator ends ---

    def part(self) -> None:
        """Wait until nothing that was said to any rank is left to hear: the channel can go.

        For the last call, when it is complete.  So it also ends alike on all ranks.
        """
        self._tell_all("parting")
        self._poll_until(
            lambda: (
                self._abort_at is not None
                or (len(self._partings) == self.transport.size - 1 and self._told_all())
            )
        )
        self._raise_interrupts()

    def settle(
        self, interrupt: Interrupt, recovery: Recovery, schedule: Schedule
    ) -> RingReduceError:
        """Bring all ranks to the same end of the call, and return the error to raise.

        After a MismatchError the communicator is as if the call had never been made; after any
        other error it is broken.  `schedule` is the call's.
        """
        try:
            if isinstance(interrupt, Aborted):
                return self._settle_mismatch(recovery)
        except Interrupt as worse:
            interrupt = worse
        if isinstance(interrupt, PeerLeft):
            return self._settle_left()
        return self._settle_timeout(recovery, schedule)

    def leave(self, reason: str) -> None:
        """Tell all ranks that this one takes part in nothing any more."""
        self._tell_all("left", completed=self.completed, reason=reason[:_LONGEST_REASON])

    def farewell(self, seconds: float) -> None:
        """Say that this rank's process ends, and wait until all that live have said so too."""
        self._tell_all("farewell")
        lost = {rank for verdict in self._verdicts.values() for rank in verdict["ranks"]}
        living = set(self._others()) - lost - set(self._left)
        self._listen_for(seconds, lambda: living <= self._farewells)

    def _settle_mismatch(self, recovery: Recovery) -> RingReduceError:
        self._poll_until(recovery.withdraw)
        sent, received = recovery.tally()
        mine = {
            "next": self.number + 1,
            "exchanges": recovery.exchanges,
            **self._history(),
        }
        for peer in self._others():
            self._tell(peer, "report", sent=sent[peer], **mine)
        self._poll_until(lambda: len(self._reports) == self.transport.size - 1)
        reports = {**self._reports, self.transport.rank: mine}

        owed = {peer: self._reports[peer]["sent"] - received[peer] for peer in self._reports}
        self._poll_until(lambda: self._drain(owed))
        self._poll_until(recovery.sends_done)
        self._poll_until(self._told_all)
        recovery.start_afresh(max(report["exchanges"] for report in reports.values()))
        self._forget_calls(max(report["next"] for report in reports.values()))
        text, alike = describe_mismatch(reports)
        return MismatchError(text, not any(self.transport.rank in ranks[1:] for ranks in alike))

    def _history(self) -> dict[str, Any]:
        """The remembered calls: the number of the first, and the index of each one's signature."""
        places: dict[Signature, int] = {}
        calls = [places.setdefault(signature, len(places)) for signature in self.calls]
        signatures = [[s.collective, list(map(list, s.arguments))] for s in places]
        return {
            "first": self._first_remembered,
            "calls": calls,
            "signatures": signatures,
            "end_of": self.end_of,
        }

    def _drain(self, owed: dict[int, int]) -> bool:
        for peer in owed:
            while owed[peer] > 0 and self.transport.discard(peer):
                owed[peer] -= 1
        return not any(owed.values())

    def _forget_calls(self, following: int) -> None:
        self._epoch += 1
        self.completed = following
        self.number = following - 1
        self.calls.clear()
        self._reports.clear()
        self._expected.clear()
        self._partings.clear()
        self._abort_at = None

    def _settle_left(self) -> RingReduceError:
        rank, message = min(self._left.items())
        return PeerLostError(
            f"rank {rank} has left the communicator: {message['reason']}; "
            "the communicator is broken, calls on it can no longer complete"
        )

    def _settle_timeout(self, recovery: Recovery, schedule: Schedule) -> RingReduceError:
        """Hold a roll call, and raise what the lowest rank that answers makes of it."""
        rank, others = self.transport.rank, self.transport.size - 1
        status = self._status(recovery)
        self._tell_all("status", **status)
        self._listen_for(_ROLL_CALL_S, lambda: self._verdicts or len(self._statuses) == others)
        statuses = {**self._statuses, rank: status}
        if min(statuses) != rank:
            self._listen_for(_VERDICT_S, lambda: self._verdicts)
        if not self._verdicts:
            waited_s = (self._alarm or {}).get("waited_s", self.deadline_s)
            text, culprits = describe_timeout(schedule, statuses, waited_s)
            self._verdicts[rank] = {"text": text, "ranks": culprits}
            self._tell_all("verdict", **self._verdicts[rank])
        self._listen_for(_CROSSING_S, lambda: 0 in self._verdicts)
        self._listen_for(_VERDICT_S, lambda: self.transport.told(statuses))
        verdict = self._verdicts[min(self._verdicts)]
        return PeerTimeoutError(verdict["text"], ranks=tuple(verdict["ranks"]))

    def _status(self, recovery: Recovery) -> dict[str, Any]:
        """Where this rank stands: the call, the step, and whom it waits for."""
        step, peers = recovery.where()
        if self._abort_at is not None and self._abort_at <= self.number:
            step, peers = None, [peer for peer in self._others() if peer not in self._reports]
        return {"number": self.number, "step": step, "waits_for": peers}

    # --- waiting for control messages ---

    def _others(self) -> Iterable[int]:
        return (peer for peer in range(self.transport.size) if peer != self.transport.rank)

    def _told_all(self) -> bool:
        return self.transport.told(self._others())

    def _listen_for(self, seconds: float, enough: Callable[[], Any]) -> None:
        end, idle = time.monotonic() + seconds, 0
        while not enough() and time.monotonic() < end:
            self.listen()
            idle += 1
            self.transport.pause(idle)

    def _poll_until(self, finished: Callable[[], bool]) -> None:
        """Poll with a deadline, listening for alarms and for ranks that leave."""
        self._waiting_since = self._looked_at = time.monotonic()
        idle = 0
        while not finished():
            self.listen()
            if self._alarm is not None:
                raise Alarmed
            if self._left:
                raise PeerLeft
            waited = self._waited()
            if waited > self.deadline_s:
                self._raise_alarm(waited)
            idle += 1
            self.transport.pause(idle)


_IN_ITS_EPOCH = frozenset(("abort", "report", "stall", "parting"))
"""Means nothing to a rank that has gone on since."""
_AT_ANY_TIME = frozenset(("alarm", "status", "verdict", "farewell"))
"""Concerns a rank that has yet to get there just as much."""
