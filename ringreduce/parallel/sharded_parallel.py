"""ShardedParallel: each rank keeps a shard of the optimizer's arrays, gradients and parameters.

A ring all-reduce is a reduce-scatter and an all-gather.  Between the two, each rank has the sums of
its shard of the gradients.  Here each rank updates its shard of the parameters between the two, and
the second half gathers parameters in the place of gradients.  So a rank needs the optimizer's
arrays for its shard alone; the messages are those of the all-reduce, and so are the bits.
`CentralParallel` gathers nothing: the ranks of a node share the parameters.

Source: Rajbhandari, Rasley, Ruwase & He, "ZeRO: memory optimizations toward training trillion
parameter models", SC 2020.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain, groupby
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.errors import shown
from ringreduce.parallel.arrays import module_of
from ringreduce.parallel.buckets import CENTRAL, STAGES, Bucket, Update, cut
from ringreduce.parallel.consensus import together
from ringreduce.parallel.over_ranks import on_host
from ringreduce.parallel.reducer import Reducer, StepTimes, agree

_HALVES = {"auto": "auto", "ring": "ring", "two_shot": "direct"}
"""All-reduce -> the reduce-scatter and all-gather that form the same bits."""
_UNCUT = 1 << 62
"""Bytes of a bucket that no layer exceeds."""


class ShardedParallel(Reducer):
    """One rank's part of a data-parallel model whose state is divided among the ranks (ZeRO).

    Stage 1 divides the optimizer's arrays, stage 2 the gradients too, stage 3 the parameters too.
    Every rank makes a ShardedParallel with the same parameters.  All ranks get those of rank 0.
    Then, in every step, on every rank::

        for layer in sharded.forward():        # from the first layer to the last
            x = forward(layer, x)              # layer: name -> whole parameter
        for layer in sharded.backward():       # from the last layer to the first
            for name, gradient in backward(layer):
                sharded.ready(name, gradient)
        sharded.finish()
        sharded.step(update)

    In stages 1 and 2 every rank has all parameters, and the two loops are not needed.  In stage 3
    they gather the parameters of the next layer while this rank computes the present one, and drop
    them afterwards.  The parameters of a layer are consecutive ones whose names are the same up to
    the last dot: ``"0.weight"``, ``"0.bias"``.

    Let P be the bytes of the parameters, N the ranks, K the optimizer's arrays, S = P / N a shard,
    and W the longest bucket (in stage 3: the longest layer).  Each bucket's numbers are rounded up
    to a multiple of N, in S and W.  A rank then holds, and sends, in messages of an all-reduce:

    ================  ==========================  ========
    stage             bytes held                  messages
    ================  ==========================  ========
    `DataParallel`    (2 + K) P                   1
    1                 P + N S + (1 + K) S         1
    2                 P + (1 + K) S + 2 W         1
    3                 (2 + K) S + 4 W             1.5
    ================  ==========================  ========

    2 W are the gradients of a bucket that is filled and of one that is reduced, 2 W more a layer in
    use and one on its way.  One bucket needs W, not 2 W; one layer 2 W, two layers 3 W.
    Gradients that are reported in another order than from the last to the first, or inside
    `no_sync`, need more.

    With the algorithm ``"ring"`` or ``"two_shot"``, parameters are bitwise those of `DataParallel`
    with the same algorithm and buckets, if `update` computes each number by itself.  In stage 3
    the buckets are the layers.

    `weigh`, `no_sync` and `join` are those of `DataParallel`.  In stage 3 all ranks make the same
    loops.  A rank that `join` gives None calls `finish` alone, which makes the loops; inside
    `no_sync` it makes the loops that the others make.

    Args:
        comm: the communicator of the ranks.
        params: name -> C-contiguous array of floats, in the order in which a forward pass uses
            them.  Stages 1 and 2 update these arrays.  Stage 3 copies its shards from them, and
            does not refer to them afterwards: drop them.
        stage: 1, 2 or 3.
        slots: names of the optimizer's arrays.  Each has the shape of the parameters, and is zero
            at first.
        first_bucket_bytes, bucket_bytes: as for `DataParallel`, in stages 1 and 2.
        op: as for `DataParallel`.
        algorithm: ``"ring"`` or ``"two_shot"``, of which the two halves are used; ``"auto"`` lets
            each half choose.

    Attributes:
        times: the `StepTimes` of the last step.

    Raises:
        MismatchError: parameters differ; all ranks raise it, and it names a parameter.
        ValueError: another stage, op or algorithm; a size below 1; or a parameter that is not
            C-contiguous.
        TypeError: a parameter is no array of floats.

    Example:
        >>> def program(comm):
        ...     params = {"w": np.full(4, comm.rank + 1.0)}  # all ranks get rank 0's
        ...     sharded = rr.train.ShardedParallel(comm, params, stage=2)
        ...     def update(parameters, slots, gradient):
        ...         parameters -= 0.1 * gradient
        ...     sharded.ready("w", np.arange(4.0) * comm.rank)
        ...     sharded.finish()
        ...     sharded.step(update)
        ...     return params["w"]
        >>> rr.spawn(program, 2)[1]
        array([1.  , 0.95, 0.9 , 0.85])
    """

    __module__ = "ringreduce.train"
    _settings = STAGES
    """Stage -> setting of the buckets."""

    def __init__(
        self,
        comm: rr.Communicator,
        params: Mapping[str, Any],
        *,
        stage: int,
        slots: Sequence[str] = (),
        first_bucket_bytes: int = 1 << 20,
        bucket_bytes: int = 25 << 20,
        op: str = "mean",
        algorithm: str = "auto",
    ) -> None:
        if stage not in self._settings:
            raise ValueError(f"ShardedParallel: stage is {shown(stage)}; wanted 1, 2 or 3")
        where = type(self).__name__
        if algorithm not in _HALVES:
            wanted = ", ".join(map(repr, _HALVES))
            raise ValueError(f"{where}: algorithm is {shown(algorithm)}; wanted one of {wanted}")
        sizes = {"first_bucket_bytes": first_bucket_bytes, "bucket_bytes": bucket_bytes}
        params = self._placed(comm, agree(where, comm, params, op, **sizes))
        for name, array in params.items():
            if not array.flags.c_contiguous:
                raise ValueError(f"{where}: {name!r} is not C-contiguous")
        layers = _layers(params)
        if stage == 3:
            backwards = [[(name, params[name]) for name in layer[::-1]] for layer in layers[::-1]]
            members = [each for layer in backwards for each in cut(layer, _UNCUT, _UNCUT)]
        else:
            members = cut(list(params.items())[::-1], first_bucket_bytes, bucket_bytes)
        how = {"algorithm": _HALVES[algorithm]}
        super().__init__(comm, members, self._settings[stage], op, how, slots)
        self._layers, self._slots = layers, tuple(slots)
        self._is_reduced = False
        """Whether `finish` has reduced gradients that `step` has not used."""

    @property
    def held_bytes(self) -> int:
        """The bytes that this rank holds now: parameters, gradients, the optimizer's arrays.

        Buffers for gathers and reductions are counted.  They are made in the first step, and kept.
        """
        workspaces = {id(bucket.workspace): bucket.workspace for bucket in self._buckets}
        kept = sum(bucket.nbytes for bucket in self._buckets)
        return kept + sum(workspace.nbytes for workspace in workspaces.values())

    # --- the parameters of a layer ---

    def forward(self) -> Iterator[dict[str, Any]]:
        """Yield the parameters of each layer, from the first to the last.

        In stage 3 the next layer is gathered while the caller computes.  All ranks must make the
        loop.  The arrays are dropped with the end of a turn; do not write to them.  A layer without
        parameters, such as an activation, has no turn, neither here nor in `backward`: compute it
        in the turn of a layer beside it.

        Returns:
            An iterator of dicts, name -> array.

        Raises:
            MismatchError: ranks have made different loops, or not reported the same gradients.

        Example:
            >>> def program(comm):
            ...     params = {"0.weight": np.ones(3), "2.weight": np.ones(2), "2.bias": np.zeros(2)}
            ...     sharded = rr.train.ShardedParallel(comm, params, stage=3)  # 1 is an activation
            ...     return [sorted(layer) for layer in sharded.forward()]
            >>> rr.spawn(program, 2)[0]
            [['0.weight'], ['2.bias', '2.weight']]
        """
        self._check_left()
        return self._loop(self._layers, reports=False)

    def backward(self) -> Iterator[dict[str, Any]]:
        """Yield the parameters of each layer, from the last to the first.

        As `forward`.  Report the gradients of a layer in its turn.

        Returns:
            An iterator of dicts, name -> array.

        Raises:
            MismatchError: ranks have made different loops, or not reported the same gradients.

        Example:
            >>> def program(comm):
            ...     params = {"0.weight": np.ones(3), "1.weight": np.ones(2), "1.bias": np.zeros(2)}
            ...     sharded = rr.train.ShardedParallel(comm, params, stage=3)
            ...     for layer in sharded.backward():
            ...         for name, array in layer.items():
            ...             sharded.ready(name, array + comm.rank)
            ...     sharded.finish()
            ...     return [array.tolist() for array in sharded.shard]
            >>> rr.spawn(program, 2)[0]
            [[0.5, 0.5], [1.5]]
        """
        self._check_left()
        return self._loop(self._layers[::-1], reports=True)

    # --- a step ---

    def finish(self) -> None:
        """Wait until this rank has its `shard` of the mean gradients, or of sums with ``op="sum"``.

        Raises:
            MismatchError: a rank has not reported all gradients.  All ranks raise it, and it names
                parameters and ranks.  The step is then void, and the next step may begin.
            ValueError: it was called inside a `no_sync` block.

        Example:
            >>> def program(comm):
            ...     sharded = rr.train.ShardedParallel(comm, {"w": np.zeros(3)}, stage=1)
            ...     sharded.ready("w", np.array([3.0, 4.0, 0.0]))
            ...     sharded.finish()
            ...     return rr.train.global_norm(sharded.shard, comm)
            >>> rr.spawn(program, 2)
            [5.0, 5.0]
        """
        self._is_reduced = False
        self._finish()
        self._is_reduced = True

    def step(self, update: Update) -> None:
        """Update the parameters, each rank its shard.

        Stages 1 and 2 then gather the parameters: one bucket while the next is updated.
        Afterwards `shard` is undefined.  All ranks must call `step`.  In stage 3 there is no
        message that would show that a rank has not.

        Args:
            update: ``update(parameters, slots, gradient)`` changes 1-d arrays of one shape, parts
                of this rank's shard, in place: the parameters, and a tuple with the optimizer's
                arrays.  It is called at least once for each bucket with numbers in the shard, and
                may be called for parts of a parameter.

        Raises:
            ValueError: no `finish` came before.
            MismatchError: another rank makes another call.

        Example:
            >>> def program(comm):
            ...     params = {"w": np.ones(3)}
            ...     sharded = rr.train.ShardedParallel(comm, params, stage=1, slots=["velocity"])
            ...     def update(parameters, slots, gradient):
            ...         slots[0][...] = 0.9 * slots[0] + gradient
            ...         parameters -= 0.5 * slots[0]
            ...     for _ in range(2):
            ...         sharded.ready("w", np.ones(3))
            ...         sharded.finish()
            ...         sharded.step(update)
            ...     return params["w"]
            >>> rr.spawn(program, 2)[0]
            array([-0.45, -0.45, -0.45])
        """
        self._check_left()
        if not self._is_reduced:
            raise ValueError("step: there are no new gradients; call finish before each step")
        self._is_reduced = False
        waited_s = gathered_s = 0.0
        publishing: deque[Bucket] = deque()
        try:
            for bucket in self._buckets:
                bucket.update(update)
                begin = time.perf_counter()
                while publishing and bucket.workspace.is_full:
                    gathered_s += publishing.popleft().end_gather()
                bucket.gather("after the step")
                publishing.append(bucket)
                waited_s += time.perf_counter() - begin
            begin = time.perf_counter()
            while publishing:
                gathered_s += publishing.popleft().end_gather()
            waited_s += time.perf_counter() - begin
        finally:
            for bucket in publishing:  # after an error
                with suppress(rr.RingReduceError):
                    bucket.end_gather()
        times = self.times
        self.times = StepTimes(times.communication_s + gathered_s, times.exposed_s + waited_s)

    # --- whole arrays ---

    @property
    def own(self) -> list[Any]:
        """The parameters on this rank: all, or in stage 3 its shard of them, as views."""
        return [array for bucket in self._buckets for array in bucket.own]

    def gradients(self) -> dict[str, Any]:
        """Return copies of the gradients that `finish` has reduced.  Collective.

        Returns:
            Name -> gradient, in the order of the parameters.

        Raises:
            MismatchError: another rank makes another call.

        Example:
            >>> def program(comm):
            ...     sharded = rr.train.ShardedParallel(comm, {"w": np.zeros(3)}, stage=2)
            ...     sharded.ready("w", np.arange(3.0) * comm.rank)
            ...     sharded.finish()
            ...     return sharded.gradients()
            >>> rr.spawn(program, 2)[0]
            {'w': array([0. , 0.5, 1. ])}
        """
        found: dict[str, Any] = {}
        for bucket in self._buckets:
            found |= bucket.whole(bucket.gradient)
        return {name: found[name] for name in chain.from_iterable(self._layers)}

    def arrays(self) -> dict[str, Any]:
        """Return copies of all parameters, and of the optimizer's arrays, for a checkpoint.

        Collective, between two steps.

        Returns:
            Name -> parameter, in the order of the parameters, and then, for each of the optimizer's
            arrays, ``"slot/name"`` -> array.

        Raises:
            MismatchError: another rank makes another call.

        Example:
            >>> def program(comm):
            ...     params = {"w": np.ones(3)}
            ...     sharded = rr.train.ShardedParallel(comm, params, stage=3, slots=["velocity"])
            ...     return sharded.arrays()
            >>> rr.spawn(program, 2)[1]
            {'w': array([1., 1., 1.]), 'velocity/w': array([0., 0., 0.])}
        """
        found: dict[str, Any] = {}
        for bucket in self._buckets:
            found |= bucket.whole_parameters()
            for slot, shard in bucket.slots.items():
                found |= {f"{slot}/{name}": array for name, array in bucket.whole(shard).items()}
        return {key: found[key] for key, *_ in self._whole_arrays()}

    def load(self, arrays: Mapping[str, Any] | None) -> None:
        """Set all parameters and the optimizer's arrays to rank 0's `arrays`.

        Collective, between two steps.

        Args:
            arrays: what `arrays` has returned, with any stage and any number of ranks.  Ranks other
                than 0 may pass None.

        Raises:
            ValueError: rank 0's arrays lack one, or one has another shape.  All ranks raise it.
            MismatchError: another rank makes another call.

        Example:
            >>> def program(comm):
            ...     params = {"w": np.ones(3)}
            ...     sharded = rr.train.ShardedParallel(comm, params, stage=3)
            ...     sharded.load({"w": np.arange(3.0)} if comm.rank == 0 else None)
            ...     return sharded.arrays()
            >>> rr.spawn(program, 2)[1]
            {'w': array([0., 1., 2.])}
        """
        whole = self._whole_arrays()
        shapes = {key: bucket.likes[name].shape for key, bucket, _, name in whole}
        is_root = self._comm.rank == 0
        together(self._comm, lambda: _check_whole(arrays or {}, shapes) if is_root else None)
        for key, bucket, slot, name in whole:
            array = bucket.new(name)
            if is_root:
                assert arrays is not None
                array[...] = module_of(array).asarray(arrays[key])
            self._comm.broadcast(array, root=0, out=array)
            if slot:
                bucket.keep(bucket.slots[slot], name, array)
            else:
                bucket.load(name, array)

    # --- implementation ---

    def _placed(self, comm: rr.Communicator, params: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays that the ranks update."""
        return params

    def _whole_arrays(self) -> list[tuple[str, Bucket, str, str]]:
        """Return, for each of `arrays`: its name, its bucket, its slot or "", its parameter."""
        return [
            (f"{slot}/{name}" if slot else name, self._bucket_of[name], slot, name)
            for slot in ("", *self._slots)
            for name in chain.from_iterable(self._layers)
        ]

    def _loop(self, layers: Sequence[Sequence[str]], *, reports: bool) -> Iterator[dict[str, Any]]:
        """Yield the parameters of layers.  While one is in use, the next is gathered.

        `reports`: a rank that has no batch then reports zeros for a layer at the end of its turn,
        between the same gathers as the ranks that compute its gradients.
        """
        buckets = [list(dict.fromkeys(self._bucket_of[name] for name in layer)) for layer in layers]
        try:
            for index, layer in enumerate(layers):
                begin = time.perf_counter()
                self._fetch(buckets[index])
                self._end_fetch(buckets[index])
                if index + 1 < len(layers):
                    self._fetch(buckets[index + 1])
                self._exposed_s += time.perf_counter() - begin
                yield {name: self._bucket_of[name].parameters[name] for name in layer}
                for bucket in buckets[index]:
                    if reports and self._has_no_batch and self._synchronises:
                        self._report_zeros(bucket)
                    bucket.drop()
        finally:
            for bucket in chain.from_iterable(buckets):
                bucket.drop()

    def _fetch(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self._make_room(bucket)
            bucket.gather("before use")

    def _end_fetch(self, buckets: Sequence[Bucket]) -> None:
        try:
            for bucket in buckets:
                self._gathered_s += bucket.end_gather()
        except rr.MismatchError as error:
            raise self._explained("finish", error) from None

    def _report_nothing(self) -> None:
        """Make the loops of the ranks that have a batch, unless this rank has made them."""
        if any(bucket.missing for bucket in self._buckets):
            for _ in chain(self.forward(), self.backward()):
                pass


class CentralParallel(ShardedParallel):
    """One rank's part of a data-parallel model whose parameters are once in the memory of a node.

    It is used as stage 2 of `ShardedParallel`, by the ranks of one node.  They share the arrays in
    `parameters`, so `step` gathers nothing.  These arrays change only while all ranks are in `step`
    or in `load`.  In `held_bytes` rank 0 counts them.

    Args:
        comm: the communicator of the ranks.
        params: name -> array of floats.  They are copied: drop them afterwards.
        slots, first_bucket_bytes, bucket_bytes, op, algorithm: as for `ShardedParallel`.

    Attributes:
        parameters: name -> parameter in the shared memory, to be read.
        times: the `StepTimes` of the last step.

    Raises:
        MismatchError, TypeError, ValueError: as for `ShardedParallel`.
        ValueError, MemoryError: as for `Communicator.shared`.

    Example:
        >>> def program(comm):
        ...     central = rr.train.CentralParallel(comm, {"w": np.full(4, comm.rank + 1.0)})
        ...     def update(parameters, slots, gradient):
        ...         parameters -= 0.1 * gradient
        ...     central.ready("w", np.arange(4.0) * comm.rank)
        ...     central.finish()
        ...     central.step(update)
        ...     return central.parameters["w"]
        >>> rr.spawn(program, 2)[1]
        array([1.  , 0.95, 0.9 , 0.85])
    """

    __module__ = "ringreduce.train"
    _settings = CENTRAL

    def __init__(
        self,
        comm: rr.Communicator,
        params: Mapping[str, Any],
        *,
        slots: Sequence[str] = (),
        first_bucket_bytes: int = 1 << 20,
        bucket_bytes: int = 25 << 20,
        op: str = "mean",
        algorithm: str = "auto",
    ) -> None:
        sizes = {"first_bucket_bytes": first_bucket_bytes, "bucket_bytes": bucket_bytes}
        super().__init__(comm, params, stage=2, slots=slots, op=op, algorithm=algorithm, **sizes)

    @property
    def held_bytes(self) -> int:
        """The bytes that this rank holds now; rank 0 counts the parameters."""
        shared = sum(int(array.nbytes) for array in self.parameters.values())
        return super().held_bytes - shared * bool(self._comm.rank)

    def _placed(self, comm: rr.Communicator, params: Mapping[str, Any]) -> dict[str, Any]:
        lines = [-(-array.nbytes // 64) for array in params.values()]  # no two have a cache line
        memory = comm.shared((sum(lines), 64), np.uint8).array
        self.parameters: dict[str, Any] = {}
        for (name, array), count, end in zip(params.items(), lines, accumulate(lines), strict=True):
            place = memory[end - count : end].reshape(-1)[: array.nbytes]
            self.parameters[name] = place.view(array.dtype).reshape(array.shape)
            self.parameters[name][...] = on_host(array)  # the same numbers on every rank
        return self.parameters

    def step(self, update: Update) -> None:
        """Update the parameters, each rank its shard, while all ranks are in this call."""
        self._comm.barrier()  # before it, a rank may read or write them
        super().step(update)
        self._comm.barrier()


def _layers(params: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [tuple(names) for _, names in groupby(params, key=lambda name: name.rpartition(".")[0])]


def _check_whole(arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for key, shape in shapes.items():
        if key not in arrays:
            raise ValueError(f"load: there is no array {key!r}")
        if arrays[key].shape != shape:
            raise ValueError(f"load: {key!r} has the shape {arrays[key].shape}; wanted {shape}")
