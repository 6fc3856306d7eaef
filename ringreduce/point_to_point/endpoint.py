"""One rank's end of all messages between two ranks: their order, their matching, their errors.

A message has a tag.  A receive takes the earliest message of its peer with its tag that no earlier
receive has taken.  A receive from any rank takes the first message with its tag that arrives.  If
several have arrived before the receive, it takes the message of the lowest rank.  If dtype or shape
differ, both ranks raise MismatchError, and the message is gone.  A send is over when its receiver
has copied the data.

While asynchronous messages are under way, a thread makes progress, if the transport allows that.
Every wait makes progress, too: for all messages of the rank.

The thread also writes answers for which the road had no place.  The peer waits for these answers,
and this rank may never make another message.

A signal handler may raise in the main thread at any instruction.  This rank then gives up the
operations of the interrupted call that are not over.  If the handler raises while messages are
matched, a message may be lost.  So all messages with busy peers end, on both ranks.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from ringreduce.errors import (
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    RingReduceError,
    numbered,
)
from ringreduce.point_to_point.operations import ANY, Operation, Pair
from ringreduce.point_to_point.road import CLOSED, CLOSING, DRAINED, OPEN, Answered, Arrival, Road
from ringreduce.shm.mailbox import DIFFERENT, REFUSED, TAKEN
from ringreduce.trace.recorder import MESSAGE, RECORDERS
from ringreduce.transports.base import ABANDONED
from ringreduce.transports.yielding import HEAD_START, WaitClock, Yielding

_CHECK_EVERY = 16
"""Idle polls between two looks at the states of the peers, and at the clock."""
_LOOK_S = 0.02
"""Seconds between two looks at whether the peers live."""
_GAVE_UP = "it has given up a message with this rank"


class FallibleWork(Protocol):
    completed: threading.Event
    """Set when the work is over."""

    @property
    def unseen_error(self) -> BaseException | None:
        """The error of a work that is over and that nobody has waited for."""

    def forked(self, error: Exception) -> None:
        """End with `error` in a child process."""


def _is_kept(work: FallibleWork) -> bool:
    return not work.completed.is_set() or work.unseen_error is not None


def no_message_error(where: str, tag: int, seconds: float) -> PeerTimeoutError:
    text = f"{where}: waited {seconds:g} s; no rank has sent a message with tag {tag}"
    return PeerTimeoutError(text, ())


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Endpoint:
    def __init__(
        self,
        road: Road,
        rank: int,
        job_ranks: Sequence[int],
        timeout_s: float,
        pause: Callable[[int], None],
        yielding: Yielding,
        threads: bool,
        advance_calls: Callable[[], None],
    ) -> None:
        self.road, self.rank, self.size, self.timeout_s = road, rank, len(job_ranks), timeout_s
        self._job_ranks = job_ranks
        """By rank: its number in the job, for errors."""
        self._pause, self._yielding, self._threads = pause, yielding, threads
        self._advance_calls = advance_calls
        """Makes progress with asynchronous collectives, if no thread does."""
        self.lock = threading.RLock()
        """Guards everything here, and the road."""
        self._pairs: defaultdict[int, Pair] = defaultdict(Pair)
        self._busy: dict[int, Pair] = {}
        """The pairs with operations that are not over, and those that answer later."""
        self._from_any: list[Operation] = []
        """Receives from any rank that have no message, in order."""
        self._begun_count = 0
        self._state = OPEN
        self.works: list[FallibleWork] = []
        """Works that are not over, or whose errors nobody has seen."""
        self._asynchronous: set[Operation] = set()
        """Asynchronous operations that are not over."""
        self._begun = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended: Exception | None = None
        self._looked_at = 0.0
        self.survives_losses, self._told = False, set[int]()
        """Whether the program goes on without lost peers: then `find_arrival` raises an error once
        for each of them.  `_told` are the peers that it has named."""
        self._clock = WaitClock().now

    # --- operations ---

    def start(self, operations: Sequence[Operation], work: FallibleWork) -> None:
        """Begin the operations of a work, in order.  Raises as `run` does."""
        try:
            self._start(operations, work)
            self._wake_thread()
        except BaseException as error:
            self._give_up_all(operations, error)
            self.works = [each for each in self.works if each is not work]
            raise

    def run(self, operations: Sequence[Operation]) -> None:
        """Begin operations, in order, and wait until they are over.

        Raises their first error; ValueError if two receives would write to the same memory;
        and the error that has ended the messages of this rank or with a peer.
        """
        try:
            self._start(operations)
            self._finish(operations)
        except BaseException as error:
            self._give_up_all(operations, error)
            raise

    def adopt(self, operation: Operation) -> None:
        """Wait for the answer to the message that compiled code has offered."""
        try:
            with self.lock:
                self._check_usable([operation])
                operation.since = self._clock()
                pair = self._pair(operation.peer)
                operation.number = self.road.unadopted(operation.peer)
                pair.offered[operation.number] = operation
                self.road.adopted(operation.peer)
                early = pair.early.pop(operation.number, None)
                if early is not None:
                    self._on_answer(pair, early)
            self._finish([operation])
        except BaseException as error:
            self._give_up_all([operation], error)
            raise

    def _start(self, operations: Sequence[Operation], work: FallibleWork | None = None) -> None:
        with self.lock:
            self._check_usable(operations)
            self._check_memory(operations)
            now = self._clock()
            if work is not None:
                self.works = [*filter(_is_kept, self.works), work]
            try:
                for operation in operations:
                    operation.since, operation.place = now, self._begun_count
                    operation.began_ns = time.perf_counter_ns() if RECORDERS else 0
                    self._begun_count += 1
                    if work is not None:
                        self._asynchronous.add(operation)
                    if operation.peer == ANY:
                        self._post_from_any(operation)
                    elif operation.sends:
                        self._pair(operation.peer).unoffered.append(operation)
                    else:
                        self._post(self._pair(operation.peer), operation)
                self._progress()
            except BaseException as error:
                self._break_off(error)
                raise

    def _pair(self, peer: int) -> Pair:
        """Return the pair of this rank and a peer, which is busy from now on."""
        pair = self._pairs[peer]
        if peer not in self._busy:
            self.road.set_idle(False)
            self.road.set_quiet(peer, False)
            self._busy[peer] = pair
        return pair

    def _check_usable(self, operations: Iterable[Operation]) -> None:
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        for operation in operations:
            if operation.peer == ANY:
                continue
            pair = self._pairs[operation.peer]
            if pair.error is None and self.road.has_given_up(operation.peer):
                # A signal handler has raised before Python knew a message of compiled code.
                self._fail(pair, self._lost_error(operation.peer, "a message was interrupted"))
            if pair.error is not None:
                raise copy.copy(pair.error)

    def _check_memory(self, operations: Sequence[Operation]) -> None:
        """Raise ValueError if two operations use the same memory and one of them receives."""
        under_way = self._under_way()
        for index, operation in enumerate(operations):
            for other in (*under_way, *operations[:index]):
                if (operation.sends and other.sends) or not operation.overlaps(other):
                    continue
                word = "is sent" if other.sends or operation.sends else "another receive writes to"
                raise ValueError(
                    f"{operation.where}: out shares memory with an array that {word}; pass an "
                    "array of its own"
                )

    def is_received_into(self, memory: np.ndarray) -> bool:
        """Return whether a receive that is under way writes to some of `memory`."""
        with self.lock:
            return any(not each.sends and each.uses(memory) for each in self._under_way())

    def _under_way(self) -> list[Operation]:
        operations = [each for pair in self._busy.values() for each in pair.operations()]
        return operations + list(self._from_any)

    def _finish(self, operations: Sequence[Operation]) -> None:
        """Wait until the operations are over; raise the first error among them."""
        self.wait_until(lambda: all(operation.over for operation in operations))
        if self._has_unsent():
            self._wake_thread()
        for operation in operations:
            if operation.error is not None:
                raise operation.error.with_traceback(None)

    def wait_until(self, test: Callable[[], bool], end: float | None = None) -> bool:
        """Make progress until `test` is true; return False if the time `end` comes before."""
        idle = 0
        while not test():
            if end is not None and time.monotonic() > end:
                return False
            idle = 0 if self.advance(idle) else idle + 1
            if idle > self._yielding.spins:
                self._advance_calls()
                self._pause(idle - self._yielding.spins)
        return True

    def advance(self, idle: int = _CHECK_EVERY) -> bool:
        """Make progress without waiting; return whether there was any.

        `idle` counts the calls since the last progress.  Some of them look at peers and timeouts.
        """
        with self.lock:
            try:
                moved = self._progress()
                if not moved and idle % _CHECK_EVERY == 0:
                    self._check_peers()
            except BaseException as error:
                self._break_off(error)
                raise
            return moved

    def advance_without_thread(self) -> None:
        """Make progress if peers may wait for it and no thread makes it."""
        if not self._threads and self._must_advance():
            self.advance()

    @property
    def is_busy(self) -> bool:
        return bool(self._asynchronous)

    def _must_advance(self) -> bool:
        return self.is_busy or self._has_unsent()

    def _has_unsent(self) -> bool:
        """Return whether answers to some peer wait until the peer takes earlier ones."""
        busy = list(self._busy.items())  # another thread may change `_busy`
        return any(self._owes(*each) for each in busy)

    def find_arrival(self, tag: int) -> int | None:
        """Return the lowest rank from which a message with `tag` has arrived that no receive has.

        None if there is none yet.  Raises the error of a peer if no peer can send one any more.
        """
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        with self.lock:
            looks = self._clock() - self._looked_at > _LOOK_S
            offers = {peer: self.road.offers(peer, tag) for peer in self._peers()}
            for peer, offered in offers.items():
                if offered is None or (looks and self.road.lost(peer)):
                    self._pair(peer)
            try:
                self._check_peers()
                self._progress()
            except BaseException as error:
                self._break_off(error)
                raise
            for peer, offered in offers.items():
                pair = self._pairs[peer]
                if pair.error is None and (offered or pair.arrivals.get(tag)):
                    return peer
            silent = None if False in offers.values() else self._why_all_silent()
            if silent is not None:
                raise silent
            if looks and self.survives_losses:
                lost = self.lost_peers(closed=True) - self._told
                self._told |= lost
                for peer in lost:
                    raise self._lost_error(peer, "it is lost, or has closed")
        return None

    def _why_all_silent(self) -> Exception | None:
        """Return the error of the first peer if no peer can send a message any more, else None."""
        errors = [self._why_silent(peer, self._pairs[peer]) for peer in self._peers()]
        return None if None in errors else errors[0]

    def _why_silent(self, peer: int, pair: Pair) -> Exception | None:
        """Return why a peer without arrivals sends no further message; None if it may."""
        if pair.error is not None:
            return copy.copy(pair.error)
        theirs = self.road.state_of(peer)
        if theirs.state >= DRAINED:
            return self._lost_error(peer, theirs.reason or "it closes the communicator")
        return None

    def lost_peers(self, closed: bool) -> set[int]:
        """Return the peers that are lost; with `closed`, also those that closed in good order."""
        found = set()
        with self.lock:
            for peer in self._peers():
                theirs = self.road.state_of(peer)
                left = theirs.broken or theirs.reason
                lost = left or self._pairs[peer].error or self.road.lost(peer)
                has_closed = theirs.state >= DRAINED and not left
                if closed if has_closed else lost:
                    found.add(peer)
        return found

    # --- for `Work`: the queue of asynchronous messages ---

    def wait_for(self, completed: threading.Event, timeout_s: float | None) -> bool:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        return self.wait_until(completed.is_set, end)

    # --- progress ---

    def _progress(self) -> bool:
        moved, busy = False, list(self._busy.items())
        for peer, pair in busy:
            moved |= self._advance_pair(peer, pair)
        for peer, pair in busy:
            if not self._is_open(peer, pair):
                self._busy.pop(peer, None)
                waits = pair.error is not None or any(pair.arrivals.values())
                self.road.set_quiet(peer, self._state == OPEN and not waits)
                self.road.set_idle(not self._busy)
        return moved

    def _break_off(self, error: BaseException) -> None:
        """End the messages with all busy peers after `error`: one of them may be half recorded."""
        for peer, pair in self._busy.items():
            if pair.error is None:
                self.road.give_up(peer)
                self._fail(pair, self._lost_error(peer, _text_of(error)))
        for operation in self._from_any:
            if operation.peer != ANY and not operation.over:
                self._end(operation, self._lost_error(operation.peer, _text_of(error)))
        self._from_any = [each for each in self._from_any if each.peer == ANY]

    def _advance_pair(self, peer: int, pair: Pair) -> bool:
        moved = False
        while pair.unoffered:
            operation = pair.unoffered[0]
            number = self.road.offer(peer, operation.kind, operation.tag, operation.data)
            if not number:
                break
            operation.number, moved = number, True
            pair.offered[number] = operation
            pair.unoffered.popleft()
        for answered in self.road.answers(peer):
            moved = True
            self._on_answer(pair, answered)
        for arrival in self.road.arrivals(peer):
            moved = True
            self._on_arrival(peer, pair, arrival)
        for operation in list(pair.reading):
            moved |= self._read(peer, pair, operation)
        return moved

    def _on_answer(self, pair: Pair, answered: Answered) -> None:
        operation = pair.offered.get(answered.number)
        if operation is None:  # it was given up, or is yet to be adopted
            pair.early[answered.number] = answered
            return
        error: Exception | None = None
        if answered.status == DIFFERENT:
            error = self._mismatch(operation, operation.kind.text, answered.text)
        elif answered.status == REFUSED:
            text = (
                f"{operation.where}: rank {operation.peer} has closed the communicator without a "
                f"receive for {operation}"
            )
            error = numbered(PeerLostError(text, (operation.peer,)), self._job_ranks)
        self._end(operation, error)
        pair.offered.pop(answered.number, None)

    def _on_arrival(self, peer: int, pair: Pair, arrival: Arrival) -> None:
        receives = list(pair.receives[arrival.tag])
        if pair.error is None:
            receives += [each for each in self._from_any if each.tag == arrival.tag]
        if receives:
            earliest = min(receives, key=lambda each: each.place)
            self._match(peer, pair, earliest, arrival)
        elif self._state == OPEN:
            pair.arrivals[arrival.tag].append(arrival)
        else:
            self.road.answer(peer, arrival, REFUSED, None)

    def _post(self, pair: Pair, operation: Operation) -> None:
        arrivals = pair.arrivals[operation.tag]
        if arrivals and not pair.receives[operation.tag]:
            self._match(operation.peer, pair, operation, arrivals.popleft())
        else:
            pair.receives[operation.tag].append(operation)

    def _post_from_any(self, operation: Operation) -> None:
        pairs = {peer: self._pair(peer) for peer in self._peers()}  # they are polled from now on
        for peer, pair in pairs.items():
            arrivals = pair.arrivals[operation.tag]
            if arrivals and pair.error is None:
                self._match(peer, pair, operation, arrivals.popleft())
                return
        self._from_any.append(operation)

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _match(self, peer: int, pair: Pair, operation: Operation, arrival: Arrival) -> None:
        operation.peer = peer
        operation.arrival, operation.number = arrival, arrival.number
        differs = arrival.digest != operation.kind.digest
        if differs:
            self.road.answer(peer, arrival, DIFFERENT, operation.kind)
            self._end(operation, self._mismatch(operation, arrival.text, operation.kind.text))
        else:
            pair.reading.append(operation)
        receives = pair.receives[operation.tag]
        if operation in receives:
            receives.remove(operation)
        self._forget_from_any(operation)
        if not differs:
            self._read(peer, pair, operation)

    def _forget_from_any(self, operation: Operation) -> None:
        if operation in self._from_any:
            self._from_any = [each for each in self._from_any if each is not operation]

    def _read(self, peer: int, pair: Pair, operation: Operation) -> bool:
        arrival = operation.arrival
        assert arrival is not None
        done = self.road.read(peer, arrival, operation.data)
        if done is None:
            return False
        if done:
            self.road.answer(peer, arrival, TAKEN, None)
            self._end(operation, None)
            pair.reading.remove(operation)
        else:
            broken = self.road.state_of(peer).broken
            reason = _GAVE_UP if broken else "its process cannot be read"
            self._fail(pair, self._lost_error(peer, reason))
        return True

    def _mismatch(self, operation: Operation, sent: str, received: str) -> MismatchError:
        ranks = (self.rank, operation.peer)
        sender, receiver = ranks if operation.sends else ranks[::-1]
        return MismatchError(
            f"send and recv: rank {sender} sends {sent} with tag {operation.tag}, rank {receiver} "
            f"receives {received}; both must pass the same dtype and shape",
            speaks=operation.sends,
        )

    def _end(self, operation: Operation, error: Exception | None) -> None:
        operation.error, operation.over = error and copy.copy(error), True
        if RECORDERS and error is None:
            name, towards = ("send", "to") if operation.sends else ("recv", "from")
            words = operation.data.nbytes, f"{towards} {operation.peer}"
            RECORDERS[0].add(MESSAGE, name, operation.began_ns, *words)
        if operation.at_end is not None:
            self._asynchronous.discard(operation)
            operation.at_end(operation)

    # --- peers that do not answer ---

    def _check_peers(self) -> None:
        """End the operations of peers that have left, died or not answered in time."""
        now = self._clock()
        # Before the pairs advance: what a peer has sent before it fell silent is matched then.
        silent = self._why_all_silent() if self._from_any else None
        looks = now - self._looked_at > _LOOK_S
        if looks:
            self._looked_at = now
        for peer, pair in list(self._busy.items()):
            self._check_state(peer, pair)
            lost = self.road.lost(peer) if looks else ""
            if lost and pair.error is None:
                self._fail(pair, self._lost_error(peer, lost))
            for operation in pair.operations():
                if now - operation.since > operation.timeout_s:
                    self._time_out(peer, pair, operation)
        for operation in self._from_any:
            if silent is not None:
                self._give_up(operation, silent)
            elif now - operation.since > operation.timeout_s:
                late = no_message_error(operation.where, operation.tag, operation.timeout_s)
                self._give_up(operation, late)

    def _check_state(self, peer: int, pair: Pair) -> None:
        theirs = self.road.state_of(peer)
        if theirs.broken and pair.error is None:
            self._fail(pair, self._lost_error(peer, _GAVE_UP))
        if theirs.state < DRAINED:
            return
        self._advance_pair(peer, pair)  # what the peer has done before it announced its state
        if theirs.state == CLOSED:
            reason = theirs.reason or "it has closed the communicator"
            self._fail(pair, self._lost_error(peer, reason))
        else:
            for operation in [each for queue in pair.receives.values() for each in queue]:
                pair.discard(operation)
                reason = f"it closes the communicator and has not sent {operation}"
                self._end(operation, self._lost_error(peer, reason))

    def _lost_error(self, peer: int, reason: str) -> PeerLostError:
        text = f"rank {peer} takes part in no more messages with this rank: {reason}"
        return numbered(PeerLostError(text, (peer,)), self._job_ranks)

    def _time_out(self, peer: int, pair: Pair, operation: Operation) -> None:
        did = f"has not received {operation}" if operation.sends else f"has not sent {operation}"
        others = sorted(tag for tag, queue in pair.arrivals.items() if queue)
        if others and not operation.sends:
            did += f"; messages with tag {', '.join(map(str, others))} have arrived"
        text = f"{operation.where}: waited {operation.timeout_s:g} s; rank {peer} {did}"
        error = numbered(PeerTimeoutError(text, (peer,)), self._job_ranks)
        self._give_up(operation, error)

    def _give_up_all(self, operations: Sequence[Operation], error: BaseException) -> None:
        for operation in operations:
            self._give_up(operation, error)

    def _give_up(self, operation: Operation, error: BaseException) -> None:
        """End an operation that is not over.

        A receive without a message leaves no trace.  The peer may still take any other message, or
        the rest of it: so the pair ends.
        """
        with self.lock:
            self._forget_from_any(operation)
            if operation.over:
                return
            if operation.peer == ANY:
                if not isinstance(error, RingReduceError):
                    error = PeerLostError(f"{operation.where}: {_text_of(error)}", ())
                self._end(operation, error)
                return
            pair = self._pairs[operation.peer]
            pair.discard(operation)
            ended: Exception = self._lost_error(operation.peer, _text_of(error))
            if isinstance(error, RingReduceError):
                ended = error
            if operation.number or operation.arrival is not None:
                ABANDONED.append((self.road, operation.data))
                self.road.give_up(operation.peer)
                self._fail(pair, ended)
            self._end(operation, ended)

    def _fail(self, pair: Pair, error: Exception) -> None:
        pair.error = error
        for operation in pair.operations():
            pair.discard(operation)
            ABANDONED.append((self.road, operation.data))
            if not operation.over:
                self._end(operation, error)

    # --- the progress thread ---

    def _wake_thread(self) -> None:
        if not self._threads:
            return
        with self._begun:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ringreduce messages", daemon=True
                )
                self._thread.start()
            self._begun.notify()

    def _run(self) -> None:
        idle = 0
        while True:
            with self._begun:
                while self._ended is None and not self._must_advance():
                    self._begun.wait()
            if self._ended is not None:
                return
            idle = 0 if self.advance(idle) else idle + 1
            if idle:
                self._pause(idle + HEAD_START)

    # --- the end ---

    def close(self, end: float | None = None) -> None:
        """Wait until all operations of this rank are over, and announce it.

        Operations that are not over at the time `end` fail with PeerTimeoutError.
        """
        with self.lock:
            if self._ended is not None:
                return
            self._announce(CLOSING)
            for peer in self._peers():  # offers of any peer have to be refused
                self._pair(peer)
            for peer, pair in self._pairs.items():
                for arrivals in pair.arrivals.values():
                    while arrivals:
                        self.road.answer(peer, arrivals.popleft(), REFUSED, None)
        if self.wait_until(lambda: not self._is_sending(), end):
            self._announce(DRAINED)
        if not self.wait_until(lambda: not self._open_pairs(), end):
            self._end_late()
        self._announce(CLOSED)

    def _open_pairs(self) -> list[tuple[int, Pair]]:
        return [each for each in self._pairs.items() if self._is_open(*each)]

    def _end_late(self) -> None:
        with self.lock:
            for peer, pair in self._open_pairs():
                text = f"close: rank {peer} did not complete its messages with this rank in time"
                self.road.give_up(peer)
                self._fail(pair, numbered(PeerTimeoutError(text, (peer,)), self._job_ranks))
            for operation in self._from_any:
                text = f"{operation.where}: no message came before the communicator was closed"
                self._give_up(operation, PeerTimeoutError(text, ()))

    def _is_open(self, peer: int, pair: Pair) -> bool:
        waits = bool(self._from_any) and pair.error is None
        return waits or pair.is_busy or self._owes(peer, pair)

    def _owes(self, peer: int, pair: Pair) -> bool:
        return pair.error is None and self.road.has_unsent(peer)

    def _is_sending(self) -> bool:
        return any(pair.unoffered or pair.offered for pair in self._pairs.values())

    def _announce(self, state: int, reason: str = "") -> None:
        with self.lock:
            self._state = state
            self.road.announce(state, reason)

    def end(self, error: Exception, reason: str = "") -> None:
        """End all operations with `error`, which later ones raise.

        Announces `reason` to the peers, if there is one.
        """
        with self.lock:
            if self._ended is None:
                self._ended = error
                if reason and self._state != CLOSED:  # else it has closed in good order
                    self._announce(CLOSED, reason)
                for peer, pair in self._pairs.items():
                    self.road.set_quiet(peer, False)
                    self._fail(pair, error)
                for operation in self._from_any:
                    self._give_up(operation, error)
                self.road.close()
        with self._begun:
            self._begun.notify_all()

    def forked(self, error: Exception) -> None:
        """Reset the endpoint in a child process, which has none of the parent's threads."""
        self.lock, self._begun = threading.RLock(), threading.Condition()
        self._ended, self._thread = error, None
        works, self.works = self.works, []
        for work in works:
            if not work.completed.is_set():
                work.forked(error)
        self.road.forked()
        self._pairs, self._busy, self._from_any = defaultdict(Pair), {}, []
