"""Messages between the stages of a pipeline: outputs of stages, and the gradients of outputs.

A receive needs the shape and dtype of the array.  The gradient of an output has those of the
output.  Before the first output of a stage with a new number of samples, the sender sends a text
with the shape and dtype.  Both ranks keep them for later steps.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

import ringreduce as rr

Array = Any
Step = Any
"""A step of `rr.pipeline.lower`."""
Key = tuple[int, int, int]
"""Stage, number of samples, and kind of the model's input: they determine the shape of outputs."""
Kinds = dict[Key, tuple[tuple[int, ...], Any]]
"""Key -> shape and dtype of the output."""
_OUTPUT = 0
_KIND_TAG = 2
"""The tag of texts with shapes.  Tags 0 and 1 are the flows."""
_KIND_BYTES = 256
_MOST_SENDS = 2
"""Sends that may be under way before a rank looks whether the oldest is over: a look takes time."""


class OnOneRank:
    """Hands the results of actions to later actions of the same rank."""

    sent_bytes = 0
    """Bytes of the arrays that were sent."""

    def __init__(self, acts: Sequence[rr.pipeline.Action]) -> None:
        self._acts = acts
        self._given: dict[tuple[bool, int, int], Array] = {}
        """Whether forward, stage, microbatch -> input of the action."""

    def receive(self, number: int) -> Array | None:
        """Wait for the input of action `number`; return None if it needs no other stage's."""
        action = self._acts[number]
        return self._given.pop((action.kind == "F", action.stage, action.microbatch), None)

    def send(self, number: int, result: Array | None) -> None:
        """Begin to send the result of action `number`, if another stage needs it."""
        action = self._acts[number]
        if result is not None:
            forward = action.kind == "F"
            stage = action.stage + 1 if forward else action.stage - 1
            self._given[forward, stage, action.microbatch] = result

    def finish(self) -> None:
        """Wait until all results are received."""


class BetweenRanks:
    """The messages of one rank in one pass through its actions.

    Receives are posted `ahead` steps before the step of their action.  Sends are asynchronous, and
    complete while the rank computes.
    """

    def __init__(
        self,
        comm: rr.Communicator,
        steps: Sequence[Step],
        ahead: int,
        key: Callable[[rr.pipeline.Payload], Key],
        kinds: Kinds,
        xp: ModuleType,
    ) -> None:
        """Begin with `steps`, as `rr.pipeline.lower` returns them; `kinds` is kept by the caller.

        `key` returns the key of a payload in `kinds`.
        """
        self.sent_bytes = 0
        self._comm, self._steps, self._ahead, self._xp = comm, steps, ahead, xp
        self._key, self._kinds = key, kinds
        self._lanes = _lanes(steps)
        self._posted: dict[rr.pipeline.Payload, rr.Work[Array]] = {}
        self._sends: deque[rr.Work[None]] = deque()

    def receive(self, number: int) -> Array | None:
        wanted = None
        for recv in self._steps[number].recvs:
            wanted = rr.pipeline.Payload.of(recv.chunks[0])
            if wanted not in self._posted and self._key(wanted) not in self._kinds:
                self._learn(recv.peer, wanted)
        self._post(number + self._ahead)
        return None if wanted is None else self._posted.pop(wanted).wait()

    def send(self, number: int, result: Array | None) -> None:
        for send in self._steps[number + 1].sends:
            payload = rr.pipeline.Payload.of(send.chunks[0])
            assert result is not None
            if payload.flow == _OUTPUT and self._key(payload) not in self._kinds:
                self._teach(send.peer, payload, result)
            self._start(result, send.peer, payload.flow)
            self.sent_bytes += result.nbytes
        while len(self._sends) > _MOST_SENDS and self._sends[0].done():
            self._sends.popleft().wait()

    def finish(self) -> None:
        while self._sends:
            self._sends.popleft().wait()

    def _post(self, last: int) -> None:
        """Post the receives of all steps up to `last` whose shapes are known, in their order."""
        for (peer, flow), lane in self._lanes.items():
            while lane and lane[0][0] <= last and self._key(lane[0][1]) in self._kinds:
                _, payload = lane.popleft()
                out = self._xp.empty(*self._kinds[self._key(payload)])
                self._posted[payload] = self._comm.recv(out, peer, flow, async_op=True)

    def _start(self, array: Array, peer: int, tag: int) -> None:
        self._sends.append(self._comm.send(array, peer, tag, async_op=True))

    def _teach(self, peer: int, payload: rr.pipeline.Payload, result: Array) -> None:
        kind = result.shape, result.dtype
        text = json.dumps([result.dtype.name, *result.shape]).encode()
        self._start(np.frombuffer(text.ljust(_KIND_BYTES), np.uint8), peer, _KIND_TAG)
        self._kinds[self._key(payload)] = kind

    def _learn(self, peer: int, payload: rr.pipeline.Payload) -> None:
        text = self._comm.recv(np.empty(_KIND_BYTES, np.uint8), peer, _KIND_TAG)
        dtype, *shape = json.loads(text.tobytes())
        self._kinds[self._key(payload)] = tuple(shape), np.dtype(dtype)


def _lanes(
    steps: Sequence[Step],
) -> Mapping[tuple[int, int], deque[tuple[int, rr.pipeline.Payload]]]:
    """Return peer and flow -> the numbers of steps and payloads of its receives, in order."""
    lanes: dict[tuple[int, int], deque[tuple[int, rr.pipeline.Payload]]] = {}
    for number, peer, payload in _receives(steps):
        lanes.setdefault((peer, payload.flow), deque()).append((number, payload))
    return lanes


def _receives(steps: Sequence[Step]) -> Iterator[tuple[int, int, rr.pipeline.Payload]]:
    for number, step in enumerate(steps):
        for recv in step.recvs:
            yield number, recv.peer, rr.pipeline.Payload.of(recv.chunks[0])
