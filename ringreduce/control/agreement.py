"""The control protocol: all ranks make the same call, or all raise the same error.

Every call has a number and a signature.  The first message of each pair of ranks in a call carries
both, in its header.  Every wait polls the control channel.

A rank aborts a call if it receives another signature, or if it finds out while it waits that a peer
is in another call: it sends an abort with the call's number to all ranks.  The ranks then exchange
their recent calls, build the same text from them, withdraw and discard the messages of the call,
raise MismatchError, and are ready for the next call.

A rank that has waited for `timeout_s` without progress sends an alarm to all ranks.  Every living
rank answers with a status: the call, the step, the peers it waits for; or with the call of another
communicator that it waits in.  The lowest rank with a status sends its verdict: the text of the
error, and the ranks to blame, which are among those that did not answer.  All ranks raise
PeerTimeoutError with that text.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ringreduce.config import COMPILING
from ringreduce.control.diagnostics import describe_mismatch, describe_timeout
from ringreduce.control.signature import NUMBER_BYTES, Signature, number_of
from ringreduce.errors import MismatchError, PeerLostError, PeerTimeoutError, RingReduceError
from ringreduce.schedules.schedule import Schedule
from ringreduce.transports.base import Transport, lost
from ringreduce.transports.yielding import WaitClock

_REMEMBERED_CALLS = 4096
"""Calls whose signatures are kept.  A root whose sends are buffered may be ahead of its peers by
this many calls, and the error of a mismatch can still name the call that differed."""
_POLL_EVERY = 16
"""Idle polls between two polls of the control channel."""
_PATIENT_POLLS = 2000
"""Idle polls after which pauses are long, so that every poll includes the control channel."""
_STALL_S = 0.1
"""Seconds without progress after which a rank sends the signature of its call to all ranks."""
_ROLL_CALL_S = 0.25
"""Seconds in which a rank has to answer an alarm before it counts as silent."""
_VERDICT_S = 0.1
"""Seconds to wait for the lowest rank's verdict before this rank builds its own."""
_ELSEWHERE_S = 0.02
"""Seconds between two looks of a waiting rank at its other communicators."""
_CROSSING_S = 0.05
"""Seconds that a verdict may take to arrive: if two cross, all ranks use the lower rank's."""
_LONGEST_REASON = 1000
"""Characters of a reason for leaving.  MPI delivers a short message without further calls by its
sender, which may be about to end."""


class Interrupt(Exception):  # noqa: N818 - no error: it never leaves the library
    """The call cannot complete.  Raised out of a wait, and settled by the engine."""


class Aborted(Interrupt):
    """The ranks differ in this call or in an earlier one."""


class Alarmed(Interrupt):
    """A rank has waited for the timeout without progress."""


class PeerLeft(Interrupt):
    """A rank has left before this call, so that the call can never complete."""


class Recovery(Protocol):
    """The functions of the engine that the agreement needs after an error."""

    def where(self) -> tuple[int | None, list[int]]:
        """Return the step that this rank is in, if known, and the peers it waits for."""

    def withdraw(self) -> bool:
        """Withdraw every receive under way; return whether none is left."""

    def tally(self) -> tuple[Any, Any]:
        """Return the number of messages ever sent to, and received from, each peer."""

    def sends_done(self) -> bool: ...

    @property
    def rounds(self) -> int:
        """Number of rounds through shared memory that this rank has begun."""

    def start_afresh(self, rounds: int) -> None:
        """Forget the call, and count rounds from `rounds` on."""


class Agreement:
    """One communicator's numbers and signatures of calls, and its end of the control channel."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self.transport = transport
        self.timeout_s = timeout_s
        """Seconds without progress until a call times out, unless the call has its own."""
        self.number = -1
        self.completed = 0
        """Calls that this rank has completed, as the engine counts them: the next call's number."""
        self.calls: deque[Signature] = deque(maxlen=_REMEMBERED_CALLS)
        """The signatures of the latest calls of this epoch, up to the call with `number`."""
        self.remember = self.calls.append
        self.end_of = ""
        """The place whose end this rank has reached, such as "the program"; "" for `close`."""
        self._epoch = 0
        """Number of mismatches that were settled: messages of an earlier epoch are obsolete."""
        self._abort_at: int | None = None
        """The lowest call number that some rank has aborted in this epoch."""
        self.warned = False
        """Whether peers have sent an abort, or the signature of a call that is yet to begin."""
        self._expected: dict[int, str] = {}
        """By number of a call that has not begun here: the digest that a stalled peer has sent."""
        self._reports: dict[int, dict[str, Any]] = {}
        self._statuses: dict[int, dict[str, Any]] = {}
        self._elsewhere: dict[int, dict[str, Any]] = {}
        """By rank that waits in another communicator, or has timed out there: the call there."""
        self.tell_others: Callable[[bool], None] = lambda unasked: None
        """Tells ranks of other communicators that this rank waits here: if asked, or `unasked`."""
        self._looked_at = 0.0
        """When this rank last looked at its other communicators."""
        self._left: dict[int, dict[str, Any]] = {}
        """By rank that has left: the number of calls it completed, its reason, and the ranks whose
        loss is the reason."""
        self._alarm: dict[str, Any] | None = None
        """The first alarm: a rank has waited for the timeout without progress."""
        self._verdicts: dict[int, dict[str, Any]] = {}
        """By rank: the text of the error after an alarm, and the ranks to blame."""
        self._partings: set[int] = set()
        """Ranks that have completed the last call of the communicator."""
        self._farewells: set[int] = set()
        """Ranks of a broken communicator whose processes are about to end."""
        self._early: list[tuple[int, dict[str, Any]]] = []
        self._waiting_since = 0.0
        self._clock = WaitClock().now
        self._asked = False
        """Whether this rank has sent the signature of its call in the present wait."""
        self.interrupt: Exception | None = None
        """The error that the call under way raises when it waits.  Another thread sets it."""
        self.deadline_s = timeout_s
        """Seconds without progress until the call under way times out."""

    # --- one call ---

    def begin(self, signature: Signature, timeout_s: float | None = None) -> bytes:
        """Number the call; return the header that its first messages carry.

        Raises Aborted if the call is already known to differ between ranks.
        """
        number = self.number = self.completed
        self.calls.append(signature)
        self.deadline_s = timeout_s or self.timeout_s
        if self.warned:
            self.check_warnings(signature)
        return signature.digest + number.to_bytes(NUMBER_BYTES, "little")

    def check_warnings(self, signature: Signature) -> None:
        """Raise Aborted if peers have sent a reason why the call just begun cannot complete."""
        self._compare_expected(self.number, signature)
        if self._abort_at is not None and self._abort_at <= self.number:
            raise Aborted
        self.warned = bool(self._expected) or self._abort_at is not None

    def report_mismatch(self, peer: int, header: bytes) -> None:
        """Abort after `peer` sent the header of another call: the lower number of the two."""
        self._abort(min(number_of(header), self.number))

    def wait(self, idle: int, ahead: int = 0) -> None:
        """Pause after `idle` polls without progress; poll the control channel.

        `ahead` polls are added to `idle` to decide how long to pause.  Raises an Interrupt
        if the call cannot complete or has made no progress for the timeout.
        """
        if idle == 1:
            self._waiting_since = self._clock()
            self._asked = False
            self._elsewhere.clear()
        if idle % _POLL_EVERY == 0 or idle + ahead > _PATIENT_POLLS:
            self.poll()
            self._raise_interrupts()
            waited = self._waited()
            if waited > min(_STALL_S, self.deadline_s / 2):
                self._look_elsewhere()
                if not self._asked:
                    self._asked = True
                    digest = self._digest_of(self.number)
                    self._send_all("stall", number=self.number, digest=digest)
            if waited > self.deadline_s:
                self._raise_alarm(waited)
        self.transport.pause(idle + ahead)

    def _waited(self) -> float:
        now = self._clock()
        if any(lock.locked() for lock in COMPILING):  # by another thread
            self._waiting_since = now
        return now - self._waiting_since

    def _look_elsewhere(self) -> None:
        now = time.monotonic()
        if now > self._looked_at + _ELSEWHERE_S:
            self._looked_at = now
            self.tell_others(False)

    def answer(self, text: str, unasked: bool) -> None:
        """Say that this rank waits in `text`, a call of another communicator, to an alarm."""
        known = self._alarm
        self.poll()
        if unasked or self._alarm is not known:
            number = self.completed - 1
            self._send_all("elsewhere", number=number, step=None, waits_for=(), text=text)

    def _raise_alarm(self, timeout_s: float) -> None:
        self._alarm = {"timeout_s": timeout_s}
        self._send_all("alarm", **self._alarm)
        raise Alarmed

    def _raise_interrupts(self) -> None:
        if self.interrupt is not None:
            raise self.interrupt
        if self._alarm is not None:
            raise Alarmed
        if self._abort_at is not None and self._abort_at <= self.number:
            raise Aborted
        if any(message["completed"] <= self.number for message in self._left.values()):
            raise PeerLeft

    def _abort(self, number: int) -> None:
        self._send_all("abort", number=number)
        self._note_abort(number)
        raise Aborted

    def _note_abort(self, number: int) -> None:
        self._abort_at = number if self._abort_at is None else min(number, self._abort_at)
        self.warned = True

    # --- the control channel ---

    def _send_all(self, kind: str, **content: Any) -> None:
        for peer in self._others():
            self._send(peer, kind, **content)

    def _send(self, peer: int, kind: str, **content: Any) -> None:
        message = {"kind": kind, "epoch": self._epoch, **content}
        self.transport.send_control(peer, json.dumps(message).encode())

    def poll(self) -> None:
        """Handle the control messages that have arrived; keep those of a later epoch for it."""
        arrived = [(peer, json.loads(message)) for peer, message in self._poll_control()]
        early, self._early = self._early, []
        for peer, message in (*early, *arrived):
            kind = message["kind"]
            if message["epoch"] > self._epoch and kind not in _AT_ANY_TIME:
                self._early.append((peer, message))
            elif message["epoch"] == self._epoch or kind not in _IN_ITS_EPOCH:
                getattr(self, f"_on_{kind}")(peer, message)

    def _poll_control(self) -> list[tuple[int, bytes]]:
        try:
            return self.transport.poll_control()
        except Exception as error:
            if self._is_of_left(self.transport.translate(error)):
                return []  # this rank can still complete a call that those ranks have completed
            raise

    def _is_of_left(self, error: Exception) -> bool:
        """Return whether `error` names lost ranks, all of which had left before."""
        ranks = set(error.ranks) if isinstance(error, PeerLostError) else set()
        return bool(ranks) and ranks <= set(self._left)

    def why_lost(self, error: Exception) -> Exception:
        """Return why ranks have left, if `error` is the loss of such ranks; else `error`."""
        return self._settle_left() if self._is_of_left(error) else error

    def _on_abort(self, peer: int, message: dict[str, Any]) -> None:
        self._note_abort(message["number"])

    def _on_report(self, peer: int, message: dict[str, Any]) -> None:
        self._reports[peer] = message

    def _on_parting(self, peer: int, message: dict[str, Any]) -> None:
        self._partings.add(peer)

    def _on_stall(self, peer: int, message: dict[str, Any]) -> None:
        number = message["number"]
        if number > self.number:
            self._expected[number] = message["digest"]
            self.warned = True
        elif self._digest_of(number) not in ("", message["digest"]):
            self._send_all("abort", number=number)
            self._note_abort(number)

    def _on_alarm(self, peer: int, message: dict[str, Any]) -> None:
        self._alarm = self._alarm or message

    def _on_status(self, peer: int, message: dict[str, Any]) -> None:
        self._alarm = self._alarm or message
        self._statuses[peer] = message

    def _on_elsewhere(self, peer: int, message: dict[str, Any]) -> None:
        self._elsewhere[peer] = message

    def _on_verdict(self, peer: int, message: dict[str, Any]) -> None:
        self._alarm = self._alarm or message
        self._verdicts[peer] = message

    def _on_left(self, peer: int, message: dict[str, Any]) -> None:
        self._left[peer] = message

    def _on_farewell(self, peer: int, message: dict[str, Any]) -> None:
        self._farewells.add(peer)

    def _compare_expected(self, number: int, signature: Signature) -> None:
        for expected in [n for n in self._expected if n <= number]:
            digest = self._expected.pop(expected)
            if expected == number and digest != signature.digest.hex():
                self._send_all("abort", number=number)
                self._note_abort(number)

    def _digest_of(self, number: int) -> str:
        place = number - self._first_remembered
        return self.calls[place].digest.hex() if 0 <= place < len(self.calls) else ""

    @property
    def _first_remembered(self) -> int:
        return self.number - len(self.calls) + 1

    # --- after an error, and at the end of the communicator ---

    def part(self) -> None:
        """Wait until all ranks have completed the last call and received all control messages.

        Then the control channel can be freed.  Raises an Interrupt if a rank aborts the
        call instead.
        """
        self._send_all("parting")
        self._poll_until(
            lambda: (
                self._abort_at is not None
                or (len(self._partings) == self.transport.size - 1 and self._all_sent())
            )
        )
        self._raise_interrupts()

    def settle(
        self, interrupt: Interrupt, recovery: Recovery, schedule: Schedule
    ) -> RingReduceError:
        """Settle the interrupted call, of `schedule`, with all ranks; return the error to raise.

        After a MismatchError the communicator is as if the call had never been made; after
        any other error it is broken.
        """
        try:
            if isinstance(interrupt, Aborted):
                return self._settle_mismatch(recovery)
        except Interrupt as worse:
            interrupt = worse
        if isinstance(interrupt, PeerLeft):
            return self._settle_left()
        return self._settle_timeout(recovery, schedule)

    def leave(self, reason: str, lost: Sequence[int] = ()) -> None:
        """Send all ranks that this rank makes no further call, because of `reason`.

        `lost` are the ranks whose loss is the reason.
        """
        reason = reason[:_LONGEST_REASON]
        self._send_all("left", completed=self.completed, reason=reason, lost=lost)

    def flush(self, seconds: float) -> None:
        end, idle = time.monotonic() + seconds, 0
        while not self._all_sent() and time.monotonic() < end:
            idle += 1
            self.transport.pause(idle)

    def farewell(self, seconds: float) -> None:
        """Send all ranks that this process ends; wait for the same from all living ranks.

        Waits for `seconds` at most.
        """
        self._send_all("farewell")
        lost = {rank for verdict in self._verdicts.values() for rank in verdict["ranks"]}
        living = set(self._others()) - lost - set(self._left)
        self._poll_for(seconds, lambda: living <= self._farewells)

    def _settle_mismatch(self, recovery: Recovery) -> RingReduceError:
        self._poll_until(recovery.withdraw)
        sent, received = recovery.tally()
        mine = {
            "next": self.number + 1,
            "rounds": recovery.rounds,
            **self._history(),
        }
        for peer in self._others():
            self._send(peer, "report", sent=sent[peer], **mine)
        self._poll_until(lambda: len(self._reports) == self.transport.size - 1)
        reports = {**self._reports, self.transport.rank: mine}

        owed = {peer: self._reports[peer]["sent"] - received[peer] for peer in self._reports}
        self._poll_until(lambda: self._drain(owed))
        self._poll_until(recovery.sends_done)
        self._poll_until(self._all_sent)
        recovery.start_afresh(max(report["rounds"] for report in reports.values()))
        self._forget_calls(max(report["next"] for report in reports.values()))
        text, alike = describe_mismatch(reports)
        return MismatchError(text, not any(self.transport.rank in ranks[1:] for ranks in alike))

    def _history(self) -> dict[str, Any]:
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
        gone = {each for left, why in self._left.items() for each in why["lost"] or [left]}
        if message["lost"]:
            return lost(sorted(gone))
        return PeerLostError(
            f"rank {rank} has left the communicator: {message['reason']}; "
            "the communicator is broken, calls on it can no longer complete",
            tuple(sorted(gone)),
        )

    def _settle_timeout(self, recovery: Recovery, schedule: Schedule) -> RingReduceError:
        """Exchange statuses; return the error that the lowest rank that answers describes."""
        rank, others = self.transport.rank, self.transport.size - 1
        status = self._status(recovery)
        self._send_all("status", **status)
        if not self._verdicts:
            self.tell_others(True)

        def is_over() -> bool:
            self._look_elsewhere()
            return bool(self._verdicts) or len({*self._statuses, *self._elsewhere}) == others

        self._poll_for(_ROLL_CALL_S, is_over)
        statuses = {**self._statuses, rank: status}
        if min(statuses) != rank:
            self._poll_for(_VERDICT_S, lambda: self._verdicts)
        if not self._verdicts:
            timeout_s = (self._alarm or {}).get("timeout_s", self.deadline_s)
            text, culprits = describe_timeout(schedule, statuses, timeout_s, self._elsewhere)
            self._verdicts[rank] = {"text": text, "ranks": culprits}
            self._send_all("verdict", **self._verdicts[rank])
        self._poll_for(_CROSSING_S, lambda: 0 in self._verdicts)
        self._poll_for(_VERDICT_S, lambda: self.transport.control_sent(statuses))
        verdict = self._verdicts[min(self._verdicts)]
        return PeerTimeoutError(verdict["text"], ranks=tuple(verdict["ranks"]))

    def _status(self, recovery: Recovery) -> dict[str, Any]:
        step, peers = recovery.where()
        if self._abort_at is not None and self._abort_at <= self.number:
            step, peers = None, [peer for peer in self._others() if peer not in self._reports]
        return {"number": self.number, "step": step, "waits_for": peers}

    # --- waiting for control messages ---

    def _others(self) -> Iterable[int]:
        return (peer for peer in range(self.transport.size) if peer != self.transport.rank)

    def _all_sent(self) -> bool:
        return self.transport.control_sent(self._others())

    def _poll_for(self, seconds: float, enough: Callable[[], Any]) -> None:
        end, idle = time.monotonic() + seconds, 0
        while not enough() and time.monotonic() < end:
            self.poll()
            idle += 1
            self.transport.pause(idle)

    def _poll_until(self, finished: Callable[[], bool]) -> None:
        """Poll until `finished`; raise an Interrupt after an alarm, a leave or the timeout."""
        self._waiting_since = self._clock()
        idle = 0
        while not finished():
            self.poll()
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
"""Kinds of messages that are dropped once the receiver is in a later epoch."""
_AT_ANY_TIME = frozenset(("alarm", "status", "elsewhere", "verdict", "farewell"))
"""Kinds of messages that are handled even if the receiver is in an earlier epoch."""
