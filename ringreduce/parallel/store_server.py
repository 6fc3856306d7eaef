"""One server of a `ParameterStore`: receives requests, applies pushes, answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.parallel.store_messages import (
    DATA,
    REPLY,
    REQUEST,
    SLOTS,
    Kind,
    Shard,
    StoreStats,
    Views,
    write,
)
from ringreduce.parallel.store_rule import Apply, Discard, Go, Number, Rule, Worker

Update = Callable[[np.ndarray, tuple[np.ndarray, ...], np.ndarray, int, int], None]


class Server:
    """A server's shard of the variables, and the pushes that it has received.

    The deciding server, the first, runs the `Rule`.  In synchronous steps it tells the other
    servers which pushes are an update; otherwise each push is one.
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
        self._first = comm.size - servers
        """The deciding server; smaller ranks are workers."""
        self._alone, self._decides = servers == 1, shard.server == 0
        self._synchronous = staleness == 0
        workers = {rank: Worker() for rank in range(self._first)}
        self._rule = Rule(workers, staleness, backup_workers)
        self._open = set(workers)
        self._answer = comm.empty((shard.nbytes,), np.uint8)
        """The reply with parameters, which lie in it."""
        self._slots = comm.empty((len(slots), shard.nbytes), np.uint8)
        self._slots[...] = 0
        self._parameters = shard.views(self._answer)
        self._slot_views = dict(zip(slots, map(shard.views, self._slots), strict=True))
        self._head_of_answer = shard.head_in(self._answer)
        self._request, self._reply_head = (np.zeros(1, shard.head) for _ in range(2))
        self._pushed: dict[int, np.ndarray] = {}
        """Worker -> the message with its gradients."""
        self._waiting: dict[int, np.ndarray] = {}
        """Worker -> the head of its last push, which is neither applied nor dropped."""
        self._asked: dict[int, np.ndarray] = {}
        """Worker -> the head of its request, which is not answered."""
        self._fate = Counter[int]()
        """Worker -> staleness of its last push here; -1: it was dropped."""
        self._updates = 0
        self._pulled_at = Counter[int]()
        """Worker -> number of updates at its last pull."""
        self.meeting, self._beginner = 0, 0
        """How many loops of `steps` have begun, and which worker began the last."""
        self._applied = set[int]()
        """The numbers of this loop that were applied."""
        self._share = 0.0
        """The sum of `share` over the pushes that were applied in this loop."""
        self._failure: dict[str, Any] = {}
        """What every reply says once a server is lost, or counts of `steps` differ."""
        self._pushes = self._discarded = self._sent_bytes = 0
        self._staleness = Counter[int]()
        self._waited_s = 0.0
        self.lost = set[int]()

    def set(self, slot: str, name: str, flat: np.ndarray) -> None:
        """Set the piece of a variable, or of one of its slots, from the flat variable."""
        views: Views = self._slot_views[slot] if slot else self._parameters
        if name in views:
            views[name][...] = flat[self.shard.pieces[name]]

    def stats(self) -> StoreStats:
        held = sum(each.nbytes for each in (self._answer, self._slots, *self._pushed.values()))
        made = self._pushes, self._discarded, dict(self._staleness)
        return StoreStats(*made, self._waited_s, self._sent_bytes, held, tuple(sorted(self.lost)))

    def serve(self) -> None:
        """Serve until all workers have closed, or are lost."""
        while self._open:
            begin = time.perf_counter()
            try:
                peer = self._comm.probe(REQUEST)  # compiled
            except (rr.PeerLostError, rr.PeerTimeoutError):
                peer = None
            self._waited_s += time.perf_counter() - begin
            try:
                if peer is None:
                    self._look()
                else:
                    self._comm.recv(self._request.view(np.uint8), peer, REQUEST)
                    self._handle(peer, self._request[0])
                self._decide()
            except rr.PeerLostError as error:
                self._lose(*error.ranks)
        self._look()

    # --- requests ---

    def _handle(self, peer: int, head: Any) -> None:
        kind = Kind(head["kind"])
        if peer in self.lost:
            return
        if kind is Kind.PUSH:
            self._receive(peer, head)
        elif kind is Kind.PUSHED:
            self._rule.push(peer, int(head["push"]))
        elif kind is Kind.BREAK:
            self._rule.break_off(peer)
        elif kind is Kind.CLOSE:
            self._open.discard(peer)
            self._rule.leave(peer)
        elif kind is Kind.APPLY:
            self._apply(np.flatnonzero(head["ranks"]).tolist())
        elif kind is Kind.DROP:
            self._drop(int(head["rank"]))
        else:
            self._asked[peer] = head.copy()
            if kind is Kind.NUMBER:
                self._meet(peer, int(head["count"]))
            elif self._decides and (
                kind is Kind.PULL or (self._synchronous and kind is Kind.SETTLE)
            ):
                self._rule.pull(peer)
            else:
                self._reply(peer)

    def _receive(self, worker: int, head: Any) -> None:
        """Receive a push; outside of synchronous steps apply it, unless this server decides."""
        self._waiting[worker] = head.copy()
        if worker not in self._pushed:
            self._pushed[worker] = self._comm.empty((self.shard.nbytes,), np.uint8)
        self._comm.recv(self._pushed[worker], worker, DATA)
        if self._alone:
            self._rule.push(worker, int(head["push"]))
        elif not self._decides:
            self._begin(int(head["meeting"]))
            is_over = head["meeting"] < self.meeting and head["number"] >= 0  # of a lost worker
            if not (self._synchronous or is_over):
                self._apply([worker])

    def _meet(self, worker: int, count: int) -> None:
        """Deal a number of the loop of `steps`, which may begin."""
        if self._failure:
            return
        ended = self._rule.workers[worker].meetings
        if ended == self.meeting:
            self._begin(self.meeting + 1)
            self._beginner = worker
        elif ended == self.meeting - 1 and self._rule.count not in (None, count):
            differ = {"rank": self._beginner, "number": self._rule.count}
            self._failure = {"kind": Kind.DIFFERENT, **differ, "other": worker, "count": count}
            return
        self._rule.steps(worker, count)

    def _begin(self, meeting: int) -> None:
        """Begin to count the numbers of a loop of `steps`, if it is a new one."""
        if meeting > self.meeting:
            self.meeting, self._share = meeting, 0.0
            self._applied.clear()

    # --- decisions ---

    def _decide(self) -> None:
        """Do what the rule has decided."""
        for decision in self._rule.decisions() if self._decides else ():
            if isinstance(decision, Apply):
                workers = [worker for worker, _, _ in decision.pushes]
                self._tell(Kind.APPLY, workers)
                self._apply(workers)
            elif isinstance(decision, Discard):
                self._tell(Kind.DROP, [decision.worker])
                self._drop(decision.worker)
            elif isinstance(decision, Go):
                self._reply(decision.worker)
            elif isinstance(decision, Number):
                self._reply(decision.worker, decision.number)
        for worker in list(self._asked) if self._failure else ():
            self._reply(worker)

    def _tell(self, kind: Kind, workers: list[int]) -> None:
        """Tell the other servers which pushes are an update, or that one is dropped."""
        tells = self._synchronous and self._open  # else servers may have closed
        for server in range(self._first + 1, self._comm.size) if tells else ():
            write(self._reply_head, kind=kind, rank=workers[0])
            self._reply_head["ranks"][0, workers] = True
            self._send(self._reply_head.view(np.uint8), server, REQUEST)

    def _apply(self, workers: Sequence[int]) -> None:
        """Make one update of the pushes of some workers, in the order of their ranks."""
        heads = {worker: self._waiting.pop(worker) for worker in sorted(workers)}
        numbers = {int(head["number"]) for head in heads.values()}
        if numbers & self._applied:
            return  # the number of a lost worker that was dealt again
        self._applied |= numbers - {-1}
        for worker, head in heads.items():
            self._fate[worker] = self._updates - self._pulled_at[worker]
            self._staleness[self._fate[worker]] += 1
            self._share += float(head["share"])
        self._pushes += len(heads)
        staleness = max(self._fate[worker] for worker in heads)
        number = max(numbers - {-1}, default=self._updates)
        weights = [float(head["samples"]) for head in heads.values()]
        parts = [self.shard.views(self._pushed[w]) for w in heads]
        with rr.span("update"):
            for name, parameters in self._parameters.items():
                gradient = _mean([part[name] for part in parts], weights)
                slots = tuple([views[name] for views in self._slot_views.values()])
                self._update(parameters, slots, gradient, staleness, number)
        self._updates += 1

    def _drop(self, worker: int) -> None:
        self._waiting.pop(worker)
        self._fate[worker] = -1
        self._discarded += 1

    # --- replies ---

    def _reply(self, worker: int, number: int | None = None) -> None:
        """Answer the request of a worker; `number` is the one that is dealt to it."""
        asked = self._asked.pop(worker, None)
        if asked is None:
            return  # it was answered by the failure
        full = asked["kind"] == Kind.FETCH or (asked["kind"] == Kind.PULL and self._alone)
        head = self._head_of_answer if full else self._reply_head
        dealt = {"number": -1 if number is None else number, "meeting": self.meeting}
        facts = {"kind": Kind.DONE, **dealt, "share": self._share, "staleness": self._fate[worker]}
        write(head, **(self._failure or facts))
        head["ranks"][0, list(self.lost)] = True
        if full:
            self._pulled_at[worker] = self._updates
        self._send(self._answer if full else head.view(np.uint8), worker, DATA if full else REPLY)
        if asked["slots"]:
            self._send(self._slots, worker, SLOTS)

    def _send(self, message: np.ndarray, peer: int, tag: int) -> None:
        try:
            self._comm.send(message, peer, tag)
            self._sent_bytes += message.nbytes
        except rr.PeerLostError as error:
            self._lose(*error.ranks)

    # --- losses ---

    def _look(self) -> None:
        """Look whether the other ranks live: a server that has closed was not lost."""
        gone = self._open & self._comm.lost_peers(closed=True)
        self._lose(*gone, *(rank for rank in self._comm.lost_peers() if rank >= self._first))

    def _lose(self, *ranks: int) -> None:
        """Go on without these ranks."""
        for rank in set(ranks) - self.lost:
            if rank in self._open:
                self._open.discard(rank)
                self._asked.pop(rank, None)
                self._rule.leave(rank)
            elif rank >= self._first:
                self._failure = {"kind": Kind.LOST, "rank": rank}
            self.lost.add(rank)


def _mean(parts: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return the weighted mean of gradients; 16-bit floats are added up in float32."""
    if len(parts) == 1:
        return parts[0]
    wide = np.promote_types(parts[0].dtype, np.float32)
    all_weights, mean = sum(weights) or 1.0, np.zeros(len(parts[0]), wide)
    for part, weight in zip(parts, weights, strict=True):
        mean += part.astype(wide, copy=False) * wide.type(weight / all_weights)
    rounded: np.ndarray = mean.astype(parts[0].dtype, copy=False)
    return rounded
