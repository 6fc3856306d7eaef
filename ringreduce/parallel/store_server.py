"""One server of a `ParameterStore`: receives requests, applies pushes, answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import ringreduce as rr
from ringreduce.parallel.store_messages import (
    DATA,
    REPLY,
    REQUEST,
    SLOTS,
    Field,
    Head,
    Kind,
    Shard,
    StoreStats,
    Views,
)
from ringreduce.parallel.store_rule import Apply, Discard, Go, Number, Rule, Worker

Update = Callable[[np.ndarray, tuple[np.ndarray, ...], np.ndarray, int, int], None]
_LOOK_S = 0.1
"""Seconds of waiting between two looks at whether the other ranks live."""


class Server:
    """A server's shard of the variables, and the pushes that it has received.

    The deciding server, the first, runs the `Rule`, and tells the others which pushes are updates,
    unless each push is one.
    """

    def __init__(
        self,
        comm: rr.Communicator,
        shard: Shard,
        update: Update,
        slots: Sequence[str],
        servers: int,
        staleness: int | None,
        backup_workers: int,
    ) -> None:
        self._comm, self._update, self.shard = comm, update, shard
        self._workers = comm.size - servers
        self._followers = range(self._workers + 1, comm.size)
        self._alone, self._decides = servers == 1, shard.server == 0
        self._synchronous = staleness == 0
        self._rule = Rule(
            {rank: Worker() for rank in range(self._workers)}, staleness, backup_workers
        )
        self._answer = comm.empty((shard.nbytes,), np.uint8)
        """The reply with parameters, which lie in it."""
        self._parameters = shard.views(self._answer)
        self._slots = comm.empty((len(slots), shard.nbytes), np.uint8)
        self._views_of_slots = {
            slot: shard.views(row) for slot, row in zip(slots, self._slots, strict=True)
        }
        self._request, self._full = Head(comm.size), Head(comm.size, self._answer)
        self._short = Head(comm.size)
        self._pushed: dict[int, np.ndarray] = {}
        """Worker -> the buffer of its gradients."""
        self._waiting: dict[int, dict[Field, float]] = {}
        """Worker -> the head of its last push, which is neither applied nor dropped."""
        self._asked: dict[int, tuple[Kind, bool]] = {}
        """Worker that waits for an answer -> its request, and whether it wants the slots."""
        self._fate: Counter[int] = Counter()
        """Worker -> staleness of its last push here; -1: it was dropped."""
        self._open = set(range(self._workers))
        self._updates = 0
        self._pulled_at: Counter[int] = Counter()
        """Worker -> number of updates at its last pull."""
        self.meeting = 0
        """How many loops of `steps` have begun."""
        self._is_over = True
        """Whether the last loop of `steps` has ended."""
        self._applied: set[int] = set()
        """The numbers of this meeting that were applied."""
        self._count: tuple[int, int] | None = None
        """A worker, and the count with which it has called `steps`."""
        self._share = 0.0
        self._failure: dict[Field, float] | None = None
        """What every reply says once a server is lost, or counts of `steps` differ."""
        self._pushes = self._discarded = self._sent_bytes = 0
        self._staleness: Counter[int] = Counter()
        self._waited_s = 0.0
        self.lost: dict[int, Exception] = {}

    def set(self, slot: str, name: str, value: np.ndarray) -> None:
        """Set the piece of a variable, or of one of its slots, from the flat variable."""
        views: Views = self._views_of_slots[slot] if slot else self._parameters
        if name in views:
            views[name][...] = value[self.shard.pieces[name]]

    def stats(self) -> StoreStats:
        """Return what this server has done."""
        held = sum(each.nbytes for each in (self._answer, self._slots, *self._pushed.values()))
        staleness = dict(self._staleness)
        made = self._pushes, self._discarded, staleness
        return StoreStats(*made, self._waited_s, self._sent_bytes, held, tuple(sorted(self.lost)))

    def serve(self) -> None:
        """Serve until all workers have closed, or are lost."""
        handlers = {
            Kind.PUSH: self._on_push,
            Kind.PUSHED: self._on_pushed,
            Kind.PULL: self._on_question,
            Kind.SETTLE: self._on_question,
            Kind.FETCH: self._on_fetch,
            Kind.NUMBER: self._on_number,
            Kind.BREAK: self._on_break,
            Kind.CLOSE: self._on_close,
            Kind.DECIDED: self._on_decided,
        }
        while self._open:
            begin = time.perf_counter()
            try:
                peer = self._comm.probe(REQUEST, timeout_s=_LOOK_S)
            except rr.PeerTimeoutError:
                self._look()
                continue
            finally:
                self._waited_s += time.perf_counter() - begin
            try:
                self._comm.recv(self._request.numbers, peer, REQUEST)
                handlers[Kind(self._request[Field.KIND])](peer)
                self._decide()
            except rr.PeerLostError as error:
                self._lose(error)

    # --- requests ---

    def _on_push(self, worker: int) -> None:
        fields: dict[Field, float] = {
            field: self._request.numbers[field] for field in Field if field is not Field.LOST
        }
        if self.shard.pieces:
            if worker not in self._pushed:
                self._pushed[worker] = self._comm.empty((self.shard.nbytes,), np.uint8)
            self._comm.recv(self._pushed[worker], worker, DATA)
        self._waiting[worker] = fields
        if self._alone:
            self._on_pushed(worker)
        elif not self._decides:
            self._begin_meeting(self._request[Field.MEETING])
            if not self._synchronous:
                self._apply([worker])

    def _on_pushed(self, worker: int) -> None:
        number = self._request[Field.NUMBER]
        self._rule.push(worker, self._request[Field.PUSH], None if number < 0 else number)

    def _on_question(self, worker: int) -> None:
        kind = Kind(self._request[Field.KIND])
        self._asked[worker] = kind, bool(self._request[Field.SLOTS])
        if self._decides and (kind is Kind.PULL or self._synchronous):
            self._rule.pull(worker)
        else:
            self._reply(worker)  # each push is applied when it comes

    def _on_fetch(self, worker: int) -> None:
        self._asked[worker] = Kind.FETCH, bool(self._request[Field.SLOTS])
        self._reply(worker)

    def _on_number(self, worker: int) -> None:
        count = self._request[Field.NUMBER]
        if self._is_over:
            self._begin_meeting(self.meeting + 1)
        self._asked[worker] = Kind.NUMBER, False
        first, wanted = self._count = self._count or (worker, count)
        if count != wanted:
            self._fail(
                {
                    Field.KIND: Kind.DIFFERENT,
                    Field.RANK: first,
                    Field.NUMBER: wanted,
                    Field.OTHER_RANK: worker,
                    Field.OTHER_COUNT: count,
                }
            )
        elif self._failure is None:
            self._rule.steps(worker, count)

    def _on_break(self, worker: int) -> None:
        self._rule.break_off(worker)

    def _on_close(self, worker: int) -> None:
        self._open.discard(worker)
        self._rule.leave(worker)

    def _on_decided(self, server: int) -> None:
        decided = np.empty(self._workers + 1)
        self._comm.recv(decided, server, DATA)
        workers = [int(worker) for worker in decided[1:] if worker >= 0]
        self._apply(workers) if decided[0] else self._drop(workers[0])

    # --- decisions ---

    def _decide(self) -> None:
        """Do what the rule has decided."""
        if self._failure is not None:
            for worker in list(self._asked):
                self._reply(worker)
        for decision in self._rule.decisions():
            if isinstance(decision, Apply):
                workers = [worker for worker, _, _ in decision.pushes]
                self._tell(1, workers)
                self._apply(workers)
            elif isinstance(decision, Discard):
                self._tell(0, [decision.worker])
                self._drop(decision.worker)
            elif isinstance(decision, Go):
                self._reply(decision.worker)
            elif isinstance(decision, Number):
                self._is_over = decision.number is None
                self._reply(decision.worker, decision.number)

    def _tell(self, applied: int, workers: Sequence[int]) -> None:
        """Tell the other servers which pushes are an update, or are dropped."""
        if not (self._followers and self._synchronous):
            return
        self._short.write(Kind.DECIDED, {Field.RANK: self._comm.rank})
        decided = np.full(self._workers + 1, -1.0)
        decided[0], decided[1 : 1 + len(workers)] = applied, workers
        for server in self._followers:
            self._send(self._short.numbers, server, REQUEST)
            self._send(decided, server, DATA)

    def _apply(self, workers: Sequence[int]) -> None:
        """Make one update of the pushes of some workers, in the order of their ranks."""
        pushes = [(worker, self._waiting.pop(worker)) for worker in sorted(workers)]
        number = max(int(head[Field.NUMBER]) for _, head in pushes)
        if number in self._applied:
            return  # the deciding server has dealt it again after a loss
        if number < 0:
            number = self._updates
        else:
            self._applied.update(int(head[Field.NUMBER]) for _, head in pushes)
        for worker, head in pushes:
            self._fate[worker] = self._updates - self._pulled_at[worker]
            self._staleness[self._fate[worker]] += 1
            self._share += head[Field.SHARE]
        staleness = max(self._fate[worker] for worker, _ in pushes)
        total = sum(head[Field.SAMPLES] for _, head in pushes) or 1.0
        shares = [head[Field.SAMPLES] / total for _, head in pushes]
        parts = [self.shard.views(self._pushed[worker]) for worker, _ in pushes]
        for name, parameters in self._parameters.items():
            gradient = parts[0][name]
            if len(parts) > 1:
                gradient = _mean([part[name] for part in parts], shares)
            slots = tuple([views[name] for views in self._views_of_slots.values()])
            self._update(parameters, slots, gradient, staleness, number)
        self._pushes += len(pushes)
        self._updates += 1

    def _drop(self, worker: int) -> None:
        self._waiting.pop(worker)
        self._fate[worker] = -1
        self._discarded += 1

    def _begin_meeting(self, meeting: int) -> None:
        if meeting != self.meeting:
            self.meeting, self._count, self._share = meeting, None, 0.0
            self._is_over = False
            self._applied.clear()

    # --- replies ---

    def _reply(self, worker: int, number: int | None = -1) -> None:
        """Answer the request of a worker; `number` is dealt to it, None is the end of the loop."""
        kind, slots = self._asked.pop(worker)
        full = kind is Kind.FETCH or (kind is Kind.PULL and self._alone)
        head = self._full if full else self._short
        fields = self._failure or {
            Field.KIND: Kind.DONE,
            Field.NUMBER: -1 if number is None else number,
            Field.STALENESS: self._fate[worker],
            Field.SHARE: self._share,
            Field.MEETING: self.meeting,
        }
        head.write(Kind(int(fields[Field.KIND])), fields, self.lost)
        self._send(self._answer if full else head.numbers, worker, DATA if full else REPLY)
        if full and slots:
            self._send(self._slots, worker, SLOTS)
        if full:
            self._pulled_at[worker] = self._updates

    def _send(self, array: np.ndarray, peer: int, tag: int) -> None:
        try:
            self._comm.send(array, peer, tag)
            self._sent_bytes += array.nbytes
        except rr.PeerLostError as error:
            self._lose(error)

    # --- losses ---

    def _look(self) -> None:
        """Look whether the other ranks live."""
        for rank, error in self._comm.lost_peers(closed=True).items():
            if rank in self._open:
                self._lose(error, rank)
        for rank, error in self._comm.lost_peers().items():
            if rank >= self._workers:
                self._lose(error, rank)
        self._decide()

    def _lose(self, error: Exception, *ranks: int) -> None:
        """Go on without these ranks, or those that the error names."""
        for rank in ranks or getattr(error, "ranks", ()):
            if rank in self.lost or rank == self._comm.rank:
                continue
            self.lost[rank] = error
            self._asked.pop(rank, None)
            if rank in self._open:
                self._open.discard(rank)
                self._rule.leave(rank)
            elif rank >= self._workers:
                self._fail({Field.KIND: Kind.LOST, Field.RANK: rank})

    def _fail(self, fields: Mapping[Field, float]) -> None:
        """Answer all requests by this failure from now on."""
        self._failure = self._failure or dict(fields)


def _mean(parts: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    """Return the mean of gradients with these shares; 16-bit floats are added up in float32."""
    wide = np.promote_types(parts[0].dtype, np.float32)
    total = parts[0].astype(wide) * wide.type(shares[0])
    for part, share in zip(parts[1:], shares[1:], strict=True):
        total += part.astype(wide, copy=False) * wide.type(share)
    mean: np.ndarray = total.astype(parts[0].dtype, copy=False)
    return mean
