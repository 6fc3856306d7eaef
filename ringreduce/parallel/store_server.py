"""One server of a `ParameterStore`: it receives requests, applies pushes and answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.parallel.store_messages import (
    DATA,
    REPLY,
    REQUEST,
    SLOTS,
    HeadKind,
    MessageHead,
    Shard,
    StoreStats,
    flags_of,
    ranks_of,
)
from ringreduce.parallel.store_replica import Chain, ShardReplica, Update, chain_of
from ringreduce.parallel.store_rule import Apply, Discard, Go, Number, Rule, Worker

_LOOK_S = 0.1
"""Seconds between two looks at whether the other ranks live."""


class Server:
    """The replicas on one server, and the requests of the workers.

    The deciding server, the first that lives, runs the `Rule`.  In synchronous steps it tells the
    other servers which pushes are an update; otherwise each push is one.  Servers send each other
    decisions in the order of their ranks, and never wait for each other with anything else.  So of
    the living servers the first knows each decision that another one knows, and can go on when the
    deciding one is lost.
    """

    def __init__(
        self,
        comm: rr.Communicator,
        shards: Sequence[Shard],
        update: Update,
        slots: Sequence[str],
        replicas: int,
        staleness: int | None,
        backup_workers: int,
    ) -> None:
        self._comm, self._servers, self._copies = comm, len(shards), replicas
        self._first = comm.size - len(shards)
        """The first server; smaller ranks are workers."""
        self._server = server = comm.rank - self._first
        self._alone, self._decides = len(shards) == 1, server == 0
        self._synchronous = staleness == 0
        self.replicas: dict[int, ShardReplica] = {}
        """Shard -> the copy on this server."""
        for shard in sorted((server - place) % len(shards) for place in range(replicas)):
            chain = Chain(server, shard, len(shards), replicas)
            self.replicas[shard] = ShardReplica(comm, shards[shard], update, slots, chain)
        self._own = self.replicas[server]
        workers = {rank: Worker() for rank in range(self._first)}
        self._rules = staleness, backup_workers
        self._rule = Rule(workers, *self._rules)
        self._open = set(workers)
        self._heads = shards[0].heads
        self._request, self._short_reply = self._heads.message(), self._heads.message()
        self._asked: dict[int, MessageHead] = {}
        """Worker -> the head of its request, which is not answered."""
        self._beginner = 0
        self._decided = self._step = 0
        """Number of decisions that this server has carried out, and of updates among them."""
        self._decisions: deque[np.ndarray] = deque(maxlen=self._first + 1)
        """The last ones.  All servers have those before: all but one push a worker are settled."""
        self._early: list[tuple[int, MessageHead]] = []
        """Requests that have come to the next deciding server."""
        self._sending: list[rr.Work[Any]] = []
        """Pushes that are on their way to other servers."""
        self.failure: MessageHead | None = None
        """The head of every reply after a shard is lost, or after counts of `steps` differ."""
        self._sent_bytes, self._waited_s, self._looked_at = 0, 0.0, 0.0
        self.lost = set[int]()

    @property
    def meeting(self) -> int:
        return self._own.meeting

    def stats(self) -> StoreStats:
        own, held = self._own, sum(replica.nbytes for replica in self.replicas.values())
        made = own.pushes, own.discarded, dict(own.staleness)
        return StoreStats(*made, self._waited_s, self._sent_bytes, held, tuple(sorted(self.lost)))

    def serve(self) -> None:
        while self._open:
            begin = time.perf_counter()
            try:
                peer = self._comm.probe(REQUEST)  # compiled
            except (rr.PeerLostError, rr.PeerTimeoutError):
                peer = None
            now = time.perf_counter()
            self._waited_s += now - begin
            try:
                if self._sending:
                    self.end_sends()
                if peer is not None:
                    self._comm.recv(self._request, peer, REQUEST)
                    self._handle(peer, self._heads.read(self._request))
                if peer is None or now > self._looked_at + _LOOK_S:
                    self._looked_at = now
                    self._look()
                self._decide()
            except rr.PeerLostError:
                self._look()

    # --- requests ---

    def _handle(self, peer: int, head: MessageHead) -> None:
        kind = head.kind
        if peer in self.lost:
            return
        if kind == HeadKind.PUSH:
            self._receive(peer, head)
        elif kind == HeadKind.CLOSE:
            self._open.discard(peer)
            self._rule.leave(peer)
            self._lose(*ranks_of(head))
        elif kind in (HeadKind.APPLY, HeadKind.DROP):
            if head.push > self._decided:  # else another server has told it
                self._decisions.append(self._request.copy())
                self._carry_out(kind, ranks_of(head))
        elif kind == HeadKind.FETCH:
            self._asked[peer] = head
            self._reply(peer)
        elif kind == HeadKind.HELD:
            self._asked[peer] = head
            if any(rank >= self._first and not head.ranks[rank] for rank in self.lost):
                self._reply(peer, kind=HeadKind.AGAIN)
            else:
                self._acknowledge(peer)
        elif self._copies > 1 and not (self._decides or self.failure):
            self._early.append((peer, head))
        elif kind == HeadKind.PUSHED:
            self._rule.push(peer, head.push)
        elif kind == HeadKind.BREAK:
            self._rule.break_off(peer)
        else:
            self._asked[peer] = head
            if kind == HeadKind.NUMBER:
                self._meet(peer, head.total)
            else:
                self._rule.pull(peer)

    def _receive(self, peer: int, head: MessageHead) -> None:
        """Receive a push from a worker or a server, and outside of synchronous steps apply it."""
        replicas = self._at(0, head) if peer < self._first else [self.replicas[head.shard]]
        for replica in replicas:
            worker = replica.receive(peer)
            if worker is not None:
                self._pass_on(replica, worker)
                if not self._synchronous:
                    replica.apply([worker])
                self._acknowledge(worker)
        if self._alone:
            self._rule.push(peer, self._own.heads[peer].push)

    def _at(self, place: int, head: MessageHead) -> list[ShardReplica]:
        """Return the replicas with this place in their chain, as far as a worker knows."""
        if self._copies == 1:
            return [self._own]
        lost = set(ranks_of(head))
        return [r for n, r in self.replicas.items() if self._chain(n, lost)[place] == self._server]

    def _chain(self, shard: int, lost: set[int]) -> list[int]:
        return chain_of(shard, self._servers, self._copies, {rank - self._first for rank in lost})

    def _pass_on(self, replica: ShardReplica, worker: int) -> None:
        """Send the last push of a worker to the next server, without waiting for that one."""
        successor = replica.chain.successor
        if successor is None:
            return
        head = self._heads.message(MessageHead(HeadKind.PUSH, shard=replica.shard.server))
        try:
            for message, tag in ((head, REQUEST), (replica.pushed[worker], DATA)):
                work = self._comm.send(message, self._first + successor, tag, async_op=True)
                self._sending.append(work)
                self._sent_bytes += message.nbytes
        except rr.PeerLostError:
            self._look()

    def _acknowledge(self, worker: int) -> None:
        """Answer a worker that asks whether the replicas have its last push, if they have it."""
        asked = self._asked.get(worker)
        if asked is None or asked.kind != HeadKind.HELD:
            return
        if all(replica.chain.has(worker, asked.push) for replica in self._at(-1, asked)):
            self._reply(worker)

    def _meet(self, worker: int, count: int) -> None:
        """Deal a number of the loop of `steps`, which may begin."""
        if self.failure:
            return
        ended = self._rule.workers[worker].meetings
        if ended == self.meeting:
            self._own.begin(self.meeting + 1)
            self._beginner = worker
        elif ended == self.meeting - 1 and self._rule.count not in (None, count):
            theirs = MessageHead(HeadKind.DIFFERENT, self._beginner, number=self._rule.count)
            self.failure = theirs._replace(other=worker, total=count)
            return
        self._rule.steps(worker, count)

    # --- decisions ---

    def _decide(self) -> None:
        if self._copies > 1 and not self._decides:
            self._resume()
        for decision in self._rule.decisions() if self._decides else ():
            if isinstance(decision, Apply):
                self._tell(HeadKind.APPLY, [worker for worker, _, _ in decision.pushes])
            elif isinstance(decision, Discard):
                self._tell(HeadKind.DROP, [decision.worker])
            elif isinstance(decision, Go):
                self._reply(decision.worker)
            elif isinstance(decision, Number):
                self._reply(decision.worker, decision.number)
        for worker in list(self._asked) if self.failure else ():
            self._reply(worker)

    def _tell(self, kind: int, workers: list[int]) -> None:
        """Tell the other servers which pushes are an update, or that one is dropped."""
        if self._synchronous and not self._alone:  # else each push is an update
            decision = MessageHead(kind, push=self._decided + 1, ranks=flags_of(workers))
            self._decisions.append(self._heads.message(decision))
            self._tell_others(self._decisions[-1])
        if self._synchronous:
            self._carry_out(kind, workers)

    def _tell_others(self, decision: np.ndarray) -> None:
        """Send a decision to the other servers, in the order of their ranks."""
        for rank in range(self._first, self._comm.size) if self._open else ():
            if rank != self._comm.rank and rank not in self.lost:
                self._send(decision, rank, REQUEST)

    def _carry_out(self, kind: int, workers: list[int]) -> None:
        self._decided, self._step = self._decided + 1, self._step + (kind == HeadKind.APPLY)
        for replica in self.replicas.values():
            if kind == HeadKind.APPLY:
                replica.apply(workers)
            else:
                replica.drop(*workers)

    def _resume(self) -> None:
        """Begin to decide, when each living worker has told by a request what it holds."""
        told = {worker: head for worker, head in reversed(self._early) if worker in self._open}
        is_first = self.lost >= set(range(self._first, self._comm.rank))
        if self.failure or (is_first and told and len(told) == len(self._open)):
            self._decides = True
            if not self.failure:
                self._make_rule(dict(sorted(told.items())))
            early, self._early = self._early, []
            for peer, head in early:
                self._handle(peer, head)

    def _make_rule(self, told: dict[int, MessageHead]) -> None:
        """Make the rule from the first request of each worker to this server.

        The last push of a lost worker may be on some servers alone.  So its number is dealt again.
        """
        own, workers, count, again = self._own, {}, None, []
        own.begin(max(head.meeting for head in told.values()))
        meetings = max(own.meeting - 1, *(head.ended for head in told.values()))
        for worker, head in told.items():
            last, pushes, number = head.push, head.pushes, head.number
            if head.meeting > meetings:
                self._beginner, count = worker, head.total
            is_waiting = worker in own.waiting and own.heads[worker].push == last
            if is_waiting or head.kind == HeadKind.PUSHED:  # the rule does not have it yet
                again.append((worker, last))
                number, last, pushes = own.heads[worker].number, last - 1, pushes - 1
            dealt = None if number < 0 else number
            workers[worker] = Worker(last, pushes, head.step, dealt, head.ended)
        left = {own.heads[worker].number for worker in own.pushed if worker not in told}
        applied = own.applied - left - {state.number for state in workers.values()} - {-1}
        self._rule = Rule(workers, *self._rules, self._step, meetings, count, applied)
        for worker, last in again:
            self._rule.push(worker, last)

    # --- replies ---

    def _reply(self, worker: int, number: int | None = None, kind: int = HeadKind.DONE) -> None:
        """Answer the request of a worker; `number` is the one that is dealt to it."""
        asked = self._asked.pop(worker, None)
        if asked is None:
            return  # it was answered by the failure
        full = asked.kind == HeadKind.FETCH or (asked.kind == HeadKind.PULL and self._alone)
        of_tails = full or asked.kind == HeadKind.HELD
        replicas = self._at(-1, asked) if of_tails else [self._own]
        if not full:
            replicas = [max(replicas, key=lambda replica: replica.fate[worker])]
        lost = flags_of(self.lost) if self.lost else b""
        for replica in replicas:
            head = self.failure or MessageHead(
                kind,
                number=-1 if number is None else number,
                meeting=self._own.meeting,
                staleness=replica.fate[worker],
                total=replica.updates,
                step=self._rule.step,
                share=self._own.share,
            )
            message = replica.answer if full else self._short_reply
            self._heads.write(message, head._replace(ranks=lost) if lost else head)
            self._send(message, worker, DATA if full else REPLY)
            if asked.slots:
                self._send(replica.slots, worker, SLOTS)

    def _send(self, message: np.ndarray, peer: int, tag: int) -> None:
        try:
            self._comm.send(message, peer, tag)
            self._sent_bytes += message.nbytes
        except rr.PeerLostError:
            self._look()

    def end_sends(self) -> None:
        for work in [work for work in self._sending if work.done()]:
            self._sending.remove(work)
            with suppress(rr.PeerLostError):  # `_look` finds that server
                work.wait()

    # --- losses ---

    def _look(self) -> None:
        """Look whether the other ranks live: a server that has closed was not lost."""
        gone = self._open & self._comm.lost_peers(closed=True)
        self._lose(*gone, *(rank for rank in self._comm.lost_peers() if rank >= self._first))

    def _lose(self, *ranks: int) -> None:
        for rank in set(ranks) - self.lost:
            self.lost.add(rank)
            if rank in self._open:
                self._open.discard(rank)
                self._asked.pop(rank, None)
                self._rule.leave(rank)
            elif rank >= self._first:
                self._lose_server(rank)

    def _lose_server(self, rank: int) -> None:
        """Go on without a server; note which shards are lost with it."""
        for shard in range(self._servers):
            if not self._chain(shard, self.lost):
                self.failure = self.failure or MessageHead(HeadKind.LOST, self._first + shard)
        for replica in self.replicas.values():
            for worker in replica.chain.lose(rank - self._first):
                self._pass_on(replica, worker)
        for worker in [w for w, asked in self._asked.items() if asked.kind == HeadKind.HELD]:
            self._reply(worker, kind=HeadKind.AGAIN)
        if self._copies > 1 and self.lost >= set(range(self._first, self._comm.rank)):
            for decision in list(self._decisions):
                self._tell_others(decision)
