"""ParameterStore: servers keep the parameters; workers pull them, compute, and push gradients.

Source: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.

A worker sends its requests to the deciding server, the first that lives.  This server runs the
`Rule`, which says when a pull may be answered and which pushes form an update.  The other servers
follow it.  They cannot see a request too early: the deciding server sends them a decision before it
answers a worker, a send ends when the message is received, and a server finishes a message before
it receives the next.  A push counts once all servers have received their part of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.errors import counted, did_you_mean, shown
from ringreduce.parallel.arrays import check_comm, check_used, plain, whole
from ringreduce.parallel.consensus import check_alike, check_arrays
from ringreduce.parallel.reducer import checked_samples
from ringreduce.parallel.store_messages import (
    DATA,
    REPLY,
    REQUEST,
    SLOTS,
    HeadKind,
    MessageHead,
    Shard,
    StoreStats,
    Views,
    flags_of,
    place,
    ranks_of,
)
from ringreduce.parallel.store_replica import Update, chain_of
from ringreduce.parallel.store_server import Server

Slots = Sequence[str] | Mapping[str, Mapping[str, Any]]
Message = tuple[np.ndarray, int, int]
"""An array that is sent or received, the other rank, and the tag."""


class ParameterStore:
    """Parameters on servers, the last ranks; the other ranks are workers.

    Every rank makes the store.  A server then calls `serve`.  A worker pulls parameters, computes a
    gradient, and pushes it::

        with rr.train.ParameterStore(comm, params, update) as store:
            if store.is_server:
                store.serve()                      # until all workers have closed
            else:
                for number in store.steps(1000):   # each number goes to one worker
                    params = store.pull()
                    store.push(gradients(params, number))

    With ``staleness=0`` the store is synchronous: a step is one update with the mean of the
    workers' gradients, weighted by their samples.  Else each push is an update, and `staleness`
    bounds how many pushes a worker may be ahead of the slowest (Ho et al., "More effective
    distributed ML via a stale synchronous parallel parameter server", NIPS 2013).

    A variable lies whole on one server, the largest first on the server with the fewest numbers; a
    variable that is larger than a server's share is cut evenly over all servers.

    Args:
        comm: the communicator of all ranks.
        params: name -> NumPy array of floats.  The values of rank 0 count.
        update: ``update(parameters, slots, gradient, staleness, number)``, called on servers, once
            for each piece of a variable.  It changes 1-d arrays of one shape in place: the
            parameters, and a tuple with the optimizer's arrays, `slots`.  `staleness` is that of
            the push on this server.  `number` is the number that `steps` dealt, in a synchronous
            step the largest of its gradients; without `steps` the number of updates before.
            With `replicas` above 1 it must not change `gradient`, which other servers get too:
            NumPy raises ValueError, unless `gradient` is the mean of several.
        slots: names of the optimizer's arrays, which are zero at first, or name -> (name of a
            parameter -> array).
        servers: number of servers.
        replicas: number of servers on which each variable lies.
        staleness: the bound; 0: synchronous steps; None: no bound.
        backup_workers: with ``staleness=0``, a step does not wait for this number of workers (Chen
            et al., "Revisiting distributed synchronous SGD", 2016).

    Attributes:
        is_server: whether this rank is a server.
        workers: the number of workers.
        placement: name -> ``((server, start, stop), ...)``: which numbers of the flat variable lie
            on which server; servers are counted from 0.

    Raises:
        MismatchError: ranks have other parameters or arguments.  All ranks raise it.
        ValueError: servers, replicas, staleness or backup_workers do not fit the ranks.
        TypeError: a parameter is no array of floats, or `update` is no function.

    Example:
        >>> def program(comm):
        ...     def update(parameters, slots, gradient, staleness, number):
        ...         parameters -= 0.5 * gradient
        ...     params = {"w": np.zeros(3)}
        ...     with rr.train.ParameterStore(comm, params, update) as store:
        ...         if store.is_server:
        ...             return store.serve()
        ...         store.pull()
        ...         store.push({"w": np.full(3, comm.rank + 1.0)})
        ...         return store.pull()["w"].tolist()
        >>> rr.spawn(program, 3)  # ranks 0 and 1 are workers
        [[-0.75, -0.75, -0.75], [-0.75, -0.75, -0.75], None]
    """

    __module__ = "ringreduce.train"

    def __init__(
        self,
        comm: rr.Communicator,
        params: Mapping[str, Any],
        update: Update,
        *,
        slots: Slots = (),
        servers: int = 1,
        replicas: int = 1,
        staleness: int | None = 0,
        backup_workers: int = 0,
    ) -> None:
        where = "ParameterStore"
        check_comm(where, comm)
        if not callable(update):
            raise TypeError(f"{where}: update is {shown(update)}; pass a function")
        numbers = servers, replicas, staleness, backup_workers
        check_numbers(comm.size, *numbers, where=f"{where}: ")
        params = check_arrays(where, params)
        _check_slots(params, slots)
        options: dict[str, Any] = {"staleness": staleness, "backup_workers": backup_workers}
        options["slots"] = f"{[*slots]}{' with arrays' * isinstance(slots, Mapping)}"
        check_alike(where, comm, params, servers=servers, replicas=replicas, **options)
        self._comm, self._params, self._slots = comm, params, tuple(slots)
        self.workers, self.is_server = comm.size - servers, comm.rank >= comm.size - servers
        self.placement = place({name: array.size for name, array in params.items()}, servers)
        self._shards = [Shard(n, self.placement, params, comm.size) for n in range(servers)]
        self._server: Server | None = None
        self._links: list[_ServerLink] = []
        if self.is_server:
            what = self._shards, update, self._slots, replicas
            self._server = Server(comm, *what, staleness, backup_workers)
        else:
            self._links = [_ServerLink(comm, shard) for shard in self._shards]
            self._pulled = _Whole(params, self.placement, [link.pulled for link in self._links])
        self._fill(slots)
        comm.survive_losses(not self.is_server or replicas > 1)
        self._heads = self._shards[0].heads
        self._request, *self._replies = (self._heads.message() for _ in range(1 + servers))
        self._is_synchronous, self._copies = staleness == 0, replicas
        self._pushes = self._discarded = self._sent_bytes = 0
        self._staleness = Counter[int]()
        self._waited_s = 0.0
        self._lost = set[int]()
        self._firsts: dict[int, list[_ServerLink]] = {}
        self._lasts: dict[int, list[_ServerLink]] = {}
        """Server -> the shards whose pushes it receives, and those that it gives."""
        self._pulls = self._heads.message(MessageHead(HeadKind.PULL))
        self._lose(())
        self._step = self._ended = self._pushes_before = self._count = 0
        """The step of the parameters; how many loops of `steps` have ended, and the pushes before;
        the count of the last loop."""
        self._closed = False
        self._is_settled = True
        """Whether this worker knows that its last push was applied, or dropped."""
        self._turn, self._has_pushed = -1, False
        """The number of the present turn of `steps`, and whether the turn has made its push."""
        self._meeting = 0
        self._left: Exception | None = None
        """The next call raises it: a loop of `steps` was left too early."""
        self.share = self.total = 0.0
        """`share` goes with the next push.  `total` is the sum over the last loop of `steps`.

        :meta private:
        """

    def _fill(self, slots: Slots) -> None:
        """Set the servers' arrays to those of rank 0.  Collective."""
        given = {"": self._params} | (dict(slots) if isinstance(slots, Mapping) else {})
        for slot, arrays in given.items():
            for name, like in self._params.items():
                array = np.ascontiguousarray(arrays[name], like.dtype)
                value = self._comm.broadcast(array, root=0).reshape(-1)
                for replica in self._server.replicas.values() if self._server else ():
                    replica.fill(slot, name, value)

    # --- of all ranks ---

    @property
    def stats(self) -> StoreStats:
        """The `StoreStats` of this rank.  After a pull they have all pushes before it."""
        server = self._server
        if server is not None:
            return server.stats()
        held = sum(link.nbytes for link in self._links) + self._pulled.nbytes
        made = self._pushes, self._discarded, dict(self._staleness)
        lost = tuple(sorted(self._lost))
        return StoreStats(*made, self._waited_s, self._sent_bytes, held, lost)

    @property
    def meeting(self) -> int:
        """Number of loops of `steps` that have begun, as far as this rank knows.

        :meta private:
        """
        return self._meeting if self._server is None else self._server.meeting

    def serve(self) -> None:
        """Serve the workers until all of them have closed, or are lost.

        Raises:
            ValueError: this rank is a worker.
            PeerLostError: another server is lost; the error names its rank and its variables.

        Example:
            >>> def program(comm):
            ...     update = lambda parameters, slots, gradient, staleness, number: None
            ...     with rr.train.ParameterStore(comm, {"w": np.ones(2)}, update) as store:
            ...         return store.serve() if store.is_server else store.pull()["w"].tolist()
            >>> rr.spawn(program, 2)
            [[1.0, 1.0], None]
        """
        if self._server is None:
            raise ValueError(f"serve: rank {self._comm.rank} is a worker; servers call serve")
        self._server.serve()
        failure = self._server.failure
        if failure is not None and failure.kind == HeadKind.LOST:
            raise self._lost_error(failure.rank)

    # --- of workers ---

    def pull(self, slots: bool = False) -> dict[str, np.ndarray]:
        """Return the parameters, when this worker may go on.

        In synchronous steps it waits until the step of this worker's last push has closed.  With a
        bound it waits until this worker has made at most `staleness` pushes more than the slowest.
        The parameters have all pushes of this worker that were not dropped.

        Args:
            slots: add the optimizer's arrays, as ``"velocity/w"``.

        Returns:
            Name -> array of the variable's shape, which the next pull overwrites.

        Raises:
            ValueError: this rank is a server, or the store is closed.
            PeerLostError: a server is lost; the error names its rank and its variables.
            PeerTimeoutError: a server does not answer.

        Example:
            >>> def program(comm):
            ...     update = lambda parameters, slots, gradient, staleness, number: None
            ...     params, slots = {"w": np.ones(2)}, ["velocity"]
            ...     with rr.train.ParameterStore(comm, params, update, slots=slots) as store:
            ...         return store.serve() if store.is_server else sorted(store.pull(slots=True))
            >>> rr.spawn(program, 2)[0]
            ['velocity/w', 'w']
        """
        self._check_worker("pull")
        if len(self._links) > 1:
            self._ask(HeadKind.PULL)
        with rr.span("pull"):
            self._persist(lambda: self._fetch(slots))
        self._settle_by([link.read() for link in self._links])
        found = dict(self._pulled.update())
        for n, slot in enumerate(self._slots if slots else ()):
            views = [link.slots_of(n) for link in self._links]
            arrays = _Whole(self._params, self.placement, views).update()
            found |= {f"{slot}/{name}": array for name, array in arrays.items()}
        return found

    def push(self, gradients: Mapping[str, Any], samples: float = 1) -> None:
        """Send gradients to the servers.  Returns as soon as they are copied.

        One push of a worker is under way at most: the next push waits for its acknowledgement.

        Args:
            gradients: name -> array of the variable's shape and dtype, of all variables.
            samples: the weight of these gradients in the mean of a synchronous step.

        Raises:
            ValueError: an unknown, missing or misshapen variable, which the text names; the store
                goes on.  Or a second push in a turn of `steps`, a server, or a closed store.
            PeerLostError, PeerTimeoutError: as for `pull`.

        Example:
            >>> def program(comm):
            ...     def update(parameters, slots, gradient, staleness, number):
            ...         parameters -= gradient
            ...     params = {"w": np.zeros(1)}
            ...     with rr.train.ParameterStore(comm, params, update, staleness=None) as store:
            ...         if store.is_server:
            ...             return store.serve()
            ...         store.push({"w": np.ones(1)})
            ...         return store.pull()["w"].item()
            >>> rr.spawn(program, 2)
            [-1.0, None]
        """
        self._check_worker("push")
        if self._turn >= 0 and self._has_pushed:
            raise ValueError(f"push: this is the second push in the turn of number {self._turn}")
        weight = checked_samples("push:", samples)
        arrays = self._checked(gradients)
        self._settle()  # the messages are free then
        for link in self._links:
            for name, piece in link.gradients.items():
                piece[...] = arrays[name].reshape(-1)[link.shard.pieces[name]]
        self._pushes += 1
        for link in self._links:
            head = MessageHead(
                HeadKind.PUSH,
                rank=self._comm.rank,
                push=self._pushes,
                number=self._turn,
                meeting=self._meeting,
                total=link.count,
                samples=weight,
                share=self.share,
            )
            self._heads.write(link.pushed, head)
        self._is_settled, self._has_pushed = False, True
        with rr.span("push"):
            heads = self._persist(self._send_push)
        if heads and not self._is_synchronous:
            self._settle_by(heads)
        if len(self._links) > 1:
            self._persist(lambda: self._send_to_decider(HeadKind.PUSHED))

    def steps(self, count: int) -> Iterator[int]:
        """Yield numbers from 0 to `count` - 1, each to one worker, the one that is ready first.

        Each turn of the loop makes one push.  The loop ends on all workers when all numbers are in
        the parameters.  Each is in them exactly once: the number of a lost worker, or of a dropped
        gradient, is dealt again.

        Args:
            count: how many numbers; all workers pass the same.

        Returns:
            An iterator of numbers.  Let the loop end by itself.

        Raises:
            ValueError: `count` is negative, or a turn made no push.  The number is dealt again.
                After a loop that was left by ``break``, the next call of the store raises it.
            MismatchError: workers pass different counts.  All of them raise it.
            PeerLostError, PeerTimeoutError: as for `pull`.

        Example:
            >>> def program(comm):
            ...     def update(parameters, slots, gradient, staleness, number):
            ...         parameters += gradient
            ...     params = {"w": np.zeros(())}
            ...     with rr.train.ParameterStore(comm, params, update, staleness=None) as store:
            ...         if store.is_server:
            ...             return store.serve()
            ...         for number in store.steps(10):
            ...             store.push({"w": np.asarray(float(number))})
            ...         return store.pull()["w"].item()
            >>> rr.spawn(program, 3)
            [45.0, 45.0, None]
        """
        self._check_worker("steps")
        return self._turns(whole("steps: count", count, least=0))

    def close(self) -> None:
        """Wait until the last push is acknowledged, and take part no more.

        The end of the ``with`` block calls it.  On servers it does nothing.

        Raises:
            ValueError: a loop of `steps` was left by ``break``.
            PeerLostError, PeerTimeoutError: as for `pull`.

        Example:
            >>> def program(comm):
            ...     update = lambda parameters, slots, gradient, staleness, number: None
            ...     store = rr.train.ParameterStore(comm, {"w": np.ones(1)}, update)
            ...     store.serve() if store.is_server else store.close()
            >>> rr.spawn(program, 2)
            [None, None]
        """
        if self._closed or self.is_server:
            return
        try:
            self._check_worker("close")
            self._settle()
        finally:
            self._close()

    def __enter__(self) -> ParameterStore:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            if isinstance(error, rr.RingReduceError):
                self._comm.survive_losses(False)
            elif self._server is not None:  # lost to the others, also where the program goes on
                self._comm.leave(f"{type(error).__name__}: {error}")
                self._server.end_sends()
            self._close()

    # --- implementation ---

    def _turns(self, count: int) -> Iterator[int]:
        while True:
            self._check_worker("steps")
            if self._turn >= 0:
                raise ValueError(f"steps: the turn of number {self._turn} has not ended")
            self._count = count
            reply = self._ask(HeadKind.NUMBER)
            number, self._meeting, self.total = reply.number, reply.meeting, reply.share
            if number < 0:
                self._ended, self._pushes_before = self._ended + 1, self._pushes
                return
            self._turn, self._has_pushed = number, False
            try:
                yield number
            except GeneratorExit:
                self._left = ValueError(f"steps: the loop was left in the turn of number {number}")
                self._break()
                raise
            finally:
                self._turn = -1
            if not self._has_pushed:
                self._break()
                raise ValueError(f"steps: the turn of number {number} made no push; wanted one")

    def _check_worker(self, where: str) -> None:
        if self.is_server:
            raise ValueError(f"{where}: rank {self._comm.rank} is a server; servers call serve")
        if self._closed:
            raise ValueError(f"{where}: the store is closed")
        if self._left is not None:
            error, self._left = self._left, None
            raise error

    def _checked(self, gradients: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return gradients as arrays.  Raises ValueError, which names a variable."""
        for name in gradients:
            if name not in self._params:
                meant = did_you_mean(str(name), self._params)
                raise ValueError(f"push: there is no variable {name!r}{meant}")
        arrays = {}
        for name, like in self._params.items():
            if name not in gradients:
                raise ValueError(f"push: the gradient of {name!r} is missing")
            array = gradients[name]
            if type(array) is not np.ndarray:
                check_used("push", name, array, like)
                array = plain("push", f"the gradient of {name!r}", array)
            if (array.shape, array.dtype) != (like.shape, like.dtype):
                raise ValueError(
                    f"push: the gradient of {name!r} is {array.dtype}{list(array.shape)}; wanted "
                    f"{like.dtype}{list(like.shape)}"
                )
            arrays[name] = array
        return arrays

    def _settle(self) -> None:
        """Wait until the last push is applied, or dropped."""
        if not self._is_settled:
            if self._is_synchronous:
                self._ask(HeadKind.SETTLE)
            self._settle_by(self._persist(self._ask_tails))

    def _settle_by(self, heads: Sequence[MessageHead]) -> None:
        """Count the last push, with the staleness in the heads of replies."""
        for head in heads:
            self._check(head)
        if not self._is_settled and heads[0].staleness < 0:
            self._discarded += 1
        elif not self._is_settled:
            self._staleness[max([head.staleness for head in heads])] += 1
        self._is_settled = True

    def _check(self, head: MessageHead) -> None:
        """Raise the error in a reply; note the ranks that are lost."""
        if head.kind == HeadKind.LOST:
            raise self._lost_error(head.rank)
        if head.kind == HeadKind.DIFFERENT:
            raise rr.MismatchError(
                f"steps: rank {head.other} passes {head.total} where rank {head.rank} passes "
                f"{head.number}; every worker must pass the same count"
            )
        if 1 in head.ranks:
            self._lose(ranks_of(head))

    # --- messages ---

    def _ask(self, kind: int) -> MessageHead:
        """Send a request to the deciding server; return the head of its reply."""

        def ask() -> MessageHead:
            self._send_to_decider(kind)
            self._comm.recv(self._replies[0], self._decider, REPLY)
            return self._heads.read(self._replies[0])

        head: MessageHead = self._persist(ask)
        self._check(head)
        self._step = head.step
        return head

    def _send_to_decider(self, kind: int) -> None:
        """Send a request, with the state of this worker for a new deciding server."""
        head = MessageHead(
            kind,
            push=self._pushes,
            number=-1 if self._has_pushed else self._turn,
            meeting=self._meeting,
            total=self._count,
            step=self._step,
            ended=self._ended,
            pushes=self._pushes - self._pushes_before,
        )
        self._request_of(self._decider, head)

    def _request_of(self, rank: int, head: MessageHead) -> None:
        self._heads.write(self._request, head)
        self._send(self._request, rank, REQUEST)

    def _send_push(self) -> list[MessageHead]:
        """Send the last push to the heads; with replicas wait until the tails have it."""
        if len(self._links) == 1:  # these calls have compiled entries
            self._send(self._announces, self.workers, REQUEST)
            self._send(self._links[0].pushed, self.workers, DATA)
            return []
        sends = []
        for rank, links in self._firsts.items():
            sends.append((self._announces, rank, REQUEST))
            sends += [(link.pushed, rank, DATA) for link in links]
        if self._copies > 1:
            return self._ask_tails(sends)
        for message in sends:  # in turn, so that workers send to different servers at a time
            self._send(*message)
        return []

    def _ask_tails(self, sends: Sequence[Message] = ()) -> list[MessageHead]:
        """Wait until all replicas have the last push; return the heads of the replies."""
        head = MessageHead(HeadKind.HELD, push=self._pushes, ranks=flags_of(self._lost))
        self._heads.write(self._request, head)
        replies = dict(zip(self._lasts, self._replies, strict=False))
        asks = [(self._request, rank, REQUEST) for rank in replies]
        self._together([(reply, rank, REPLY) for rank, reply in replies.items()], [*sends, *asks])
        heads = [self._heads.read(reply) for reply in replies.values()]
        for head in heads:
            if head.kind == HeadKind.AGAIN:
                raise rr.PeerLostError("", tuple(ranks_of(head)))
        return heads

    def _fetch(self, slots: bool) -> None:
        only = len(self._links) == 1  # then one request is enough
        if only and not slots:  # these calls have compiled entries
            self._send(self._pulls, self.workers, REQUEST)
            self._comm.recv(self._links[0].answer, self.workers, DATA)
            return
        kind = HeadKind.PULL if only else HeadKind.FETCH
        for rank, links in self._lasts.items():
            self._request_of(rank, MessageHead(kind, slots=slots, ranks=flags_of(self._lost)))
            for link in links:
                self._comm.recv(link.answer, rank, DATA)
                if slots:
                    self._comm.recv(link.slots_for(self._slots), rank, SLOTS)

    def _together(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Receive and send; wait until all is over, also where servers are lost."""
        works, errors = [], []
        for number, (array, rank, tag) in enumerate([*receives, *sends]):
            call = self._comm.recv if number < len(receives) else self._comm.send
            try:
                works.append(call(array, rank, tag, async_op=True))
            except rr.PeerLostError as error:
                errors.append(error)
        # Sends first: a server that receives nothing has stopped; one that sends nothing may wait.
        for work in reversed(works):
            try:
                work.wait()
            except rr.PeerLostError as error:
                errors.append(error)
        self._sent_bytes += sum(message.nbytes for message, _, _ in sends)
        if errors:
            errors[0].ranks = tuple(rank for error in errors for rank in error.ranks)
            raise errors[0]

    def _send(self, message: np.ndarray, rank: int, tag: int) -> None:
        self._sent_bytes += message.nbytes
        self._comm.send(message, rank, tag)

    def _break(self) -> None:
        """Give the number of the present turn back."""
        if not self._closed:
            with suppress(rr.RingReduceError):
                self._send_to_decider(HeadKind.BREAK)

    def _close(self) -> None:
        """Tell the servers that this worker takes part no more."""
        for rank in () if self._closed or self.is_server else range(self.workers, self._comm.size):
            with suppress(rr.RingReduceError):
                self._request_of(rank, MessageHead(HeadKind.CLOSE, ranks=flags_of(self._lost)))
        self._closed = True

    # --- losses ---

    def _persist(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns; make it again when a server is lost that others replace."""
        begin = time.perf_counter()
        try:
            while True:
                try:
                    return make()
                except rr.PeerLostError as error:
                    if not error.ranks:
                        raise  # this rank has left the communicator
                    self._lose(error.ranks)
        finally:
            self._waited_s += time.perf_counter() - begin

    def _lose(self, ranks: Sequence[int]) -> None:
        """Find the deciding server, and heads and tails; PeerLostError if no server has a shard."""
        self._lost.update(ranks)
        count, lost = len(self._shards), {rank - self.workers for rank in self._lost}
        chains = [chain_of(shard, count, self._copies, lost) for shard in range(count)]
        if [] in chains:
            raise self._lost_error(self.workers + chains.index([]))
        self._decider = self.workers + min(set(range(count)) - lost)
        self._announces = self._heads.message(
            MessageHead(HeadKind.PUSH, ranks=flags_of(self._lost))
        )
        self._firsts, self._lasts = {}, {}
        first = self._comm.rank % count  # workers begin with different servers
        for server in [*range(first, count), *range(first)]:
            for end, found in (0, self._firsts), (-1, self._lasts):
                links = [link for n, link in enumerate(self._links) if chains[n][end] == server]
                found |= {self.workers + server: links} if links else {}

    def _lost_error(self, rank: int) -> rr.PeerLostError:
        names = ", ".join(map(repr, self._shards[rank - self.workers].pieces)) or "no variable"
        self._lost.add(rank)
        text = f"rank {rank}, a server, is lost, and with it its part of {names}"
        return rr.PeerLostError(text, (rank,))


class _ServerLink:
    """A worker's messages with the gradients and the parameters of one shard."""

    def __init__(self, comm: rr.Communicator, shard: Shard) -> None:
        self.shard = shard
        self.pushed, self.answer = (comm.empty((shard.nbytes,), np.uint8) for _ in range(2))
        self.gradients, self.pulled = shard.views(self.pushed), shard.views(self.answer)
        self.count = 0
        """How many updates the parameters had that were received last."""
        self._slots = np.empty((0, 0), np.uint8)

    def read(self) -> MessageHead:
        head = self.shard.heads.read(self.answer)
        self.count = head.total
        return head

    @property
    def nbytes(self) -> int:
        return self.pushed.nbytes + self.answer.nbytes + self._slots.nbytes

    def slots_for(self, slots: Sequence[str]) -> np.ndarray:
        """Return the message in which to receive the slots."""
        self._slots = np.empty((len(slots), self.shard.nbytes), np.uint8)
        return self._slots

    def slots_of(self, number: int) -> Views:
        return self.shard.views(self._slots[number])


class _Whole:
    """Variables, put together from their pieces on the servers."""

    def __init__(
        self, like: Mapping[str, Any], placement: Mapping[str, Any], pieces: Sequence[Views]
    ) -> None:
        self._arrays = {}
        self._copies = []
        self.nbytes = 0
        """Bytes of the arrays that are not in a server's message."""
        for name, places in placement.items():
            shape, dtype = like[name].shape, like[name].dtype
            if len(places) == 1:
                self._arrays[name] = pieces[places[0][0]][name].reshape(shape)
                continue
            flat = np.empty(like[name].size, dtype)
            self._arrays[name] = flat.reshape(shape)
            self.nbytes += flat.nbytes
            self._copies += [(flat[start:stop], pieces[s][name]) for s, start, stop in places]

    def update(self) -> dict[str, np.ndarray]:
        """Return the arrays, with the numbers of the last messages."""
        for into, piece in self._copies:
            into[...] = piece
        return self._arrays


def check_numbers(
    ranks: int,
    servers: int,
    replicas: int,
    staleness: int | None,
    backup_workers: int,
    where: str = "",
) -> None:
    """Raise TypeError or ValueError if these numbers do not fit; its text begins with `where`."""
    servers = whole(f"{where}servers", servers, least=1)
    if servers >= ranks:
        raise ValueError(
            f"{where}servers is {servers}; of {counted(ranks, 'rank')} that leaves no worker: pass "
            "fewer servers, or start more ranks"
        )
    if whole(f"{where}replicas", replicas, least=1) > servers:
        raise ValueError(f"{where}replicas is {replicas}; wanted at most servers, {servers}")
    if isinstance(staleness, float):
        raise ValueError(f"{where}staleness is {staleness}; wanted a whole number or None")
    if staleness is not None:
        whole(f"{where}staleness", staleness, least=0)
    if whole(f"{where}backup_workers", backup_workers, least=0) == 0:
        return
    if staleness != 0:
        raise ValueError(
            f"{where}backup_workers is {backup_workers} and staleness is {staleness}; backup "
            "workers are for staleness 0"
        )
    if backup_workers >= ranks - servers:
        raise ValueError(
            f"{where}backup_workers is {backup_workers}; wanted fewer than workers, "
            f"{ranks - servers}"
        )


def _check_slots(params: Mapping[str, Any], slots: Slots) -> None:
    """Raise ValueError if the arrays of slots do not fit the parameters."""
    for slot, arrays in slots.items() if isinstance(slots, Mapping) else ():
        for name, like in params.items():
            if getattr(arrays.get(name), "shape", None) != like.shape:
                wanted = f"pass an array of shape {like.shape}"
                raise ValueError(f"ParameterStore: slots has no {slot}/{name}; {wanted}")
